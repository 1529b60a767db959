// Working memory that calls borrow and give back: calls of one pool run one after another most of the time, so all
// layers of a model share one buffer that has grown to the largest call.
#pragma once

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.h"

namespace kt {

class Arena {
 public:
  Buffer borrow(size_t bytes) {
    std::lock_guard lock(mutex_);
    auto it = std::find_if(free_.begin(), free_.end(), [&](const Buffer& b) { return b.size() >= bytes; });
    if (it == free_.end()) {
      // What is too small is let go: a larger one replaces it.
      if (!free_.empty()) free_.pop_back();
      return Buffer(bytes);
    }
    Buffer found = std::move(*it);
    free_.erase(it);
    return found;
  }

  void give_back(Buffer buffer) {
    std::lock_guard lock(mutex_);
    if (buffer) free_.push_back(std::move(buffer));
  }

 private:
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

}  // namespace kt
