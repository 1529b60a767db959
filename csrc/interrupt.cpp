#include "interrupt.h"

#include <algorithm>
#include <atomic>

namespace kt {

static std::atomic<InterruptCheck> interrupt_check{nullptr};

void set_interrupt_check(InterruptCheck check) { interrupt_check.store(check); }

bool InterruptPoll::read_clock() {
  using std::chrono::milliseconds;
  constexpr milliseconds kInterval{100}, kShort{2}, kLong{20};
  constexpr int kMaxCalls = 64;
  const auto now = std::chrono::steady_clock::now();
  if (next_ == std::chrono::steady_clock::time_point{}) {
    next_ = now + kInterval;
  } else if (now - last_ > kLong) {
    calls_ = 1;
  } else if (now - last_ < kShort) {
    calls_ = std::min(2 * calls_, kMaxCalls);
  }
  last_ = now;
  calls_left_ = calls_;
  if (now < next_) return false;
  next_ = now + kInterval;
  const InterruptCheck check = interrupt_check.load(std::memory_order_relaxed);
  return check && check();
}

}  // namespace kt
