// Codes as bytes, and bytes as floats: what opening a tile of bf16 pairs consists of, for every vector width.
//
// A vector of code bytes has four codes in each of its W lanes. `CodeWords` splits the words of a strip's planes into
// such vectors: byte b of a lane is the code of row `row_of(word, part, b)` of the k tile, so a shift and a mask serve
// four codes of every lane at once. `Numbers` turns selected bytes, one for a lane, into floats: an integer is put
// below the exponent of 2^23, which one subtraction removes together with the zero point (a conversion of integers has
// half the rate of a subtraction on Neoverse-N1, and widening a byte needs two instructions more on AVX2); a level of a
// table of 16 is looked up as the two upper bytes of its float. All of these are exact.
#pragma once

#include "kernels/codecs.h"

namespace kt {
namespace {

template <int W>
using U8 = typename Vec<4 * W>::u8;
template <int W>
using U16 = typename Vec<W>::pairs;

// Bytes of a vector register; the compiler splits wider vectors.
#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

// Vectors of NEON, not those of a wider variant that is emulated there.
template <int W>
constexpr bool kNeon =
#ifdef KT_NEON
    W == 4;
#else
    false;
#endif

// Whether a byte shuffle within quarters of 16 bytes is an instruction.
template <int W>
constexpr bool kShufflesBytes =
#if defined(__AVX2__) || defined(KT_NEON)
    W * 4 <= kRegister;
#else
    false;
#endif

// Out of line: loops with many of these, split into narrower vectors, take minutes to compile.
template <int W>
__attribute__((noinline)) void shuffle_bytes_singly(const U8<W>& v, const U8<W>& at, U8<W>& out) {
  for (int i = 0; i < 4 * W; i++) out[i] = at[i] & 128 ? (uint8_t)0 : v[i / 16 * 16 + (at[i] & 15)];
}

// Bytes `at` of each quarter of v; zero where bit 7 of `at` is set.
template <int W>
inline U8<W> shuffle_bytes(U8<W> v, U8<W> at) {
#ifdef __AVX512BW__
  if constexpr (W == 16) return (U8<W>)_mm512_shuffle_epi8((__m512i)v, (__m512i)at);
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (U8<W>)_mm256_shuffle_epi8((__m256i)v, (__m256i)at);
  if constexpr (W == 4) return (U8<W>)_mm_shuffle_epi8((__m128i)v, (__m128i)at);
#endif
#ifdef KT_NEON
  if constexpr (W == 4) return (U8<W>)vqtbl1q_u8((uint8x16_t)v, (uint8x16_t)at);
#endif
  U8<W> out;
  shuffle_bytes_singly<W>(v, at, out);
  return out;
}

// The order of a shuffle that takes byte `At::of(i)` of its quarter to byte `to` of lane i and clears the others.
template <class At, int to>
struct ToLanes {
  alignas(64) uint32_t at[16];
  constexpr ToLanes() : at() {
    for (int i = 0; i < 16; i++) at[i] = (0x80808080u & ~(255u << (8 * to))) | (uint32_t)At::of(i) << (8 * to);
  }
};

template <int W, class At, int to>
inline U8<W> to_lanes() {
  static constexpr ToLanes<At, to> kOrder;
  return load<U8<W>>(kOrder.at);
}

// Byte At::of(i) of lane i's quarter, at bits 8 * to of the lane; `base` in the other bits.
template <int W, class At, int to>
inline U32<W> bytes_in_lanes(U8<W> v, uint32_t base) {
  if constexpr (!kShufflesBytes<W> && At::byte >= 0)
    return ((U32<W>)v >> (uint32_t)(8 * At::byte) & 255u) << (uint32_t)(8 * to) | base;
  return (U32<W>)shuffle_bytes<W>(v, to_lanes<W, At, to>()) | base;
}

#ifdef KT_NEON
// Four selections from two vectors. In registers of fixed numbers, and four at a time: gcc 12 moves the pairs of
// vqtbl2q_u8 through memory, and would move `a` before every selection.
inline void shuffle_two(U8<4> a, U8<4> b, const U8<4> (&at)[4], F32<4> (&out)[4]) {
  register U8<4> first asm("v30") = a;
  register U8<4> second asm("v31") = b;
  asm("tbl %0.16b, {v30.16b, v31.16b}, %4.16b\n"
      "tbl %1.16b, {v30.16b, v31.16b}, %5.16b\n"
      "tbl %2.16b, {v30.16b, v31.16b}, %6.16b\n"
      "tbl %3.16b, {v30.16b, v31.16b}, %7.16b"
      : "=&w"(out[0]), "=&w"(out[1]), "=&w"(out[2]), "=&w"(out[3])
      : "w"(at[0]), "w"(at[1]), "w"(at[2]), "w"(at[3]), "w"(first), "w"(second));
}
#endif

// Byte b of each lane. `byte`: the same, or -1 where lanes differ.
template <int b>
struct SameByte {
  static constexpr int byte = b;
  static constexpr int of(int lane) { return lane % 4 * 4 + b; }
};

// The numbers of code bytes. `usual` shortens e4m3: on NEON numbers are 2^-120 of what they are, elsewhere codes are
// neither subnormal nor zero.
template <int W, Codec C, bool usual>
struct Numbers {
  static constexpr const FormatRow& row = kFormats[(int)C];
  static constexpr ElementKind element = row.element;
  // Numbers by a table of 16 levels. On NEON, two look-ups of 16 codes replace four subtractions.
  static constexpr bool levels =
      kNeon<W> ? row.plane[0] == 4 && row.plane[1] == 0 : element == ElementKind::e2m1 || element == ElementKind::iq4;
  // Signed bytes have their sign bit flipped.
  static constexpr bool is_signed = element == ElementKind::int8 || element == ElementKind::grid;
  static constexpr int zero = is_signed ? 128 : row.zero_point;

  U8<W> first, second;  // code bytes; for levels, and for e4m3 on NEON, the third and the fourth byte of floats

  static Numbers of(U8<W> codes) {
    if constexpr (levels) {
      return {look_up_bytes<2>(codes), look_up_bytes<3>(codes)};
    } else if constexpr (is_signed) {
      return {codes ^ (uint8_t)128, U8<W>{}};
    } else if constexpr (kNeon<W> && element == ElementKind::e4m3) {
      // Floats with the exponent of e4m3, 2^-120 of the number.
      typedef int8_t Signed __attribute__((vector_size(4 * W)));
      return {codes << 4, (U8<W>)((Signed)codes >> 4) & (uint8_t)0x87};
    } else {
      return {codes, U8<W>{}};
    }
  }

  // Numbers of four bytes for every lane: byte At::of(i) for lane i.
  template <class... At>
  void select(F32<W> (&out)[4]) const {
    static_assert(sizeof...(At) == 4);
#ifdef KT_NEON
    if constexpr (kNeon<W>) {
      constexpr bool two_bytes = levels || element == ElementKind::e4m3;
      shuffle_two(first, two_bytes ? second : (U8<W>)(U32<W>{} + 0x4b000000u), {order<At, two_bytes>()...}, out);
      for (F32<W>& x : out) {
        if constexpr (!two_bytes) x -= splat<F32<W>>(kOffset);
        // Moves the bias, and normalises; a product with a subnormal number is as fast as any.
        if constexpr (element == ElementKind::e4m3 && !usual) x *= splat<F32<W>>(0x1p120f);
      }
      return;
    }
#endif
    int i = 0;
    ((out[i++] = one<At>()), ...);
  }

  // The same for one byte.
  template <class At>
  F32<W> one() const {
    if constexpr (levels) {
      return (F32<W>)(bytes_in_lanes<W, At, 2>(first, 0) | bytes_in_lanes<W, At, 3>(second, 0));
    } else if constexpr (element == ElementKind::e4m3) {
      return finite_e4m3<W, usual>(bytes_in_lanes<W, At, 3>(first, 0));
    } else {
      return (F32<W>)bytes_in_lanes<W, At, 0>(first, 0x4b000000u) - splat<F32<W>>(kOffset);
    }
  }

 private:
  static constexpr float kOffset = 8388608.0f + (float)zero;

#ifdef KT_NEON
  // Where the bytes of four floats come from: of the code byte's vector, and of the vector behind it.
  template <class At, bool two_bytes>
  static U8<4> order() {
    U8<4> at;
    for (int i = 0; i < 16; i++) {
      const int from = At::of(i / 4), byte = i % 4;
      at[i] = (uint8_t)(two_bytes ? (byte < 2 ? 255 : (byte - 2) * 16 + from) : (byte ? 16 + byte : from));
    }
    return at;
  }
#endif

  static constexpr const float (&table())[16] {
    if constexpr (element == ElementKind::e2m1) return kE2m1;
    if constexpr (element == ElementKind::iq4) return kIq4;
    if constexpr (row.zero_point) return kMinus8;
    return kUnsigned;
  }

  // Byte `byte` of the floats of 16 levels, in every quarter of a vector.
  struct LevelBytes {
    alignas(64) uint8_t at[64];
    constexpr explicit LevelBytes(int byte) : at() {
      for (int i = 0; i < 64; i++) at[i] = (uint8_t)(__builtin_bit_cast(uint32_t, table()[i % 16]) >> (8 * byte));
    }
  };

  template <int byte>
  static U8<W> look_up_bytes(U8<W> codes) {
    static_assert(!row.zero_point || row.zero_point == 8);
    static constexpr LevelBytes kLevels(byte);
    return shuffle_bytes<W>(load<U8<W>>(kLevels.at), codes);
  }
};

// Two vectors of W lanes whose results make pairs: even and odd k of W outputs where pairs are rounded together, else
// neighbouring lanes of a row.
template <int W>
struct LanePair {
  U32<W> first, second;
};

// Hardware that rounds to bf16 leaves the lanes of two vectors one after the other.
template <int W>
constexpr bool kEvenAndOdd =
#if defined(__AVX512BF16__)
    W != 16;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    W != 4;
#else
    true;
#endif

// The first byte of each lane in its quarter, four times.
alignas(64) constexpr uint32_t kFirstBytes[16] = {
    0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c,
    0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c};

// Bytes a, a, b, b of every lane.
template <int W>
inline U8<W> repeat_bytes(U32<W> v, int a, int b) {
  if constexpr (kShufflesBytes<W>) {
    return shuffle_bytes<W>((U8<W>)v, (U8<W>)(load<U32<W>>(kFirstBytes) + (uint32_t)(a * 0x0101 + b * 0x01010000)));
  }
  return (U8<W>)((v >> (uint32_t)(8 * a) & 255u) * 0x0101u | (v >> (uint32_t)(8 * b) & 255u) * 0x01010000u);
}

// `yes` in the bytes that have the bit of byte b of `bits`, zero in the others.
template <int W>
inline U8<W> test_bytes(U8<W> v, uint32_t bits, int yes) {
  U8<W> bit = (U8<W>)(U32<W>{} + bits);
  return (U8<W>)((v & bit) == bit) & (uint8_t)yes;
}

// The planes of a format: words of 32 bits, and how they split into code bytes.
template <int W, Codec C>
struct CodeWords {
  static constexpr const FormatRow& row = kFormats[(int)C];
  static constexpr int low = row.in_grid() ? 8 : row.plane[0], high = row.in_grid() ? 0 : row.plane[1];
  static constexpr int words = low / 2, parts = 4 / words;  // words of a lane, code bytes of a word
  static constexpr int row_of(int word, int part, int b) { return (word * 4 + b) * parts + part; }

  // Words of lanes [2 n, 2 n + 2 W).
  static LanePair<W> load_words(const char* codes, int word, int n) {
    const char* at = codes + (word * kTileN + n) * 8;
#ifdef __AVX2__
    if constexpr (W == 8) {
      // Inserting from memory and shuffling within halves: a shuffle of whole registers would take three instructions.
      auto halves = [](const char* low) {
        __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)low));
        return (__m256)_mm256_inserti128_si256(v, _mm_loadu_si128((const __m128i*)(low + 32)), 1);
      };
      __m256 a = halves(at), b = halves(at + 16);
      return {(U32<W>)_mm256_shuffle_ps(a, b, 0x88), (U32<W>)_mm256_shuffle_ps(a, b, 0xdd)};
    }
#endif
    U32<W> a = load<U32<W>>(at), b = load<U32<W>>(at + 4 * W);
    if constexpr (!kEvenAndOdd<W>) return {a, b};
    I32<W> even, odd;
    for (int i = 0; i < W; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
    return {__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd)};
  }

  // The words of the second plane; 16 codes of one bit lie in the lower half of a lane.
  static LanePair<W> load_high(const char* codes, int n) {
    const char* plane = codes + kTileN * kTileK * low / 8;
    if constexpr (high == 1) {
      if constexpr (kEvenAndOdd<W>) {
        U32<W> both = load<U32<W>>(plane + n * 4);
        return {both, both >> 16};
      }
      using Halves = typename Vec<W>::u16;
      return {__builtin_convertvector(load<Halves>(plane + n * 4), U32<W>),
              __builtin_convertvector(load<Halves>(plane + n * 4 + 2 * W), U32<W>)};
    } else if constexpr (high == 2) {
      CodeWords<W, Codec::tq2_0> two;
      return two.load_words(plane, 0, n);
    } else {
      return {U32<W>{}, U32<W>{}};
    }
  }

  static U8<W> split(U32<W> plane, U32<W> second, int word, int part) {
    U8<W> bytes = (U8<W>)plane;
    if constexpr (low == 4) bytes = part ? bytes >> 4 : bytes & (uint8_t)15;
    if constexpr (low == 2) bytes = part == 3 ? bytes >> 6 : (U8<W>)(plane >> (uint32_t)(2 * part)) & (uint8_t)3;
    if constexpr (high == 1) bytes |= one_bit(second, word, part);
    if constexpr (high == 2) bytes |= two_bits(second, word, part);
    return bytes;
  }

 private:
  // Bit j of a lane's 16 is that of row j.
  static U8<W> one_bit(U32<W> v, int word, int part) {
    uint32_t bits = 0;
    for (int b = 0; b < 4; b++) bits |= 1u << (row_of(word, part, b) % 8) << (8 * b);
    return test_bytes<W>(repeat_bytes<W>(v, row_of(word, part, 0) / 8, row_of(word, part, 2) / 8), bits, 1 << low);
  }

  // Bits 2 j and 2 j + 1 of a lane are those of row j = 8 word + part + 2 b, moved to bit 4 of byte b.
  static U8<W> two_bits(U32<W> v, int word, int part) {
    static_assert(high != 2 || low == 4);
    U16<W> both = (U16<W>)repeat_bytes<W>(v, 2 * word, 2 * word + 1);
    U16<W> even = part ? both << 2 : both << 4, odd = part ? both >> 2 : both;
    return (U8<W>)((even & (uint16_t)0x0030) | (odd & (uint16_t)0x3000));
  }
};

// a - b, or zero where b is larger.
template <int W>
inline U16<W> saturating_sub(U16<W> a, U16<W> b) {
#ifdef __AVX512BW__
  if constexpr (W == 16) return (U16<W>)_mm512_subs_epu16((__m512i)a, (__m512i)b);
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (U16<W>)_mm256_subs_epu16((__m256i)a, (__m256i)b);
#endif
#ifdef KT_NEON
  if constexpr (W == 4) return (U16<W>)vqsubq_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
  return (a - b) & (U16<W>)(a >= b);
}

// Pairs of bf16, `low` in the lower halves, rounded to the nearest, ties to even. A NaN must have zeros in its lower 16
// bits and is not quietened: scales are made so once for all of their products (`without_payload`), codes are.
template <int W>
inline U32<W> round_pairs(F32<W> low, F32<W> high) {
  U32<W> a = (U32<W>)low, b = (U32<W>)high;
  U16<W> kept, rest;
#ifdef __AVX2__
  if constexpr (W == 8) {
    kept = (U16<W>)_mm256_blend_epi16((__m256i)(a >> 16), (__m256i)b, 0xaa);
    rest = (U16<W>)_mm256_blend_epi16((__m256i)a, (__m256i)(b << 16), 0xaa);
  } else
#endif
#ifdef KT_NEON
      if constexpr (W == 4) {
    kept = (U16<W>)vtrn2q_u16((uint16x8_t)a, (uint16x8_t)b);
    rest = (U16<W>)vtrn1q_u16((uint16x8_t)a, (uint16x8_t)b);
  } else
#endif
  {
    kept = (U16<W>)((a >> 16) | (b & 0xffff0000u));
    rest = (U16<W>)((a & 0xffffu) | (b << 16));
  }
  // Up if the rest is above half, or half and the last kept bit is set.
  U16<W> above = saturating_sub<W>(rest, ~kept & (uint16_t)1);
#ifdef KT_NEON
  if constexpr (W == 4) {
    asm("usra %0.8h, %1.8h, #15" : "+w"(kept) : "w"(above));  // gcc 12 copies `kept` first
    return (U32<W>)kept;
  }
#endif
  return (U32<W>)(kept + (above >> 15));
}

template <int W>
inline bool any_of(U8<W> v) {
#ifdef __AVX512F__
  if constexpr (W == 16) return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#endif
  typename Vec<W>::u64 words = (typename Vec<W>::u64)v;
  uint64_t any = 0;
  for (int i = 0; i < W / 2; i++) any |= words[i];
  return any != 0;
}

// Floats whose NaNs are quiet and have zeros in the bits that rounding to bf16 drops.
template <int W>
inline F32<W> without_payload(F32<W> v) {
  U32<W> is_nan = (U32<W>)(v != v);
  return (F32<W>)(((U32<W>)v & ~(is_nan & 0xffffu)) | (is_nan & 0x00400000u));
}

// Two vectors of products into a row of a tile. `exact`: they are bf16 numbers already.
template <int W, bool exact>
inline void put_pair(char* out, F32<W> first, F32<W> second) {
  if constexpr (kEvenAndOdd<W> && exact) {
    store(out, (U32<W>)first >> 16 | ((U32<W>)second & 0xffff0000u));
  } else if constexpr (kEvenAndOdd<W>) {
    store(out, round_pairs<W>(first, second));
  } else {
#if defined(__AVX512BF16__)
    store(out, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    store(out, vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second));
#endif
  }
}

}  // namespace
}  // namespace kt
