// int8 dot products in the vector units: four products per 32-bit lane, added to the lane (dp4a in CUDA's terms).
#pragma once

#include "kernels/formats.h"

namespace kt {
namespace {

// The sum of two 16-bit products in every lane.
template <int W>
inline I32<W> pair_product(I32<W> a, I32<W> b) {
#ifdef __AVX512BW__
  if constexpr (W == 16) return (I32<W>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
#ifdef __SSE2__
  typedef short Halves __attribute__((vector_size(16)));
  if constexpr (W == 4) return (I32<W>)__builtin_ia32_pmaddwd128((Halves)a, (Halves)b);
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (I32<W>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}

// Signed bytes as pairs of 16 bits: elements 0 and 2 of every lane, and 1 and 3.
template <int W>
struct BytePairs {
  I32<W> even, odd;
};
template <int W>
inline BytePairs<W> widen(U32<W> bytes) {
  typedef int16_t Halves __attribute__((vector_size(W * 4)));
  return {(I32<W>)((Halves)(bytes << 8) >> 8), (I32<W>)((Halves)bytes >> 8)};
}

template <int W>
inline I32<W> add_pairs(I32<W> sum, const BytePairs<W>& a, const BytePairs<W>& b) {
  sum += pair_product<W>(a.even, b.even);
  return sum + pair_product<W>(a.odd, b.odd);
}

// Out of line for emulated variants: loops with many of these, split into narrower vectors, take minutes to compile.
template <int W>
__attribute__((noinline)) void add_wide(I32<W>& sum, const U32<W>& a, const U32<W>& b) {
  sum = add_pairs<W>(sum, widen<W>(a), widen<W>(b));
}

// dp4a of a variant. Words of int8 weights are unpacked first, and so are the matching words of x; unpacked weights are
// `offset` too large. int4 codes are used as unsigned numbers from 0 to 15: two products of them with int8 fit 16 bits.
template <int W>
struct WideningDp4a {
  static constexpr int width = W, offset = 0;
  static constexpr bool wider_than_register = W * 4 > kRegister;
  static auto unpack(U32<W> codes) {
    if constexpr (wider_than_register)
      return codes;
    else
      return widen<W>(codes);
  }
  static auto unpack_x(U32<W> x) {
    // A broadcast known to the compiler would be shifted as a scalar and broadcast twice; the barrier prevents that.
    if constexpr (wider_than_register)
      return x;
    else
      return widen<W>(apart(x));
  }
  static I32<W> add(I32<W> sum, const decltype(unpack(U32<W>{}))& codes, const decltype(unpack_x(U32<W>{}))& x) {
    if constexpr (wider_than_register) {
      add_wide<W>(sum, codes, x);
      return sum;
    } else {
      return add_pairs<W>(sum, codes, x);
    }
  }
  static I32<W> add_nibbles(I32<W> sum, U32<W> codes, U32<W> x) {
#ifdef __AVX512BW__
    if constexpr (W == 16) {
      __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
      return sum + (I32<W>)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
#endif
#ifdef __AVX2__
    if constexpr (W == 8) {
      __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
      return sum + (I32<W>)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#endif
    return add(sum, unpack(codes), unpack_x(x));
  }
};

}  // namespace
}  // namespace kt
