// Rows of x as operands of integer dot products with the codes of a format.
#pragma once

#include "kernels/byte_products.h"
#include "kernels/packed_gemv.h"

namespace kt {
namespace {

constexpr int kInt16GroupRows = 4;  // rows that are multiplied at a time

// One k tile of one row of x, for the codes of one format: for every quad the two operands of its products, eight bytes
// of even and of odd k, `copies` times; for each half of the k tile (the first alone where it has one scale) the
// initial sums of both operands in the same form, and the sum of x.
template <int copies>
struct alignas(copies == 1 ? 64 : 16) Int16Tile {
  char operand[kQuads][2][copies * kPartBytes];
  char start[2][2][copies * kPartBytes];
  float sum[2], scale;
};

// What writing rows depends on in the codes of a format.
struct QuadLayout {
  uint8_t code[kQuads][4];  // code_of
  int halves, zero;         // scales of a k tile; by how much codes are too large
  float unit;               // value of a code of one
  bool pairs;               // operands are int16: codes at bytes 0 and 2, codes at bytes 1 and 3
  bool floats = false;      // x stays as it is, 32 floats
  bool operator==(const QuadLayout&) const = default;
};

typedef int16_t EightOf16 __attribute__((vector_size(16)));

// 32 values as int16, in order of k, and the power of two that they are to be multiplied with.
template <int W, DType panel>
inline float to_int16(const char* row, int16_t (&out)[kTileK]) {
  F32<W> v[kTileK / W];
  I32<W> largest = {};
  for (int i = 0; i < kTileK / W; i++) {
    if constexpr (panel == DType::bf16) {
      v[i] = from_bf16<W>(row + i * W * 2);
    } else {
      v[i] = load<F32<W>>(row + i * W * 4);
    }
    const I32<W> magnitude = (I32<W>)v[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t bits = 0;
  for (int i = 0; i < W; i++) bits = largest[i] > bits ? largest[i] : bits;
  // The first signed byte reaches 127, so numbers reach 32,639.
  float most;
  __builtin_memcpy(&most, &bits, 4);
  const bool finite = bits < 0x7f800000;
  float above = most * (32768.0f / 32639.0f), scale, inverse;
  __builtin_memcpy(&bits, &above, 4);
  int32_t exponent = bits >> 23 > 27 ? bits >> 23 : 27;  // tiny values count as zero
  uint32_t scale_bits = (uint32_t)(exponent - 14) << 23, inverse_bits = (uint32_t)(268 - exponent) << 23;
  __builtin_memcpy(&scale, &scale_bits, 4);
  __builtin_memcpy(&inverse, &inverse_bits, 4);
  auto rounded = [&](int i) { return v[i] * splat<F32<W>>(inverse) + splat<F32<W>>(kRounding); };
  if constexpr (W == 4) {  // 16 bytes at a time, as they are read: a load waits for two stores of eight
    for (int i = 0; i < kTileK / W; i += 2)
      store(out + i * W,
            __builtin_shuffle((EightOf16)rounded(i), (EightOf16)rounded(i + 1), EightOf16{0, 2, 4, 6, 8, 10, 12, 14}));
  } else {
    for (int i = 0; i < kTileK / W; i++)
      store(out + i * W, __builtin_convertvector((U32<W>)rounded(i), typename Vec<W>::u16));
  }
  return finite ? scale : most;  // what is not finite makes the whole tile's results not finite
}

// Sums of even and of odd k of a vector in order of k, twice.
inline I32<4> by_parity(const EightOf16& v) {
  const I32<4> even = (I32<4>)v << 16 >> 16, odd = (I32<4>)v >> 16;
  const I32<4> pairs =
      __builtin_shuffle(even, odd, I32<4>{0, 4, 1, 5}) + __builtin_shuffle(even, odd, I32<4>{2, 6, 3, 7});
  return pairs + __builtin_shuffle(pairs, I32<4>{2, 3, 0, 1});
}

template <class Product>
inline void put_start(char* to, const I32<4>& sums, int zero) {
  const I32<4> start = I32<4>{Product::start, 0, Product::start, 0} - sums * zero;
  __builtin_memcpy(to, &start, Product::copies * kPartBytes);
}

// For every quad of a layout, which of 32 bytes in order of k the bytes of its operands are, twice.
struct ByteOrder {
  RowBytes from[kQuads];
  explicit ByteOrder(const QuadLayout& layout) {
    for (int quad = 0; quad < kQuads; quad++)
      for (int i = 0; i < 16; i++) from[quad][i] = (uint8_t)(2 * layout.code[quad][i % 4] + i / 4 % 2);
  }
};

// x as int16 pairs.
template <class Product>
inline void write_pairs(const int16_t (&x)[kTileK], const QuadLayout& layout, Int16Tile<Product::copies>& out) {
  for (int quad = 0; quad < kQuads; quad++)
    for (int f = 0; f < 2; f++) {
      int16_t operand[4];
      for (int i = 0; i < 4; i++) operand[i] = x[2 * layout.code[quad][f + i % 2 * 2] + i / 2];
      for (int copy = 0; copy < Product::copies; copy++)
        __builtin_memcpy(out.operand[quad][f] + copy * kPartBytes, operand, kPartBytes);
    }
}

// x as two signed bytes.
template <class Product>
inline void write_bytes(const int16_t (&x)[kTileK], const ByteOrder& order, Int16Tile<Product::copies>& out) {
  alignas(16) int8_t bytes[2][kTileK];
  for (int k = 0; k < kTileK; k++) {
    bytes[0][k] = (int8_t)((x[k] + 128) >> 8);
    bytes[1][k] = (int8_t)x[k];
  }
  for (int f = 0; f < 2; f++) {
    const RowBytes first = load<RowBytes>(bytes[f]), second = load<RowBytes>(bytes[f] + 16);
    for (int quad = 0; quad < kQuads; quad++) {
      const RowBytes operand = __builtin_shuffle(first, second, order.from[quad]);
      __builtin_memcpy(out.operand[quad][f], &operand, Product::copies * kPartBytes);
    }
  }
}

template <class Product>
inline void write_tile(const int16_t (&x)[kTileK], float scale, const QuadLayout& layout, const ByteOrder& order,
                       Int16Tile<Product::copies>& out) {
  layout.pairs ? write_pairs<Product>(x, layout, out) : write_bytes<Product>(x, order, out);
  EightOf16 high[2], low[2];
  for (int half = 0; half < 2; half++) {
    const EightOf16 a = load<EightOf16>(x + 16 * half), b = load<EightOf16>(x + 16 * half + 8);
    const EightOf16 a_high = (a + 128) >> 8, b_high = (b + 128) >> 8;
    high[half] = a_high + b_high;
    low[half] = (a - (a_high << 8)) + (b - (b_high << 8));
  }
  if (layout.halves == 1) high[0] += high[1], low[0] += low[1];
  out.scale = scale * layout.unit;
  for (int half = 0; half < layout.halves; half++) {
    const I32<4> h = by_parity(high[half]), l = by_parity(low[half]), all = h * 256 + l;
    out.sum[half] = (float)(all[0] + all[1]) * scale;
    put_start<Product>(out.start[half][0], layout.pairs ? all : h, layout.zero);
    put_start<Product>(out.start[half][1], layout.pairs ? I32<4>{} : l, layout.zero);
  }
}

}  // namespace
}  // namespace kt
