// From strips to weight tiles, written once for every ISA: headers become a scale (and an offset) for every row, codes
// become numbers, and their product is rounded into the tile.
//
// A format is a struct with two functions: `scales` fills s and m for the k tile's 16 rows (twice where 16 values share
// a scale, not 32), `number` turns the codes of W lanes into floats. Multiplication and addition are rounded apart, as
// whoever released the weights did it: the bits agree with theirs. Lanes are (output, parity of k), in the order in
// which a row of a bf16 tile lies, so a row is W floats after W floats and nothing is shuffled.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "kernels/elementwise.h"
#include "kernels/format.h"

namespace kt {
namespace {

constexpr int kLanesOfTile = 2 * kTileN;

// What a k tile's rows are multiplied with, and what is added: [half of the tile][row]. Formats whose 32 values share a
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
inline F32<W> e8m0(U32<W> code) {
  U32<W> bits = code << 23;
  bits |= (U32<W>)((I32<W>)code == 0) & 0x00400000u;
  return (F32<W>)(bits | ((U32<W>)((I32<W>)code == 255) & 0x7fc00000u));
}

// Of a byte at the top of its lane.
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

template <int W>
inline void e4m3_to_floats(const uint8_t* from, float* out) {
  for (int n = 0; n < kTileN; n += W) store(out + n, e4m3<W>(bytes_of<W>(from, n) << 24));
}

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr float kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kLess8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr float kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

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

// (code & mask) + low, for codes of few bits that are plain numbers.
template <int W, int bits, int low>
inline F32<W> counted(U32<W> code) {
  return __builtin_convertvector((I32<W>)(code & ((1u << bits) - 1)) + low, F32<W>);
}

template <int W, int low>
inline F32<W> counted4(U32<W> code) {
  if constexpr (W == 16) return look_up<W>(low ? kLess8 : kCount, code);
  return counted<W, 4, low>(code);
}

// A signed byte at the top of its lane.
template <int W>
inline F32<W> signed8(U32<W> code) {
  return __builtin_convertvector((I32<W>)code >> 24, F32<W>);
}

// `tile`: the k tile's number in its span; `whole`: the strip, for what all of it shares. s and m as in RowScales.
template <Codec>
struct Decoder;

template <>
struct Decoder<Codec::int8> {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int, const char*, RowScales& r) {
    __builtin_memcpy(r.s[0], h.at, sizeof r.s[0]);
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return signed8<W>(code);
  }
};

template <>
struct Decoder<Codec::int4> {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format& f, Header h, int, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) store(r.s[0] + n, load_as<F32<W>>(h.at, n, f.scale));
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted4<W, -8>(code);
  }
};

template <>
struct Decoder<Codec::fp8> {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format& f, Header h, int, const char*, RowScales& r) {
    if (!f.shared) return (void)__builtin_memcpy(r.s[0], h.at, sizeof r.s[0]);
    for (float& s : r.s[0]) s = load<float>(h.at);
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return e4m3<W>(code);
  }
};

template <>
struct Decoder<Codec::mxfp8> : Decoder<Codec::fp8> {
  template <int W>
  static void scales(const Format&, Header h, int, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) store(r.s[0] + n, e8m0<W>(bytes_of<W>(h.bytes(0), n)));
  }
};

template <>
struct Decoder<Codec::mxfp4> : Decoder<Codec::mxfp8> {
  template <int W>
  static F32<W> number(U32<W> code) {
    return look_up<W>(kE2m1, code);
  }
};

template <>
struct Decoder<Codec::nvfp4> : Decoder<Codec::mxfp4> {
  static constexpr int halves = 2;
  template <int W>
  static void scales(const Format&, Header h, int, const char* whole, RowScales& r) {
    for (int half = 0; half < 2; half++) {
      e4m3_to_floats<W>(h.bytes(half), r.s[half]);
      for (float& s : r.s[half]) s *= load<float>(whole);
    }
  }
};

template <>
struct Decoder<Codec::q8_0> {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int, const char*, RowScales& r) {
    halves_to_floats<W>(h.at, r.s[0]);
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return signed8<W>(code);
  }
};

template <>
struct Decoder<Codec::q4_0> : Decoder<Codec::q8_0> {
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted4<W, -8>(code);
  }
};

template <>
struct Decoder<Codec::q5_0> : Decoder<Codec::q8_0> {
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted<W, 5, -16>(code);
  }
};

template <>
struct Decoder<Codec::iq4_nl> : Decoder<Codec::q8_0> {
  template <int W>
  static F32<W> number(U32<W> code) {
    return look_up<W>(kIq4, code);
  }
};

template <>
struct Decoder<Codec::q4_1> {
  static constexpr int halves = 1;
  static constexpr bool offset = true;
  template <int W>
  static void scales(const Format&, Header h, int, const char*, RowScales& r) {
    halves_to_floats<W>(h.at, r.s[0]);
    halves_to_floats<W>(h.at + 2 * kTileN, r.m[0]);
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted4<W, 0>(code);
  }
};

template <>
struct Decoder<Codec::q5_1> : Decoder<Codec::q4_1> {
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted<W, 5, 0>(code);
  }
};

template <>
struct Decoder<Codec::q2_k> {
  static constexpr int halves = 2;
  static constexpr bool offset = true;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = from_f16<W>(h.at + 16 * kTileN + 2 * n), least = from_f16<W>(h.at + 18 * kTileN + 2 * n);
      for (int half = 0; half < 2; half++) {
        U32<W> both = bytes_of<W>(h.bytes(2 * tile + half), n);
        store(r.s[half] + n, d * to_floats<W>(both & 15u));
        store(r.m[half] + n, -(least * to_floats<W>(both >> 4)));
      }
    }
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted<W, 2, 0>(code);
  }
};

template <>
struct Decoder<Codec::q3_k> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = from_f16<W>(h.at + 12 * kTileN + 2 * n);
      for (int half = 0; half < 2; half++) {
        int i = 2 * tile + half;
        U32<W> low = bytes_of<W>(h.bytes(i % 8), n) >> (uint32_t)(i / 8 * 4);
        U32<W> high = bytes_of<W>(h.bytes(8 + i % 4), n) >> (uint32_t)(i / 4 * 2);
        store(r.s[half] + n, d * to_floats<W>(((low & 15u) | (high & 3u) << 4) - 32u));
      }
    }
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted<W, 3, -4>(code);
  }
};

template <>
struct Decoder<Codec::q4_k> {
  static constexpr int halves = 1;
  static constexpr bool offset = true;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    // Eight scales and eight minima of six bits in twelve bytes, the last four of each in pieces.
    const uint8_t *a = h.bytes(4 + tile), *b = h.bytes(8 + tile), *c = h.bytes(tile);
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = from_f16<W>(h.at + 2 * n), least = from_f16<W>(h.at + 2 * kTileN + 2 * n);
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
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted4<W, 0>(code);
  }
};

template <>
struct Decoder<Codec::q5_k> : Decoder<Codec::q4_k> {
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted<W, 5, 0>(code);
  }
};

template <>
struct Decoder<Codec::q6_k> {
  static constexpr int halves = 2;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = from_f16<W>(h.at + 16 * kTileN + 2 * n);
      for (int half = 0; half < 2; half++)
        store(r.s[half] + n, d * signed8<W>(bytes_of<W>(h.bytes(2 * tile + half), n) << 24));
    }
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return counted<W, 6, -32>(code);
  }
};

template <>
struct Decoder<Codec::iq4_xs> {
  static constexpr int halves = 1;
  static constexpr bool offset = false;
  template <int W>
  static void scales(const Format&, Header h, int tile, const char*, RowScales& r) {
    const uint8_t* low = h.bytes(4 + tile / 2);
    for (int n = 0; n < kTileN; n += W) {
      F32<W> d = from_f16<W>(h.at + 2 * n);
      auto high = __builtin_convertvector(load<typename Vec<W>::u16>(h.at + 2 * kTileN + 2 * n), U32<W>);
      U32<W> scale = ((bytes_of<W>(low, n) >> (uint32_t)(tile % 2 * 4)) & 15u) | ((high >> (uint32_t)(2 * tile)) & 3u)
                                                                                     << 4;
      store(r.s[0] + n, d * to_floats<W>(scale - 32u));
    }
  }
  template <int W>
  static F32<W> number(U32<W> code) {
    return look_up<W>(kIq4, code);
  }
};

// Bits of a plane from row `j` on, in W lanes from `lane` on; more than one code's may come.
template <int W, int bits>
inline U32<W> plane_bits(const char* plane, int j, int lane) {
  if constexpr (bits == 1) {
    auto half = load<typename Vec<W>::u16>(plane + lane * 2);
    return __builtin_convertvector(half, U32<W>) >> (uint32_t)j;
  } else {
    return load<U32<W>>(plane + (j * bits / 32 * kLanesOfTile + lane) * 4) >> (uint32_t)(j * bits % 32);
  }
}

// A code of one plane keeps its neighbours' bits above it, which every `number` masks; that of two is put together.
// Whole bytes come at the top of their lanes, with neighbours' bits below.
template <int W, Codec C>
inline U32<W> code_at(const char* codes, int j, int lane) {
  constexpr int low = kCodecRows[(int)C].plane[0], high = kCodecRows[(int)C].plane[1];
  if constexpr (low == 8) return load<U32<W>>(codes + (j / 4 * kLanesOfTile + lane) * 4) << (uint32_t)(24 - j % 4 * 8);
  U32<W> code = plane_bits<W, low>(codes, j, lane);
  if constexpr (high > 0) {
    U32<W> rest = plane_bits<W, high>(codes + kTileN * kTileK * low / 8, j, lane);
    code = (code & ((1u << low) - 1)) | (rest << low);
  }
  return code;
}

// Two vectors of a row, whose first lane is number `lane`, into row j of a tile.
template <class Real>
struct TileRow {
  template <int W>
  static void put(char* tile, int j, int lane, F32<W> a, F32<W> b) {
    for (int i = 0; i < W; i++) {
      int x = lane + i, y = x + W;
      ((Real*)tile)[(2 * j + x % 2) * kTileN + x / 2] = (Real)a[i];
      ((Real*)tile)[(2 * j + y % 2) * kTileN + y / 2] = (Real)b[i];
    }
  }
};

struct Bf16Pairs;
template <>
struct TileRow<Bf16Pairs> {
  template <int W>
  static void put(char* tile, int j, int lane, F32<W> a, F32<W> b) {
    char* out = tile + j * 64 + lane * 2;
#ifdef __AVX512BF16__
    if constexpr (W == 16) {
      store(out, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
      return;
    }
#endif
    to_bf16<W>(out, a);
    to_bf16<W>(out + W * 2, b);
  }
};

// The same value, of which the compiler knows nothing: a product that may not be fused with the addition after it.
template <class V>
inline V apart(V v) {
#if defined(__AVX512F__)
  constexpr int widest = 64;
#elif defined(__AVX__)
  constexpr int widest = 32;
#else
  constexpr int widest = 16;
#endif
  if constexpr (sizeof(V) > widest) {
    asm("" : "+m"(v));
  } else {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#else
    asm("" : "+m"(v));
#endif
  }
  return v;
}

inline void two_lanes_each(const float* rows, float* lanes) {
  for (int n = 0; n < kTileN; n++) lanes[2 * n] = lanes[2 * n + 1] = rows[n];
}

template <int W, class Real, Codec C>
inline void decode_tile(const RowScales& r, const char* codes, char* tile) {
  using D = Decoder<C>;
  using V = F32<W>;
  alignas(64) float s_of[D::halves][kLanesOfTile], m_of[D::halves][kLanesOfTile];
  for (int half = 0; half < D::halves; half++) {
    two_lanes_each(r.s[half], s_of[half]);
    if constexpr (D::offset) two_lanes_each(r.m[half], m_of[half]);
  }
  for (int lane = 0; lane < kLanesOfTile; lane += 2 * W) {
    V s[D::halves][2], m[D::halves][2];
    for (int half = 0; half < D::halves; half++)
      for (int v = 0; v < 2; v++) {
        s[half][v] = load<V>(s_of[half] + lane + v * W);
        if constexpr (D::offset) m[half][v] = load<V>(m_of[half] + lane + v * W);
      }
#pragma GCC unroll 16
    for (int j = 0; j < kTileK / 2; j++) {
      V x[2];
      for (int v = 0; v < 2; v++) {
        constexpr int per_half = kTileK / 2 / D::halves;
        V product = D::template number<W>(code_at<W, C>(codes, j, lane + v * W)) * s[j / per_half][v];
        x[v] = product;
        if constexpr (D::offset) x[v] = apart(product) + m[j / per_half][v];
      }
      TileRow<Real>::template put<W>(tile, j, lane, x[0], x[1]);
    }
  }
}

constexpr int kDecodeAhead = 8;  // k tiles whose codes come into L1 meanwhile

// k tiles [k0, k0 + count) of a strip; tile i at out + i * step.
// Never inlined: every product decodes, and there are many formats.
template <int W, class Real, Codec C>
__attribute__((noinline)) void decode_strip_as(const Format& f, const Strip& s, const char* strip, int k0, int count,
                                               char* out, int64_t step) {
  const char* codes = strip + s.codes + (int64_t)k0 * s.tile_bytes;
  const int span = k0 / s.span_tiles;
  Header header{strip + s.headers + (int64_t)span * s.span_bytes};
  for (int k = k0, in_span = k0 - span * s.span_tiles; k < k0 + count; k++, in_span++) {
    for (int line = 0; line < s.tile_bytes; line += 64)
      __builtin_prefetch(codes + kDecodeAhead * s.tile_bytes + line, 0, 3);
    if (in_span == s.span_tiles) {
      in_span = 0;
      header.at += s.span_bytes;
    }
    RowScales scales;
    Decoder<C>::template scales<W>(f, header, in_span, strip, scales);
    decode_tile<W, Real, C>(scales, codes, out);
    codes += s.tile_bytes;
    out += step;
  }
}

template <int W, class Real>
__attribute__((noinline)) void decode_strip(const Format& f, const Strip& s, const char* strip, int k0, int count,
                                            char* out, int64_t step) {
  switch (f.codec) {
#define KT_CODEC(name) \
  case Codec::name:    \
    return decode_strip_as<W, Real, Codec::name>(f, s, strip, k0, count, out, step);
    KT_CODEC(int8)
    KT_CODEC(int4)
    KT_CODEC(fp8)
    KT_CODEC(mxfp8)
    KT_CODEC(mxfp4)
    KT_CODEC(nvfp4)
    KT_CODEC(q8_0)
    KT_CODEC(q4_0)
    KT_CODEC(q4_1)
    KT_CODEC(q5_0)
    KT_CODEC(q5_1)
    KT_CODEC(q2_k)
    KT_CODEC(q3_k)
    KT_CODEC(q4_k)
    KT_CODEC(q5_k)
    KT_CODEC(q6_k)
    KT_CODEC(iq4_nl)
    KT_CODEC(iq4_xs)
#undef KT_CODEC
    case Codec::tiles:
      return;
  }
}

// The vectors and the tiles of an ISA. Decoding is in fp32 whatever the sums are.
template <class Isa>
constexpr int kDecodeWidth = sizeof(typename Isa::Real) == 8 ? Isa::width * 2 : Isa::width;
template <bool pairs, class Real>
struct TileKind {
  using type = Real;
};
template <class Real>
struct TileKind<true, Real> {
  using type = Bf16Pairs;
};

// k tiles of a block from `k0` on, both halves, as [count][2 tiles].
template <class Isa>
void decode_block(const Encoding& e, const char* block, int k0, int count, char* out) {
  using Real = typename TileKind<Isa::tile_bytes == kTileBytes, typename Isa::Real>::type;
  for (int half = 0; half < 2; half++)
    decode_strip<kDecodeWidth<Isa>, Real>(e.format[half], e.strip[half], block + (half ? e.strip[0].bytes : 0), k0,
                                          count, out + half * Isa::tile_bytes, 2 * Isa::tile_bytes);
}

}  // namespace
}  // namespace kt
