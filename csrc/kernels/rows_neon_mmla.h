// Arithmetic of rows.h for NEON with matrix products: BFMMLA and SMMLA multiply 2 rows by 2 outputs, 8 bytes of K each.
//
// Two neighbouring rows of a weight tile, zipped by words, are [2 outputs][8 bytes of K]; two rows of the panel, joined
// by halves, [2 rows][8 bytes of K]. An accumulator is [2 rows][2 outputs]; 8 rows by 8 outputs are 16 registers, and 8
// bytes of K take 16 products and 8 permutations. A single row is multiplied by BFDOT and SDOT by element, which need
// no permutations. BFMMLA is defined as two BFDOT one after the other, so a row's bits do not depend on the number of
// rows.
#pragma once

#include "kernels/rows_neon.h"

namespace kt {
namespace {

struct NeonBf16Dot {
  using Vector = F32<4>;
  static bfloat16x8_t bits(uint32x4_t v) { return vreinterpretq_bf16_u32(v); }
  static F32<4> mmla(F32<4> acc, uint32x4_t a, uint32x4_t b) {
    return (F32<4>)vbfmmlaq_f32((float32x4_t)acc, bits(a), bits(b));
  }
  template <int lane>
  static F32<4> dot(F32<4> acc, uint32x4_t w, uint32x4_t x) {
    return (F32<4>)vbfdotq_laneq_f32((float32x4_t)acc, bits(w), bits(x), lane);
  }
};

struct NeonInt8Dot {
  using Vector = I32<4>;
  using Dp4a = NeonDp4a;
  static I32<4> mmla(I32<4> acc, uint32x4_t a, uint32x4_t b) {
    return (I32<4>)vmmlaq_s32((int32x4_t)acc, vreinterpretq_s8_u32(a), vreinterpretq_s8_u32(b));
  }
  template <int lane>
  static I32<4> dot(I32<4> acc, uint32x4_t w, uint32x4_t x) {
    return (I32<4>)vdotq_laneq_s32((int32x4_t)acc, vreinterpretq_s8_u32(w), vreinterpretq_s8_u32(x), lane);
  }
};

template <class Dot>
struct NeonMatrix : Dot {
  using Vector = typename Dot::Vector;
  static constexpr int elem = 2, step_k = 2, step_bytes = 4, tile_bytes = kTileBytes, chunk_tiles = 16;
  static constexpr int max_rows = 8;
  static constexpr int row_bytes = 64, rows_of_tile = kTileBytes / row_bytes;  // of a weight tile; 64 of the panel too
  static constexpr DType panel = DType::bf16;
  template <int rows>
  static constexpr int vectors = kNeonVectorsOf<rows>;

  static uint32x4_t words(const char* p) { return vld1q_u32((const uint32_t*)p); }
  template <int half>
  static uint32x4_t halves(uint32x4_t a, uint32x4_t b) {
    const uint64x2_t x = vreinterpretq_u64_u32(a), y = vreinterpretq_u64_u32(b);
    return vreinterpretq_u32_u64(half ? vzip2q_u64(x, y) : vzip1q_u64(x, y));
  }

  template <int NV, int rows>
  static void sweep(const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate, Prefetch prefetch,
                    Lane<Vector>* c) {
    if constexpr (rows == 1) {
      one_row<NV>(a, tile_rows, b, k_tiles, accumulate, prefetch, c);
    } else {
      pairs_of_rows<NV, rows>(a, tile_rows, b, k_tiles, accumulate, prefetch, c);
    }
  }

 private:
  template <int lane, int NV>
  static void add_row(uint32x4_t x, const char* b, Vector (&acc)[NV]) {
    for (int v = 0; v < NV; v++)
      acc[v] = Dot::template dot<lane>(acc[v], words(b + lane * row_bytes + column_at<NeonMatrix>(v * 4)), x);
  }

  template <int NV>
  static void one_row(const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate, Prefetch prefetch,
                      Lane<Vector>* c) {
    Vector acc[NV];
    for (int v = 0; v < NV; v++) acc[v] = accumulate ? load<Vector>(c + v * 4) : Vector{};
    for (int kt = 0; kt < k_tiles; kt++) {
      for (int p = 0; p < rows_of_tile; p += 4) {
        prefetch_quarter(prefetch, p / 4);
        const uint32x4_t x = words(a + p * 4);
        const char* w = b + p * row_bytes;
        add_row<0>(x, w, acc);
        add_row<1>(x, w, acc);
        add_row<2>(x, w, acc);
        add_row<3>(x, w, acc);
      }
      a += tile_rows * row_bytes;
      b += 2 * kTileBytes;
      prefetch.at += prefetch.lines * 64;
    }
    for (int v = 0; v < NV; v++) store(c + v * 4, acc[v]);
  }

  // 8 bytes of K: those of half `half` of 16 bytes at `x`.
  template <int half, int NV, int rows>
  static void add_pairs(const char* x, const char* b, Vector (&acc)[(rows + 1) / 2][2 * NV]) {
    uint32x4_t w[2 * NV];
    for (int v = 0; v < NV; v++) {
      const char* at = b + 2 * half * row_bytes + column_at<NeonMatrix>(v * 4);
      const uint32x4_t first = words(at), second = words(at + row_bytes);
      w[2 * v] = vzip1q_u32(first, second);
      w[2 * v + 1] = vzip2q_u32(first, second);
    }
    for (int m = 0; m < rows; m += 2) {
      // The second row of the last pair, where there is none, is the first again; its sums are not stored.
      const char *row = x + m * row_bytes, *next = m + 1 < rows ? row + row_bytes : row;
      const uint32x4_t two = halves<half>(words(row), words(next));
      for (int j = 0; j < 2 * NV; j++) acc[m / 2][j] = Dot::mmla(acc[m / 2][j], two, w[j]);
    }
  }

  template <int NV, int rows>
  static void pairs_of_rows(const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate,
                            Prefetch prefetch, Lane<Vector>* c) {
    Vector acc[(rows + 1) / 2][2 * NV] = {};
    if (accumulate)
      for (int m = 0; m < rows; m += 2)
        for (int v = 0; v < NV; v++) {
          const char* from = (const char*)(c + m * kBlockN + v * 4);
          const uint32x4_t first = words(from), second = m + 1 < rows ? words(from + kBlockN * 4) : first;
          acc[m / 2][2 * v] = (Vector)halves<0>(first, second);
          acc[m / 2][2 * v + 1] = (Vector)halves<1>(first, second);
        }
    for (int kt = 0; kt < k_tiles; kt++) {
      for (int p = 0; p < rows_of_tile; p += 4) {
        prefetch_quarter(prefetch, p / 4);
        add_pairs<0, NV, rows>(a + p * 4, b + p * row_bytes, acc);
        add_pairs<1, NV, rows>(a + p * 4, b + p * row_bytes, acc);
      }
      a += tile_rows * row_bytes;
      b += 2 * kTileBytes;
      prefetch.at += prefetch.lines * 64;
    }
    for (int m = 0; m < rows; m += 2)
      for (int v = 0; v < NV; v++) {
        const uint32x4_t low = (uint32x4_t)acc[m / 2][2 * v], high = (uint32x4_t)acc[m / 2][2 * v + 1];
        store(c + m * kBlockN + v * 4, halves<0>(low, high));
        if (m + 1 < rows) store(c + (m + 1) * kBlockN + v * 4, halves<1>(low, high));
      }
  }
};

}  // namespace
}  // namespace kt
