// The meaning of headers and codes in vectors, written once for every ISA.
//
// `ScaleReader` has a specialisation for each kind of scales: `scales` fills s and m for the k tile's 16 rows (twice
// where 16 values share a scale, not 32). `number_of` has a case for each kind of elements and turns the codes of W
// lanes into floats. A format is one of each, as its row in format_table.h says; formats.h multiplies the two into
// tiles.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#endif

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
#ifdef __aarch64__  // gcc 12 would extract the bytes one by one
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

// W scales in f16.
template <int W>
inline F32<W> half_scales(const void* from) {
#ifdef __aarch64__
  if constexpr (W == 4) return (F32<W>)vcvt_f32_f16((float16x4_t)load<uint16x4_t>(from));
#endif
  return from_f16<W>(from);
}

template <int W>
inline void halves_to_floats(const char* from, float* out) {
  for (int n = 0; n < kTileN; n += W) store(out + n, half_scales<W>(from + n * 2));
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
    for (int n = 0; n < kTileN; n += W) store(r.s[0] + n, load_as<F32<W>>(h.at, n, f.scale));
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

template <FieldType type>
struct ScaleReader<ScaleKind::q2_k, type> {
  static constexpr int halves = 2;
  static constexpr bool offset = true;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = half_scales<W>(h.at + 16 * kTileN + 2 * n), least = half_scales<W>(h.at + 18 * kTileN + 2 * n);
      for (int half = 0; half < 2; half++) {
        U32<W> both = bytes_of<W>(h.bytes(2 * tile + half), n);
        store(r.s[half] + n, d * to_floats<W>(both & 15u));
        store(r.m[half] + n, -(least * to_floats<W>(both >> 4)));
      }
    }
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::q3_k, type> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = half_scales<W>(h.at + 12 * kTileN + 2 * n);
      for (int half = 0; half < 2; half++) {
        int i = 2 * tile + half;
        U32<W> low = bytes_of<W>(h.bytes(i % 8), n) >> (uint32_t)(i / 8 * 4);
        U32<W> high = bytes_of<W>(h.bytes(8 + i % 4), n) >> (uint32_t)(i / 4 * 2);
        store(r.s[half] + n, d * to_floats<W>(((low & 15u) | (high & 3u) << 4) - 32u));
      }
    }
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::q4_k, type> {
  static constexpr int halves = 1;
  static constexpr bool offset = true;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    // Eight scales and eight minima of six bits in twelve bytes, the last four of each in pieces.
    const uint8_t *a = h.bytes(4 + tile), *b = h.bytes(8 + tile), *c = h.bytes(tile);
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = half_scales<W>(h.at + 2 * n), least = half_scales<W>(h.at + 2 * kTileN + 2 * n);
      U32<W> scale = bytes_of<W>(a, n), minimum = bytes_of<W>(b, n);
      if (tile < 4) {
        scale &= 63u;
        minimum &= 63u;
      } else {
        U32<W> low = minimum;
        minimum = (low >> 4) | (scale >> 6) << 4;
        scale = (low & 15u) | (bytes_of<W>(c, n) >> 6) << 4;
      }
      store(r.s[0] + n, d * to_floats<W>(scale));
      store(r.m[0] + n, -(least * to_floats<W>(minimum)));
    }
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::q6_k, type> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = half_scales<W>(h.at + 16 * kTileN + 2 * n);
      for (int half = 0; half < 2; half++)
        store(r.s[half] + n, d * signed8<W>(bytes_of<W>(h.bytes(2 * tile + half), n) << 24));
    }
  }
};

template <FieldType type>
struct ScaleReader<ScaleKind::iq4_xs, type> {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    const uint8_t* low = h.bytes(4 + tile / 2);
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = half_scales<W>(h.at + 2 * n);
      auto high = __builtin_convertvector(load<typename Vec<W>::u16>(h.at + 2 * kTileN + 2 * n), U32<W>);
      U32<W> scale = ((bytes_of<W>(low, n) >> (uint32_t)(tile % 2 * 4)) & 15u) | ((high >> (uint32_t)(2 * tile)) & 3u)
                                                                                     << 4;
      store(r.s[0] + n, d * to_floats<W>(scale - 32u));
    }
  }
};

template <Codec C>
struct Decoder : ScaleReader<kFormats[(int)C].scales, kFormats[(int)C].header[0].type> {};

}  // namespace
}  // namespace kt
