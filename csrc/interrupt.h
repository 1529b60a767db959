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

// Asks the check at most ten times a second, first after a tenth of a second: short calls never do. Every call reads
// the clock of the kernel's ticks: 9 ns, a few milliseconds coarse, where the fine clock takes as long as a small unit.
class InterruptPoll {
 public:
  InterruptPoll();
  bool operator()();

 private:
  std::chrono::nanoseconds next_;  // when the check is asked again
};

}  // namespace kt
