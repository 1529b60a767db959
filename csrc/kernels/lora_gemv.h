// LoRA on a linear layer for the few rows of decoding: out += scale * (x A^T) B. Single-threaded, because waking a
// second thread takes as long as the work.
#pragma once

#include "kernels/elementwise.h"

namespace kt {
namespace {

template <int W, DType type>
inline void lora_gemv_row(const LoraGemv& a, int64_t row) {
  using V = F32<W>;
  for (int64_t r = 0; r < a.rank; r++) {
    V sums = {};
    int64_t i = 0;
    for (; i + W <= a.k; i += W) sums = sums + load_as<V>(a.x, row * a.x_stride + i, type) * load<V>(a.a + r * a.k + i);
    float sum = 0;
    for (; i < a.k; i++) sum += element_of<float>(a.x, row * a.x_stride + i, type) * a.a[r * a.k + i];
    for (int lane = 0; lane < W; lane++) sum += sums[lane];
    a.xa[r] = sum * a.scale;
  }
  int64_t i = 0, at = row * a.out_stride;
  for (; i + W <= a.columns; i += W) {
    V sums = {};
    for (int64_t r = 0; r < a.rank; r++) sums = sums + load<V>(a.b + r * a.columns + i) * splat<V>(a.xa[r]);
    store_as<V>(a.out, at + i, type, load_as<V>(a.out, at + i, type) + sums);
  }
  for (; i < a.columns; i++) {
    float sum = 0;
    for (int64_t r = 0; r < a.rank; r++) sum += a.b[r * a.columns + i] * a.xa[r];
    set_element(a.out, at + i, type, element_of<float>(a.out, at + i, type) + sum);
  }
}

template <int W>
void run_lora_gemv(const LoraGemv& a) {
  for (int64_t row = 0; row < a.rows; row++)
    a.type == DType::bf16 ? lora_gemv_row<W, DType::bf16>(a, row) : lora_gemv_row<W, DType::f32>(a, row);
}

}  // namespace
}  // namespace kt
