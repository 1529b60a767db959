// dp4a by VPDPBUSD, one of whose operands is unsigned. That is the weights; int8 weights have 128 added.
#pragma once

#include <immintrin.h>

#include "kernels/elementwise.h"

namespace kt {
namespace {

template <int W>
inline I32<W> add_byte_products(I32<W> sum, U32<W> plain, U32<W> x) {
  if constexpr (W == 16) return (I32<W>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)plain, (__m512i)x);
  if constexpr (W == 8) return (I32<W>)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)plain, (__m256i)x);
}

template <int W>
struct VnniDp4a {
  static constexpr int width = W, offset = 128;
  static U32<W> unpack(U32<W> codes) { return codes ^ 0x80808080u; }
  static U32<W> unpack_x(U32<W> x) { return x; }
  static I32<W> add(I32<W> sum, U32<W> plain, U32<W> x) { return add_byte_products<W>(sum, plain, x); }
  static I32<W> add_nibbles(I32<W> sum, U32<W> codes, U32<W> x) { return add(sum, codes, x); }
};

}  // namespace
}  // namespace kt
