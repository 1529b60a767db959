// Dequantised tiles for products of CPUs without bf16 instructions: weights are rounded to bf16 by two float
// instructions and stored as f32, or as pairs of bf16 where they are read several times.
//
// 65535 x, rounded to f32, has its last bit where the last bit of a bf16 number as large as 65536 x is, and the
// difference of the two is exact: x rounded to eight bits, ties to even. All f32 numbers x were compared with integer
// rounding: those of [2^-126, 2^112) have the same bits, and zero is rounded to +0 whatever its sign. Products do not
// notice that sign, but decoded weights that leave the core keep it (formats.h). Scales that might leave the range take
// the tiles of formats.h as well.
//
// A product of a code and a scale of 16 bits or fewer is exact, and so are base * scale and their sum: a byte that lies
// in the mantissa of 2^7 or 2^15 is multiplied as it is, and one multiply-add removes the base.
#pragma once

#include "kernels/formats.h"

namespace kt {
namespace {

// Whether the CPU has that multiply-add for W lanes and no instruction that rounds to bf16.
template <int W>
constexpr bool kRoundsByFma =
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
    W == 16;
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    W == 8;
#else
    false;
#endif

// a b + c with one rounding. Left to the compiler, either of two products of a sum may be the one that is not rounded.
template <int W>
inline F32<W> multiply_add(F32<W> a, F32<W> b, F32<W> c) {
#ifdef __AVX512F__
  if constexpr (W == 16) return (F32<W>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#ifdef __FMA__
  if constexpr (W == 8) return (F32<W>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
  return a * b + c;
}

template <int W>
inline F32<W> round_to_bf16(F32<W> x) {
  const F32<W> below = x * splat<F32<W>>(-65535.0f);
  return multiply_add<W>(x, splat<F32<W>>(65536.0f), below);
}

// Where two vectors of numbers, k = 2 j and 2 j + 1 of W outputs from n on, go: rows of f32, or pairs of bf16.
struct RoundedF32Tile {
  static constexpr int tile_bytes = kTileK * kTileN * 4;
  template <int W>
  static void put(char* tile, int j, int n, F32<W> even, F32<W> odd) {
    store(tile + (2 * j * kTileN + n) * 4, even);
    store(tile + ((2 * j + 1) * kTileN + n) * 4, odd);
  }
};
struct RoundedBf16Tile {
  static constexpr int tile_bytes = kTileBytes;
  template <int W>
  static void put(char* tile, int j, int n, F32<W> even, F32<W> odd) {
    store(tile + (j * kTileN + n) * 4, (U32<W>)even >> 16 | (U32<W>)odd);
  }
};

// Codes of four bytes in each of W lanes as floats that are `base` larger. e4m3 (normal numbers only): 2^-120 of the
// number.
template <int W, Codec C>
struct BasedFloats {
  static constexpr const FormatRow& row = kFormats[(int)C];
  static constexpr ElementKind element = row.element;
  static constexpr bool is_signed = element == ElementKind::int8 || element == ElementKind::grid;
  static constexpr bool levels = element == ElementKind::e2m1 || element == ElementKind::iq4;
  static_assert(is_signed || levels || element == ElementKind::e4m3 || element == ElementKind::uint);
  // Bytes lie in the second byte of a float, codes of fewer bits in the third.
  static constexpr int to = is_signed ? 1 : 2;
  static constexpr uint32_t bits = is_signed ? 0x47000000u : 0x43000000u;
  static constexpr float base = levels || element == ElementKind::e4m3 ? 0
                                : is_signed                            ? 32768 + 128
                                                                       : 128 + row.zero_point;

  static void of(U8<W> codes, F32<W> (&out)[4]) {
    if constexpr (levels) {
      Numbers<W, C, false>::of(codes).template select<SameByte<0>, SameByte<1>, SameByte<2>, SameByte<3>>(out);
    } else if constexpr (element == ElementKind::e4m3) {
      typedef int16_t Halves __attribute__((vector_size(4 * W)));
      auto widen = [](Halves bytes_at_top) { return (U32<W>)(U16<W>)((bytes_at_top >> 4) & (int16_t)0x87f0); };
      const U32<W> even = widen((Halves)((U16<W>)codes << 8)), odd = widen((Halves)codes);
      out[0] = (F32<W>)(even << 16), out[1] = (F32<W>)(odd << 16);
      out[2] = (F32<W>)(even & 0xffff0000u), out[3] = (F32<W>)(odd & 0xffff0000u);
    } else {
      one<0>(codes, out), one<1>(codes, out), one<2>(codes, out), one<3>(codes, out);
    }
  }

 private:
  template <int b>
  static void one(U8<W> codes, F32<W> (&out)[4]) {
    if constexpr (W == 16) {
      // A mask and the bits of the base are one instruction there; the sign is flipped by the same one.
      U32<W> v = (U32<W>)codes;
      v = b < to ? v << (uint32_t)(8 * (to - b)) : v >> (uint32_t)(8 * (b - to));
      out[b] = (F32<W>)((v & (255u << (8 * to))) ^ (bits | (is_signed ? 128u << (8 * to) : 0u)));
    } else {
      const U8<W> unsigned_codes = is_signed ? codes ^ (uint8_t)128 : codes;
      out[b] = (F32<W>)bytes_in_lanes<W, SameByte<b>, to>(unsigned_codes, bits);
    }
  }
};

// Whether base * scale is exact: 3 to 9 bits times the 11 of an f16; 6 times 17 in q3_k and 3 times 19 in q6_k, with a
// sub-scale.
template <Codec C>
constexpr bool kFoldsBase = [] {
  constexpr const FormatRow& row = kFormats[(int)C];
  return !Decoder<C>::offset && (row.element == ElementKind::int8 || row.element == ElementKind::uint) &&
         ((row.scales == ScaleKind::floats && row.header[0].type == FieldType::f16) || row.scales == ScaleKind::q3_k ||
          row.scales == ScaleKind::q6_k);
}();

// Whether code * scale is exact, so that an offset may be added by the same instruction.
template <Codec C>
constexpr bool kExactProducts = [] {
  constexpr ScaleKind kind = kFormats[(int)C].scales;
  return kind == ScaleKind::scale_and_min || kind == ScaleKind::q2_k || kind == ScaleKind::q4_k;
}();

// What W outputs multiply and add to get from a float of BasedFloats to a weight.
template <int W>
struct WeightLine {
  F32<W> s, m;
};

template <int W, Codec C, class Out>
inline void decode_rounded(const RowScales& r, const char* codes, char* __restrict tile) {
  using D = Decoder<C>;
  using Words = CodeWords<W, C>;
  using Floats = BasedFloats<W, C>;
  constexpr bool folds = kFoldsBase<C> && !kLooksUpNibbles<W, C>;
  constexpr bool e4m3 = kFormats[(int)C].element == ElementKind::e4m3;
  for (int n = 0; n < kTileN; n += W) {
    WeightLine<W> line[D::halves];
    for (int half = 0; half < D::halves; half++) {
      line[half].s = load<F32<W>>(r.s[half] + n);
      if constexpr (e4m3) line[half].s *= splat<F32<W>>(0x1p120f);
      if constexpr (folds) line[half].m = line[half].s * splat<F32<W>>(-Floats::base);
      if constexpr (D::offset) line[half].m = load<F32<W>>(r.m[half] + n);
    }
    auto weight = [&](int j, F32<W> number) {
      const WeightLine<W>& l = line[j / (kTileK / 2 / D::halves)];
      F32<W> x;
      if constexpr (folds || (D::offset && kExactProducts<C>)) {
        x = multiply_add<W>(number, l.s, l.m);
      } else {
        x = scaled<D::offset>(number, l.s, l.m);
      }
      if constexpr (kExactInBf16<C>) return x;
      return round_to_bf16<W>(x);
    };
    const LanePair<W> high = Words::load_high(codes, n);
#pragma GCC unroll 4
    for (int word = 0; word < Words::words; word++) {
      const LanePair<W> plane = Words::load_words(codes, word, n);
      if constexpr (kLooksUpNibbles<W, C>) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
          Out::template put<W>(tile, 8 * word + j, n,
                               weight(8 * word + j, number_of<W, C>(plane.first >> (uint32_t)(4 * j))),
                               weight(8 * word + j, number_of<W, C>(plane.second >> (uint32_t)(4 * j))));
      } else {
#pragma GCC unroll 4
        for (int part = 0; part < Words::parts; part++) {
          F32<W> first[4], second[4];
          Floats::of(Words::split(plane.first, high.first, word, part), first);
          Floats::of(Words::split(plane.second, high.second, word, part), second);
#pragma GCC unroll 4
          for (int b = 0; b < 4; b++) {
            const int j = Words::row_of(word, part, b);
            auto number = [](F32<W> x) { return folds || Floats::base == 0 ? x : x - splat<F32<W>>(Floats::base); };
            Out::template put<W>(tile, j, n, weight(j, number(first[b])), weight(j, number(second[b])));
          }
        }
      }
    }
  }
}

// Whether every weight of a tile is zero or in the range of round_to_bf16. Codes are below 2^9, and the sum of a
// product and an offset is zero or a multiple of their last bits, which are 2^-84 or more. Scales of e4m3 times 2^120
// are finite.
template <int W, Codec C>
inline bool rounds_by_fma(const RowScales& r) {
  using D = Decoder<C>;
  constexpr int least = -60, most = kFormats[(int)C].element == ElementKind::e4m3 ? 7 : 60;
  constexpr uint32_t first = (uint32_t)(127 + least) << 23, range = (uint32_t)(most - least) << 23;
  U32<W> outside = {};
  auto test = [&](const float* rows) {
    for (int n = 0; n < kTileN; n += W) {
      const U32<W> magnitude = load<U32<W>>(rows + n) & 0x7fffffffu;
      outside |= (U32<W>)(magnitude - first > range) & (U32<W>)(magnitude != 0u);
    }
  };
  for (int half = 0; half < D::halves; half++) {
    test(r.s[half]);
    if constexpr (D::offset) test(r.m[half]);
  }
  return !any_of<W>((U8<W>)outside);
}

// The same tile by the loops of formats.h.
template <int W, Codec C, class Out>
__attribute__((noinline)) void decode_unusual_tile(RowScales r, const char* codes, char* tile) {
  if constexpr (Out::tile_bytes == kTileBytes) {
    decode_tile<W, Bf16Pairs, C>(r, codes, tile);
  } else {
    alignas(64) char pairs[kTileBytes];
    decode_tile<W, Bf16Pairs, C>(r, codes, pairs);
    for (int j = 0; j < kTileK / 2; j++)
      for (int n = 0; n < kTileN; n += W) {
        const U32<W> both = load<U32<W>>(pairs + (j * kTileN + n) * 4);
        RoundedF32Tile::put<W>(tile, j, n, (F32<W>)(both << 16), (F32<W>)(both & 0xffff0000u));
      }
  }
}

// As decode_strip_as, for products.
template <int W, class Out, Codec C>
__attribute__((noinline)) void product_strip_as(const Format& f, const Strip& s, const char* strip, int k0, int count,
                                                char* out, int64_t step) {
  bool in_range = false;
  for_each_tile<W, C, true>(f, s, strip, k0, count, [&](const RowScales& scales, const char* codes, bool same) {
    if (!same) in_range = rounds_by_fma<W, C>(scales);
    bool usual = in_range;
    if constexpr (kFormats[(int)C].element == ElementKind::e4m3) usual = usual && all_normal<W>(codes);
    if (__builtin_expect(usual, 1)) {
      decode_rounded<W, C, Out>(scales, codes, out);
    } else {
      decode_unusual_tile<W, C, Out>(scales, codes, out);
    }
    out += step;
  });
}

template <int W, class Out>
__attribute__((noinline)) void product_strip(const Format& f, const Strip& s, const char* strip, int k0, int count,
                                             char* out, int64_t step) {
  if (f.codec == Codec::bf16_12) {
    using Real = typename Either<Out::tile_bytes == kTileBytes, Bf16Pairs, float>::type;
    return decode_strip_bf16_12<W, Real>(s, strip, k0, count, out, step);
  }
  switch (f.codec) {
#define KT_FORMAT(name, ...) \
  case Codec::name:          \
    return product_strip_as<W, Out, decoded_as(Codec::name)>(f, s, strip, k0, count, out, step);
#include "kernels/format_table.h"
  }
}

// k tiles of a block from `k0` on, both halves, as [count][2 tiles] for a product.
template <int W, class Out>
inline void decode_product_block(const Encoding& e, const char* block, int k0, int count, char* out) {
  for (int half = 0; half < 2; half++)
    product_strip<W, Out>(e.format[half], e.strip[half], block + (half ? e.strip[0].bytes : 0), k0, count,
                          out + half * Out::tile_bytes, 2 * Out::tile_bytes);
}

}  // namespace
}  // namespace kt
