// Products of bytes in the vector units: four to a lane of 32 bits, added to what the lane holds.
#pragma once

#include "kernels/formats.h"

namespace kt {
namespace {

// The sum of two products of 16 bits in every lane.
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

// Bytes with a sign as pairs of 16 bits: numbers 0 and 2 of every lane, and 1 and 3.
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

// The same for emulated variants: loops that have many of these in pieces take minutes to compile.
template <int W>
__attribute__((noinline)) void add_wide(I32<W>& sum, const U32<W>& a, const U32<W>& b) {
  sum = add_pairs<W>(sum, widen<W>(a), widen<W>(b));
}

// How a variant multiplies codes with bytes of x. Words of int8 are opened first, as are those of x that they meet;
// `offset` is what their numbers have then too much. Codes of int4 come as they are, from 0 to 15: two products of such
// with bytes fit 16 bits.
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
    // Known to be one number in all lanes, it would be shifted outside the vectors and brought in twice.
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
