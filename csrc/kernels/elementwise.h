// Vectors of W floats in the compiler's own vector types, and the element-wise mathematics of an expert on them:
// conversions to and from bf16 and f16 (round to nearest even), exp, erf, and the activations.
//
// The same source serves 4 floats a vector (any CPU), 8 (AVX2) and 16 (AVX-512): the file that includes it was compiled
// with its flags, and the compiler picks the instructions. Everything sits in an unnamed namespace, so that each ISA
// keeps its own copy.
#pragma once

#include "kernels/table.h"

namespace kt {
namespace {

template <int W>
struct Vec {
  typedef float f32 __attribute__((vector_size(W * 4)));
  typedef int32_t i32 __attribute__((vector_size(W * 4)));
  typedef uint32_t u32 __attribute__((vector_size(W * 4)));
  typedef uint16_t u16 __attribute__((vector_size(W * 2)));
  typedef uint16_t pairs __attribute__((vector_size(W * 4)));
  typedef uint64_t u64 __attribute__((vector_size(W * 4)));
};

template <int W>
using F32 = typename Vec<W>::f32;
template <int W>
using U32 = typename Vec<W>::u32;
template <int W>
using I32 = typename Vec<W>::i32;

// Unaligned loads and stores; memcpy of a fixed size is one instruction.
template <class T>
inline T load(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
inline void store(void* p, const T& v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <int W>
inline F32<W> splat(float x) {
  return F32<W>{} + x;
}

template <int W>
inline F32<W> select(I32<W> mask, F32<W> yes, F32<W> no) {
  return (F32<W>)((mask & (I32<W>)yes) | (~mask & (I32<W>)no));
}

// The smaller and the larger; a NaN in `a` stays, so bounds go to the right.
template <int W>
inline F32<W> vmin(F32<W> a, F32<W> b) {
  return b < a ? b : a;
}

template <int W>
inline F32<W> vmax(F32<W> a, F32<W> b) {
  return b > a ? b : a;
}

template <int W>
inline F32<W> from_bf16(const void* p) {
  auto h = load<typename Vec<W>::u16>(p);
  return (F32<W>)(__builtin_convertvector(h, U32<W>) << 16);
}

// Bits of the nearest bf16, ties to even, in the low half of each lane; a NaN stays a quiet NaN.
template <int W>
inline U32<W> bf16_bits(F32<W> x) {
  U32<W> u = (U32<W>)x;
  U32<W> rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  U32<W> quiet = (u >> 16) | 0x40u;
  U32<W> is_nan = (U32<W>)((u & 0x7fffffffu) > 0x7f800000u);
  return (is_nan & quiet) | (~is_nan & rounded);
}

template <int W>
inline void to_bf16(void* p, F32<W> x) {
  store(p, __builtin_convertvector(bf16_bits<W>(x), typename Vec<W>::u16));
}

template <int W>
inline F32<W> from_f16(const void* p) {
  U32<W> h = __builtin_convertvector(load<typename Vec<W>::u16>(p), U32<W>);
  U32<W> sign = (h & 0x8000u) << 16;
  U32<W> magnitude = (h & 0x7fffu) << 13;
  // 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals on the way; infinities and NaNs are put
  // back.
  F32<W> scaled = (F32<W>)magnitude * splat<W>(0x1p112f);
  U32<W> special = (U32<W>)(magnitude >= (31u << 23)) & 0x7f800000u;
  return (F32<W>)((U32<W>)scaled | special | sign);
}

template <int W>
inline void to_f16(void* p, F32<W> x) {
  U32<W> u = (U32<W>)x;
  U32<W> sign = (u >> 16) & 0x8000u;
  U32<W> a = u & 0x7fffffffu;
  U32<W> normal = (a + 0xfffu + ((a >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14: adding one half aligns the bits that a subnormal keeps, and the addition rounds.
  U32<W> tiny = (U32<W>)((F32<W>)a + splat<W>(0.5f)) - (126u << 23);
  U32<W> over = 0x7c00u | ((U32<W>)(a > 0x7f800000u) & 0x200u);
  U32<W> is_tiny = (U32<W>)(a < (113u << 23));
  U32<W> is_over = (U32<W>)(a >= 0x477ff000u);
  U32<W> bits = (is_tiny & tiny) | (~is_tiny & normal);
  bits = ((is_over & over) | (~is_over & bits)) | sign;
  store(p, __builtin_convertvector(bits, typename Vec<W>::u16));
}

template <int W>
inline F32<W> load_as_f32(const void* base, int64_t index, DType type) {
  const char* p = (const char*)base + index * (int64_t)size_of(type);
  if (type == DType::bf16) return from_bf16<W>(p);
  if (type == DType::f16) return from_f16<W>(p);
  return load<F32<W>>(p);
}

template <int W>
inline void store_as(void* base, int64_t index, DType type, F32<W> x) {
  char* p = (char*)base + index * (int64_t)size_of(type);
  if (type == DType::bf16) {
    to_bf16<W>(p, x);
  } else if (type == DType::f16) {
    to_f16<W>(p, x);
  } else {
    store(p, x);
  }
}

// e^x to about one unit in the last place: x = n ln2 + r with |r| <= ln2 / 2, and the Taylor series to r^7.
template <int W>
inline F32<W> vexp(F32<W> x) {
  x = vmin<W>(vmax<W>(x, splat<W>(-87.0f)), splat<W>(88.0f));
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
  F32<W> shifted = x * splat<W>(1.44269504f) + splat<W>(12582912.0f);
  I32<W> n = (I32<W>)shifted - 0x4b400000;
  F32<W> nf = shifted - splat<W>(12582912.0f);
  F32<W> r = x - nf * splat<W>(0.693359375f);
  r = r - nf * splat<W>(-2.12194440e-4f);
  F32<W> y = splat<W>(1.0f / 5040);
  y = y * r + splat<W>(1.0f / 720);
  y = y * r + splat<W>(1.0f / 120);
  y = y * r + splat<W>(1.0f / 24);
  y = y * r + splat<W>(1.0f / 6);
  y = y * r + splat<W>(0.5f);
  y = y * r + splat<W>(1.0f);
  y = y * r + splat<W>(1.0f);
  return (F32<W>)((I32<W>)y + (n << 23));
}

template <int W>
inline F32<W> sigmoid(F32<W> x) {
  F32<W> y = splat<W>(1.0f) / (splat<W>(1.0f) + vexp<W>(-x));
  return select<W>(x < splat<W>(-88.0f), splat<W>(0.0f), y);  // vexp stops there, and x may be large
}

// Phi(x), the normal distribution, by the complementary error function of Abramowitz & Stegun 7.1.26 (absolute
// error 1.5e-7).
template <int W>
inline F32<W> gelu_phi(F32<W> x) {
  F32<W> z = x * splat<W>(0.70710678f);
  F32<W> az = vmax<W>(z, -z);
  F32<W> t = splat<W>(1.0f) / (splat<W>(1.0f) + splat<W>(0.3275911f) * az);
  F32<W> p = splat<W>(1.061405429f);
  p = p * t + splat<W>(-1.453152027f);
  p = p * t + splat<W>(1.421413741f);
  p = p * t + splat<W>(-0.284496736f);
  p = p * t + splat<W>(0.254829592f);
  F32<W> half_tail = splat<W>(0.5f) * p * t * vexp<W>(-az * az);  // Phi(-|x|)
  return select<W>(x < splat<W>(0.0f), half_tail, splat<W>(1.0f) - half_tail);
}

// x * (1 + tanh(u)) / 2 is x * sigmoid(2u).
template <int W>
inline F32<W> gelu_tanh(F32<W> x) {
  F32<W> u = splat<W>(0.79788456f) * (x + splat<W>(0.044715f) * x * x * x);
  return x * sigmoid<W>(u + u);
}

// The scalar part of an activation, on the gate (or on up alone where there is no gate).
template <int W, Activation A>
inline F32<W> activate(F32<W> g, float alpha) {
  if constexpr (A == Activation::silu) return g * sigmoid<W>(g);
  if constexpr (A == Activation::none) return g;
  if constexpr (A == Activation::gelu) return g * gelu_phi<W>(g);
  if constexpr (A == Activation::gelu_tanh) return gelu_tanh<W>(g);
  if constexpr (A == Activation::swiglu_oai) return g * sigmoid<W>(g * splat<W>(alpha));
  F32<W> positive = vmax<W>(g, splat<W>(0.0f));
  return positive * positive;
}

// One vector of the gated product, clamps included.
template <int W, Activation A>
inline F32<W> gated(F32<W> g, F32<W> u, const Gate& gate) {
  if (gate.limit > 0.0f) {
    F32<W> l = splat<W>(gate.limit);
    g = vmin<W>(g, l);
    u = vmin<W>(vmax<W>(u, -l), l);
  }
  if constexpr (A == Activation::swiglu_oai) u = u + splat<W>(1.0f);
  return activate<W, A>(g, gate.alpha) * u;
}

}  // namespace
}  // namespace kt
