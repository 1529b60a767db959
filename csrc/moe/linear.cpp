// Threads take pieces of the matrices, of one group of rows or several: long pieces first, because each is one
// sequential read, single groups at the end, so that all threads finish together. A thread claims its next piece before
// it multiplies the current one, so that the next weights are prefetched.
#include "moe/linear.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace kt {

namespace {

constexpr int64_t kMaxGroups = 16;  // of a piece
constexpr int64_t kPieces = 4;      // per thread, of the remaining groups

// Packed activations; one buffer per calling thread, which is reused by every layer and token.
char* scratch_of(int64_t bytes) {
  struct Free {
    void operator()(char* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<char[], Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory.reset((char*)::operator new[]((size_t)bytes, std::align_val_t{64}));
    size = bytes;
  }
  return memory.get();
}

class LinearJob : public Job {
 public:
  LinearJob(const KernelTable& kernels, const Linear& linear, int threads)
      : kernels_(kernels), l_(linear), threads_(threads) {
    int64_t inputs = 0;
    for (int32_t i = 0; i < l_.count; i++) {
      groups_ += ceil_div(l_.matrices[i].rows, kGemvGroup);
      inputs += has_new_x(i);
    }
    const int64_t bytes = round_up(packed_rows_bytes(l_.tokens, l_.k), 64);
    char* packed = scratch_of(inputs * bytes);
    for (int32_t i = 0; i < l_.count; i++) {
      if (!has_new_x(i)) {
        x_.push_back(x_.back());
        continue;
      }
      kernels_.pack_rows({l_.matrices[i].x, l_.dtype, l_.x_stride, (int32_t)l_.k, l_.tokens, packed});
      x_.push_back(packed);
      packed += bytes;
    }
  }

  void work(const Worker&) override {
    bool cold = true;
    for (Piece piece = take(); piece.matrix && !cancelled(); cold = false) {
      Piece next = take();
      const Matrix& m = *piece.matrix;
      kernels_.gemv_rows({m.weights + piece.row * m.weight_stride, m.weight_stride, (int32_t)piece.rows, (int32_t)l_.k,
                          l_.tokens, x_[(size_t)(&m - l_.matrices)], l_.dtype,
                          (char*)m.out + piece.row * (int64_t)size_of(l_.dtype), m.out_stride, cold,
                          next.matrix ? next.matrix->weights + next.row * next.matrix->weight_stride : nullptr});
      piece = next;
    }
  }

 private:
  struct Piece {
    const Matrix* matrix;  // null: no piece is left
    int64_t row, rows;
  };

  bool has_new_x(int32_t i) const { return i == 0 || l_.matrices[i].x != l_.matrices[i - 1].x; }

  Piece take() {
    int64_t first = next_.load(std::memory_order_relaxed);
    while (first < groups_) {
      const Matrix* m = l_.matrices;
      int64_t at = first, own = ceil_div(m->rows, kGemvGroup);
      for (; at >= own; own = ceil_div(m->rows, kGemvGroup)) at -= own, m++;
      int64_t share = std::clamp<int64_t>((groups_ - first) / (kPieces * threads_), 1, kMaxGroups);
      int64_t count = std::min(share, own - at);
      if (next_.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) {
        int64_t row = at * kGemvGroup;
        return {m, row, std::min(count * kGemvGroup, m->rows - row)};
      }
    }
    return {};
  }

  const KernelTable& kernels_;
  const Linear& l_;
  int64_t threads_, groups_ = 0;
  std::vector<const char*> x_;  // packed rows of each matrix
  std::atomic<int64_t> next_{0};
};

}  // namespace

std::unique_ptr<Job> linear_job(const KernelTable& kernels, const Linear& linear, int threads) {
  return std::make_unique<LinearJob>(kernels, linear, threads);
}

void multiply(Pool& pool, const KernelTable& kernels, const Linear& linear) {
  LinearJob job(kernels, linear, pool.threads());
  pool.run(job);
}

}  // namespace kt
