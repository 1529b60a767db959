// Packed GEMV with int8 activations (W8A8): int8 and int4 codes times int8 x, four products per lane and instruction.
//
// A part is a word of int8, whose bytes are multiplied with eight neighbours of a quantised row, or the lower or the
// higher nibbles of a word of int4, which are multiplied with eight of sixteen.
//
// Codes are unsigned, so a sum is too large by their offset times the sum of x; it starts from the negative of that.
// int8 sums are exact integers, the same as those of tiles. Each int4 group keeps its own f32 scale here, whereas tiles
// requantise all groups of a channel to one scale: small batches are slightly more accurate.
#pragma once

#include "kernels/dp4a.h"
#include "kernels/packed_gemv.h"

namespace kt {
namespace {

inline bool integer_sums(const Encoding& e) {
  return e.format[0].codec == Codec::int8 && e.format[1].codec == Codec::int8;
}

// Orders sixteen bytes of x for the nibbles of a word: those of the lower nibbles at even and odd k, then those of the
// higher.
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
inline Bytes16 in_nibble_order(Bytes16 bytes) {
  Bytes16 from;
  for (int i = 0; i < 16; i++) {
    int k = i % 4 * 4 + i / 8 * 2 + i / 4 % 2;
    from[i] = (uint8_t)(k / 8 * 8 + k % 2 * 4 + k % 8 / 2);
  }
  return __builtin_shuffle(bytes, from);
}

// Eight times the sums of the even and of the odd k of 32 bytes, twice.
template <int W>
inline I32<4> eightfold_sums(const char* bytes) {
  constexpr int S = W < 8 ? 4 : 8;
  I32<S> sums = {};
  for (int i = 0; i < kTileK; i += 4 * S)
    sums = WideningDp4a<S>::add_nibbles(sums, U32<S>{} + 0x08080808u, load<U32<S>>(bytes + i));
  I32<4> part[S / 4];
  __builtin_memcpy(part, &sums, sizeof sums);
  if constexpr (S == 8) part[0] += part[1];
  return part[0] + __builtin_shuffle(part[0], I32<4>{2, 3, 0, 1});
}

// Writes one row in the orders that are needed; the others are null.
template <int W>
inline void write_row(const char* row, int64_t step, int k_tiles, int rows, char* bytes, char* nibbles,
                      int32_t* prefix_sums) {
  I32<4> sum = {};
  for (int k = 0; k < k_tiles; k++, prefix_sums += 2 * rows) {
    const char* from = row + k / 2 * step + k % 2 * kTileK;
    int64_t at = (int64_t)k * rows * kTileK;
    for (int i = 0; i < kTileK; i += 16) {
      Bytes16 x = load<Bytes16>(from + i);
      if (bytes) store(bytes + at + i, x);
      if (nibbles) store(nibbles + at + i, in_nibble_order(x));
    }
    __builtin_memcpy(prefix_sums, &sum, 8);
    sum += eightfold_sums<W>(from);
  }
  __builtin_memcpy(prefix_sums, &sum, 8);
}

// Initial value of sums over the k tiles between two prefix sums, for codes that are `eights` times eight too large.
template <int W>
inline I32<W> offset_sums(const int32_t* prefix_sums, const int32_t* prefix_sums_after, int eights) {
  return ((I32<W>)in_pairs<W>(prefix_sums) - (I32<W>)in_pairs<W>(prefix_sums_after)) * eights;
}

template <class Dp4a>
struct Int8Codes {
  static constexpr int width = Dp4a::width, words = 4, parts = 1;
  static constexpr bool begins = Dp4a::offset > 0, scaled = false;
  using Sum = I32<width>;
  using Number = int32_t;
  auto unpack(U32<width> word, int) const { return Dp4a::unpack(word); }
  auto factor(U32<width> x) const { return Dp4a::unpack_x(x); }
  template <class Unpacked, class Factor>
  Sum add(Sum sum, const Unpacked& codes, const Factor& x) const {
    return Dp4a::add(sum, codes, x);
  }
  Sum begin(const int32_t* prefix_sums, const int32_t* prefix_sums_after) const {
    return offset_sums<width>(prefix_sums, prefix_sums_after, Dp4a::offset / 8);
  }
};

template <class Dp4a, Scale type>
struct Int4Codes {
  static constexpr int width = Dp4a::width, words = 2, parts = 2;
  static constexpr bool begins = true, scaled = true;
  using Sum = I32<width>;
  using Number = float;
  U32<width> unpack(U32<width> word, int part) const { return (word >> (uint32_t)(4 * part)) & 0x0f0f0f0fu; }
  U32<width> factor(U32<width> x) const { return x; }
  Sum add(Sum sum, U32<width> codes, U32<width> x) const { return Dp4a::add_nibbles(sum, codes, x); }
  Sum begin(const int32_t* prefix_sums, const int32_t* prefix_sums_after) const {
    return offset_sums<width>(prefix_sums, prefix_sums_after, 1);
  }
  F32<width> scale(const char* scales, int lane) const { return scales_of_lanes<width, type>(scales, lane); }
};

// Sums are integers where both halves of a block are int8, whose results must have the bits of tiles.
template <class Dp4a, class Sums>
struct PackedGemvInt8 {
  using Real = Sums;
  static constexpr bool int8_rows = true;
  static constexpr int max_rows = kPackedGemvInt8Rows;

  // Writes all rows into the scratch of dequantised tiles.
  template <class Unit>
  static PackedGemvPanel write_rows(const Unit& u) {
    return write_rows(u.packed_gemv, u.live, *u.encoded.encoding, u.base.k_tiles, u.encoded.decoded);
  }
  __attribute__((noinline)) static PackedGemvPanel write_rows(const PackedGemvRows& input, int rows, const Encoding& e,
                                                              int k_tiles, char* scratch) {
    const bool is_int8[2] = {e.format[0].codec == Codec::int8, e.format[1].codec == Codec::int8};
    const int64_t size = (int64_t)k_tiles * rows * kTileK;
    char *bytes = is_int8[0] || is_int8[1] ? scratch : nullptr,
         *nibbles = is_int8[0] && is_int8[1] ? nullptr : scratch + size;
    int32_t* prefix_sums = (int32_t*)(scratch + 2 * size);
    for (int r = 0; r < rows; r++)
      write_row<Dp4a::width>(input.row[r], input.step, k_tiles, rows, bytes ? bytes + r * kTileK : nullptr,
                             nibbles ? nibbles + r * kTileK : nullptr, prefix_sums + 2 * r);
    return {{is_int8[0] ? bytes : nibbles, is_int8[1] ? bytes : nibbles}, prefix_sums};
  }

  template <class Act>
  static void with_codes(const Format& f, const Act& act) {
    if (f.codec == Codec::int8) return act(Int8Codes<Dp4a>{});
    if constexpr ((Sums)0.5 != 0) {
      if (f.scale == DType::bf16) return act(Int4Codes<Dp4a, Scale::bf16>{});
      if (f.scale == DType::f16) return act(Int4Codes<Dp4a, Scale::f16>{});
      act(Int4Codes<Dp4a, Scale::f32>{});
    }
  }
};

}  // namespace
}  // namespace kt
