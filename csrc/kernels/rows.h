// `multiply` for CPUs without tiles: a few token rows at a time in vector registers, weights widened on the way.
//
// A weight vector holds, for W outputs, the neighbours k and k + 1 as bf16. Where the CPU has no bf16 product, a shift
// and a mask make two f32 vectors of it (exactly), and each meets the broadcast activation of its k. NV vectors and MR
// rows fill the register file; a block of 32 outputs takes 32 / (NV * W) walks over K, or one where rows are few.
#pragma once

#include "kernels/gemm.h"
#include "kernels/outer.h"

namespace kt {
namespace {

// acc[m] += x[m][k] * w[k] + x[m][k + 1] * w[k + 1] in plain f32, activations f32.
template <int W>
struct WidenToF32 {
  static constexpr int elem = 4;
  struct Pair {
    F32<W> low, high;
  };
  static Pair open(const char* w) {
    U32<W> u = load<U32<W>>(w);
    return {(F32<W>)(u << 16), (F32<W>)(u & 0xffff0000u)};
  }
  static F32<W> step(F32<W> acc, const char* x, const Pair& w) {
    acc = acc + load<float>(x) * w.low;
    return acc + load<float>(x + 4) * w.high;
  }
};

template <class Arith, int W, int NV, int rows>
inline void rows_by_columns(const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate, Ahead ahead,
                            float* c) {
  F32<W> acc[rows][NV];
  for (int m = 0; m < rows; m++)
    for (int v = 0; v < NV; v++) acc[m][v] = accumulate ? load<F32<W>>(c + m * kBlockN + v * W) : F32<W>{};
  for (int kt = 0; kt < k_tiles; kt++) {
    for (int p = 0; p < kTileK / 2; p++) {
      if (p % 4 == 0) prefetch_quarter(ahead, p / 4);
      const char* x = a + p * 2 * Arith::elem;
      constexpr int row = kTileK * Arith::elem;
      // Columns past the first tile of the block lie one tile further on.
      auto weights = [&](int v) {
        return Arith::open(b + p * 64 + (v * W / kTileN) * kTileBytes + (v * W % kTileN) * 4);
      };
      if constexpr (rows > NV) {
        decltype(Arith::open(b)) w[NV];
        for (int v = 0; v < NV; v++) w[v] = weights(v);
        for (int m = 0; m < rows; m++)
          for (int v = 0; v < NV; v++) acc[m][v] = Arith::step(acc[m][v], x + m * row, w[v]);
      } else {
        for (int v = 0; v < NV; v++) {
          auto w = weights(v);
          for (int m = 0; m < rows; m++) acc[m][v] = Arith::step(acc[m][v], x + m * row, w);
        }
      }
    }
    a += tile_rows * kTileK * Arith::elem;
    b += 2 * kTileBytes;
    ahead.at += ahead.step;
  }
  for (int m = 0; m < rows; m++)
    for (int v = 0; v < NV; v++) store(c + m * kBlockN + v * W, acc[m][v]);
}

// One tile with `live` rows, 1 ... rows: the instance for exactly that many.
template <class Arith, int W, int NV, int rows>
inline void tile_by_block(int live, const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate,
                          Ahead ahead, float* c) {
  if (live == rows) {
    // Few rows leave registers for the whole block: its weights are then read in one walk, as they lie.
    constexpr bool whole = rows * (kBlockN / W) <= 8;
    constexpr int NW = whole ? kBlockN / W : NV;
    for (int column = 0; column < kBlockN; column += NW * W) {
      const char* at = b + (column / kTileN) * kTileBytes + (column % kTileN) * 4;
      rows_by_columns<Arith, W, NW, rows>(a, tile_rows, at, k_tiles, accumulate, ahead, c + column);
      ahead.lines = 0;
    }
  } else if constexpr (rows > 1) {
    tile_by_block<Arith, W, NV, rows - 1>(live, a, tile_rows, b, k_tiles, accumulate, ahead, c);
  }
}

// An ISA that works on rows: W floats a vector, MR rows by NV vectors in registers.
template <class Arith, int W, int NV, int MR>
struct RowIsa {
  static constexpr int width = W, elem = Arith::elem, max_rows = MR;
  static void enter(int) {}
  static void leave() {}
  static Tiling tiling(int32_t live) { return {MR, (live + MR - 1) / MR}; }
  static void outer(const Outer& o) { run_outer<W>(o); }
  // The vector units do the product itself, so nothing is gained by mixing other rows' work into it.
  template <class Rows>
  static void multiply(const Product& p, Rows& unfinished) {
    unfinished.all();
    for (int t = 0; t < p.tiles; t++) {
      int live = p.live - t * p.rows < p.rows ? p.live - t * p.rows : p.rows;
      Ahead ahead = p.ahead;
      if (t > 0) ahead.lines = 0;
      float* c = p.c + t * p.rows * kBlockN;
      auto add = [&](const Stretch& s, bool accumulate, Ahead fetch) {
        tile_by_block<Arith, W, NV, MR>(live, s.a + (p.tile + t) * (int64_t)s.a_tile, p.rows, s.b, s.k_tiles,
                                        accumulate, fetch, c);
      };
      add(p.s, p.accumulate, ahead);
      for_each_extra(p, [&](const Stretch& s) { add(s, true, kNothingAhead); });
    }
  }
};

}  // namespace
}  // namespace kt
