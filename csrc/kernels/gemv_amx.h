// gemv.h with AMX tiles: sixteen matrix rows by 32 k are an A operand in the checkpoint's layout, and the activations,
// packed once as pairs of k, the B operand. So a product takes the same time for 1 token and for 16, far less than
// reading the weights takes; 17 to 32 tokens take twice that.
//
// Tiles 0 and 1 accumulate the even steps of k for two times 16 tokens, 2 and 3 the odd ones; 4 and 5 hold weights, 6
// and 7 activations. f32 rows are multiplied by the vectors of gemv.h.
#pragma once

#include <immintrin.h>

#include "kernels/gemv.h"

namespace kt {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];

  void use() const {
    // The compiler's header declares only 8 of the 64 bytes as read.
    asm volatile("" : : "m"(*this));
    _tile_loadconfig(this);
  }
};

// Rows are divided into slabs of equal length.
inline int64_t slab_of(int64_t row_bytes) {
  int64_t slabs = ceil_div(row_bytes, kSlab);
  return round_up(ceil_div(row_bytes, slabs), 64);
}

// Columns of the B operand: a power of two, so that few tokens take little space.
inline int columns_for(int32_t tokens) {
  int columns = 1;
  while (columns < tokens && columns < kTileN) columns *= 2;
  return columns;
}

// Interleaves the halves of N vectors seen as one array: the element at index abc... in binary moves to bc...a.
template <class V, int N>
inline void interleave_halves(V (&v)[N]) {
  constexpr int W = kLanes<V>;
  Mask<V> low, high;
  V out[N];
  if constexpr (N == 1) {
    for (int i = 0; i < W; i++) low[i] = i / 2 + i % 2 * (W / 2);
    out[0] = __builtin_shuffle(v[0], low);
  } else {
    for (int i = 0; i < W; i++) low[i] = i / 2 + i % 2 * W, high[i] = low[i] + W / 2;
    for (int i = 0; i < N / 2; i++) {
      out[2 * i] = __builtin_shuffle(v[i], v[i + N / 2], low);
      out[2 * i + 1] = __builtin_shuffle(v[i], v[i + N / 2], high);
    }
  }
  for (int i = 0; i < N; i++) v[i] = out[i];
}

// Packs rows of N tokens as pairs [k / 2][N]; rows past `live` are zero.
template <int N>
inline void pack_row_pairs(const char* x, int64_t stride, int32_t live, int32_t k, char* out) {
  for (int64_t pair = 0; pair < k / 2; pair += 16, out += N * 64) {
    F32<16> v[N];
    for (int t = 0; t < N; t++) v[t] = t < live ? load<F32<16>>(x + t * stride + pair * 4) : F32<16>{};
    for (int n = 1; n < N; n *= 2) interleave_halves(v);
    for (int t = 0; t < N; t++) store(out + t * 64, v[t]);
  }
}

// Adds the sums of even and odd steps, [16 rows][N] each, and transposes them to [N][16 rows].
template <int N>
inline void transpose_sums(const float* even, const float* odd, float* out) {
  F32<16> v[N];
  for (int i = 0; i < N; i++) v[i] = load<F32<16>>(even + i * 16) + load<F32<16>>(odd + i * 16);
  for (int n = 1; n < kGemvGroup; n *= 2) interleave_halves(v);
  for (int i = 0; i < N; i++) store(out + i * 16, v[i]);
}

// Calls `use` with the number of columns as a template argument.
template <class Use>
inline void with_columns(int columns, Use&& use) {
  switch (columns) {
    case 1:
      return use.template operator()<1>();
    case 2:
      return use.template operator()<2>();
    case 4:
      return use.template operator()<4>();
    case 8:
      return use.template operator()<8>();
    default:
      return use.template operator()<16>();
  }
}

// Steps [0, steps) of 32 k; x of tokens 16-31 lies `second` bytes after that of tokens 0-15.
template <bool two>
inline void gemv_steps(const char* w, int64_t stride, const char* x, int64_t step, int64_t second, int64_t steps,
                       GroupPrefetch& fetch) {
  int64_t width = step / 16, i = 0;
  for (; i + 2 <= steps; i += 2, w += 128, x += 2 * step) {
    _tile_loadd(4, w, stride);
    _tile_loadd(6, x, width);
    fetch.lines(2);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (two) {
      _tile_loadd(7, x + second, width);
      _tile_dpbf16ps(1, 4, 7);
    }
    fetch.lines(2);
    _tile_loadd(5, w + 64, stride);
    fetch.lines(2);
    if constexpr (two) {
      _tile_loadd(6, x + step, width);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, x + second + step, width);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_loadd(7, x + step, width);
      _tile_dpbf16ps(2, 5, 7);
    }
    fetch.lines(2);
  }
  if (i == steps) return;
  _tile_loadd(4, w, stride);
  _tile_loadd(6, x, width);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (two) {
    _tile_loadd(7, x + second, width);
    _tile_dpbf16ps(1, 4, 7);
  }
  fetch.lines(4);
}

// One group times all tokens, into sums [tokens][16]. Long rows are taken in slabs, so that the prefetched bytes in L2
// do not grow with K.
template <bool two>
inline void gemv_group(const Gemv& n, const char* w, const char* next, int columns, float* sums) {
  int64_t row = (int64_t)n.k * 2, slab = slab_of(row), step = columns * 64, second = row * columns;
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (two) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t at = 0; at < row; at += slab) {
    int64_t end = at + slab < row ? at + slab : row, ahead = row - end < slab ? row - end : slab;
    GroupPrefetch fetch{w + end, n.weight_stride, ahead};
    if (end == row) fetch = {next, n.weight_stride, slab};
    gemv_steps<two>(w + at, n.weight_stride, n.x + at / 64 * step, step, second, (end - at) / 64, fetch);
  }
  alignas(64) float even[kGemvGroup * kTileN] = {}, odd[kGemvGroup * kTileN] = {};
  auto transpose = [&]<int N>() { transpose_sums<N>(even, odd, sums); };
  _tile_stored(0, even, columns * 4);
  _tile_stored(2, odd, columns * 4);
  with_columns(columns, transpose);
  if constexpr (two) {
    sums += kTileN * kGemvGroup;
    _tile_stored(1, even, columns * 4);
    _tile_stored(3, odd, columns * 4);
    with_columns(columns, transpose);
  }
}

struct GemvAmx {
  static constexpr int32_t tokens = kGemvMaxTokens;

  static void pack_rows(const PackRows& s) {
    if (s.type == DType::f32) return WidenedRows<16>::pack_rows(s);
    const char* x = (const char*)s.x;
    char* out = s.out;
    int columns = columns_for(s.tokens);
    for (int32_t t = 0; t < s.tokens; t += columns, x += columns * s.stride * 2, out += (int64_t)columns * s.k * 2)
      with_columns(columns, [&]<int N>() { pack_row_pairs<N>(x, s.stride * 2, s.tokens - t, s.k, out); });
  }

  static void multiply(const Gemv& n) {
    if (n.type == DType::f32) return gemv_vectors<WidenedRows<16>>(n);
    alignas(64) float sums[kGemvMaxTokens * kGemvGroup];
    int columns = columns_for(n.tokens), height = 0;
    if (n.cold) GroupPrefetch{n.weights, n.weight_stride, slab_of((int64_t)n.k * 2)}.all();
    for (int32_t row = 0; row < n.rows; row += kGemvGroup) {
      int32_t count = n.rows - row < kGemvGroup ? n.rows - row : kGemvGroup;
      if (count != height) {
        height = count;
        configure(height, columns);
      }
      const char* w = n.weights + row * n.weight_stride;
      const char* next = row + kGemvGroup < n.rows ? w + kGemvGroup * n.weight_stride : n.next;
      n.tokens > kTileN ? gemv_group<true>(n, w, next, columns, sums) : gemv_group<false>(n, w, next, columns, sums);
      store_sums<16>(n, sums, row, count);
    }
    _tile_release();
  }

 private:
  static void configure(int height, int columns) {
    TileConfig c = {};
    c.palette = 1;
    for (int i = 0; i < 8; i++) {
      c.colsb[i] = (uint16_t)(i == 4 || i == 5 ? 64 : columns * 4);
      c.rows[i] = (uint8_t)(i < 6 ? height : 16);
    }
    c.use();
  }
};

}  // namespace
}  // namespace kt
