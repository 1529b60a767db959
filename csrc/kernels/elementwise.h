// SIMD vectors in the compiler's vector types, and the element-wise functions of an expert on them: conversions to and
// from bf16 and f16 (round to nearest even), exp, erf, and the activations.
//
// The same source serves 4 floats a vector (any CPU), 8 (AVX2), 16 (AVX-512) and, for precision f64, 2 doubles: each
// ISA file includes it and is compiled with its own flags, and the compiler selects the instructions. V is any of these
// vector types, F32<W> etc. are those of W lanes. Floats have polynomial approximations of exp and erf; doubles call
// the C library lane by lane, because that precision is meant to be exact. Everything is in an unnamed namespace, so
// that each ISA has its own copy.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif
// NEON of this machine. A variant that is emulated on it takes the loops of any CPU instead.
#if defined(__aarch64__) && !defined(KT_EMULATE)
#define KT_NEON
#include <arm_neon.h>
#endif

#include "kernels/table.h"

namespace kt {
namespace {

template <int W>
struct Vec {
  typedef float f32 __attribute__((vector_size(W * 4)));
  typedef double f64 __attribute__((vector_size(W * 8)));
  typedef int32_t i32 __attribute__((vector_size(W * 4)));
  typedef uint32_t u32 __attribute__((vector_size(W * 4)));
  typedef uint8_t u8 __attribute__((vector_size(W)));
  typedef uint16_t u16 __attribute__((vector_size(W * 2)));
  typedef uint16_t pairs __attribute__((vector_size(W * 4)));
  typedef uint64_t u64 __attribute__((vector_size(W * 4)));
};

template <int W>
using F32 = typename Vec<W>::f32;
template <int W>
using F64 = typename Vec<W>::f64;
template <int W>
using U32 = typename Vec<W>::u32;
template <int W>
using I32 = typename Vec<W>::i32;

// One of two types; ISA code takes no templates from the standard library.
template <bool first, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

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

template <class V>
using Lane = decltype(V{}[0] + 0);  // float or double
template <class V>
using Mask = decltype(V{} < V{});
template <class V>
constexpr int kLanes = sizeof(V) / sizeof(Lane<V>);
template <class V>
constexpr bool kDouble = sizeof(Lane<V>) == 8;

template <class V>
inline V splat(Lane<V> x) {
  return x - V{};  // x + 0 would not be x where x is -0, and the compiler would add
}

template <class V>
inline V select(Mask<V> mask, V yes, V no) {
  return (V)((mask & (Mask<V>)yes) | (~mask & (Mask<V>)no));
}

// The sum of a vector's lanes, by halves. `half` is a constant of each step: as a variable of a loop, gcc computes the
// order of every shuffle lane by lane, which takes longer than the products that are summed.
template <class V, int half = kLanes<V> / 2>
inline Lane<V> sum_of_lanes(V v) {
  if constexpr (half == 0) {
    return v[0];
  } else {
    Mask<V> from;
    for (int i = 0; i < kLanes<V>; i++) from[i] = (i + half) % kLanes<V>;
    return sum_of_lanes<V, half / 2>(v + __builtin_shuffle(v, from));
  }
}

// Minimum and maximum; a NaN in `a` is kept, so bounds are passed as `b`.
template <class V>
inline V vmin(V a, V b) {
  return b < a ? b : a;
}

template <class V>
inline V vmax(V a, V b) {
  return b > a ? b : a;
}

// Halves as the low or the high parts of 32-bit lanes. Four of them fill half a register, which gcc converts one by
// one; as a permutation of a whole register they take one instruction.
template <int W, bool high = false>
inline U32<W> load_halves(const void* p) {
  using Halves = typename Vec<8>::u16;
  if constexpr (W == 4) {
    const Halves halves = (Halves)Vec<4>::u64{load<uint64_t>(p), 0}, zero = {};
    const Halves order = {0, 8, 1, 9, 2, 10, 3, 11};
    return (U32<W>)(high ? __builtin_shuffle(zero, halves, order) : __builtin_shuffle(halves, zero, order));
  } else {
    return __builtin_convertvector(load<typename Vec<W>::u16>(p), U32<W>) << (high ? 16u : 0u);
  }
}

// Stores the low halves of 32-bit lanes.
template <int W>
inline void store_halves(void* p, U32<W> v) {
  using Halves = typename Vec<8>::u16;
  if constexpr (W == 4) {
    const Halves low = __builtin_shuffle((Halves)v, Halves{0, 2, 4, 6, 0, 2, 4, 6});
    __builtin_memcpy(p, &low, 8);
  } else {
    store(p, __builtin_convertvector(v, typename Vec<W>::u16));
  }
}

template <int W>
inline F32<W> from_bf16(const void* p) {
#ifdef __AVX512F__  // as below
  if constexpr (W == 16)
    return (F32<W>)((U32<W>)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)p)) << 16);
#endif
  return (F32<W>)load_halves<W, true>(p);
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
  store_halves<W>(p, bf16_bits<W>(x));
}

template <int W>
inline F32<W> from_f16(const void* p) {
#ifdef __AVX512F__  // masked: without one, gcc's header reads an undefined vector and warns of it
  if constexpr (W == 16) return (F32<W>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#endif
#ifdef __F16C__
  if constexpr (W == 8) return (F32<W>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
#ifdef KT_NEON
  typedef __fp16 Half __attribute__((vector_size(8)));
  if constexpr (W == 4) return __builtin_convertvector(load<Half>(p), F32<W>);
#endif
  U32<W> h = load_halves<W>(p);
  U32<W> sign = (h & 0x8000u) << 16;
  U32<W> magnitude = (h & 0x7fffu) << 13;
  // 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals; infinities and NaNs are restored.
  F32<W> scaled = (F32<W>)magnitude * splat<F32<W>>(0x1p112f);
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
  U32<W> tiny = (U32<W>)((F32<W>)a + splat<F32<W>>(0.5f)) - (126u << 23);
  U32<W> over = 0x7c00u | ((U32<W>)(a > 0x7f800000u) & 0x200u);
  U32<W> is_tiny = (U32<W>)(a < (113u << 23));
  U32<W> is_over = (U32<W>)(a >= 0x477ff000u);
  U32<W> bits = (is_tiny & tiny) | (~is_tiny & normal);
  bits = ((is_over & over) | (~is_over & bits)) | sign;
  store_halves<W>(p, bits);
}

// Loads W values from element `index` of a tensor on, and stores them. W doubles are wider than a register where V is
// float, so they are never passed by value outside these functions.
template <class V>
inline V load_as(const void* base, int64_t index, DType type) {
  constexpr int W = kLanes<V>;
  const char* p = (const char*)base + index * (int64_t)size_of(type);
  if (type == DType::bf16) return __builtin_convertvector(from_bf16<W>(p), V);
  if (type == DType::f16) return __builtin_convertvector(from_f16<W>(p), V);
  if (type == DType::f32) return __builtin_convertvector(load<F32<W>>(p), V);
  F64<W> wide;
  __builtin_memcpy(&wide, p, sizeof wide);
  return __builtin_convertvector(wide, V);
}

template <class V>
inline void store_as(void* base, int64_t index, DType type, V x) {
  constexpr int W = kLanes<V>;
  char* p = (char*)base + index * (int64_t)size_of(type);
  if (type == DType::bf16) {
    to_bf16<W>(p, __builtin_convertvector(x, F32<W>));
  } else if (type == DType::f16) {
    to_f16<W>(p, __builtin_convertvector(x, F32<W>));
  } else if (type == DType::f32) {
    store(p, __builtin_convertvector(x, F32<W>));
  } else {
    F64<W> wide = __builtin_convertvector(x, F64<W>);
    __builtin_memcpy(p, &wide, sizeof wide);
  }
}

// e^x; for floats to about one unit in the last place: x = n ln2 + r with |r| <= ln2 / 2, and the Taylor series to r^7.
template <class V>
__attribute__((always_inline)) inline V vexp(V x) {
  if constexpr (kDouble<V>) {
    for (int i = 0; i < kLanes<V>; i++) x[i] = __builtin_exp(x[i]);
    return x;
  } else {
    x = vmin<V>(vmax<V>(x, splat<V>(-87.0f)), splat<V>(88.0f));
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    V shifted = x * splat<V>(1.44269504f) + splat<V>(12582912.0f);
    Mask<V> n = (Mask<V>)shifted - 0x4b400000;
    V nf = shifted - splat<V>(12582912.0f);
    V r = x - nf * splat<V>(0.693359375f);
    r = r - nf * splat<V>(-2.12194440e-4f);
    V y = splat<V>(1.0f / 5040);
    y = y * r + splat<V>(1.0f / 720);
    y = y * r + splat<V>(1.0f / 120);
    y = y * r + splat<V>(1.0f / 24);
    y = y * r + splat<V>(1.0f / 6);
    y = y * r + splat<V>(0.5f);
    y = y * r + splat<V>(1.0f);
    y = y * r + splat<V>(1.0f);
    return (V)((Mask<V>)y + (n << 23));
  }
}

template <class V>
inline V sigmoid(V x) {
  V one = splat<V>(1.0), above = one;
  // vexp clamps there for floats, and x may be large. Applied to the numerator, or the compiler divides twice to
  // select.
  if constexpr (!kDouble<V>) above = select<V>(x < splat<V>(-88.0f), splat<V>(0.0), one);
  return above / (one + vexp<V>(-x));
}

// Phi(x), the normal distribution function; for floats by the complementary error function of Abramowitz &
// Stegun 7.1.26 (absolute error 1.5e-7).
template <class V>
inline V gelu_phi(V x) {
  V z = x * splat<V>(0.70710678118654752);
  if constexpr (kDouble<V>) {
    for (int i = 0; i < kLanes<V>; i++) z[i] = 0.5 * __builtin_erfc(-z[i]);
    return z;
  }
  V az = vmax<V>(z, -z);
  V t = splat<V>(1.0) / (splat<V>(1.0) + splat<V>(0.3275911f) * az);
  V p = splat<V>(1.061405429f);
  p = p * t + splat<V>(-1.453152027f);
  p = p * t + splat<V>(1.421413741f);
  p = p * t + splat<V>(-0.284496736f);
  p = p * t + splat<V>(0.254829592f);
  V half_tail = splat<V>(0.5f) * p * t * vexp<V>(-az * az);  // Phi(-|x|)
  return select<V>(x < splat<V>(0.0), half_tail, splat<V>(1.0) - half_tail);
}

// x * (1 + tanh(u)) / 2 is x * sigmoid(2u).
template <class V>
inline V gelu_tanh(V x) {
  V u = splat<V>(0.79788456080286536) * (x + splat<V>(0.044715) * x * x * x);
  return x * sigmoid<V>(u + u);
}

// The activation function, of the gate (or of up where there is no gate).
template <class V, Activation A>
inline V activate(V g, double alpha) {
  if constexpr (A == Activation::silu) return g * sigmoid<V>(g);
  if constexpr (A == Activation::none) return g;
  if constexpr (A == Activation::gelu) return g * gelu_phi<V>(g);
  if constexpr (A == Activation::gelu_tanh) return gelu_tanh<V>(g);
  if constexpr (A == Activation::swiglu_oai) return g * sigmoid<V>(g * splat<V>(alpha));
  V positive = vmax<V>(g, splat<V>(0.0));
  return positive * positive;
}

// One vector of the gated product, with clamps.
template <class V, Activation A>
inline V gated(V g, V u, const Gate& gate) {
  if (gate.limit > 0) {
    V l = splat<V>(gate.limit);
    g = vmin<V>(g, l);
    u = vmin<V>(vmax<V>(u, -l), l);
  }
  if constexpr (A == Activation::swiglu_oai) u = u + splat<V>(1.0);
  return activate<V, A>(g, gate.alpha) * u;
}

}  // namespace
}  // namespace kt
