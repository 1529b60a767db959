// dp4a by VPDPBUSD, one of whose operands is unsigned. That is the weights; int8 weights have 128 added.
#pragma once

#include <immintrin.h>

#include "kernels/elementwise.h"

namespace kt {
namespace {

struct VnniDp4a {
  static constexpr int width = 16, offset = 128;
  static U32<16> unpack(U32<16> codes) { return codes ^ 0x80808080u; }
  static U32<16> unpack_x(U32<16> x) { return x; }
  static I32<16> add(I32<16> sum, U32<16> plain, U32<16> x) {
    return (I32<16>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)plain, (__m512i)x);
  }
  static I32<16> add_nibbles(I32<16> sum, U32<16> codes, U32<16> x) { return add(sum, codes, x); }
};

}  // namespace
}  // namespace kt
