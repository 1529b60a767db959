// RMS norm of the few rows of decoding, one kernel instead of torch's seven operators.
#pragma once

#include "kernels/elementwise.h"

namespace kt {
namespace {

template <int W, DType type>
inline void norm_row(const Norm& n, int64_t row) {
  using V = F32<W>;
  V squares = {};
  int64_t i = 0, at = row * n.size;
  for (; i + W <= n.size; i += W) {
    V x = load_as<V>(n.x, at + i, type);
    squares = squares + x * x;
  }
  float sum = 0;
  for (; i < n.size; i++) {
    float x = element_of<float>(n.x, at + i, type);
    sum += x * x;
  }
  for (int lane = 0; lane < W; lane++) sum += squares[lane];
  float scale = 1.0f / __builtin_sqrtf(sum / (float)n.size + n.epsilon);
  for (i = 0; i + W <= n.size; i += W) {
    V y = load_as<V>(n.x, at + i, type) * splat<V>(scale);
    if (type == DType::bf16) y = (V)(bf16_bits<W>(y) << 16);
    store_as<V>(n.out, at + i, type, y * load_as<V>(n.weight, i, type));
  }
  for (; i < n.size; i++) {
    float y = element_of<float>(n.x, at + i, type) * scale;
    set_element(n.out, at + i, type, y);
    set_element(n.out, at + i, type, element_of<float>(n.out, at + i, type) * element_of<float>(n.weight, i, type));
  }
}

template <int W>
void run_norm(const Norm& n) {
  for (int64_t row = 0; row < n.rows; row++)
    n.type == DType::bf16 ? norm_row<W, DType::bf16>(n, row) : norm_row<W, DType::f32>(n, row);
}

}  // namespace
}  // namespace kt
