// Steps that follow each other within one job of a pool.
//
// Between two jobs a pool's threads leave the one and join the other, each under the pool's lock: microseconds, as long
// as a small product takes. Here they stay. A step is a job of its own: threads enter it until one of them finds no
// unit left, and the last one to leave makes the next step's job, which may read what this step has written. So nothing
// waits for a thread that comes late, or for one that does not come at all.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <utility>

#include "threads.h"

namespace kt {

class Steps {
 public:
  // Makes the job of a step once the step before is done, on any thread; null: there is nothing for other threads. The
  // job exists until the step after has been made.
  using Make = std::function<Job*()>;

  void add(Make make) { steps_.emplace_back(std::move(make)); }
  // Throws the first exception of a Make, after which no step follows; or Interrupted between two steps. Arithmetic is
  // the default one (default_arithmetic.h), whichever thread makes a step.
  void run(Pool& pool);

 private:
  struct Step {
    explicit Step(Make function) : make(std::move(function)) {}
    Make make;
    Job* job = nullptr;
    alignas(64) std::atomic<uint32_t> members{0};  // threads inside, and kClosed once no unit is left
  };
  class StepsJob;
  static constexpr uint32_t kClosed = 1u << 31;

  static bool enter(Step& step);
  static bool leave(Step& step);      // whether this thread was the last one
  void make_from(size_t index);       // and those behind it that have no job
  void end();                         // no step follows
  bool wait_for(size_t index) const;  // whether the step has been made; false: it will not be

  std::deque<Step> steps_;
  std::exception_ptr error_;
  alignas(64) std::atomic<size_t> made_{0};  // steps that threads may enter; kEnded: none follows
};

}  // namespace kt
