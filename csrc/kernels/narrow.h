// A few token rows times a matrix as it lies in a checkpoint, rows of bf16: what decoding asks of every linear layer
// that is not an expert. Memory is what it waits for, so nothing is packed: each weight is read once, widened by a
// shift and a mask, and meets the activations of its k, which were taken apart into even and odd ones before.
#pragma once

#include "kernels/elementwise.h"

namespace kt {
namespace {

constexpr int kNarrowAhead = 1024;  // bytes of each row that are fetched ahead

template <int W, int R, int T>
inline void narrow_rows(const Narrow& n, int32_t row) {
  F32<W> sums[R][T] = {};
  const char* w[R];
  for (int r = 0; r < R; r++) w[r] = n.weights + (row + r) * n.weight_stride;
  int64_t half = n.k / 2;
  for (int64_t i = 0; i < half; i += W) {
    F32<W> low[R], high[R];
    for (int r = 0; r < R; r++) {
      U32<W> both = load<U32<W>>(w[r] + i * 4);
      if (i % 16 == 0) __builtin_prefetch(w[r] + i * 4 + kNarrowAhead, 0, 3);
      low[r] = (F32<W>)(both << 16);
      high[r] = (F32<W>)(both & 0xffff0000u);
    }
    for (int t = 0; t < T; t++) {
      F32<W> even = load<F32<W>>(n.even + t * half + i), odd = load<F32<W>>(n.odd + t * half + i);
      for (int r = 0; r < R; r++) {
        sums[r][t] = sums[r][t] + low[r] * even;
        sums[r][t] = sums[r][t] + high[r] * odd;
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) {
      float sum = 0;
      for (int i = 0; i < W; i++) sum += sums[r][t][i];
      n.out[t * n.out_stride + row + r] = sum;
    }
}

// Every token's sums are added up in the same order, whoever is beside it.
template <int W, int T>
inline void narrow_tokens(const Narrow& n) {
  constexpr int R = T > 4 ? 2 : 4;
  int32_t row = 0;
  for (; row + R <= n.rows; row += R) narrow_rows<W, R, T>(n, row);
  for (; row < n.rows; row++) narrow_rows<W, 1, T>(n, row);
}

template <int W>
void run_narrow(const Narrow& n) {
  static_assert(kNarrowTokens == 8);
  switch (n.tokens) {
    case 1:
      return narrow_tokens<W, 1>(n);
    case 2:
      return narrow_tokens<W, 2>(n);
    case 3:
      return narrow_tokens<W, 3>(n);
    case 4:
      return narrow_tokens<W, 4>(n);
    case 5:
      return narrow_tokens<W, 5>(n);
    case 6:
      return narrow_tokens<W, 6>(n);
    case 7:
      return narrow_tokens<W, 7>(n);
    case 8:
      return narrow_tokens<W, 8>(n);
  }
}

}  // namespace
}  // namespace kt
