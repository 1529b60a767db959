// The queue of lanes. A lane's experts must be added in order, but any thread may take the next few of them.
//
// There are more lanes than threads. A thread takes the free lane with the fewest finished experts, advances it for
// about a tenth of a millisecond and puts it back, so that cores of unequal speed (a busy sibling, another guest)
// finish together, and all lanes are near the same expert, whose rows are in the shared cache.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "futex.h"

namespace kt {

class LaneQueue {
 public:
  // `lanes` lanes that each process `segments` experts.
  void reset(size_t lanes, int32_t segments) {
    segments_ = segments;
    lane_.assign(lanes, {0, false});
    left_ = segments ? (int32_t)lanes : 0;
  }

  // Takes the free lane with the fewest finished segments and returns its index and next segment; -1 when all lanes are
  // done. Waits while all unfinished lanes are taken by other threads: one of them may be put back.
  int32_t take(int32_t& segment) {
    for (int spins = 0;; spins++) {
      {
        std::lock_guard lock(lock_);
        if (!left_) return -1;
        int32_t best = -1;
        for (int32_t i = 0; i < (int32_t)lane_.size(); i++)
          if (!lane_[(size_t)i].taken && lane_[(size_t)i].at < segments_ &&
              (best < 0 || lane_[(size_t)i].at < lane_[(size_t)best].at))
            best = i;
        if (best >= 0) {
          lane_[(size_t)best].taken = true;
          segment = lane_[(size_t)best].at;
          return best;
        }
      }
      // Polls rarely enough not to disturb the working threads.
      for (int i = 0; i < 64; i++) relax();
      if (spins > 1000) sched_yield();
    }
  }

  void put_back(int32_t lane, int32_t segment) {
    std::lock_guard lock(lock_);
    lane_[(size_t)lane] = {segment, false};
    if (segment == segments_) left_--;
  }

 private:
  struct Lane {
    int32_t at;
    bool taken;
  };
  SpinLock lock_;
  std::vector<Lane> lane_;
  int32_t segments_ = 0, left_ = 0;
};

}  // namespace kt
