// Floats are compared as integers, by their bits: threads find the largest of each part of a row, then its index is
// searched in the one part that has it.
#include "moe/argmax.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace kt {

namespace {

constexpr int64_t kPart = 16384;  // columns that a thread takes at a time

// An integer key in the order of the floats: the magnitude, negated where the sign is set, so that both zeros are
// equal; NaN is the largest. V is Int or a vector of them.
template <class Int, Int infinity, class V>
inline V key_of(V bits) {
  constexpr int sign = sizeof(Int) * 8 - 1;
  constexpr Int max_magnitude = (Int) ~((Int)1 << sign);
  V negative = bits >> sign, magnitude = bits & max_magnitude;
  V key = (magnitude ^ negative) - negative, is_nan = (V)(infinity - magnitude) >> sign;
  return (is_nan & max_magnitude) | (~is_nan & key);
}

template <class Int, Int infinity>
inline Int max_key_of(const Int* at, int64_t count) {
  typedef Int V __attribute__((vector_size(16)));
  constexpr int lanes = sizeof(V) / sizeof(Int);
  Int max_key = key_of<Int, infinity, Int>(at[0]);
  V all = V{} + max_key;
  int64_t c = 0;
  for (; c + lanes <= count; c += lanes) {
    V bits;
    __builtin_memcpy(&bits, at + c, sizeof bits);
    V key = key_of<Int, infinity, V>(bits), more = key > all;
    all = (more & key) | (~more & all);
  }
  for (int i = 0; i < lanes; i++) max_key = std::max<Int>(max_key, all[i]);
  for (; c < count; c++) max_key = std::max(max_key, key_of<Int, infinity, Int>(at[c]));
  return max_key;
}

template <class Int, Int infinity>
class ArgmaxJob : public Job {
 public:
  ArgmaxJob(const void* x, int64_t rows, int64_t columns, int64_t stride)
      : x_((const Int*)x), rows_(rows), columns_(columns), stride_(stride), parts_(ceil_div(columns, kPart)) {
    part_max_.resize((size_t)(rows * parts_));
  }

  void work(const Worker&) override {
    for (int64_t i; !cancelled() && (i = next_.fetch_add(1, std::memory_order_relaxed)) < rows_ * parts_;) {
      const Int* at = x_ + i / parts_ * stride_;
      int64_t first = i % parts_ * kPart, last = std::min(first + kPart, columns_);
      part_max_[(size_t)i] = max_key_of<Int, infinity>(at + first, last - first);
    }
  }

  int64_t index_of_max(int64_t row) const {
    auto begin = part_max_.begin() + row * parts_, best = std::max_element(begin, begin + parts_);
    const Int* at = x_ + row * stride_;
    int64_t c = (best - begin) * kPart;
    while (key_of<Int, infinity, Int>(at[c]) != *best) c++;
    return c;
  }

 private:
  const Int* x_;
  int64_t rows_, columns_, stride_, parts_;
  std::vector<Int> part_max_;  // [rows][parts]
  std::atomic<int64_t> next_{0};
};

template <class Job>
void run(Pool& pool, Job&& job, int64_t rows, int64_t* index) {
  pool.run(job);
  for (int64_t row = 0; row < rows; row++) index[row] = job.index_of_max(row);
}

}  // namespace

void argmax(Pool& pool, const void* x, DType type, int64_t rows, int64_t columns, int64_t stride, int64_t* index) {
  if (type == DType::bf16) {
    run(pool, ArgmaxJob<int16_t, 0x7f80>(x, rows, columns, stride), rows, index);
  } else {
    run(pool, ArgmaxJob<int32_t, 0x7f800000>(x, rows, columns, stride), rows, index);
  }
}

}  // namespace kt
