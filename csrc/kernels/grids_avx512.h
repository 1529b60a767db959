// Look-ups of grids.cpp with AVX-512: a k tile of IQ3 or TQ1_0 without a load for every entry.
//
// An entry of IQ3 has four codes of 4 bits, so its table of 256 or 512 words of 16 bits is looked up by VPERMI2W, 64
// words at a time, for all 16 rows of 8 of K at once; loads bring four weights each and take twice as long. Nibbles at
// even and at odd places are the codes of even and of odd k. Signs are mask registers. Functions of
// `target("avx512bw")` as in grids_avx2.h, whose arithmetic of trits this file has in wider vectors.
#pragma once

#include <immintrin.h>

namespace kt {
namespace {

// Rows in dwords: unpacking the dwords of two vectors leaves rows 0 to 7 in one and 8 to 15 in the other, in order.
constexpr int row_of_dword(int i) { return i / 4 * 2 + i % 2 + (i & 2 ? 8 : 0); }

// Which of 48 dwords, 16 rows of three, hold dword `field` of every row.
struct RowDwords {
  alignas(64) uint32_t at[16];
  uint16_t in_third;  // bit i: of the last 16 dwords
  constexpr RowDwords(int field, bool unpacked) : at(), in_third(0) {
    for (int i = 0; i < 16; i++) {
      at[i] = (uint32_t)(3 * (unpacked ? row_of_dword(i) : i) + field);
      if (at[i] >= 32) in_third = (uint16_t)(in_third | 1 << i);
    }
  }
};
constexpr RowDwords kFirstIndices(0, true), kLastIndices(1, true), kThirdDwords(2, false);

// 16 rows of 12 bytes.
struct TwelveBytes {
  __m512i at[3];
  [[gnu::target("avx512bw")]] explicit TwelveBytes(const char* codes) {
    for (int i = 0; i < 3; i++) at[i] = _mm512_loadu_si512(codes + 64 * i);
  }
  [[gnu::target("avx512bw")]] __m512i dwords(const RowDwords& which) const {
    const __m512i from = _mm512_load_si512(which.at);
    return _mm512_mask_permutexvar_epi32(_mm512_permutex2var_epi32(at[0], from, at[1]), which.in_third, from, at[2]);
  }
};

// A table of 16 bytes in every quarter of a vector.
[[gnu::target("avx512bw")]] inline __m512i four_times(const void* table) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
}

// Sign bits of a nibble as a byte of a mask has them: those of even k, then those of odd k. `eighth`: how bit 7 comes
// to be, as a bit of its own or so that the number of bits is even.
enum class Eighth { stored, even };
struct NibbleSigns {
  uint8_t low[16], high[16];
  constexpr explicit NibbleSigns(Eighth eighth) : low(), high() {
    for (int nibble = 0; nibble < 16; nibble++)
      for (int i = 0; i < 4; i++) {
        if (!((nibble >> i) & 1)) continue;
        const bool parity = eighth == Eighth::even;
        low[nibble] = (uint8_t)(low[nibble] ^ 1 << byte_of_code(i) ^ (parity ? 128 : 0));
        if (i < 3) high[nibble] = (uint8_t)(high[nibble] ^ 1 << byte_of_code(i + 4) ^ (parity ? 128 : 0));
        if (i == 3 && !parity) high[nibble] ^= 128;
      }
  }
};
constexpr NibbleSigns kStoredSigns(Eighth::stored), kEvenNibbles(Eighth::even);
alignas(16) constexpr uint8_t kTransposed[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

// Masks of the negative bytes of `OpenTile::codes`.
struct SignMasks {
  alignas(64) uint64_t at[kTileK / 8][2];  // of 8 of k: rows 0 to 7, rows 8 to 15

  // From bytes of sign bits, [row][8 of k].
  [[gnu::target("avx512bw")]] SignMasks(__m512i bytes, const NibbleSigns& signs) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i low = _mm512_shuffle_epi8(four_times(signs.low), _mm512_and_si512(bytes, nibble)),
                  high = _mm512_shuffle_epi8(four_times(signs.high),
                                             _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble));
    const __m512i by_group = _mm512_shuffle_epi8(_mm512_xor_si512(low, high), four_times(kTransposed));
    const __m512i order = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)kTransposed));
    _mm512_store_si512(at, _mm512_permutexvar_epi32(order, by_group));
  }
};

// Words of a table at indices of which six bits count.
[[gnu::target("avx512bw")]] inline __m512i look_up_64(const uint16_t* table, __m512i index) {
  return _mm512_permutex2var_epi16(_mm512_loadu_si512(table), index, _mm512_loadu_si512(table + 32));
}

[[gnu::target("avx512bw")]] inline __m512i look_up_256(const uint16_t* table, __m512i index, __mmask32 bit6,
                                                       __mmask32 bit7) {
  const __m512i low = _mm512_mask_blend_epi16(bit6, look_up_64(table, index), look_up_64(table + 64, index)),
                high = _mm512_mask_blend_epi16(bit6, look_up_64(table + 128, index), look_up_64(table + 192, index));
  return _mm512_mask_blend_epi16(bit7, low, high);
}

// Indices of both IQ3 formats, [row_of_dword][four of them].
struct Iq3Indices {
  __m512i dwords[2];

  // Words of the two indices of every row for k = 8 g ... 8 g + 7.
  [[gnu::target("avx512bw")]] __m512i words(int g) const {
    constexpr uint8_t z = 128;
    alignas(16) static constexpr uint8_t kBytes[2][16] = {{0, z, 1, z, 4, z, 5, z, 8, z, 9, z, 12, z, 13, z},
                                                          {2, z, 3, z, 6, z, 7, z, 10, z, 11, z, 14, z, 15, z}};
    return _mm512_shuffle_epi8(dwords[g / 2], four_times(kBytes[g % 2]));
  }
};

// Bits 6 and 7 of words.
[[gnu::target("avx512bw")]] inline __mmask32 bit_of_words(__m512i words, int bit) {
  return _mm512_movepi16_mask(_mm512_slli_epi16(words, (unsigned)(15 - bit)));
}

// Codes of 8 of k, nibbles of the words of two indices for every row; `levels` are theirs.
[[gnu::target("avx512bw")]] inline void put_nibbles(__m512i words, __m512i levels, const uint64_t (&negative)[2],
                                                    int8_t (&codes)[kTileN][2][4]) {
  const __m512i nibble = _mm512_set1_epi8(15), even = _mm512_and_si512(words, nibble),
                odd = _mm512_and_si512(_mm512_srli_epi16(words, 4), nibble);
  const __m512i eight[2] = {_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd)};
  for (int half = 0; half < 2; half++) {
    const __m512i level = _mm512_shuffle_epi8(levels, eight[half]);
    _mm512_store_si512(codes[8 * half], _mm512_mask_sub_epi8(level, negative[half], _mm512_setzero_si512(), level));
  }
}

[[gnu::target("avx512bw")]] inline __m512i levels_of(const int8_t (&levels)[8]) {
  return _mm512_broadcast_i32x4(_mm_loadl_epi64((const __m128i*)levels));
}

[[gnu::target("avx512bw")]] void open_iq3_xxs_avx512(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  const TwelveBytes rows(codes);
  const __m512i words = rows.dwords(kThirdDwords);
  const __m512i twice = _mm512_slli_epi32(_mm512_srli_epi32(words, 28), 1);
  const __m128i scales = _mm512_cvtepi32_epi8(_mm512_add_epi32(twice, _mm512_set1_epi32(1)));
  for (int half = 0; half < 2; half++) _mm_storeu_si128((__m128i*)out.odd[half], scales);
  __m512i seven = _mm512_and_si512(words, _mm512_set1_epi32(0x7f));
  for (int i = 1; i < 4; i++)
    seven = _mm512_or_si512(
        seven, _mm512_and_si512(_mm512_slli_epi32(words, (unsigned)i), _mm512_set1_epi32(0x7f << (8 * i))));
  const SignMasks signs(seven, kEvenNibbles);
  const Iq3Indices indices{{rows.dwords(kFirstIndices), rows.dwords(kLastIndices)}};
  const __m512i levels = levels_of(kLevelsXxs);
#pragma GCC unroll 4
  for (int g = 0; g < kTileK / 8; g++) {
    const __m512i index = indices.words(g);
    put_nibbles(look_up_256(kIq3Xxs, index, bit_of_words(index, 6), bit_of_words(index, 7)), levels, signs.at[g],
                out.codes[g]);
  }
}

[[gnu::target("avx512bw")]] void open_iq3_s_avx512(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  const __m128i both = _mm_loadu_si128((const __m128i*)(header + (10 + tile / 2) * kTileN)),
                four = _mm_and_si128(tile % 2 ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15)),
                scales = _mm_add_epi8(_mm_add_epi8(four, four), _mm_set1_epi8(1));
  for (int half = 0; half < 2; half++) _mm_storeu_si128((__m128i*)out.odd[half], scales);
  const TwelveBytes rows(codes);
  const SignMasks signs(rows.dwords(kThirdDwords), kStoredSigns);
  const Iq3Indices indices{{rows.dwords(kFirstIndices), rows.dwords(kLastIndices)}};
  // Bit i of a byte of the header is the ninth of index i.
  const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  const __m128i ninths = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(header + (2 + tile) * kTileN)), order);
  const __m512i once = _mm512_cvtepu8_epi32(ninths), twice = _mm512_or_si512(once, _mm512_slli_epi32(once, 16));
  const __m512i levels = levels_of(kLevelsS);
#pragma GCC unroll 4
  for (int g = 0; g < kTileK / 8; g++) {
    const __m512i index = indices.words(g);
    const __mmask32 bit6 = bit_of_words(index, 6), bit7 = bit_of_words(index, 7),
                    bit8 = _mm512_test_epi16_mask(twice, _mm512_set1_epi32(1 << (2 * g) | 2 << (2 * g + 16)));
    put_nibbles(_mm512_mask_blend_epi16(bit8, look_up_256(kIq3S, index, bit6, bit7),
                                        look_up_256(kIq3S + 256, index, bit6, bit7)),
                levels, signs.at[g], out.codes[g]);
  }
}

[[gnu::target("avx512bw")]] inline __m512i digits_of(__m512i numbers, const uint16_t (&factors)[8]) {
  return _mm512_mulhi_epu16(_mm512_mullo_epi16(numbers, four_times(factors)), _mm512_set1_epi16(3));
}

// As in grids_avx2.h, of eight rows.
[[gnu::target("avx512bw")]] inline __m512i trits_of(__m512i even, __m512i odd, const TritFactors& factors) {
  const __m512i above = _mm512_slli_epi16(digits_of(odd, factors.odd), 8);
  return _mm512_add_epi8(_mm512_or_si512(digits_of(even, factors.even), above), _mm512_set1_epi8(-1));
}

[[gnu::target("avx512bw")]] inline __m512i words_below_243(__m256i bytes) {
  return _mm512_cvtepu8_epi16(_mm256_min_epu8(bytes, _mm256_set1_epi8((char)kMostTrits)));
}

template <int words>
[[gnu::target("avx512bw")]] inline __m512i one_of_two(__m512i v) {
  return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(v, words), words);
}

[[gnu::target("avx512bw")]] void open_tq1_0_avx512(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 20, out);
  std::memset(out.odd, 1, sizeof out.odd);
  auto field = [&](int i) { return (const __m128i*)(header + i * kTileN); };
  const __m128i even = _mm_loadu_si128(field(2 * tile)), odd = _mm_loadu_si128(field(2 * tile + 1)),
                shared = _mm_loadu_si128(field(16 + tile / 2));
  const auto& factors = kTritFactors.at[tile % 2];
  for (int half = 0; half < 2; half++) {
    const __m128i third = half ? _mm_unpackhi_epi8(even, odd) : _mm_unpacklo_epi8(even, odd),
                  last = half ? _mm_unpackhi_epi8(shared, shared) : _mm_unpacklo_epi8(shared, shared);
    const __m256i more = _mm256_setr_m128i(_mm_unpacklo_epi8(third, last), _mm_unpackhi_epi8(third, last));
    const __m512i first = words_below_243(_mm256_loadu_si256((const __m256i*)(codes + 32 * half))),
                  second = words_below_243(more);
    const __m512i middle = _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_slli_epi32(second, 16));
    const __m512i lowest = one_of_two<kFirstOfDword>(first);
    auto put = [&](int g, __m512i trits)
                   __attribute__((target("avx512bw"))) { _mm512_store_si512(out.codes[g][8 * half], trits); };
    put(0, trits_of(lowest, lowest, factors[0]));
    put(1, trits_of(first, one_of_two<kSecondOfDword>(first), factors[1]));
    put(2, trits_of(middle, middle, factors[2]));
    put(3, trits_of(one_of_two<kFirstOfDword>(second), second, factors[3]));
  }
}

}  // namespace
}  // namespace kt
