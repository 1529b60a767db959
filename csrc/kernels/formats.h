// From strips to weight tiles, written once for every ISA: headers become a scale (and an offset) for every row, codes
// become numbers (codecs.h), and their product is rounded into the tile.
//
// Multiplication and addition are rounded separately, as in the reference decoders of the formats: the bits agree.
// Tiles of bf16 pairs and of f32 are decoded from bytes of codes (code_bytes.h), which takes about seven instructions
// for a vector of weights; tiles of f64, and fp8 tiles that contain a NaN, code by code.
#pragma once

#include "kernels/bf16_12.h"
#include "kernels/code_bytes.h"
#include "kernels/grids.h"

namespace kt {
namespace {

constexpr int kLanesOfTile = 2 * kTileN;

// Bits of a plane from row `j` on, in W lanes from `lane` on, with those of the following codes above them.
template <int W, int bits>
inline U32<W> plane_bits(const char* plane, int j, int lane) {
  if constexpr (bits == 1) {
    auto half = load<typename Vec<W>::u16>(plane + lane * 2);
    return __builtin_convertvector(half, U32<W>) >> (uint32_t)j;
  } else {
    return load<U32<W>>(plane + (j * bits / 32 * kLanesOfTile + lane) * 4) >> (uint32_t)(j * bits % 32);
  }
}

// A code of one plane keeps its neighbours' bits above it, which `number_of` masks; the planes of a code are joined.
// Whole bytes come at the top of their lanes, with neighbours' bits below.
template <int W, Codec C>
inline U32<W> code_at(const char* codes, int j, int lane) {
  constexpr const FormatRow& row = kFormats[(int)C];
  constexpr int low = row.in_grid() ? 8 : row.plane[0], high = row.plane[1];
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

// Numbers in f32, not rounded, in the order in which pairs of vectors have them: [32 k][16 outputs], or, where a vector
// has both k of a pair, [16 pairs of k][16 outputs][2].
struct F32Lanes;
template <int W>
constexpr int kPairLanes = kEvenAndOdd<W> ? 1 : 2;
template <>
struct TileRow<F32Lanes> {
  template <int W>
  static void put(char* tile, int j, int lane, F32<W> a, F32<W> b) {
    if constexpr (kEvenAndOdd<W>) return TileRow<float>::put<W>(tile, j, lane, a, b);
    float* row = (float*)tile + j * kLanesOfTile + lane;
    store(row, a);
    store(row + W, b);
  }
};

// The same value, opaque to the compiler: a product that may not be fused with the addition after it.
template <class V>
inline V apart(V v) {
  if constexpr (sizeof(V) > kRegister) {
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

// Scales of the rows of an opened tile.
template <int W>
inline void scales_of(const OpenTile& t, float unit, RowScales& r) {
  for (int n = 0; n < kTileN; n += W)
    for (int half = 0; half < 2; half++)
      store(r.s[half] + n, from_f16<W>(t.d + n) * (to_floats<W>(bytes_of<W>(t.odd[half], n)) * splat<F32<W>>(unit)));
}

// Row by row: lanes are (output, parity of k), in the order in which a row of a bf16 tile lies.
template <int W, class Real, Codec C>
inline void decode_rows(const RowScales& r, const char* codes, char* tile) {
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
    for (int j = 0; j < kTileK / 2; j++) {
      V x[2];
      for (int v = 0; v < 2; v++) {
        constexpr int per_half = kTileK / 2 / D::halves;
        V product = number_of<W, C>(code_at<W, C>(codes, j, lane + v * W)) * s[j / per_half][v];
        x[v] = product;
        if constexpr (D::offset) x[v] = apart(product) + m[j / per_half][v];
      }
      TileRow<Real>::template put<W>(tile, j, lane, x[0], x[1]);
    }
  }
}

// number * s, or number * s + m rounded twice.
template <bool offset, class V>
inline V scaled(V number, V s, V m) {
  V product = number * s;
  if constexpr (offset) return apart(product) + m;
  return product;
}

// Clears what round_pairs must not see in scales that are NaN.
template <int W, Codec C>
inline void clear_payloads(RowScales& r) {
  using D = Decoder<C>;
  if constexpr (kFormats[(int)C].scales == ScaleKind::e8m0) return;
  U32<W> is_nan = {};
  for (int half = 0; half < D::halves; half++)
    for (int n = 0; n < kTileN; n += W) {
      F32<W> s = load<F32<W>>(r.s[half] + n), m = D::offset ? load<F32<W>>(r.m[half] + n) : s;
      is_nan |= (U32<W>)(s != s) | (U32<W>)(m != m);
    }
  if (__builtin_expect(!any_of<W>((U8<W>)is_nan), 1)) return;
  for (int half = 0; half < D::halves; half++)
    for (int n = 0; n < kTileN; n += W) {
      store(r.s[half] + n, without_payload<W>(load<F32<W>>(r.s[half] + n)));
      if constexpr (D::offset) store(r.m[half] + n, without_payload<W>(load<F32<W>>(r.m[half] + n)));
    }
}

// The scales of the two vectors that make W outputs' pairs, from output n on.
template <int W>
inline void scales_of_pair(const float* rows, int n, F32<W> (&s)[2]) {
  s[0] = s[1] = load<F32<W>>(rows + n);
  if constexpr (!kEvenAndOdd<W>) {
    I32<W> twice;
    for (int i = 0; i < W; i++) twice[i] = i / 2;
    s[0] = __builtin_shuffle(s[1], twice);
    s[1] = __builtin_shuffle(s[1], twice + W / 2);
  }
}

// Sixteen nibbles of every format are in a register of 16 floats, where looking one up is one instruction.
template <int W, Codec C>
constexpr bool kLooksUpNibbles = W == 16 && CodeWords<W, C>::low == 4 && CodeWords<W, C>::high == 0;

// Whether numbers times scales are bf16 numbers: 0.5 to 6 times a power of two of at least 2^-127. Numbers of e4m3
// times a small one would be below the least bf16 number.
template <Codec C>
constexpr bool kExactInBf16 =
    kFormats[(int)C].element == ElementKind::e2m1 && kFormats[(int)C].scales == ScaleKind::e8m0;

// The two vectors of W outputs from n on into row j of a tile of bf16 pairs or of f32.
template <int W, class Real, Codec C>
inline void put_vectors(char* tile, int j, int n, F32<W> first, F32<W> second) {
  if constexpr (__is_same(Real, Bf16Pairs)) {
    put_pair<W, kExactInBf16<C>>(tile + j * 64 + n * 4, first, second);
  } else {
    float* row = (float*)tile + j * kLanesOfTile + kPairLanes<W> * n;
    store(row, first);
    store(row + (kPairLanes<W> == 1 ? kTileN : W), second);
  }
}

// Whether tiles of this kind take the vectors of decode_pairs.
template <int W, class Real>
constexpr bool kTakesVectors =
    __is_same(Real, Bf16Pairs) || __is_same(Real, F32Lanes) || (__is_same(Real, float) && kEvenAndOdd<W>);

template <int W, class Real, Codec C, bool usual>
inline void decode_pairs(const RowScales& r, const char* codes, char* __restrict tile) {
  using D = Decoder<C>;
  using Words = CodeWords<W, C>;
  for (int n = 0; n < kTileN; n += W) {
    F32<W> s[D::halves][2], m[D::halves][2] = {};
    for (int half = 0; half < D::halves; half++) {
      scales_of_pair<W>(r.s[half], n, s[half]);
      if constexpr (D::offset) scales_of_pair<W>(r.m[half], n, m[half]);
    }
    const LanePair<W> high = Words::load_high(codes, n);
    auto put = [&](int j, F32<W> first, F32<W> second) {
      const int half = j / (kTileK / 2 / D::halves);
      put_vectors<W, Real, C>(tile, j, n, scaled<D::offset>(first, s[half][0], m[half][0]),
                              scaled<D::offset>(second, s[half][1], m[half][1]));
    };
#pragma GCC unroll 4
    for (int word = 0; word < Words::words; word++) {
      const LanePair<W> plane = Words::load_words(codes, word, n);
      if constexpr (kLooksUpNibbles<W, C>) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
          put(8 * word + j, number_of<W, C>(plane.first >> (uint32_t)(4 * j)),
              number_of<W, C>(plane.second >> (uint32_t)(4 * j)));
      } else {
#pragma GCC unroll 4
        for (int part = 0; part < Words::parts; part++) {
          F32<W> first[4], second[4];
          auto numbers = [&](U32<W> word_of, U32<W> high_of, F32<W>(&out)[4]) {
            Numbers<W, C, usual>::of(Words::split(word_of, high_of, word, part))
                .template select<SameByte<0>, SameByte<1>, SameByte<2>, SameByte<3>>(out);
          };
          numbers(plane.first, high.first, first);
          numbers(plane.second, high.second, second);
#pragma GCC unroll 4
          for (int b = 0; b < 4; b++) put(Words::row_of(word, part, b), first[b], second[b]);
        }
      }
    }
  }
}

// Whether a k tile has NaNs of e4m3.
template <int W>
inline bool has_nan(const char* codes) {
  U8<W> largest = {};
  for (int at = 0; at < kTileN * kTileK; at += 4 * W) {
    U8<W> v = load<U8<W>>(codes + at);
    v += v;
    largest = v > largest ? v : largest;
  }
  return any_of<W>((U8<W>)(largest == (uint8_t)0xfe));
}

// Whether it has nothing but normal numbers of e4m3.
template <int W>
inline bool all_normal(const char* codes) {
  U8<W> largest = {};
  for (int at = 0; at < kTileN * kTileK; at += 4 * W) {
    U8<W> v = load<U8<W>>(codes + at);
    v = v + v - (uint8_t)16;  // up to 0xec for normal numbers, 0xee for NaN, more for zero and subnormal ones
    largest = v > largest ? v : largest;
  }
  return !any_of<W>((U8<W>)(largest > (uint8_t)0xec));
}

template <bool is>
struct Constant {
  static constexpr bool value = is;
};

// Multiplies the scales of e4m3 with 2^120 if all are below 2^7.
template <int W, Codec C>
inline bool raise_scales(RowScales& r) {
  auto each = [&](auto act) {
    for (int half = 0; half < Decoder<C>::halves; half++)
      for (int n = 0; n < kTileN; n += W) act(r.s[half] + n);
  };
  U32<W> large = {};
  each([&](float* s) { large |= (U32<W>)(((U32<W>)load<F32<W>>(s) & 0x7fffffffu) >= 0x43000000u); });
  if (any_of<W>((U8<W>)large)) return false;
  each([](float* s) { store(s, load<F32<W>>(s) * splat<F32<W>>(0x1p120f)); });
  return true;
}

// Calls act(Constant) with `usual` of `Numbers`. Returns false instead if there are NaNs among codes of e4m3.
template <int W, Codec C, class Act>
inline bool unless_nan(RowScales& r, const char* codes, const Act& act) {
  if constexpr (kFormats[(int)C].element == ElementKind::e4m3) {
    if constexpr (!kNeon<W>)
      if (all_normal<W>(codes)) return act(Constant<true>{}), true;
    if (has_nan<W>(codes)) return false;
    if constexpr (kNeon<W>)
      if (raise_scales<W, C>(r)) return act(Constant<true>{}), true;
  }
  act(Constant<false>{});
  return true;
}

template <int W, class Real, Codec C>
__attribute__((noinline)) void decode_rows_with_nan(const RowScales& r, const char* codes, char* tile) {
  decode_rows<W, Real, C>(r, codes, tile);
}

template <int W, class Real, Codec C>
inline void decode_tile(RowScales& r, const char* codes, char* tile) {
  if constexpr (kTakesVectors<W, Real>) {
    if constexpr (__is_same(Real, Bf16Pairs)) clear_payloads<W, C>(r);
    const bool decoded = unless_nan<W, C>(
        r, codes, [&](auto usual) { decode_pairs<W, Real, C, decltype(usual)::value>(r, codes, tile); });
    if (__builtin_expect(!decoded, 0)) decode_rows_with_nan<W, Real, C>(r, codes, tile);
  } else {
    decode_rows<W, Real, C>(r, codes, tile);
  }
}

// A tile of bf16 pairs as numbers that are not rounded.
template <int W, class Real>
inline void widen_tile(const char* pairs, char* tile) {
  if constexpr (kTakesVectors<W, Real>) {
    for (int j = 0; j < kTileK / 2; j++)
      for (int n = 0; n < kTileN; n += W) {
        const char* at = pairs + j * 64 + n * 4;
        const U32<W> both = load<U32<W>>(at);
        F32<W> first = (F32<W>)(both << 16), second = (F32<W>)(both & 0xffff0000u);
        if constexpr (!kEvenAndOdd<W>) first = from_bf16<W>(at), second = from_bf16<W>(at + 2 * W);
        put_vectors<W, Real, Codec::bf16_12>(tile, j, n, first, second);
      }
  } else {
    for (int k = 0; k < kTileK; k++)
      for (int n = 0; n < kTileN; n++)
        ((Real*)tile)[k * kTileN + n] =
            (Real)to_float(load<uint16_t>(pairs + (k / 2 * kTileN + n) * 4 + k % 2 * 2), DType::bf16);
  }
}

constexpr int kDecodeAhead = 8;  // k tiles by which codes are prefetched into L1

inline void prefetch_codes(const Strip& s, const char* codes) {
  for (int line = 0; line < s.tile_bytes; line += 64)
    __builtin_prefetch(codes + kDecodeAhead * s.tile_bytes + line, 0, 3);
}

// As decode_strip_as, for bf16:12.
template <int W, class Real>
__attribute__((noinline)) void decode_strip_bf16_12(const Strip& s, const char* strip, int k0, int count, char* out,
                                                    int64_t step) {
  const Patches patches(s, strip);
  for (int k = k0; k < k0 + count; k++, out += step) {
    prefetch_codes(s, strip + s.codes + (int64_t)k * s.tile_bytes);
    if constexpr (__is_same(Real, Bf16Pairs)) {
      decode_bf16_12<W>(s, strip, k, patches, out);
    } else {
      alignas(64) char pairs[kTileBytes];
      decode_bf16_12<W>(s, strip, k, patches, pairs);
      widen_tile<W, Real>(pairs, out);
    }
  }
}

// Whether all k tiles of a span have the same scales.
template <Codec C>
constexpr bool kScalesOfSpan =
    kFormats[(int)C].scales == ScaleKind::floats || kFormats[(int)C].scales == ScaleKind::scale_and_zero;

// Calls act(scales, codes, same) for k tiles [k0, k0 + count) of a strip. `same`: the scales are those of the call
// before, which must not have changed them; only with `keep`.
template <int W, Codec C, bool keep, class Act>
inline void for_each_tile(const Format& f, const Strip& s, const char* strip, int k0, int count, const Act& act) {
  const char* codes = strip + s.codes + (int64_t)k0 * s.tile_bytes;
  const Grid* grid = kFormats[(int)C].in_grid() ? &grid_of(f.codec, W) : nullptr;
  const int span = k0 / s.span_tiles;
  Header header{strip + s.headers + (int64_t)span * s.span_bytes};
  RowScales scales;
  bool same = false;
  for (int k = k0, in_span = k0 - span * s.span_tiles; k < k0 + count; k++, in_span++) {
    prefetch_codes(s, codes);
    if (in_span == s.span_tiles) {
      in_span = 0, same = false;
      header.at += s.span_bytes;
    }
    if constexpr (kFormats[(int)C].in_grid()) {
      OpenTile tile;
      grid->open(header.at, in_span, codes, tile);
      scales_of<W>(tile, grid->unit, scales);
      act(scales, (const char*)tile.codes, false);
    } else {
      if (!same) Decoder<C>::template scales<W>(f, header, in_span, strip, scales);
      act(scales, codes, same);
      same = keep && kScalesOfSpan<C>;
    }
    codes += s.tile_bytes;
  }
}

// k tiles [k0, k0 + count) of a strip; tile i at out + i * step.
// Never inlined: every product calls it, and there are many formats.
template <int W, class Real, Codec C>
__attribute__((noinline)) void decode_strip_as(const Format& f, const Strip& s, const char* strip, int k0, int count,
                                               char* out, int64_t step) {
  for_each_tile<W, C, false>(f, s, strip, k0, count, [&](RowScales& scales, const char* codes, bool) {
    decode_tile<W, Real, C>(scales, codes, out);
    out += step;
  });
}

// The codec whose instantiation decodes a strip: an opened tile of any grid is decoded alike, tiles of bf16 never are,
// and bf16:12 has functions of its own.
constexpr Codec decoded_as(Codec codec) {
  if (kFormats[(int)codec].in_grid()) return Codec::iq2_xxs;
  return codec == Codec::bf16 || codec == Codec::bf16_12 ? Codec::int8 : codec;
}

template <int W, class Real>
__attribute__((noinline)) void decode_strip(const Format& f, const Strip& s, const char* strip, int k0, int count,
                                            char* out, int64_t step) {
  if (f.codec == Codec::bf16_12) return decode_strip_bf16_12<W, Real>(s, strip, k0, count, out, step);
  switch (f.codec) {
#define KT_FORMAT(name, ...) \
  case Codec::name:          \
    return decode_strip_as<W, Real, decoded_as(Codec::name)>(f, s, strip, k0, count, out, step);
#include "kernels/format_table.h"
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
