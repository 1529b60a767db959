#include "task_queue.h"

#include <chrono>
#include <utility>

#include "interrupt.h"

namespace kt {

TaskQueue::TaskQueue() : thread_([this] { run(); }) {}

TaskQueue::~TaskQueue() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  submitted_.notify_one();
  thread_.join();
}

void TaskQueue::submit(QueuedTask task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(task);
    pending_++;
  }
  submitted_.notify_one();
}

void TaskQueue::wait(int64_t pending) {
  InterruptPoll interrupted;
  std::unique_lock lock(mutex_);
  while (!finished_.wait_for(lock, std::chrono::milliseconds(50), [&] { return pending_ <= pending; })) {
    lock.unlock();
    if (interrupted()) throw Interrupted();
    lock.lock();
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void TaskQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    submitted_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    QueuedTask task = tasks_.front();
    tasks_.pop_front();
    lock.unlock();
    std::exception_ptr thrown;
    try {
      task.function(task.argument);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    if (thrown && !error_) error_ = thrown;
    pending_--;
    finished_.notify_all();
  }
}

}  // namespace kt
