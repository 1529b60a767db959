// Encoders of GGUF's blocks that hold one scale for all of their numbers, with the bits of the `gguf` package, and
// `run_encode`, which takes every format that `kt quant` writes.
#pragma once

#include "kernels/encode_groups.h"

namespace kt {
namespace {

// Integers of at most a byte, ties away from zero, stored plus `zero`.
struct AwayFromZero {
  int32_t zero;

  template <int W>
  __attribute__((always_inline)) Nearest<W> nearest(F32<W> t) const {
    const F32<W> size = magnitude<W>(t), shift = lanes_of<W>(kRounding);
    F32<W> q = (size + shift) - shift;
    // Ties were rounded to even: where that was down, one more.
    q -= __builtin_convertvector((I32<W>)(size - q == lanes_of<W>(0.5f)), F32<W>);
    q = (F32<W>)((U32<W>)q | ((U32<W>)t & 0x80000000u));
    return {__builtin_convertvector(q, I32<W>) + zero, q};
  }
};

// Truncated after `add` was added, at most `most`; the number is the code minus `zero`.
struct Truncated {
  float add;
  int32_t most, zero;

  template <int W>
  __attribute__((always_inline)) Nearest<W> nearest(F32<W> t) const {
    I32<W> code = __builtin_convertvector(t + lanes_of<W>(add), I32<W>);
    const I32<W> high = I32<W>{} + most;
    code = code > high ? high : code;
    return {code, __builtin_convertvector(code - zero, F32<W>)};
  }
};

// Low nibbles of the first 16 codes, high nibbles of the others.
inline void store_nibble_halves(const int32_t* code, uint8_t* out) {
  for (int i = 0; i < 16; i++) out[i] = (uint8_t)((code[i] & 15) | code[16 + i] << 4);
}

inline void store_fifth_bits(const int32_t* code, uint8_t* out) {
  for (int i = 0; i < 4; i++) {
    int bits = 0;
    for (int bit = 0; bit < 8; bit++) bits |= (code[8 * i + bit] >> 4 & 1) << bit;
    out[i] = (uint8_t)bits;
  }
}

// Five trits in a byte, as a fraction of 256.
inline void store_trits(const int32_t* code, int bytes, int digits, uint8_t* out) {
  for (int i = 0; i < bytes; i++) {
    int number = 0;
    for (int digit = 0; digit < 5; digit++) number = number * 3 + (digit < digits ? code[digit * bytes + i] : 0);
    out[i] = (uint8_t)((number * 256 + 242) / 243);
  }
}

inline void store_block(Codec codec, const int32_t* code, uint8_t* out) {
  switch (codec) {
    case Codec::q8_0:
      for (int i = 0; i < 32; i++) out[2 + i] = (uint8_t)code[i];
      return;
    case Codec::q4_0:
      return store_nibble_halves(code, out + 2);
    case Codec::q4_1:
      return store_nibble_halves(code, out + 4);
    case Codec::q5_0:
      store_fifth_bits(code, out + 2);
      return store_nibble_halves(code, out + 6);
    case Codec::q5_1:
      store_fifth_bits(code, out + 4);
      return store_nibble_halves(code, out + 8);
    case Codec::tq1_0:
      store_trits(code, 32, 5, out);
      store_trits(code + 160, 16, 5, out + 32);
      return store_trits(code + 240, 4, 4, out + 48);
    case Codec::tq2_0:
      for (int i = 0; i < 64; i++) {
        const int32_t* at = code + i / 32 * 128 + i % 32;
        out[i] = (uint8_t)(at[0] | at[32] << 2 | at[64] << 4 | at[96] << 6);
      }
      return;
    default:
      return;
  }
}

constexpr bool blocks_are_encoded() {
  constexpr Codec known[] = {Codec::q8_0, Codec::q4_0,  Codec::q4_1, Codec::q5_0,
                             Codec::q5_1, Codec::tq1_0, Codec::tq2_0};
  for (int c = 0; c < kCodecs; c++) {
    bool found = !kFormats[c].written || !kFormats[c].block;
    for (Codec codec : known) found |= c == (int)codec;
    if (!found) return false;
  }
  return true;
}
static_assert(blocks_are_encoded(), "store_block has no case for a type of GGUF that is written");

// The number of each group that is farthest from zero; of two as far, the first.
template <int W>
inline void find_first_peaks(const RowScratch& row, float* peak) {
  find_peaks<W>(row, peak);
  for (int g = 0; g < row.groups; g++) {
    const float* x = row.x + (int64_t)g * row.span;
    int i = 0;
    while (i < row.span - 1 && x[i] != peak[g] && x[i] != -peak[g]) i++;
    peak[g] = x[i];
  }
}

template <int W>
inline void find_extremes(const RowScratch& row, float* low, float* high) {
  for (int g = 0; g < row.groups; g++) {
    const float* x = row.x + (int64_t)g * row.span;
    F32<W> least = load<F32<W>>(x), most = least;
    for (int i = W; i < row.span; i += W) {
      const F32<W> v = load<F32<W>>(x + i);
      least = vmin<F32<W>>(least, v), most = vmax<F32<W>>(most, v);
    }
    low[g] = least[0], high[g] = most[0];
    for (int i = 1; i < W; i++) {
      low[g] = least[i] < low[g] ? least[i] : low[g];
      high[g] = most[i] > high[g] ? most[i] : high[g];
    }
  }
}

// Codes of numbers minus the least of their group, for a scale and an offset of each group, both as stored.
template <int W>
__attribute__((always_inline)) inline float encode_above(const Truncated element, const RowScratch& row,
                                                         const float* scale, const float* inverses, const float* low,
                                                         const float* offset) {
  const float* x = row.x;
  int32_t* code = row.code;
  const int span = row.span, groups = row.groups;
  F32<W> moved = {};
  for (int g = 0; g < groups; g++, x += span, code += span) {
    const F32<W> factor = lanes_of<W>(inverses[g]), unit = lanes_of<W>(scale[g]);
    const F32<W> least = lanes_of<W>(low[g]), added = lanes_of<W>(offset[g]);
    for (int i = 0; i < span; i += W) {
      const F32<W> v = load<F32<W>>(x + i);
      const Nearest<W> n = element.nearest<W>(apart((v - least) * factor));
      store(code + i, n.code);
      const F32<W> miss = through_bf16<W>(apart(n.value * unit) + added) - v;
      moved += miss * miss;
    }
  }
  return sum_of_lanes<W>(moved);
}

// One row of blocks: scales, then codes. Codes are made with the scale, numbers with its stored f16.
template <int W>
inline float encode_blocks(const Encode& e, const RowScratch& row, uint8_t* out) {
  const FormatRow& f = e.format->row();
  float *peak = row.group[0], *scale = row.group[1], *inverses = row.group[2], *low = row.group[3];
  float* offset = row.group[4];
  const int codes = 1 << e.format->bits();
  const bool has_offset = f.scales == ScaleKind::scale_and_min,
             is_signed = f.element == ElementKind::uint && !has_offset;
  const bool trits = f.span == 256;
  float divisor = trits                            ? 1.0f
                  : f.element == ElementKind::int8 ? 127.0f
                  : has_offset                     ? (float)(codes - 1)
                                                   : -(float)f.zero_point;
  if (has_offset) {
    find_extremes<W>(row, low, peak);
    for_groups<W>(row.groups, [&](int g) {
      store(peak + g, load<F32<W>>(peak + g) - load<F32<W>>(low + g));
      store(offset + g, round_scale<W>(load<F32<W>>(low + g), DType::f16));
    });
  } else if (is_signed && !trits) {
    find_first_peaks<W>(row, peak);
  } else {
    for_groups<W>(row.groups, [&](int g) { store(peak + g, F32<W>{}); });
    add_largest<W>(row, peak);
  }
  for_groups<W>(row.groups, [&](int g) {
    const F32<W> d = load<F32<W>>(peak + g) / lanes_of<W>(divisor);
    store(inverses + g, inverse<W>(d));
    store(scale + g, round_scale<W>(d, DType::f16));
  });
  float moved;
  if (has_offset) {
    moved = encode_above<W>(Truncated{0.5f, codes - 1, 0}, row, scale, inverses, low, offset);
  } else if (is_signed && !trits) {
    moved = encode_row<W>(Truncated{(float)f.zero_point + 0.5f, codes - 1, f.zero_point}, row, scale, inverses);
  } else {
    moved = encode_row<W>(AwayFromZero{trits ? 1 : 0}, row, scale, inverses);
  }
  const int scale_at = f.header[f.fields() - 1 - (has_offset ? 1 : 0)].at;
  for (int g = 0; g < row.groups; g++, out += f.block) {
    store_block(e.format->codec, row.code + (int64_t)g * row.span, out);
    store(out + scale_at, from_float(scale[g], DType::f16));
    if (has_offset) store(out + scale_at + 2, from_float(offset[g], DType::f16));
  }
  return moved;
}

// Sums and the largest magnitude of a matrix that is not encoded yet.
template <int W>
inline EncodeSums scan_rows(const Encode& e) {
  EncodeSums sums{0, 0, 0, true};
  const RowScratch row(e.scratch, e.k, 0);
  for (int r = 0; r < e.rows; r++) {
    const float squares = load_row<W>(e, r, row);
    sums.norm += squares;
    sums.finite &= finite_row(row.x, e.k, squares);
    add_largest<W>(row, &sums.largest);
  }
  return sums;
}

// Rows that share no scale with others.
template <int W, class EncodeRow>
inline void for_rows(const Encode& e, const RowScratch& row, EncodeSums& sums, EncodeRow&& encode) {
  for (int r = 0; r < e.rows; r++) {
    const float squares = load_row<W>(e, r, row);
    sums.norm += squares;
    sums.finite &= finite_row(row.x, e.k, squares);
    uint8_t* codes = e.codes + r * e.row_bytes;
    sums.moved += encode(codes, e.scales + r * e.scale_stride);
    if (!e.format->row().block && e.format->row().element != ElementKind::bf16_12)
      store_codes(row.code, e.k, e.format->bits(), codes);
  }
}

// Numbers as bf16; returns the squares of what they change by.
inline float store_bf16(const float* x, int32_t k, uint8_t* out) {
  float moved = 0;
  for (int i = 0; i < k; i++) {
    const uint16_t nearest = from_float(x[i], DType::bf16);
    __builtin_memcpy(out + 2 * i, &nearest, 2);
    const float change = to_float(nearest, DType::bf16) - x[i];
    moved += change * change;
  }
  return moved;
}

// Calls act with the element of a format and its largest number.
template <class Act>
inline void with_element(const Format& f, Act&& act) {
  const FormatRow& row = f.row();
  const int32_t most = (1 << f.bits()) - 1 - row.zero_point;
  if (row.element == ElementKind::e4m3) return act(E4m3{kE4m3Max}, kE4m3Max);
  if (row.element == ElementKind::e2m1) return act(E2m1{kE2m1Max}, kE2m1Max);
  if (row.element == ElementKind::int8) return act(Integers{-127, 127, 0}, 127.0f);
  act(Integers{-row.zero_point, most, row.zero_point}, (float)most);
}

template <int W>
void run_encode(const Encode& e) {
  EncodeSums& sums = *e.sums;
  if (!e.codes) {
    sums = scan_rows<W>(e);
    return;
  }
  sums = {0, 0, 0, true};
  const Format& f = *e.format;
  const RowScratch row(e.scratch, e.k, f.span() / (f.row().block ? 1 : f.row().header[0].count));
  if (f.row().block)
    return for_rows<W>(e, row, sums, [&](uint8_t* codes, char*) { return encode_blocks<W>(e, row, codes); });
  if (f.row().element == ElementKind::bf16_12)
    return for_rows<W>(e, row, sums, [&](uint8_t* codes, char*) { return store_bf16(row.x, e.k, codes); });
  if (f.row().scales == ScaleKind::e4m3)
    return for_rows<W>(
        e, row, sums, [&](uint8_t*, char* scales) { return encode_e4m3<W>(e, row, E2m1{kE2m1Max}, (uint8_t*)scales); });
  if (f.row().scales == ScaleKind::e8m0) {
    auto encode = [&](auto element, float limit) {
      for_rows<W>(e, row, sums,
                  [&](uint8_t*, char* scales) { return encode_e8m0<W>(row, element, limit, (uint8_t*)scales); });
    };
    // Numbers of 16 bits times a power of two are rounded alike by both, and by this with fewer operations.
    const bool short_numbers = e.source.dtype == DType::bf16 || e.source.dtype == DType::f16;
    if (f.row().element == ElementKind::e2m1 && short_numbers) return encode(SmallFloats<4, 1, 0>{kE2m1Max}, kE2m1Max);
    return with_element(f, encode);
  }
  if (f.row().element != ElementKind::uint)
    return with_element(f, [&](auto element, float limit) { encode_floats<W>(e, row, element, limit, sums); });
  const int32_t zero = f.row().zero_point;
  const Integers element{-zero, (1 << f.bits()) - 1 - zero, zero};
  if (encode_columns_of<W>(e, sums)) return;
  for_rows<W>(e, row, sums, [&](uint8_t*, char* scales) {
    const float moved = encode_clipped<W>(e, row, element, row.group[0], row.group[1]);
    for (int g = 0; g < row.groups; g++) set_element(scales, g, f.scale, row.group[0][g]);
    return moved;
  });
}

}  // namespace
}  // namespace kt
