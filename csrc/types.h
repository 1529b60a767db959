// The words that every part of the core shares: element types, the tile, and the checks.
//
// A weight tile holds 32 of K by 16 of N. In bf16, 1 KB, it is stored as 16 rows of k-pairs: row p holds, for each of
// 16 outputs n, the two neighbours k = 2p and 2p + 1. It is the B operand of an AMX product as it lies in memory, one
// 64-byte load for AVX-512 and two shifts away from f32 for everyone else. In f32 (2 KB) and f64 (4 KB), the exact
// kinds, it is simply [32 k][16 n]. Everything in this header is constexpr or
// internal to the file that includes it: the ISA files include it too, and the linker must not find a copy there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

enum class DType : uint8_t { f32, bf16, f16, f64 };

constexpr size_t size_of(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }

// What weights are rounded to when they are packed. bf16: sums are f32, activations bf16 or f32 as the CPU multiplies
// them. f32 and f64: weights, activations and sums alike, so nothing is rounded but by the arithmetic itself.
enum class Precision : uint8_t { bf16, f32, f64 };
constexpr int kPrecisions = 3;

constexpr int kTileK = 32;        // contraction steps in a tile
constexpr int kTileN = 16;        // outputs in a tile
constexpr int kBlockN = 32;       // outputs in a block: two tiles side by side
constexpr int kTileBytes = 1024;  // of a bf16 tile; KernelTable::tile_bytes says it for any
constexpr int kMaxRows = 16;      // tokens in an activation tile, at most

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// What stands between the two products of an expert. `gated` forms take gate and up, the others up alone.
// `none` is for products that are not an expert's own.
enum class Activation : uint8_t { silu, gelu, gelu_tanh, relu2, swiglu_oai, none };

// One bf16 or f16 as f32: the scalar form of what kernels/elementwise.h does in vectors, for the code outside the
// kernels.
static inline float to_float(uint16_t half, DType type) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  if (type == DType::f16) {
    // 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals.
    uint32_t magnitude = (half & 0x7fffu) << 13;
    __builtin_memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    __builtin_memcpy(&bits, &value, 4);
    if (magnitude >= (31u << 23)) bits |= 0x7f800000u;
    bits |= (half & 0x8000u) << 16;
  }
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// And back: the nearest, ties to even. What f16 cannot hold is infinite.
static inline uint16_t from_float(float value, DType type) {
  uint32_t u;
  __builtin_memcpy(&u, &value, 4);
  if (type == DType::bf16) {
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (a < (113u << 23)) {
    // Adding one half aligns the bits that a subnormal keeps, and the addition rounds.
    float magnitude;
    __builtin_memcpy(&magnitude, &a, 4);
    magnitude += 0.5f;
    __builtin_memcpy(&a, &magnitude, 4);
    return (uint16_t)(sign | (a - (126u << 23)));
  }
  return (uint16_t)(sign | ((a + 0xfffu + ((a >> 13) & 1u) - (112u << 23)) >> 13));
}

// Element `index` of a tensor, and back.
template <class Real>
static inline Real element_of(const void* data, int64_t index, DType type) {
  if (type == DType::f32) return (Real)((const float*)data)[index];
  if (type == DType::f64) return (Real)((const double*)data)[index];
  return (Real)to_float(((const uint16_t*)data)[index], type);
}

template <class Real>
static inline void set_element(void* data, int64_t index, DType type, Real value) {
  if (type == DType::f32) {
    ((float*)data)[index] = (float)value;
  } else if (type == DType::f64) {
    ((double*)data)[index] = (double)value;
  } else {
    ((uint16_t*)data)[index] = from_float((float)value, type);
  }
}

}  // namespace kt
