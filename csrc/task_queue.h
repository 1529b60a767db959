// C functions that run one after another on a thread of their own, in the order in which they were submitted: the task
// queue of kt-kernel's CPUInfer, for programs that have tasks of their own. Experts do not need it; they have the Pool.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace kt {

struct QueuedTask {
  void (*function)(void*);
  void* argument;
};

class TaskQueue {
 public:
  TaskQueue();
  ~TaskQueue();  // runs what is queued, then ends the thread
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  void submit(QueuedTask task);
  // Waits until at most `pending` tasks are queued or running; throws the first exception of a task since the last
  // wait, or Interrupted.
  void wait(int64_t pending = 0);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable submitted_, finished_;
  std::deque<QueuedTask> tasks_;
  int64_t pending_ = 0;  // queued or running
  bool ending_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace kt
