// Software versions of the few NEON intrinsics that the aarch64 kernels use, for machines that lack them.
//
// As immintrin.h beside it: with this file in place of the compiler's <arm_neon.h> the NEON variants run on every CPU,
// slowly, with the same loops, layouts and edge cases, in test builds only (KT_EMULATE). The hardware rounds the sums
// of bf16 products to odd and counts denormals as zero; here they are rounded to nearest, so the last bits differ.
#pragma once

#include <stdint.h>

typedef int8_t int8x8_t __attribute__((vector_size(8)));
typedef float float32x2_t __attribute__((vector_size(8)));
typedef int8_t int8x16_t __attribute__((vector_size(16)));
typedef int32_t int32x4_t __attribute__((vector_size(16)));
typedef uint16_t uint16x8_t __attribute__((vector_size(16)));
typedef uint16_t bfloat16x8_t __attribute__((vector_size(16)));
typedef uint32_t uint32x4_t __attribute__((vector_size(16)));
typedef uint64_t uint64x2_t __attribute__((vector_size(16)));
typedef float float32x4_t __attribute__((vector_size(16)));

namespace {

template <class V>
inline V emulated_load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline float32x2_t vld1_f32(const float* p) { return emulated_load<float32x2_t>(p); }
inline float32x4_t vld1q_f32(const float* p) { return emulated_load<float32x4_t>(p); }
inline int8x8_t vld1_s8(const int8_t* p) { return emulated_load<int8x8_t>(p); }
inline int8x16_t vld1q_s8(const int8_t* p) { return emulated_load<int8x16_t>(p); }
inline uint16x8_t vld1q_u16(const uint16_t* p) { return emulated_load<uint16x8_t>(p); }
inline uint32x4_t vld1q_u32(const uint32_t* p) { return emulated_load<uint32x4_t>(p); }

inline bfloat16x8_t vreinterpretq_bf16_u32(uint32x4_t v) { return (bfloat16x8_t)v; }
inline int8x16_t vreinterpretq_s8_u32(uint32x4_t v) { return (int8x16_t)v; }
inline uint64x2_t vreinterpretq_u64_u32(uint32x4_t v) { return (uint64x2_t)v; }
inline uint32x4_t vreinterpretq_u32_u64(uint64x2_t v) { return (uint32x4_t)v; }

inline uint16x8_t vtrn1q_u16(uint16x8_t a, uint16x8_t b) {
  return uint16x8_t{a[0], b[0], a[2], b[2], a[4], b[4], a[6], b[6]};
}
inline uint16x8_t vtrn2q_u16(uint16x8_t a, uint16x8_t b) {
  return uint16x8_t{a[1], b[1], a[3], b[3], a[5], b[5], a[7], b[7]};
}
inline uint32x4_t vzip1q_u32(uint32x4_t a, uint32x4_t b) { return uint32x4_t{a[0], b[0], a[1], b[1]}; }
inline uint32x4_t vzip2q_u32(uint32x4_t a, uint32x4_t b) { return uint32x4_t{a[2], b[2], a[3], b[3]}; }
inline uint64x2_t vzip1q_u64(uint64x2_t a, uint64x2_t b) { return uint64x2_t{a[0], b[0]}; }
inline uint64x2_t vzip2q_u64(uint64x2_t a, uint64x2_t b) { return uint64x2_t{a[1], b[1]}; }

inline float32x4_t vfmaq_lane_f32(float32x4_t sum, float32x4_t a, float32x2_t b, int lane) { return sum + a * b[lane]; }
inline float32x4_t vfmaq_laneq_f32(float32x4_t sum, float32x4_t a, float32x4_t b, int lane) {
  return sum + a * b[lane];
}

// One sum of four products of bytes. Overflow wraps.
inline int32_t emulated_dot(int32_t sum, const int8_t* a, const int8_t* b, int count) {
  for (int i = 0; i < count; i++) sum = (int32_t)((uint32_t)sum + (uint32_t)(a[i] * b[i]));
  return sum;
}

inline int32x4_t vdotq_s32(int32x4_t sum, int8x16_t a, int8x16_t b) {
  for (int i = 0; i < 4; i++) sum[i] = emulated_dot(sum[i], (const int8_t*)&a + 4 * i, (const int8_t*)&b + 4 * i, 4);
  return sum;
}
inline int32x4_t vdotq_lane_s32(int32x4_t sum, int8x16_t a, int8x8_t b, int lane) {
  for (int i = 0; i < 4; i++) sum[i] = emulated_dot(sum[i], (const int8_t*)&a + 4 * i, (const int8_t*)&b + 4 * lane, 4);
  return sum;
}
inline int32x4_t vdotq_laneq_s32(int32x4_t sum, int8x16_t a, int8x16_t b, int lane) {
  for (int i = 0; i < 4; i++) sum[i] = emulated_dot(sum[i], (const int8_t*)&a + 4 * i, (const int8_t*)&b + 4 * lane, 4);
  return sum;
}
inline int32x4_t vmmlaq_s32(int32x4_t sum, int8x16_t a, int8x16_t b) {
  for (int i = 0; i < 4; i++)
    sum[i] = emulated_dot(sum[i], (const int8_t*)&a + i / 2 * 8, (const int8_t*)&b + i % 2 * 8, 8);
  return sum;
}

inline float emulated_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// A pair of products is added before the sum is.
inline float emulated_pair(float sum, const uint16_t* a, const uint16_t* b) {
  const float first = emulated_bf16(a[0]) * emulated_bf16(b[0]), second = emulated_bf16(a[1]) * emulated_bf16(b[1]);
  return sum + (first + second);
}

inline float32x4_t vbfdotq_f32(float32x4_t sum, bfloat16x8_t a, bfloat16x8_t b) {
  for (int i = 0; i < 4; i++) sum[i] = emulated_pair(sum[i], (const uint16_t*)&a + 2 * i, (const uint16_t*)&b + 2 * i);
  return sum;
}
inline float32x4_t vbfdotq_laneq_f32(float32x4_t sum, bfloat16x8_t a, bfloat16x8_t b, int lane) {
  for (int i = 0; i < 4; i++)
    sum[i] = emulated_pair(sum[i], (const uint16_t*)&a + 2 * i, (const uint16_t*)&b + 2 * lane);
  return sum;
}
inline float32x4_t vbfmmlaq_f32(float32x4_t sum, bfloat16x8_t a, bfloat16x8_t b) {
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k += 2)
      sum[i] = emulated_pair(sum[i], (const uint16_t*)&a + i / 2 * 4 + k, (const uint16_t*)&b + i % 2 * 4 + k);
  return sum;
}

inline int32x4_t vpaddq_s32(int32x4_t a, int32x4_t b) {
  return int32x4_t{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]};
}

}  // namespace
