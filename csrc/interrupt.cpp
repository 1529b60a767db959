#include "interrupt.h"

#include <atomic>

namespace kt {

static std::atomic<InterruptCheck> interrupt_check{nullptr};

void set_interrupt_check(InterruptCheck check) { interrupt_check.store(check); }

bool InterruptPoll::operator()() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return false;
  next_ = now + kInterval;
  const InterruptCheck check = interrupt_check.load(std::memory_order_relaxed);
  return check && check();
}

}  // namespace kt
