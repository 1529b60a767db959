// Tasks run in order on another thread; waiting may leave some of them, and gives an error back.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "task_queue.h"

namespace kt {
namespace {

struct Step {
  std::vector<int>* seen;
  int number;
};

void note(void* given) {
  auto* step = (Step*)given;
  step->seen->push_back(step->number);
}

TEST(task_queue_runs_in_order) {
  std::vector<int> seen;
  std::vector<Step> steps;
  for (int i = 0; i < 1000; i++) steps.push_back({&seen, i});
  TaskQueue queue;
  for (Step& step : steps) queue.submit({note, &step});
  queue.wait();
  CHECK(seen.size() == steps.size());
  for (size_t i = 0; i < seen.size(); i++) CHECK(seen[i] == (int)i);
}

TEST(task_queue_waits_for_all_but_some) {
  std::atomic<bool> release{false};
  TaskQueue queue;
  queue.submit({[](void* p) {
                  while (!*(std::atomic<bool>*)p) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                },
                &release});
  queue.wait(1);  // does not wait for it
  release = true;
  queue.wait();
}

TEST(task_queue_gives_the_first_error_back_once) {
  TaskQueue queue;
  queue.submit({[](void*) { throw std::runtime_error("first"); }, nullptr});
  queue.submit({[](void*) { throw std::runtime_error("second"); }, nullptr});
  bool thrown = false;
  try {
    queue.wait();
  } catch (const std::runtime_error& error) {
    thrown = std::string(error.what()) == "first";
  }
  CHECK(thrown);
  queue.wait();
}

TEST(task_queue_runs_what_is_queued_before_it_ends) {
  std::vector<int> seen;
  std::vector<Step> steps;
  for (int i = 0; i < 100; i++) steps.push_back({&seen, i});
  {
    TaskQueue queue;
    for (Step& step : steps) queue.submit({note, &step});
  }
  CHECK(seen.size() == steps.size());
}

}  // namespace
}  // namespace kt
