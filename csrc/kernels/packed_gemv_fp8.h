// Packed GEMV with codes of e4m3: they have too many sizes for integers, become floats and are multiplied with the
// floats of x.
#pragma once

#include "kernels/byte_products.h"
#include "kernels/segment_scales.h"

namespace kt {
namespace {

constexpr int kFp8Rows = 2;  // at most: dequantised tiles take less time for more

struct FloatCodes {};

// What a k tile has: numbers that are short to convert (on NEON, where scales make up for 2^-120; elsewhere, normal
// numbers), any finite numbers, or NaNs.
enum class Fp8Tile { usual, plain, nan };

// Numbers of four codes of every lane.
template <int W, Fp8Tile kind>
inline void e4m3_numbers(U32<W> words, F32<W> (&out)[4]) {
  if constexpr (kind == Fp8Tile::nan) {
    for (int b = 0; b < 4; b++) out[b] = e4m3<W>(words << (uint32_t)(24 - 8 * b));
  } else {
    Numbers<W, Codec::fp8, kind == Fp8Tile::usual>::of((U8<W>)words)
        .template select<SameByte<0>, SameByte<1>, SameByte<2>, SameByte<3>>(out);
  }
}

// 32 vector registers, not 16.
template <int W>
constexpr bool kManyRegisters = W == 16 || kNeon<W>;

// Sums of a lane, so that additions overlap. As many for any number of rows, which has the same bits then; vectors of
// lanes that one sweep over a strip accumulates are what the registers hold.
template <int W>
constexpr int kFp8Chains = kManyRegisters<W> ? 4 : 2;
template <int W, int rows>
constexpr int kFp8Vectors = rows > 2            ? 1
                            : kManyRegisters<W> ? 2
                                                : 4 / rows;

template <int W, int rows, int NV, Fp8Tile kind>
inline void add_e4m3_tile(const char* tile, int lane, const float* x, F32<W> (&sums)[rows][NV]) {
  constexpr int chains = kFp8Chains<W>;
  F32<W> parts[chains][rows][NV] = {};
#pragma GCC unroll 4
  for (int word = 0; word < kQuads; word++) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      F32<W> number[4];
      e4m3_numbers<W, kind>(load<U32<W>>(tile + (word * kLanesOfTile + lane + v * W) * 4), number);
      for (int b = 0; b < 4; b++)
        for (int r = 0; r < rows; r++)
          parts[b % chains][r][v] += number[b] * (F32<W>)broadcast_pairs<W>(x + r * kTileK + (word * 4 + b) * 2);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < NV; v++) {
      sums[r][v] = parts[0][r][v];
      for (int c = 1; c < chains; c++) sums[r][v] += parts[c][r][v];
    }
}

// Out of line: their constants would take registers from the usual tiles.
template <int W, int rows, int NV, Fp8Tile kind>
__attribute__((noinline)) void add_unusual_tile(const char* tile, int lane, const float* x, F32<W> (&sums)[rows][NV]) {
  add_e4m3_tile<W, rows, NV, kind>(tile, lane, x, sums);
}

// What the k tiles of a segment of e4m3 have.
struct Fp8Segment {
  uint32_t nan_tiles = 0, usual_tiles = 0;  // a bit for each k tile

  template <int W>
  void look_at(const char* codes, int tile_bytes, int count, float* scales) {
    for (int k = 0; k < count; k++, codes += tile_bytes, scales += kTileN) {
      const bool usual = kNeon<W> ? !has_nan<W>(codes) : all_normal<W>(codes);
      if (usual && raised<W>(scales)) {
        usual_tiles |= 1u << k;
      } else if (kNeon<W> ? !usual : has_nan<W>(codes)) {
        nan_tiles |= 1u << k;
      }
    }
  }

 private:
  // On NEON: whether the scales could be multiplied with 2^120, and are now.
  template <int W>
  static bool raised(float* scales) {
    if constexpr (!kNeon<W>) return true;
    RowScales r;
    __builtin_memcpy(r.s[0], scales, sizeof r.s[0]);
    if (!raise_scales<W, Codec::fp8>(r)) return false;
    __builtin_memcpy(scales, r.s[0], sizeof r.s[0]);
    return true;
  }
};

// As multiply_segment, with lanes apart; x is [count][rows][32] floats, k tiles `x_step` floats apart.
template <int W, int rows>
__attribute__((noinline)) void multiply_e4m3_segment(const char* codes, int tile_bytes, int count,
                                                     const SegmentScales& scales, const Fp8Segment& fp8, const float* x,
                                                     int64_t x_step, int64_t next, float* numbers) {
  constexpr int NV = kFp8Vectors<W, rows>;
  for (int lane = 0; lane < kLanesOfTile; lane += NV * W) {
    F32<W> total[rows][NV];
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < NV; v++) total[r][v] = load<F32<W>>(numbers + r * kLanesOfTile + lane + v * W);
    for (int k = 0; k < count; k++) {
      const char* tile = codes + (int64_t)k * tile_bytes;
      if (lane == 0) prefetch_tile(tile, tile_bytes, next);
      F32<W> sums[rows][NV];
      const float* at = x + k * x_step;
      if (fp8.usual_tiles >> k & 1) {
        add_e4m3_tile<W, rows, NV, Fp8Tile::usual>(tile, lane, at, sums);
      } else if (fp8.nan_tiles >> k & 1) {
        add_unusual_tile<W, rows, NV, Fp8Tile::nan>(tile, lane, at, sums);
      } else {
        add_unusual_tile<W, rows, NV, Fp8Tile::plain>(tile, lane, at, sums);
      }
      for (int v = 0; v < NV; v++) {
        const F32<W> scale = scales_of_lanes_at<W>(scales.s + k * kTileN, lane + v * W);
        for (int r = 0; r < rows; r++) total[r][v] += sums[r][v] * scale;
      }
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < NV; v++) store(numbers + r * kLanesOfTile + lane + v * W, total[r][v]);
  }
}

}  // namespace
}  // namespace kt
