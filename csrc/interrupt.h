// Ends long calls early when the user interrupts the program. The core knows no signals of its own: the bindings set a
// check that runs Python's signal handlers, and a call on the main thread asks it ten times a second, between units of
// work. A handler that does not raise leaves the call alone.
#pragma once

#include <chrono>
#include <exception>

namespace kt {

// Thrown by a call that was interrupted; its outputs are undefined, and it may be made again.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

using InterruptCheck = bool (*)();               // whether the calling thread is to end its call
void set_interrupt_check(InterruptCheck check);  // null: calls are never interrupted

// Asks the check at most ten times a second, first after a tenth of a second: short calls never do. The clock is read
// once in a few calls, as many as take a few milliseconds, because reading it takes as long as a small unit of work.
class InterruptPoll {
 public:
  explicit InterruptPoll(int calls = 2) : calls_left_(calls), calls_(calls) {}
  bool operator()() { return --calls_left_ <= 0 && read_clock(); }

 private:
  bool read_clock();

  int calls_left_, calls_;  // until the clock is read again; between two readings
  std::chrono::steady_clock::time_point last_{}, next_{};
};

}  // namespace kt
