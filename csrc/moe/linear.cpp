#include "moe/linear.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace kt {

namespace {

constexpr int64_t kRowsAtATime = 32;

class LinearJob : public Job {
 public:
  LinearJob(const KernelTable& kernels, const Linear& linear) : kernels_(kernels), l_(linear) {
    int64_t half = l_.k / 2;
    even_.resize((size_t)(l_.tokens * half));
    odd_.resize(even_.size());
    for (int32_t t = 0; t < l_.tokens; t++)
      for (int64_t i = 0; i < half; i++) {
        even_[(size_t)(t * half + i)] = element_of<float>(l_.x, t * l_.x_stride + 2 * i, l_.dtype);
        odd_[(size_t)(t * half + i)] = element_of<float>(l_.x, t * l_.x_stride + 2 * i + 1, l_.dtype);
      }
  }

  void work(const Worker&) override {
    float sums[kNarrowTokens * kRowsAtATime];
    for (int64_t row; (row = next_.fetch_add(kRowsAtATime)) < l_.rows;) {
      int64_t count = std::min(kRowsAtATime, l_.rows - row);
      kernels_.narrow({l_.weights + row * l_.weight_stride, l_.weight_stride, (int32_t)count, (int32_t)l_.k, l_.tokens,
                       even_.data(), odd_.data(), sums, kRowsAtATime});
      for (int32_t t = 0; t < l_.tokens; t++)
        for (int64_t i = 0; i < count; i++)
          set_element(l_.out, t * l_.out_stride + row + i, l_.dtype, (double)sums[t * kRowsAtATime + i]);
    }
  }

 private:
  const KernelTable& kernels_;
  const Linear& l_;
  std::vector<float> even_, odd_;
  std::atomic<int64_t> next_{0};
};

}  // namespace

void multiply(Pool& pool, const KernelTable& kernels, const Linear& linear) {
  LinearJob job(kernels, linear);
  pool.run(job);
}

}  // namespace kt
