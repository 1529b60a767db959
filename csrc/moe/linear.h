// A linear layer for a few token rows: out = x W^T, W [N, K] in bf16 where it lies.
#pragma once

#include "kernels/table.h"
#include "threads.h"

namespace kt {

struct Linear {
  const char* weights;
  int64_t weight_stride;  // bytes
  int64_t rows, k;        // N and K
  const void* x;          // [tokens, K]
  int64_t x_stride;       // elements
  void* out;              // [tokens, N]
  int64_t out_stride;
  DType dtype;  // of x and out
  int32_t tokens;
};

void multiply(Pool& pool, const KernelTable& kernels, const Linear& linear);

}  // namespace kt
