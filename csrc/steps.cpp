#include "steps.h"

#include "default_arithmetic.h"
#include "futex.h"

namespace kt {

namespace {
constexpr size_t kEnded = (size_t)-1;
constexpr int kSpins = 2000;  // before a waiting thread yields its cpu
}  // namespace

class Steps::StepsJob : public Job {
 public:
  explicit StepsJob(Steps& steps) : steps_(steps) {}

  // The thread that was interrupted leaves between two steps; whichever ends the step before makes no other.
  void work(const Worker& worker) override {
    const DefaultArithmetic arithmetic;
    for (size_t i = 0; i < steps_.steps_.size() && steps_.wait_for(i) && !cancelled(); i++) {
      Step& step = steps_.steps_[i];
      if (!step.job || !enter(step)) continue;
      step.job->work(worker);
      if (leave(step)) cancelled() ? steps_.end() : steps_.make_from(i + 1);
    }
  }

 private:
  Steps& steps_;
};

void Steps::run(Pool& pool) {
  {
    const DefaultArithmetic arithmetic;
    make_from(0);
  }
  if (made_.load(std::memory_order_relaxed) != kEnded) {
    StepsJob job(*this);
    pool.run(job);
  }
  if (error_) std::rethrow_exception(error_);
}

bool Steps::enter(Step& step) {
  uint32_t members = step.members.load(std::memory_order_relaxed);
  while (!(members & kClosed))
    if (step.members.compare_exchange_weak(members, members + 1, std::memory_order_acq_rel)) return true;
  return false;
}

bool Steps::leave(Step& step) {
  step.members.fetch_or(kClosed, std::memory_order_acq_rel);
  return step.members.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1);
}

void Steps::make_from(size_t index) {
  try {
    for (; index < steps_.size(); index++) {
      steps_[index].job = steps_[index].make();
      if (steps_[index].job) return made_.store(index + 1, std::memory_order_release);
    }
  } catch (...) {
    error_ = std::current_exception();
  }
  end();
}

void Steps::end() { made_.store(kEnded, std::memory_order_release); }

bool Steps::wait_for(size_t index) const {
  size_t made = made_.load(std::memory_order_acquire);
  for (int spins = 0; made <= index; made = made_.load(std::memory_order_acquire))
    ++spins < kSpins ? relax() : (void)sched_yield();
  return made != kEnded;
}

}  // namespace kt
