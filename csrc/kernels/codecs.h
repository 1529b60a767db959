// The meaning of headers and codes in vectors, written once for every ISA.
//
// `ScaleReader` has a specialisation for each kind of scales: `scales` fills s and m for the k tile's 16 rows (twice
// where 16 values share a scale, not 32). `number_of` has a case for each kind of elements and turns the codes of W
// lanes into floats. A format is one of each, as its row in format_table.h says; formats.h multiplies the two into
// tiles.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/format.h"

namespace kt {
namespace {

// Scales of a k tile's rows and the offsets that are added: [half of the tile][row]. Formats whose 32 values share a
// scale use the first half alone.
struct RowScales {
  alignas(64) float s[2][kTileN], m[2][kTileN];
};

// The header of a span as arrays over rows.
struct Header {
  const char* at;
  const uint8_t* bytes(int field) const { return (const uint8_t*)at + field * kTileN; }
};

// W bytes from row n of a field on.
template <int W>
inline U32<W> bytes_of(const uint8_t* field, int n) {
#ifdef __AVX512F__  // masked: without one, gcc's header reads an undefined vector and warns of it
  if constexpr (W == 16)
    return (U32<W>)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)(field + n)));
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (U32<W>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(field + n)));
#endif
#ifdef KT_NEON  // gcc 12 would extract the bytes one by one
  if constexpr (W == 4) return (U32<W>)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(load<uint32_t>(field + n)))));
#endif
  // In two steps: the compiler takes longer ones apart.
  auto wider = __builtin_convertvector(load<typename Vec<W>::u8>(field + n), typename Vec<W>::u16);
  return __builtin_convertvector(wider, U32<W>);
}

template <int W>
inline F32<W> to_floats(U32<W> v) {
  return __builtin_convertvector((I32<W>)v, F32<W>);
}

template <int W>
inline void halves_to_floats(const char* from, float* out) {
  for (int n = 0; n < kTileN; n += W) store(out + n, from_f16<W>(from + n * 2));
}

template <int W>
inline void negate(float* rows) {
  for (int n = 0; n < kTileN; n += W) store(rows + n, -load<F32<W>>(rows + n));
}

template <int W>
inline F32<W> e8m0(U32<W> code) {
  U32<W> bits = code << 23;
  bits |= (U32<W>)((I32<W>)code == 0) & 0x00400000u;
  return (F32<W>)(bits | ((U32<W>)((I32<W>)code == 255) & 0x7fc00000u));
}

// A byte at the top of its lane.
template <int W>
inline F32<W> e4m3(U32<W> code) {
  U32<W> magnitude = (code >> 4) & (0x7fu << 20), sign = code & 0x80000000u;
  // Subnormals: 2^-6 and eighths of it, less 2^-6. The others move their exponent's bias from 7 to 127.
  F32<W> tiny = (F32<W>)(magnitude + (121u << 23)) - splat<F32<W>>(0x1p-6f);
  F32<W> normal = (F32<W>)(magnitude + (120u << 23));
  F32<W> value = select<F32<W>>((I32<W>)magnitude < (8 << 20), tiny, normal);
  U32<W> nan = (U32<W>)((I32<W>)magnitude == (0x7f << 20)) & 0x7fc00000u;
  return (F32<W>)((U32<W>)value | sign | nan);
}

// The same for codes that are not NaN. `normal`: nor subnormal or zero.
template <int W, bool normal>
inline F32<W> finite_e4m3(U32<W> code) {
  if constexpr (normal) return (F32<W>)(((U32<W>)((I32<W>)code >> 4) & 0x87f00000u) + (120u << 23));
  F32<W> value = (F32<W>)(((code >> 4) & (0x7fu << 20)) + (120u << 23));
  // Below 2^-6 the exponent is that of subnormals, and twice the number less 2^-6 is smaller than the number.
  value = vmin<F32<W>>(value, value * splat<F32<W>>(2.0f) - splat<F32<W>>(0x1p-6f));
  return (F32<W>)((U32<W>)value | (code & 0x80000000u));
}

template <int W>
inline void e4m3_to_floats(const uint8_t* from, float* out) {
  for (int n = 0; n < kTileN; n += W) store(out + n, e4m3<W>(bytes_of<W>(from, n) << 24));
}

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kMinus8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr float kUnsigned[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// table[code & 15].
template <int W>
inline F32<W> look_up(const float (&table)[16], U32<W> code) {
  if constexpr (W == 16) {
    return __builtin_shuffle(load<F32<16>>(table), (I32<16>)code);
  } else if constexpr (W == 8) {
    F32<8> low = __builtin_shuffle(load<F32<8>>(table), (I32<8>)code);
    F32<8> high = __builtin_shuffle(load<F32<8>>(table + 8), (I32<8>)code);
    return select<F32<8>>((I32<8>)(code << 28) >> 31, high, low);
  } else {
    F32<W> v;
    for (int i = 0; i < W; i++) v[i] = table[code[i] & 15];
    return v;
  }
}

// (code & mask) - zero_point.
template <int W, int bits, int zero_point>
inline F32<W> integer(U32<W> code) {
  return __builtin_convertvector((I32<W>)(code & ((1u << bits) - 1)) - zero_point, F32<W>);
}

// A signed byte at the top of its lane.
template <int W>
inline F32<W> signed8(U32<W> code) {
  return __builtin_convertvector((I32<W>)code >> 24, F32<W>);
}

template <int W, Codec C>
inline F32<W> number_of(U32<W> code) {
  constexpr const FormatRow& row = kFormats[(int)C];
  constexpr int bits = row.plane[0] + row.plane[1];
  if constexpr (row.element == ElementKind::int8) {
    return signed8<W>(code);
  } else if constexpr (row.element == ElementKind::e4m3) {
    return e4m3<W>(code);
  } else if constexpr (row.element == ElementKind::e2m1) {
    return look_up<W>(kE2m1, code);
  } else if constexpr (row.element == ElementKind::iq4) {
    return look_up<W>(kIq4, code);
  } else if constexpr (row.element == ElementKind::grid) {
    return signed8<W>(code);
  } else {
    static_assert(row.element == ElementKind::uint);
    // A look-up is one instruction there, a conversion two.
    if constexpr (W == 16 && bits == 4 && row.zero_point == 8) return look_up<W>(kMinus8, code);
    if constexpr (W == 16 && bits == 4 && row.zero_point == 0) return look_up<W>(kUnsigned, code);
    return integer<W, bits, row.zero_point>(code);
  }
}

// `type` is that of the header's first field. `tile`: the k tile's number in its span; `strip`: its beginning, where
// the scale of the whole matrix lies. `halves`: scales of a k tile; `offset`: whether m is filled.
template <ScaleKind kind, FieldType type>
struct ScaleReader;

struct OneScale {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
};

template <>
struct ScaleReader<ScaleKind::floats, FieldType::f32> : OneScale {
  template <int W>
  static void scales(const Format& f, Header h, int, const char*, RowScales& r) {
    if (!f.shared) return (void)__builtin_memcpy(r.s[0], h.at, sizeof r.s[0]);
    for (float& s : r.s[0]) s = load<float>(h.at);
  }
};

template <>
struct ScaleReader<ScaleKind::floats, FieldType::f16> : OneScale {
  template <int W>
  static void scales(const Format&, Header h, int, const char*, RowScales& r) {
    halves_to_floats<W>(h.at, r.s[0]);
  }
};

template <>
struct ScaleReader<ScaleKind::floats, FieldType::by_name> : OneScale {
  template <int W>
  static void scales(const Format& f, Header h, int, const char*, RowScales& r) {
    if (f.scale == DType::bf16) {
      for (int n = 0; n < kTileN; n += W) store(r.s[0] + n, from_bf16<W>(h.at + 2 * n));
    } else {
      for (int n = 0; n < kTileN; n += W) store(r.s[0] + n, load_as<F32<W>>(h.at, n, f.scale));
    }
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::e8m0, type> : OneScale {
  template <int W>
  static void scales(const Format&, Header h, int, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) store(r.s[0] + n, e8m0<W>(bytes_of<W>(h.bytes(0), n)));
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::e4m3, type> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int, const char* strip, RowScales& r) {
    for (int half = 0; half < 2; half++) {
      e4m3_to_floats<W>(h.bytes(half), r.s[half]);
      for (float& s : r.s[half]) s *= load<float>(strip);
    }
  }
};

// grids.h reads the scales together with the codes.
template <FieldType type>
struct ScaleReader<ScaleKind::grid, type> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
};

template <FieldType type>
struct ScaleReader<ScaleKind::scale_and_min, type> {
  static constexpr int halves = 1;
  static constexpr bool offset = true;
  template <int W>
  static void scales(const Format&, Header h, int, const char*, RowScales& r) {
    halves_to_floats<W>(h.at, r.s[0]);
    halves_to_floats<W>(h.at + 2 * kTileN, r.m[0]);
  }
};

// The offset is exact, and so is code * scale + offset, for scales of 16 bits: no product has more than 19.
template <FieldType type>
struct ScaleReader<ScaleKind::scale_and_zero, type> {
  static constexpr int halves = 1;
  static constexpr bool offset = true;
  template <int W>
  static void scales(const Format& f, Header h, int, const char* strip, RowScales& r) {
    ScaleReader<ScaleKind::floats, FieldType::by_name>::scales<W>(f, h, 0, strip, r);
    const uint8_t* zeros = (const uint8_t*)h.at + kTileN * (f.scale == DType::f32 ? 4 : 2);
    const bool is_signed = f.row().element == ElementKind::int8;
    for (int n = 0; n < kTileN; n += W) {
      U32<W> zero = bytes_of<W>(zeros, n);
      if (is_signed) zero = (U32<W>)((I32<W>)(zero << 24) >> 24);
      store(r.m[0] + n, -(to_floats<W>(zero) * load<F32<W>>(r.s[0] + n)));
    }
  }
};

// A byte of each of the 16 rows.
typedef uint8_t RowBytes __attribute__((vector_size(kTileN)));

// The f16 fields of a header, which all k tiles of its span share: factors of the scales and of the minima.
struct SpanScales {
  alignas(64) float d[kTileN], least[kTileN];
};

// out[n] = d[n] * bytes[n]; `Byte` is uint8_t or int8_t.
template <int W, class Byte = uint8_t>
inline void scaled_bytes(const float* d, RowBytes bytes, float* out) {
  constexpr bool is_signed = (Byte)-1 < 0;
#ifdef KT_NEON
  // Below the exponent of 2^23: a conversion takes as long as four other instructions.
  if constexpr (W == 4) {
    if (is_signed) bytes ^= 128;
    for (int n = 0; n < kTileN; n += W) {
      RowBytes at;
      for (int i = 0; i < kTileN; i++) at[i] = i % 4 ? (uint8_t)255 : (uint8_t)(n + i / 4);
      const U32<4> bits = (U32<4>)vqtbl1q_u8((uint8x16_t)bytes, (uint8x16_t)at) | 0x4b000000u;
      store(out + n, ((F32<4>)bits - splat<F32<4>>(8388608.0f + (is_signed ? 128.0f : 0.0f))) * load<F32<4>>(d + n));
    }
    return;
  }
#endif
  typedef Byte Narrow __attribute__((vector_size(W)));
  typedef typename Either<is_signed, int16_t, uint16_t>::type Wide __attribute__((vector_size(2 * W)));
  alignas(16) char stored[kTileN];
  store(stored, bytes);
  for (int n = 0; n < kTileN; n += W) {
    auto wider = __builtin_convertvector(__builtin_convertvector(load<Narrow>(stored + n), Wide), I32<W>);
    store(out + n, load<F32<W>>(d + n) * __builtin_convertvector(wider, F32<W>));
  }
}

// Kinds whose spans have fields of their own: `begin` reads these, `tile_scales` the scales of one k tile.
template <class Reader>
struct SpanReader {
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    SpanScales span;
    Reader::template begin<W>(h, span);
    Reader::template tile_scales<W>(h, tile, span, r);
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::q2_k, type> : SpanReader<ScaleReader<ScaleKind::q2_k, type>> {
  static constexpr int halves = 2;
  static constexpr bool offset = true;
  template <int W>
  static void begin(Header h, SpanScales& span) {
    halves_to_floats<W>(h.at + 16 * kTileN, span.d);
    halves_to_floats<W>(h.at + 18 * kTileN, span.least);
    negate<W>(span.least);
  }
  template <int W>
  static void tile_scales(Header h, int tile, const SpanScales& span, RowScales& r) {
    for (int half = 0; half < 2; half++) {
      const auto both = load<RowBytes>(h.bytes(2 * tile + half));
      scaled_bytes<W>(span.d, both & 15, r.s[half]);
      scaled_bytes<W>(span.least, both >> 4, r.m[half]);
    }
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::q3_k, type> : SpanReader<ScaleReader<ScaleKind::q3_k, type>> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
  template <int W>
  static void begin(Header h, SpanScales& span) {
    halves_to_floats<W>(h.at + 12 * kTileN, span.d);
  }
  template <int W>
  static void tile_scales(Header h, int tile, const SpanScales& span, RowScales& r) {
    for (int half = 0; half < 2; half++) {
      const int i = 2 * tile + half;
      const RowBytes low = load<RowBytes>(h.bytes(i % 8)) >> (i / 8 * 4);
      const RowBytes high = load<RowBytes>(h.bytes(8 + i % 4)) >> (i / 4 * 2);
      scaled_bytes<W, int8_t>(span.d, ((low & 15) | (high & 3) << 4) - 32, r.s[half]);
    }
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::q4_k, type> : SpanReader<ScaleReader<ScaleKind::q4_k, type>> {
  static constexpr int halves = 1;
  static constexpr bool offset = true;
  template <int W>
  static void begin(Header h, SpanScales& span) {
    halves_to_floats<W>(h.at, span.d);
    halves_to_floats<W>(h.at + 2 * kTileN, span.least);
    negate<W>(span.least);
  }
  // Eight scales and eight minima of six bits in twelve bytes, the last four of each in pieces.
  template <int W>
  static void tile_scales(Header h, int tile, const SpanScales& span, RowScales& r) {
    RowBytes scale = load<RowBytes>(h.bytes(4 + tile)), minimum = load<RowBytes>(h.bytes(8 + tile));
    if (tile < 4) {
      scale &= 63;
      minimum &= 63;
    } else {
      const RowBytes low = minimum;
      minimum = (low >> 4) | (scale >> 6) << 4;
      scale = (low & 15) | (load<RowBytes>(h.bytes(tile)) >> 6) << 4;
    }
    scaled_bytes<W>(span.d, scale, r.s[0]);
    scaled_bytes<W>(span.least, minimum, r.m[0]);
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::q6_k, type> : SpanReader<ScaleReader<ScaleKind::q6_k, type>> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
  template <int W>
  static void begin(Header h, SpanScales& span) {
    halves_to_floats<W>(h.at + 16 * kTileN, span.d);
  }
  template <int W>
  static void tile_scales(Header h, int tile, const SpanScales& span, RowScales& r) {
    for (int half = 0; half < 2; half++)
      scaled_bytes<W, int8_t>(span.d, load<RowBytes>(h.bytes(2 * tile + half)), r.s[half]);
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::iq4_xs, type> : SpanReader<ScaleReader<ScaleKind::iq4_xs, type>> {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
  template <int W>
  static void begin(Header h, SpanScales& span) {
    halves_to_floats<W>(h.at, span.d);
  }
  template <int W>
  static void tile_scales(Header h, int tile, const SpanScales& span, RowScales& r) {
    typedef uint16_t RowPairs __attribute__((vector_size(2 * kTileN)));
    const RowBytes low = load<RowBytes>(h.bytes(4 + tile / 2)) >> (tile % 2 * 4);
    const RowPairs high = load<RowPairs>(h.at + 2 * kTileN) >> (2 * tile);
    scaled_bytes<W, int8_t>(span.d, ((low & 15) | (__builtin_convertvector(high, RowBytes) & 3) << 4) - 32, r.s[0]);
  }
};

template <Codec C>
struct Decoder : ScaleReader<kFormats[(int)C].scales, kFormats[(int)C].header[0].type> {};

}  // namespace
}  // namespace kt
