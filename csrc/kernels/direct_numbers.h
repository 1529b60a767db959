// Few rows of numbers: codes become numbers in registers and meet those of x there, in f32.
//
// A part is one code of every lane: a nibble looks its number up, a byte is converted where it stands, at the top of
// its lane, and is 2^24 times too large then. Numbers of x lie as they are, since even and odd k are neighbours. A
// span's sum meets its scale once, where tiles have every weight scaled and rounded: of 16 weights that takes two
// instructions and one more for each row, instead of five, and the weights are not rounded. The products of bf16
// (VDPBF16PS) would take half as many, but each of them four times as long as one of f32.
#pragma once

#include "kernels/direct.h"

namespace kt {
namespace {

// What all kinds of such codes have in common.
template <int W, Scale type>
struct NumberSums {
  static constexpr int width = W, chains = 2;
  static constexpr bool begins = false, scaled = true, in_pieces = W * 4 > kRegister;
  using Sum = F32<W>;
  using Number = float;

  F32<W> factor(U32<W> x) const { return (F32<W>)x; }
  F32<W> add(F32<W> sum, F32<W> codes, F32<W> x) const {
    if constexpr (!in_pieces) return sum + codes * x;
    add_pieces(sum, codes, x);
    return sum;
  }
  F32<W> scale(const char* scales, int lane) const { return scales_of_lanes<W, type>(scales, lane); }

  // For emulated variants: loops that have many of these in pieces take minutes to compile.
  __attribute__((noinline)) static void add_pieces(F32<W>& sum, const F32<W>& codes, const F32<W>& x) {
    sum += codes * x;
  }
};

template <int W, Scale type>
struct NibbleNumbers : NumberSums<W, type> {
  static constexpr int words = 2, parts = 8;
  F32<W> table;

  explicit NibbleNumbers(const float (&numbers)[16]) : table(load<F32<W>>(numbers)) { static_assert(W == 16); }
  F32<W> open(U32<W> word, int part) const {
    F32<W> opened;
    if constexpr (NumberSums<W, type>::in_pieces) {
      open_pieces(table, word, part, opened);
    } else {
      opened = __builtin_shuffle(table, (I32<W>)(word >> (uint32_t)(4 * part)));
    }
    return opened;
  }
  __attribute__((noinline)) static void open_pieces(const F32<W>& table, const U32<W>& word, int part, F32<W>& out) {
    out = __builtin_shuffle(table, (I32<W>)(word >> (uint32_t)(4 * part)));
  }
};

template <int W, Scale type>
struct ByteNumbers : NumberSums<W, type> {
  static constexpr int words = 4, parts = 4;

  F32<W> open(U32<W> word, int part) const {
    U32<W> top = (word << (uint32_t)(24 - 8 * part)) & 0xff000000u;
#ifdef __AVX512BW__
    if (W == 16 && part < 3) {
      typename Vec<64>::u8 from;
      for (int i = 0; i < 64; i++) from[i] = (uint8_t)(i % 4 == 3 ? i % 16 - 3 + part : 0x80);
      top = (U32<W>)_mm512_shuffle_epi8((__m512i)word, (__m512i)from);
    }
#endif
    return __builtin_convertvector((I32<W>)top, F32<W>);
  }
  F32<W> scale(const char* scales, int lane) const {
    return NumberSums<W, type>::scale(scales, lane) * splat<F32<W>>(0x1p-24f);
  }
};

// Rows at most: where tiles are multiplied beside the vector units, a row more costs them nothing, and nibbles, which
// are looked up fast, are soon better made into tiles; measured (docs/log.md).
template <class Isa>
struct DirectNumbers {
  using Real = float;
  static constexpr bool in_bytes = false;
  static constexpr int W = Isa::width, most_rows = kDirectRows, most_of_nibbles = Isa::overlaps ? 4 : most_rows;

  static int32_t rows_of(const Format& f) {
    const FormatRow& row = f.row();
    if (row.plane[1] || f.shared) return 0;
    if (row.element == ElementKind::int8) return row.scales == ScaleKind::floats ? most_rows : 0;
    const bool scaled = row.scales == ScaleKind::floats || row.scales == ScaleKind::e8m0;
    return scaled && row.plane[0] == 4 && numbers_of(row) ? most_of_nibbles : 0;
  }

  // The 16 numbers of a nibble; null for other kinds of elements.
  static const float (*numbers_of(const FormatRow& row))[16] {
    if (row.element == ElementKind::e2m1) return &kE2m1;
    if (row.element == ElementKind::iq4) return &kIq4;
    return row.element == ElementKind::uint && row.zero_point == 8 ? &kMinus8 : nullptr;
  }

  // Rows of bf16, into scratch that has room for decoded tiles.
  __attribute__((noinline)) static DirectPanel write_rows(const DirectRows& direct, int rows, const Encoding&,
                                                          int k_tiles, char* scratch) {
    for (int r = 0; r < rows; r++)
      for (int k = 0; k < k_tiles; k++)
        for (int i = 0; i < kTileK; i += W)
          store(scratch + (((int64_t)k * rows + r) * kTileK + i) * 4,
                from_bf16<W>(direct.row[r] + k * direct.step + i * 2));
    return {{scratch, scratch}};
  }

  template <class Act>
  static void with_codes(const Format& f, const Act& act) {
    const FormatRow& row = f.row();
    const FieldType type = f.type_of(row.header[0]);
    if (row.element == ElementKind::int8) {
      if (type == FieldType::f16) return act(ByteNumbers<W, Scale::f16>{});
      return act(ByteNumbers<W, Scale::f32>{});
    }
    const float (&table)[16] = *numbers_of(row);
    if (row.scales == ScaleKind::e8m0) return act(NibbleNumbers<W, Scale::e8m0>(table));
    if (type == FieldType::bf16) return act(NibbleNumbers<W, Scale::bf16>(table));
    if (type == FieldType::f16) return act(NibbleNumbers<W, Scale::f16>(table));
    act(NibbleNumbers<W, Scale::f32>(table));
  }
};

// Where an ISA multiplies so: those that hold rows as bf16, so that both ways see the same x.
template <class Isa>
constexpr bool kOpens = Isa::panel == DType::bf16;

template <class Isa>
constexpr auto direct_rows_of() -> int32_t (*)(const Encoding&) {
  if constexpr (kOpens<Isa>)
    return [](const Encoding& e) {
      int32_t a = DirectNumbers<Isa>::rows_of(e.format[0]), b = DirectNumbers<Isa>::rows_of(e.format[1]);
      return a < b ? a : b;
    };
  return nullptr;
}

}  // namespace
}  // namespace kt
