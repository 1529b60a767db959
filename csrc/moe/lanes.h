// The queue of lanes. A lane's experts must be added in order, but any thread may take the next few of them.
//
// Lanes are divided into rounds at the same experts, and slices (a lane in a round) are taken in order, by one atomic
// increment: first all lanes up to the first boundary, then all up to the second. So all lanes are near the same
// expert, whose rows are in the shared cache, and a lane's previous slice was taken as many slices ago as there are
// lanes: it is nearly always done. The last rounds are short, so that cores of unequal speed (a busy sibling, another
// guest) finish together.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "futex.h"

namespace kt {

class LaneQueue {
 public:
  // Segments [begin, end) of a lane.
  struct Slice {
    int32_t lane, begin, end;
  };

  // `ends`: the segment at which each round ends.
  void reset(size_t lanes, const std::vector<int32_t>& ends) {
    ends_ = ends;
    lanes_ = (int32_t)lanes;
    if (done_.size() < lanes) done_ = std::vector<std::atomic<int32_t>>(lanes);
    for (std::atomic<int32_t>& done : done_) done.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
  }

  // False when all slices are taken.
  bool take(Slice& slice) {
    const int32_t count = lanes_ * (int32_t)ends_.size(), n = next_.fetch_add(1, std::memory_order_relaxed);
    if (n >= count) return false;
    const size_t round = (size_t)(n / lanes_);
    slice = {n % lanes_, round ? ends_[round - 1] : 0, ends_[round]};
    return true;
  }

  // Waits for the lane's previous slice. A thread finishes its slices in the order in which they were taken, so the
  // first unfinished one never waits.
  void wait_for_previous(const Slice& slice) const {
    for (int spins = 0; done_[(size_t)slice.lane].load(std::memory_order_acquire) != slice.begin; spins++)
      spins < 1000 ? relax() : (void)sched_yield();
  }

  void finish(const Slice& slice) { done_[(size_t)slice.lane].store(slice.end, std::memory_order_release); }

 private:
  std::vector<int32_t> ends_;
  int32_t lanes_ = 0;
  std::atomic<int32_t> next_{0};
  std::vector<std::atomic<int32_t>> done_;  // [lanes] segments
};

}  // namespace kt
