// Rows in bf16 or f32 as floats and back, in loops of which compilers make vectors.
#pragma once

#include "types.h"

namespace kt {

template <DType type>
inline float load(const char* at, int64_t i) {
  return type == DType::bf16 ? to_float(((const uint16_t*)at)[i], type) : ((const float*)at)[i];
}

// As from_float, without a branch, so that compilers make vectors of loops with it.
inline uint16_t to_bf16(float value) {
  uint32_t u;
  __builtin_memcpy(&u, &value, 4);
  const uint32_t is_nan = 0u - (uint32_t)((u & 0x7fffffffu) > 0x7f800000u);
  const uint32_t nan = (u >> 16) | 0x40u, number = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)((nan & is_nan) | (number & ~is_nan));
}

template <DType type>
inline float rounded(float value) {
  return type == DType::bf16 ? to_float(to_bf16(value), type) : value;
}

// The floats never overlap the rows.
template <DType type>
inline void widen(const char* from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = load<type>(from, i);
}

template <DType type>
inline void narrow(const float* __restrict from, char* to, int64_t count) {
  if constexpr (type == DType::bf16) {
    for (int64_t i = 0; i < count; i++) ((uint16_t*)to)[i] = to_bf16(from[i]);
  } else {
    __builtin_memcpy(to, from, (size_t)count * 4);
  }
}

inline void widen(DType type, const char* from, float* to, int64_t count) {
  type == DType::bf16 ? widen<DType::bf16>(from, to, count) : widen<DType::f32>(from, to, count);
}

inline void narrow(DType type, const float* from, char* to, int64_t count) {
  type == DType::bf16 ? narrow<DType::bf16>(from, to, count) : narrow<DType::f32>(from, to, count);
}

}  // namespace kt
