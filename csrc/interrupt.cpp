#include "interrupt.h"

#include <time.h>

#include <atomic>

namespace kt {
namespace {

constexpr std::chrono::milliseconds kInterval{100};
std::atomic<InterruptCheck> interrupt_check{nullptr};

std::chrono::nanoseconds coarse_now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

void set_interrupt_check(InterruptCheck check) { interrupt_check.store(check); }

InterruptPoll::InterruptPoll() : next_(coarse_now() + kInterval) {}

bool InterruptPoll::operator()() {
  const std::chrono::nanoseconds now = coarse_now();
  if (now < next_) return false;
  next_ = now + kInterval;
  const InterruptCheck check = interrupt_check.load(std::memory_order_relaxed);
  return check && check();
}

}  // namespace kt
