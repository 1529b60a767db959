// W8A8: quantises token rows to int8, in the order of k of int8_tiles.h, and scales int32 sums back to floats.
//
// Sums are int32 and exact, the same on every CPU; they are scaled once all of K is accumulated.
#pragma once

#include "kernels/int8_tiles.h"
#include "kernels/pack.h"

namespace kt {
namespace {

// Whether sums are integers.
template <class Isa>
constexpr bool kIntegerSums = (typename Isa::Real)0.5 == 0;

template <class Int8Isa>
constexpr bool kHasInt8 = requires { typename Int8Isa::Real; };

// A block's 32 sums as floats: times the scales of the row and the channels, plus the LoRA terms.
template <class V, class Real = int32_t>
struct ScaledSums {
  const Real* c;           // [rows][32]
  const float* row_scale;  // [rows]
  const float* channel;    // [32]
  const float* lora_sums;  // as c, or null

  // W outputs of row r from output n on.
  __attribute__((always_inline)) V at(int r, int n) const {
    typedef Real Sum __attribute__((vector_size(sizeof(V))));
    V scale = splat<V>(row_scale[r]) * load<V>(channel + n);
    // Rounded here, not fused with the addition that follows, whose presence depends on the row's neighbours.
    V v = apart(__builtin_convertvector(load<Sum>(c + r * kBlockN + n), V) * scale);
    return lora_sums ? v + load<V>(lora_sums + r * kBlockN + n) : v;
  }
};

// The factor that maps a row to int8, and its inverse scale. A row whose largest magnitude is not finite keeps that as
// its scale, so that its results are not finite either; rows of tiny values count as zero.
struct RowScale {
  float inverse, scale;
};
inline RowScale scale_of(int32_t largest_bits) {
  float largest;
  __builtin_memcpy(&largest, &largest_bits, 4);
  if (largest_bits >= 0x7f800000) return {0, largest};
  if (largest < 0x1p-100f) return {0, 0};
  return {127.0f / largest, largest / 127.0f};
}
template <int W>
inline RowScale scale_of(I32<W> magnitudes) {
  int32_t bits = 0;
  for (int i = 0; i < W; i++) bits = magnitudes[i] > bits ? magnitudes[i] : bits;
  return scale_of(bits);
}

// Rounds to int8 in the low bits of the lanes, ties to even.
template <int W>
inline I32<W> rounded(F32<W> v, float inverse) {
  return (I32<W>)(apart(v * splat<F32<W>>(inverse)) + splat<F32<W>>(kRounding));
}

template <int W>
inline typename Vec<W>::u8 low_bytes(I32<W> v) {
#ifdef __AVX512F__
  if constexpr (W == 16) return (typename Vec<W>::u8)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v);
#endif
  // In two steps: the compiler splits longer conversions.
  return __builtin_convertvector(__builtin_convertvector((U32<W>)v, typename Vec<W>::u16), typename Vec<W>::u8);
}

// Quantises 64 values, W of them from at(i) on.
template <int W, class At>
inline void store_step(char* out, float inverse, const At& at) {
#pragma GCC unroll 8
  for (int i = 0; i < kStepK; i += W < 8 ? 8 : W) {
    if constexpr (W < 8) {
      static_assert(W == 4);
      U32<W> a = (U32<W>)rounded<W>(at(i), inverse), b = (U32<W>)rounded<W>(at(i + W), inverse);
      store(out + i, low_bytes<W>((I32<W>)deinterleave<W, 0>(a, b)));
      store(out + i + W, low_bytes<W>((I32<W>)deinterleave<W, 1>(a, b)));
    } else {
      I32<W> order;
      for (int n = 0; n < W; n++) order[n] = n / 8 * 8 + n % 4 * 2 + n % 8 / 4;
      store(out + i, low_bytes<W>(__builtin_shuffle(rounded<W>(at(i), inverse), order)));
    }
  }
}

// Quantises a row of `steps` times 64 values, W of them from at(step, i) on, and 64 more in `tail` (or null), into out,
// out + stride, ...; returns its scale.
template <int W, class At>
inline float quantise_row(int32_t steps, const At& at, const float* tail, char* out, int64_t stride) {
  // Magnitudes compare as integers; a NaN is the largest of them.
  I32<W> max_bits = {};
  auto take_max = [&](F32<W> v) {
    I32<W> magnitude = (I32<W>)v & 0x7fffffff;
    max_bits = magnitude > max_bits ? magnitude : max_bits;
  };
  for (int32_t s = 0; s < steps; s++)
    for (int i = 0; i < kStepK; i += W) take_max(at(s, i));
  for (int i = 0; tail && i < kStepK; i += W) take_max(load<F32<W>>(tail + i));
  RowScale r = scale_of<W>(max_bits);
  for (int32_t s = 0; s < steps; s++) store_step<W>(out + s * stride, r.inverse, [&](int i) { return at(s, i); });
  if (tail) store_step<W>(out + steps * stride, r.inverse, [&](int i) { return load<F32<W>>(tail + i); });
  return r.scale;
}

template <int W>
void quantise_rows(const Quantise& q) {
  int32_t steps = q.width / kStepK, rest = q.width % kStepK;
  int64_t bytes = round_up(q.width, kStepK);
  for (int32_t row = 0; row < q.rows; row++) {
    int64_t first = row * q.x_stride;
    char* out = q.out + row * bytes;
    alignas(64) float tail[kStepK] = {};
    for (int i = 0; i < rest; i++) tail[i] = element_of<float>(q.x, first + steps * kStepK + i, q.dtype);
    auto convert = [&](const auto& at) { return quantise_row<W>(steps, at, rest ? tail : nullptr, out, kStepK); };
    if (q.dtype == DType::bf16) {
      const uint16_t* x = (const uint16_t*)q.x + first;
      q.scale[row] = convert([&](int32_t s, int i) { return from_bf16<W>(x + s * kStepK + i); });
    } else {
      q.scale[row] = convert([&](int32_t s, int i) { return load_as<F32<W>>(q.x, first + s * kStepK + i, q.dtype); });
    }
  }
}

// The int8 values of a step overwrite the k tile of the same index, which has been read by then. Panels that are not
// bf16 are rounded to bf16 first, so that the int8 values are the same on every CPU.
template <class Isa>
void run_quantise_panel(const QuantisePanel& h) {
  constexpr int W = Isa::width;
  int64_t row_bytes = kTileK * Isa::elem, step = row_bytes * h.tiling.rows;
  for (int r = 0; r < h.live; r++) {
    char* row = h.panel + (r / h.tiling.rows) * step * h.k_tiles + (r % h.tiling.rows) * row_bytes;
    auto at = [&](int32_t s, int i) {
      F32<W> v = get_element<Isa>(row + (2 * s + i / kTileK) * step, i % kTileK);
      if constexpr (Isa::panel != DType::bf16) v = (F32<W>)(bf16_bits<W>(v) << 16);
      return v;
    };
    int32_t steps = h.k_tiles / 2;
    alignas(64) float tail[kStepK] = {};
    for (int i = 0; h.k_tiles % 2 && i < kTileK; i += W) store(tail + i, at(steps, i));
    h.scale[r] = quantise_row<W>(steps, at, h.k_tiles % 2 ? tail : nullptr, row, step);
  }
}

template <class Isa>
void gather_int8_panel(const GatherInt8& g) {
  int64_t row_bytes = kTileK * Isa::elem, step = row_bytes * g.tiling.rows;
  for (int r = 0; r < g.tiling.rows * g.tiling.tiles; r++) {
    char* out = g.out + (r / g.tiling.rows) * step * g.steps + (r % g.tiling.rows) * row_bytes;
    if (r >= g.live) {
      for (int s = 0; s < g.steps; s++) __builtin_memset(out + s * step, 0, kStepK);
      continue;
    }
    const char* from = g.bytes + g.token[r] * g.stride + (int64_t)g.step0 * kStepK;
    for (int s = 0; s < g.steps; s++) __builtin_memcpy(out + s * step, from + (int64_t)s * kStepK, kStepK);
    g.row_scale[r] = g.scale[g.token[r]];
  }
}

}  // namespace
}  // namespace kt
