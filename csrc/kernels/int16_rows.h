// Rows of x as operands of integer dot products with the codes of a format.
//
// x is int16 or, in W8A8, int8: then the first of its two signed bytes is zero and not multiplied.
#pragma once

#include "kernels/byte_products.h"
#include "kernels/packed_gemv.h"
#include "kernels/quantise.h"

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

template <int W>
inline int32_t largest_lane(const I32<W>& v) {
  if constexpr (W > 4) {
    I32<W / 2> half[2];
    __builtin_memcpy(half, &v, sizeof v);
    return largest_lane<W / 2>(half[0] > half[1] ? half[0] : half[1]);
  } else {
    const I32<4> by_two = __builtin_shuffle(v, I32<4>{2, 3, 0, 1}), pairs = v > by_two ? v : by_two;
    return pairs[0] > pairs[1] ? pairs[0] : pairs[1];
  }
}

// 32 values of a row.
template <int W>
struct TileValues {
  F32<W> v[kTileK / W];
  int32_t largest_bits;  // of the largest magnitude

  template <DType panel>
  static TileValues of(const char* row) {
    TileValues x;
    I32<W> largest = {};
    for (int i = 0; i < kTileK / W; i++) {
      if constexpr (panel == DType::bf16) {
        x.v[i] = from_bf16<W>(row + i * W * 2);
      } else {
        x.v[i] = load<F32<W>>(row + i * W * 4);
      }
      const I32<W> magnitude = (I32<W>)x.v[i] & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    x.largest_bits = largest_lane<W>(largest);
    return x;
  }

  // Whole registers at a time, as they are read: a load waits for two stores of half its size.
  void store_rounded(float inverse, int16_t (&out)[kTileK]) const {
    using Pairs = typename Vec<W>::pairs;
    Pairs low_halves;
    for (int i = 0; i < 2 * W; i++) low_halves[i] = (uint16_t)(2 * i);
    for (int i = 0; i < kTileK / W; i += 2)
      store(out + i * W,
            __builtin_shuffle((Pairs)rounded<W>(v[i], inverse), (Pairs)rounded<W>(v[i + 1], inverse), low_halves));
  }
};

// 32 values as int16, in order of k, and the power of two that they are to be multiplied with.
template <int W>
inline float to_int16(const TileValues<W>& x, int16_t (&out)[kTileK]) {
  int32_t bits = x.largest_bits;
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
  x.store_rounded(inverse, out);
  return finite ? scale : most;  // what is not finite makes the whole tile's results not finite
}

// 32 values as int8 in int16, and the scale that they are to be multiplied with.
template <int W>
inline float to_int8(const TileValues<W>& x, int16_t (&out)[kTileK]) {
  const RowScale r = scale_of(x.largest_bits);
  x.store_rounded(r.inverse, out);
  return r.scale;
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

// Which value of x, in order of k, byte i of the operand `f` of a quad is taken from.
inline int source_of(const QuadLayout& layout, int quad, int f, int i) {
  if (!layout.pairs) return 2 * layout.code[quad][i % 4] + i / 4;
  return 2 * layout.code[quad][f + i / 2 % 2 * 2] + i / 4;
}

// High and low signed bytes of 32 values.
struct SplitBytes {
  alignas(16) int8_t at[2][kTileK];
  explicit SplitBytes(const int16_t (&x)[kTileK]) {
    for (int k = 0; k < kTileK; k++) {
      at[0][k] = (int8_t)((x[k] + 128) >> 8);
      at[1][k] = (int8_t)x[k];
    }
  }
};

// Writes the operands of a k tile by bytes.
template <int W>
struct ByteOperands {
  const QuadLayout& layout;
  RowBytes from[kQuads];  // of 32 bytes in order of k, twice

  explicit ByteOperands(const QuadLayout& of_format) : layout(of_format) {
    for (int quad = 0; quad < kQuads; quad++)
      for (int i = 0; i < 16; i++) from[quad][i] = (uint8_t)source_of(layout, quad, 0, i % kPartBytes);
  }

  template <int copies>
  void write(const int16_t (&x)[kTileK], Int16Tile<copies>& out) const {
    layout.pairs ? write_pairs(x, out) : write_bytes(x, out);
  }

 private:
  template <int copies>
  void write_pairs(const int16_t (&x)[kTileK], Int16Tile<copies>& out) const {
    for (int quad = 0; quad < kQuads; quad++)
      for (int f = 0; f < 2; f++) {
        int16_t operand[4];
        for (int i = 0; i < 4; i++) operand[i] = x[source_of(layout, quad, f, 2 * i)];
        for (int copy = 0; copy < copies; copy++)
          __builtin_memcpy(out.operand[quad][f] + copy * kPartBytes, operand, kPartBytes);
      }
  }

  template <int copies>
  void write_bytes(const int16_t (&x)[kTileK], Int16Tile<copies>& out) const {
    const SplitBytes bytes(x);
    for (int f = 0; f < 2; f++) {
      const RowBytes first = load<RowBytes>(bytes.at[f]), second = load<RowBytes>(bytes.at[f] + 16);
      for (int quad = 0; quad < kQuads; quad++) {
        const RowBytes operand = __builtin_shuffle(first, second, from[quad]);
        __builtin_memcpy(out.operand[quad][f], &operand, copies * kPartBytes);
      }
    }
  }
};

// AVX2 shuffles the bytes of one register, so the operands of a quad are put together from all 64 bytes.
template <int W>
struct PartOperands {
  bool pairs;
  RowBytes from[kQuads][4];  // of 16 of the 64 bytes each

  explicit PartOperands(const QuadLayout& layout) : pairs(layout.pairs) {
    for (int quad = 0; quad < kQuads; quad++)
      for (int i = 0; i < 16; i++) {
        const int f = i / kPartBytes, value = source_of(layout, quad, f, i % kPartBytes),
                  byte = pairs ? 2 * value + i % 2 : kTileK * f + value;
        for (int part = 0; part < 4; part++) from[quad][part][i] = (uint8_t)(byte / 16 == part ? byte % 16 : 0x80);
      }
  }

  void write(const int16_t (&x)[kTileK], Int16Tile<1>& out) const {
    if (pairs) return put_together((const char*)x, out);
    const SplitBytes bytes(x);
    put_together((const char*)bytes.at, out);
  }

 private:
  void put_together(const char* bytes, Int16Tile<1>& out) const {
    U8<4> part[4];
    for (int i = 0; i < 4; i++) part[i] = load<U8<4>>(bytes + 16 * i);
    for (int quad = 0; quad < kQuads; quad++) {
      U8<4> operands = {};
      for (int i = 0; i < 4; i++) operands |= shuffle_bytes<4>(part[i], (U8<4>)from[quad][i]);
      store((uint8_t*)out.operand[quad], operands);
    }
  }
};

// AVX-512 shuffles all 32 values at once: for every two bytes of the operands, the values of the first and the second.
template <int W>
struct WordOperands {
  static_assert(W == 16);
  bool pairs;
  U16<W> first, second, high;  // `high`: all ones where the bytes are high ones

  explicit WordOperands(const QuadLayout& layout) : pairs(layout.pairs) {
    for (int i = 0; i < 32; i++) {
      const int quad = i / 8, f = i / 4 % 2, byte = i % 4 * 2;
      first[i] = (uint16_t)source_of(layout, quad, f, byte);
      second[i] = (uint16_t)source_of(layout, quad, f, byte + 1);
      high[i] = f ? 0 : 0xffff;
    }
  }

  void write(const int16_t (&x)[kTileK], Int16Tile<1>& out) const {
    const U16<W> values = load<U16<W>>(x), a = __builtin_shuffle(values, first);
    U16<W> operands = a;
    if (!pairs) {
      const U16<W> b = __builtin_shuffle(values, second);
      const U16<W> high_bytes = ((a + 128) >> 8) | ((b + 128) & 0xff00), low_bytes = (a & 0xff) | (b << 8);
      operands = (high_bytes & high) | (low_bytes & ~high);
    }
    store((uint16_t*)out.operand, operands);
  }
};

template <int W>
using OperandOrder =
    typename Either<W == 16, WordOperands<W>, typename Either<W == 8, PartOperands<W>, ByteOperands<W>>::type>::type;

template <class Product>
inline void write_tile(const int16_t (&x)[kTileK], float scale, const QuadLayout& layout,
                       const OperandOrder<Product::width>& order, Int16Tile<Product::copies>& out) {
  order.write(x, out);
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
