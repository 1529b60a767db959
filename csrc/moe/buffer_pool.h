// Pools of reusable buffers, because the system zeroes fresh pages at a tenth of the speed at which they can be
// written.
//
// Arena holds workspaces of calls: the calls of one thread pool run one after another most of the time, so all layers
// of a model share one buffer that has grown to the largest call. BufferPool holds tensors that every training step
// allocates again: activations kept for backward, gradients.
#pragma once

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.h"

namespace kt {

class Arena {
 public:
  Buffer acquire(size_t bytes) {
    std::lock_guard lock(mutex_);
    auto it = std::find_if(free_.begin(), free_.end(), [&](const Buffer& b) { return b.size() >= bytes; });
    if (it == free_.end()) {
      // A buffer that is too small is freed: the larger one replaces it.
      if (!free_.empty()) free_.pop_back();
      return Buffer(bytes);
    }
    Buffer buffer = std::move(*it);
    free_.erase(it);
    return buffer;
  }

  void release(Buffer buffer) {
    std::lock_guard lock(mutex_);
    if (buffer) free_.push_back(std::move(buffer));
  }

 private:
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

// Never holds more bytes than were in use at one time.
class BufferPool {
 public:
  Buffer acquire(size_t bytes) {
    bytes = (bytes + kStep - 1) / kStep * kStep;
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); it++)
      if (it->size() >= bytes && it->size() <= bytes + bytes / 4 && (best == free_.end() || it->size() < best->size()))
        best = it;
    Buffer buffer;
    if (best != free_.end()) {
      buffer = std::move(*best);
      free_.erase(best);
    } else {
      shrink_to(in_use_ + bytes > peak_ ? 0 : peak_ - in_use_ - bytes);
      buffer = Buffer(bytes);
    }
    in_use_ += buffer.size();
    peak_ = std::max(peak_, in_use_);
    return buffer;
  }

  void release(Buffer buffer) {
    std::lock_guard lock(mutex_);
    in_use_ -= buffer.size();
    free_.push_back(std::move(buffer));
    shrink_to(peak_ - in_use_);
  }

  size_t total_bytes() const {
    std::lock_guard lock(mutex_);
    size_t sum = in_use_;
    for (const Buffer& b : free_) sum += b.size();
    return sum;
  }

 private:
  static constexpr size_t kStep = 2 << 20;

  // Frees the least recently released buffers until at most `bytes` are unused.
  void shrink_to(size_t bytes) {
    size_t sum = 0;
    for (const Buffer& b : free_) sum += b.size();
    auto it = free_.begin();
    for (; sum > bytes; it++) sum -= it->size();
    free_.erase(free_.begin(), it);
  }

  mutable std::mutex mutex_;
  std::vector<Buffer> free_;  // in the order of their release
  size_t in_use_ = 0, peak_ = 0;
};

}  // namespace kt
