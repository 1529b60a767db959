// Products along the rows of a weight in packed codes: sums over outputs instead of over K, for few rows of x.
//
// Codes have a scale for each output, so sums over outputs cannot be taken of codes as they lie. A k tile of all blocks
// is dequantised in f32 into L1, once for all rows of x. Lanes of a vector are outputs: a vector of sums belongs to one
// k, or to two where lanes are pairs of k, and its lanes are added at the end, of as many k at once as fill a vector.
// Every row sees the same operations in the same order, whatever the other rows.
#pragma once

#include "kernels/rounded_tiles.h"
#include "kernels/segment_scales.h"

namespace kt {
namespace {

// Numbers of x for W lanes of a tile's row: an output is one lane, or two.
template <int W>
inline F32<W> factors_of_lanes(const float* x, int lane) {
  if constexpr (kPairLanes<W> == 1) return load<F32<W>>(x + lane);
  return scales_of_lanes_at<W>(x, lane);
}

// Adds neighbouring lanes, or pairs of lanes, of two vectors: sums of `a`, then those of `b`.
template <int W>
inline F32<W> add_neighbours(F32<W> a, F32<W> b) {
  constexpr int pair = kPairLanes<W>;
  I32<W> first;
  for (int i = 0; i < W; i++) first[i] = i / pair * 2 * pair + i % pair;
  return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, first + pair);
}

// Sums over the lanes of `count` vectors, in the order of the vectors.
template <int W, int count>
inline F32<W> add_lanes(const F32<W>* sums) {
  if constexpr (count == 1) {
    return sums[0];
  } else {
    return add_neighbours<W>(add_lanes<W, count / 2>(sums), add_lanes<W, count / 2>(sums + count / 2));
  }
}

template <int W>
constexpr int kTileVectors = kTileK / kPairLanes<W>;  // rows of a tile, each with sums of its own

// Rows [row0, row0 + count) of the tiles of all strips times `tokens` rows of x, into sums.
template <int W, int tokens, int count>
inline void sweep_strips(const float* tiles, int strips, const float* x, int64_t x_stride, int row0,
                         F32<W> (&sums)[tokens][kTileVectors<W>]) {
  constexpr int lanes = kTileN * kPairLanes<W>;
  F32<W> acc[tokens][count] = {};
  for (int strip = 0; strip < strips; strip++) {
    const float* tile = tiles + strip * kTileK * kTileN + row0 * lanes;
#pragma GCC unroll 8
    for (int lane = 0; lane < lanes; lane += W) {
      F32<W> factor[tokens];
#pragma GCC unroll 2
      for (int t = 0; t < tokens; t++) factor[t] = factors_of_lanes<W>(x + t * x_stride + strip * kTileN, lane);
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) {
        const F32<W> w = load<F32<W>>(tile + i * lanes + lane);
#pragma GCC unroll 2
        for (int t = 0; t < tokens; t++) acc[t][i] = multiply_add<W>(w, factor[t], acc[t][i]);
      }
    }
  }
  for (int t = 0; t < tokens; t++)
    for (int i = 0; i < count; i++) sums[t][row0 + i] = acc[t][i];
}

// One k tile of `tokens` rows from `token` on.
template <int W, int tokens>
__attribute__((noinline)) void multiply_opened(const RowsProduct& p, int k_tile, int token) {
  constexpr int count = tokens == 1 || W == 16 ? 8 : 4, group = W / kPairLanes<W>;
  const int64_t x_stride = (int64_t)p.blocks * kBlockN;
  F32<W> sums[tokens][kTileVectors<W>];
  for (int row = 0; row < kTileVectors<W>; row += count)
    sweep_strips<W, tokens, count>((const float*)p.scratch, 2 * p.blocks, p.x + token * x_stride, x_stride, row, sums);
  const int valid = p.width - k_tile * kTileK;
  for (int t = 0; t < tokens; t++) {
    alignas(64) float out[kTileK];
    for (int i = 0; i < kTileK / W; i++) store(out + i * W, add_lanes<W, group>(sums[t] + i * group));
    const int64_t at = (token + t) * p.out_stride + k_tile * kTileK;
    for (int i = 0; i < kTileK && valid >= kTileK; i += W)
      store_as<F32<W>>(p.out, at + i, p.dtype, load<F32<W>>(out + i));
    for (int i = 0; i < valid && valid < kTileK; i++) set_element(p.out, at + i, p.dtype, out[i]);
  }
}

// The codes and the scales of a k tile.
inline void prefetch_k_tile(const Encoding& e, const char* block, int k_tile) {
  for (int half = 0; half < 2; half++) {
    const Strip& s = e.strip[half];
    const char *strip = block + half * e.strip[0].bytes, *codes = strip + s.codes + (int64_t)k_tile * s.tile_bytes;
    for (int at = 0; at < s.tile_bytes; at += 64) __builtin_prefetch(codes + at, 0, 2);
    if (k_tile % s.span_tiles) continue;
    const char* header = strip + s.headers + (int64_t)(k_tile / s.span_tiles) * s.span_bytes;
    for (int at = 0; at < s.span_bytes; at += 64) __builtin_prefetch(header + at, 0, 2);
  }
}

template <int W>
void run_rows_product(const RowsProduct& p) {
  constexpr int64_t tile = kTileK * kTileN * sizeof(float);
  const Encoding& e = *p.encoding;
  for (int k = p.k0; k < p.k0 + p.count; k++) {
    char* opened = p.scratch;
    for (int block = 0; block < p.blocks; block++) {
      if (p.next[block]) prefetch_k_tile(e, p.next[block], p.next_k0 + k - p.k0);
      for (int half = 0; half < 2; half++, opened += tile)
        decode_strip<W, F32Lanes>(e.format[half], e.strip[half], p.block[block] + half * e.strip[0].bytes, k, 1, opened,
                                  tile);
    }
    int token = 0;
    for (; token + 2 <= p.tokens; token += 2) multiply_opened<W, 2>(p, k, token);
    if (token < p.tokens) multiply_opened<W, 1>(p, k, token);
  }
}

}  // namespace
}  // namespace kt
