// Software versions of the few NEON intrinsics that the aarch64 kernels use, for machines that lack them.
//
// As immintrin.h beside it: with this file in place of the compiler's <arm_neon.h> the NEON variants run on every CPU,
// slowly, with the same loops, layouts and edge cases, in test builds only (KT_EMULATE).
#pragma once

#include <stdint.h>

typedef int8_t int8x16_t __attribute__((vector_size(16)));
typedef int32_t int32x4_t __attribute__((vector_size(16)));

namespace {

inline int32x4_t vdotq_s32(int32x4_t sum, int8x16_t a, int8x16_t b) {
  for (int i = 0; i < 16; i++) sum[i / 4] = (int32_t)((uint32_t)sum[i / 4] + (uint32_t)(a[i] * b[i]));
  return sum;
}

inline int32x4_t vpaddq_s32(int32x4_t a, int32x4_t b) {
  return int32x4_t{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]};
}

}  // namespace
