// Sums of products of code bytes and int16 or int8 activations, in 32-bit lanes: how each kind of CPU multiplies them.
//
// A `Product` has
//   width, copies        lanes of a vector; how often eight bytes of x are stored, so that a load needs no broadcast
//   joins                whether the two lanes of an output are added at the end of a k tile
//   accumulators         registers for sums
//   max_rows, slow_rows  for which this takes less time than dequantised tiles and products in f32; slow_rows: of codes
//                        that take long to unpack
//   start                initial sum of even k, besides what makes up for codes that are too large
//   byte_offset          added to signed bytes, whose sums are then too large
//   Sums<bits, planes>   accumulators for codes of `bits` bits; 8: signed bytes. planes: bytes of a number of x, 1 or 2
//   look_up              table[code] of every byte
// and its `Sums` have
//   pairs                whether x is multiplied as int16 pairs; else as two signed bytes
//   Factor, factor       an operand of x, loaded from Int16Tile
//   widen                codes as operands
//   begin, add           initial sums of both operands; multiply-add
//   total, or joined     sums as floats, of lanes (given what `begin` was given) or of the outputs of two vectors
#pragma once

#include "kernels/code_quads.h"
#include "kernels/dp4a.h"

namespace kt {
namespace {

template <int W>
inline U32<W> broadcast_pairs(const void* eight) {
#ifdef KT_NEON  // gcc would load a general register and copy it
  if constexpr (W == 4) return (U32<W>)vld1q_dup_u64((const uint64_t*)eight);
#endif
  return (U32<W>)(typename Vec<W>::u64{} + load<uint64_t>(eight));
}

// Codes widened to 16 bits, two products of which are added in every lane: on every CPU.
template <int W, int code_bits>
struct WordSums {
  static constexpr bool pairs = true, wider_than_register = W * 4 > kRegister;
  using Factor = I32<W>;
  I32<W> sum;

  static Factor factor(const char* x) { return (I32<W>)broadcast_pairs<W>(x); }
  static BytePairs<W> widen(const U8<W>& codes) {
    if constexpr (code_bits == 8) return kt::widen<W>((U32<W>)codes);
    return {(I32<W>)((U32<W>)codes & 0x00ff00ffu), (I32<W>)(((U32<W>)codes >> 8) & 0x00ff00ffu)};
  }
  void begin(const char* start, const char*) { sum = (I32<W>)broadcast_pairs<W>(start); }
  void add(const BytePairs<W>& codes, const Factor& even, const Factor& odd) {
    if constexpr (wider_than_register) return add_out_of_line(sum, codes, even, odd);
    sum += pair_product<W>(codes.even, even);
    sum += pair_product<W>(codes.odd, odd);
  }
  F32<W> total(const char*, const char*) const { return __builtin_convertvector(sum, F32<W>); }

  // For emulated variants: loops with many of these, split into narrower vectors, take minutes to compile.
  __attribute__((noinline)) static void add_out_of_line(I32<W>& sum, const BytePairs<W>& codes, const Factor& even,
                                                        const Factor& odd) {
    sum += pair_product<W>(codes.even, even) + pair_product<W>(codes.odd, odd);
  }
};

template <int W>
struct WordProduct {
  static constexpr int width = W, copies = 1, byte_offset = 0, start = 0, accumulators = W == 16 ? 16 : 8;
  static constexpr int max_rows = 16, slow_rows = 16;
  static constexpr bool joins = false;
  template <int bits, int planes>
  using Sums = WordSums<W, bits>;

  static U8<W> look_up(const U8<W>& table, const U8<W>& codes) { return shuffle_bytes<W>(table, codes); }
};

}  // namespace
}  // namespace kt
