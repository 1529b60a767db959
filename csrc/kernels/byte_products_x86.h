// Products of code bytes by VPMADDUBSW (AVX2, AVX-512) and by VPDPBUSD (VNNI). Both take unsigned codes.
#pragma once

#include <immintrin.h>

#include "kernels/byte_products.h"
#include "kernels/dp4a_vnni.h"

namespace kt {
namespace {

template <int W>
inline U32<W> multiply_add_bytes(U32<W> codes, U32<W> x) {
  if constexpr (W == 16) return (U32<W>)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
  if constexpr (W == 8) return (U32<W>)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
}

template <int W>
inline I32<W> add_neighbours(U32<W> sums) {
  if constexpr (W == 16) return (I32<W>)_mm512_madd_epi16((__m512i)sums, (__m512i)(U32<W>{} + 0x00010001u));
  if constexpr (W == 8) return (I32<W>)_mm256_madd_epi16((__m256i)sums, (__m256i)(U32<W>{} + 0x00010001u));
}

// 16-bit sums of a k tile of codes up to 31, or of half a k tile of codes up to 63: at most 8 * 31 * 128 or 4 * 63 *
// 128.
template <int W, int planes>
struct MaddSums {
  static constexpr bool pairs = false;
  using Factor = U32<W>;
  U32<W> high, low;  // of the two bytes of x; int8: the second alone

  static Factor factor(const char* x) { return broadcast_pairs<W>(x); }
  static U32<W> widen(const U8<W>& codes) { return (U32<W>)codes; }
  void begin(const char*, const char*) { high = low = U32<W>{}; }
  void add(const U32<W>& codes, const Factor& x_high, const Factor& x_low) {
    if constexpr (planes == 2) high = (U32<W>)((U16<W>)high + (U16<W>)multiply_add_bytes<W>(codes, x_high));
    low = (U32<W>)((U16<W>)low + (U16<W>)multiply_add_bytes<W>(codes, x_low));
  }
  F32<W> total(const char* start_high, const char* start_low) const {
    const I32<W> lows = add_neighbours<W>(low) + (I32<W>)broadcast_pairs<W>(start_low);
    if constexpr (planes == 1) return __builtin_convertvector(lows, F32<W>);
    const I32<W> highs = add_neighbours<W>(high) + (I32<W>)broadcast_pairs<W>(start_high);
    return __builtin_convertvector((highs << 8) + lows, F32<W>);
  }
};

template <int W>
struct MaddProduct : WordProduct<W> {
  static constexpr int max_rows = W == 16 ? 8 : 12, slow_rows = 8;
  template <int bits, int planes>
  using Sums = typename Either<bits == 8, WordSums<W, 8>, MaddSums<W, planes>>::type;
};

template <int W, int bits, int planes>
struct VnniSums {
  static constexpr bool pairs = false;
  using Factor = U32<W>;
  I32<W> high, low;

  static Factor factor(const char* x) { return broadcast_pairs<W>(x); }
  static U32<W> widen(const U8<W>& codes) { return bits == 8 ? (U32<W>)codes ^ 0x80808080u : (U32<W>)codes; }
  void begin(const char* start_high, const char* start_low) {
    if constexpr (planes == 2) high = (I32<W>)broadcast_pairs<W>(start_high);
    low = (I32<W>)broadcast_pairs<W>(start_low);
  }
  void add(const U32<W>& codes, const Factor& x_high, const Factor& x_low) {
    if constexpr (planes == 2) high = add_byte_products<W>(high, codes, x_high);
    low = add_byte_products<W>(low, codes, x_low);
  }
  F32<W> total(const char*, const char*) const {
    if constexpr (planes == 1) return __builtin_convertvector(low, F32<W>);
    return __builtin_convertvector((high << 8) + low, F32<W>);
  }
};

template <int W>
struct VnniProduct : WordProduct<W> {
  static constexpr int byte_offset = 128, max_rows = kAnyRows;
  template <int bits, int planes>
  using Sums = VnniSums<W, bits, planes>;
};

}  // namespace
}  // namespace kt
