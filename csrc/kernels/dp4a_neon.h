// dp4a by SDOT, four signed products per 32-bit lane. int4 codes, 0 to 15, are signed bytes as they are.
#pragma once

#include <arm_neon.h>

#include "kernels/elementwise.h"

namespace kt {
namespace {

struct NeonDp4a {
  static constexpr int width = 4, offset = 0;
  static U32<4> unpack(U32<4> codes) { return codes; }
  static U32<4> unpack_x(U32<4> x) { return x; }
  static I32<4> add(I32<4> sum, U32<4> codes, U32<4> x) {
    return (I32<4>)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);
  }
  static I32<4> add_nibbles(I32<4> sum, U32<4> codes, U32<4> x) { return add(sum, codes, x); }
};

}  // namespace
}  // namespace kt
