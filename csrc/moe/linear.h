// Linear layers for a few token rows: out = x W^T, each W [N, K] in bf16 in the checkpoint's layout.
#pragma once

#include <memory>

#include "kernels/table.h"
#include "threads.h"

namespace kt {

struct Matrix {
  const void* x;  // [tokens, K]
  const char* weights;
  int64_t weight_stride;  // bytes
  int64_t rows;           // N
  void* out;              // [tokens, N]
  int64_t out_stride;     // elements
};

// Several matrices are one job. Those with the same x follow each other.
struct Linear {
  int64_t x_stride;  // elements
  int64_t k;
  DType dtype;  // of x and out
  int32_t tokens;
  const Matrix* matrices;
  int32_t count;
};

void multiply(Pool& pool, const KernelTable& kernels, const Linear& linear);
// The same as a step of a job of `threads` threads; `linear` outlives it.
std::unique_ptr<Job> linear_job(const KernelTable& kernels, const Linear& linear, int threads);

}  // namespace kt
