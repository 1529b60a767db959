// Definitions shared by all parts of the core: element types, the weight tile, scalar conversions.
//
// A weight tile holds 32 of K by 16 of N. In bf16, 1 KB, it is stored as 16 rows of k-pairs: row p holds, for each of
// 16 outputs n, the two neighbours k = 2p and 2p + 1. In this layout it is the B operand of an AMX product, one 64-byte
// load for AVX-512, and converted to f32 by two shifts elsewhere. In f32 (2 KB) and f64 (4 KB), the exact precisions,
// it is [32 k][16 n]. Everything in this header is constexpr or has internal linkage: the ISA files include it too, and
// the linker must not find a copy there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

enum class DType : uint8_t { f32, bf16, f16, f64 };

constexpr size_t size_of(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }

// The type that weights are rounded to when they are packed. bf16: sums are f32, activations bf16 or f32 as the CPU
// multiplies them. f32 and f64: weights, activations and sums have that type, so only the arithmetic itself rounds.
enum class Precision : uint8_t { bf16, f32, f64 };
constexpr int kPrecisions = 3;

constexpr int kTileK = 32;        // contraction steps in a tile
constexpr int kTileN = 16;        // outputs in a tile
constexpr int kBlockN = 32;       // outputs in a block: two tiles side by side
constexpr int kTileBytes = 1024;  // of a bf16 tile; KernelTable::tile_bytes has that of any precision
constexpr int kMaxRows = 16;      // tokens in an activation tile, at most

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The function between the two products of an expert. `gated` forms take gate and up, the others up alone. `none` is
// for products of LoRA factors.
enum class Activation : uint8_t { silu, gelu, gelu_tanh, relu2, swiglu_oai, none };

// One bf16 or f16 as f32: the scalar form of the conversions of kernels/elementwise.h, for code outside the kernels.
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

// Rounds to the nearest, ties to even. Values beyond the range of f16 become infinite.
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

// Loads element `index` of a tensor; set_element stores it.
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
