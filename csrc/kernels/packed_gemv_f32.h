// Packed GEMV with f32 activations: codes are converted to floats in registers and multiplied with x.
//
// A part is one code of every lane: a nibble is looked up in a table, a byte is converted at the top of its lane, which
// makes it 2^24 times too large. Rows of x need no reordering, since even and odd k are neighbours. A span's sum is
// multiplied with its scale once, where dequantised tiles have every weight scaled and rounded: 16 weights take two
// instructions plus one per row instead of five, and weights are not rounded. bf16 products (VDPBF16PS) would be half
// as many, but each takes four times as long as an f32 FMA.
#pragma once

#include "kernels/packed_gemv.h"

namespace kt {
namespace {

// Common to all codes.
template <int W, Scale type>
struct F32Sums {
  static constexpr int width = W, chains = 2;
  static constexpr bool begins = false, scaled = true, wider_than_register = W * 4 > kRegister;
  using Sum = F32<W>;
  using Number = float;

  F32<W> factor(U32<W> x) const { return (F32<W>)x; }
  F32<W> add(F32<W> sum, F32<W> codes, F32<W> x) const {
    if constexpr (!wider_than_register) return sum + codes * x;
    add_wide(sum, codes, x);
    return sum;
  }
  F32<W> scale(const char* scales, int lane) const { return scales_of_lanes<W, type>(scales, lane); }

  // Out of line for emulated variants: loops with many of these, split into narrower vectors, take minutes to compile.
  __attribute__((noinline)) static void add_wide(F32<W>& sum, const F32<W>& codes, const F32<W>& x) {
    sum += codes * x;
  }
};

template <int W, Scale type>
struct NibbleCodes : F32Sums<W, type> {
  static constexpr int words = 2, parts = 8;
  F32<W> table;

  explicit NibbleCodes(const float (&numbers)[16]) : table(load<F32<W>>(numbers)) { static_assert(W == 16); }
  F32<W> unpack(U32<W> word, int part) const {
    F32<W> unpacked;
    if constexpr (F32Sums<W, type>::wider_than_register) {
      unpack_wide(table, word, part, unpacked);
    } else {
      unpacked = __builtin_shuffle(table, (I32<W>)(word >> (uint32_t)(4 * part)));
    }
    return unpacked;
  }
  __attribute__((noinline)) static void unpack_wide(const F32<W>& table, const U32<W>& word, int part, F32<W>& out) {
    out = __builtin_shuffle(table, (I32<W>)(word >> (uint32_t)(4 * part)));
  }
};

template <int W, Scale type>
struct ByteCodes : F32Sums<W, type> {
  static constexpr int words = 4, parts = 4;

  F32<W> unpack(U32<W> word, int part) const {
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
    return F32Sums<W, type>::scale(scales, lane) * splat<F32<W>>(0x1p-24f);
  }
};

// Most rows for packed GEMV. Where tiles are multiplied in parallel with the vector units, further rows are free for
// tiles, and nibbles, which dequantise fast, profit from tiles earlier; measured (docs/log.md).
template <class Isa>
struct PackedGemvF32 {
  using Real = float;
  static constexpr bool int8_rows = false;
  static constexpr int W = Isa::width, max_rows = kPackedGemvRows, max_rows_of_nibbles = Isa::overlaps ? 4 : max_rows;

  static int32_t rows_of(const Format& f) {
    const FormatRow& row = f.row();
    if (row.plane[1] || f.shared) return 0;
    if (row.element == ElementKind::int8) return row.scales == ScaleKind::floats ? max_rows : 0;
    const bool scaled = row.scales == ScaleKind::floats || row.scales == ScaleKind::e8m0;
    return scaled && row.plane[0] == 4 && nibble_values(row) ? max_rows_of_nibbles : 0;
  }

  // The 16 values of a nibble; null for other kinds of elements.
  static const float (*nibble_values(const FormatRow& row))[16] {
    if (row.element == ElementKind::e2m1) return &kE2m1;
    if (row.element == ElementKind::iq4) return &kIq4;
    return row.element == ElementKind::uint && row.zero_point == 8 ? &kMinus8 : nullptr;
  }

  // Widens bf16 rows to f32 in the scratch of dequantised tiles.
  template <class Unit>
  static PackedGemvPanel write_rows(const Unit& u) {
    return write_rows(u.packed_gemv, u.live, *u.encoded.encoding, u.base.k_tiles, u.encoded.decoded);
  }
  __attribute__((noinline)) static PackedGemvPanel write_rows(const PackedGemvRows& input, int rows, const Encoding&,
                                                              int k_tiles, char* scratch) {
    for (int r = 0; r < rows; r++)
      for (int k = 0; k < k_tiles; k++)
        for (int i = 0; i < kTileK; i += W)
          store(scratch + (((int64_t)k * rows + r) * kTileK + i) * 4,
                from_bf16<W>(input.row[r] + k * input.step + i * 2));
    return {{scratch, scratch}};
  }

  template <class Act>
  static void with_codes(const Format& f, const Act& act) {
    const FormatRow& row = f.row();
    const FieldType type = f.type_of(row.header[0]);
    if (row.element == ElementKind::int8) {
      if (type == FieldType::f16) return act(ByteCodes<W, Scale::f16>{});
      return act(ByteCodes<W, Scale::f32>{});
    }
    const float (&table)[16] = *nibble_values(row);
    if (row.scales == ScaleKind::e8m0) return act(NibbleCodes<W, Scale::e8m0>(table));
    if (type == FieldType::bf16) return act(NibbleCodes<W, Scale::bf16>(table));
    if (type == FieldType::f16) return act(NibbleCodes<W, Scale::f16>(table));
    act(NibbleCodes<W, Scale::f32>(table));
  }
};

// Only ISAs whose panels are bf16 have it, so that both paths see the same x. A register must hold a table of 16
// floats.
template <class Isa>
constexpr bool kHasPackedGemvF32 = Isa::panel == DType::bf16 && Isa::width == 16;

}  // namespace
}  // namespace kt
