// Arithmetic of rows.h for NEON: activations are multiplied by element, from a register that holds several k of a row,
// because a broadcast would take a slot of the same two pipes that multiply.
//
// A weight vector of bf16 pairs becomes two f32 vectors by two permutations with zeros; a shift runs on one pipe only.
// 12 rows by 2 vectors are 24 accumulators, and four k take 96 products and 8 permutations.
#pragma once

#include "kernels/dp4a_neon.h"
#include "kernels/rows_neon_f32.h"

namespace kt {
namespace {

constexpr int kNeonVectors = 2;

// Vectors of outputs in a sweep. Few rows take more, so that there are enough independent sums.
template <int rows>
constexpr int kNeonVectorsOf = rows <= 2   ? 8
                               : rows <= 4 ? 4
                                           : kNeonVectors;

// bf16 weights, f32 activations.
struct NeonWiden {
  using Vector = F32<4>;
  static constexpr int elem = 4, step_k = 2, step_bytes = 8, tile_bytes = kTileBytes;
  static constexpr int steps_together = 2, max_rows = 12, chunk_tiles = 8;
  static constexpr DType panel = DType::f32;
  template <int rows>
  static constexpr int vectors = kNeonVectorsOf<rows>;
  struct Pair {
    float32x4_t low, high;
  };
  static Pair unpack(const char* w) {
    const uint16x8_t pairs = vld1q_u16((const uint16_t*)w), zero = {};
    return {(float32x4_t)vtrn1q_u16(zero, pairs), (float32x4_t)vtrn2q_u16(zero, pairs)};
  }
  template <int i>
  static F32<4> step(F32<4> acc, const char* x, const Pair& w) {
    const float32x4_t four = vld1q_f32((const float*)x);
    acc = (F32<4>)vfmaq_laneq_f32((float32x4_t)acc, w.low, four, 2 * i);
    return (F32<4>)vfmaq_laneq_f32((float32x4_t)acc, w.high, four, 2 * i + 1);
  }
#ifdef KT_NEON
  template <int NV, int rows>
  static void sweep(const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate, Prefetch prefetch,
                    float* c)
    requires(NV == 2)
  {
    f32_rows_by_8<rows>(a, tile_rows, b, k_tiles, accumulate, prefetch, c);
  }
#endif
};

// f32 weights and activations.
struct NeonExact {
  using Vector = F32<4>;
  static constexpr int elem = 4, step_k = 1, step_bytes = 4, tile_bytes = kTileK * kTileN * elem;
  static constexpr int steps_together = 2, max_rows = 12, chunk_tiles = 8;
  static constexpr DType panel = DType::f32;
  template <int rows>
  static constexpr int vectors = kNeonVectorsOf<rows>;
  static float32x4_t unpack(const char* w) { return vld1q_f32((const float*)w); }
  template <int i>
  static F32<4> step(F32<4> acc, const char* x, const float32x4_t& w) {
    return (F32<4>)vfmaq_lane_f32((float32x4_t)acc, w, vld1_f32((const float*)x), i);
  }
};

// int8 weights and activations, four k in a lane.
template <DType panel_type>
struct NeonInt8 {
  using Vector = I32<4>;
  static constexpr int elem = (int)size_of(panel_type), step_k = 2, step_bytes = 4, tile_bytes = kTileBytes;
  static constexpr int steps_together = 2, max_rows = 12, chunk_tiles = 16;
  static constexpr DType panel = panel_type;
  using Dp4a = NeonDp4a;
  template <int rows>
  static constexpr int vectors = kNeonVectorsOf<rows>;
  static int8x16_t unpack(const char* w) { return vld1q_s8((const int8_t*)w); }
  template <int i>
  static I32<4> step(I32<4> acc, const char* x, const int8x16_t& w) {
    return (I32<4>)vdotq_lane_s32((int32x4_t)acc, w, vld1_s8((const int8_t*)x), i);
  }
};

// Rate of a product on accumulators that stay in registers; `step` adds `flop` operations to one. They start from
// different values, or the compiler would compute one chain only. register_rate multiplies the accumulator, which takes
// a move besides where products add to their destination.
template <class Step>
inline double neon_register_rate(double seconds, int flop, const Step& step) {
  constexpr int chains = 24;
  F32<4> acc[chains];
#pragma GCC unroll 24
  for (int i = 0; i < chains; i++) acc[i] = splat<F32<4>>((float)i);
  double rate = per_second(seconds, [&] {
    for (int n = 0; n < 4096; n++)
#pragma GCC unroll 24
      for (int i = 0; i < chains; i++) acc[i] = step(acc[i]);
    return 4096.0 * chains * flop;
  });
#pragma GCC unroll 24
  for (int i = 1; i < chains; i++) acc[0] += acc[i];
  asm volatile("" : : "g"(acc[0][0]) : "memory");
  return rate;
}

template <class Arith>
struct NeonRows : RowIsa<Arith, kNeonVectors, Arith::max_rows> {
  // Tiles of equal height: 13 rows are 7 and 6, not 12 and 1.
  static Tiling tiling(int32_t live) {
    const int32_t tiles = (live + Arith::max_rows - 1) / Arith::max_rows;
    return {tiles ? (live + tiles - 1) / tiles : Arith::max_rows, tiles};
  }
  static void lora_wgrad(const LoraWgrad& o) { run_lora_wgrad<typename Arith::Vector, Arith::panel, kRankStep>(o); }
  static double registers(double seconds) {
    alignas(64) float noise[8];
    fill_with_noise((char*)noise, sizeof noise, sizeof noise[0]);
    const float32x4_t x = vld1q_f32(noise), y = vld1q_f32(noise + 4);
    return neon_register_rate(seconds, 8,
                              [&](F32<4> acc) { return (F32<4>)vfmaq_laneq_f32((float32x4_t)acc, x, y, 0); });
  }
};

}  // namespace
}  // namespace kt
