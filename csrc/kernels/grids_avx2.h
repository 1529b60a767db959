// Look-ups of grids.cpp with AVX2: the same tables and the same bytes, signs and indices of a k tile in vectors.
//
// Entries are loaded one by one into the quarters of a vector, where they get their signs. Gathers took 20 to 30 cycles
// for eight entries on Cascade Lake, longer than these loads. Trits are computed, without a table. Functions, not
// lambdas, have `target("avx2")`, since the file is compiled for the baseline; grids.cpp, which has the tables and
// includes it, calls them if the CPU has AVX2.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of the undefined vectors with which gcc 12 begins intrinsics
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace kt {
namespace {

// Sign bits of a k tile: bit i of byte g of row n is that of k = 8 g + i.
struct SignBytes {
  alignas(32) uint8_t at[kTileN][4];
};

// Bytes of seven sign bits, with the eighth, which makes the number of minus signs even.
[[gnu::target("avx2")]] inline __m256i with_parity(__m256i seven) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const char n = (char)0x80;
  const __m256i odd = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, n, n, 0, n, 0, 0, n, n, 0, 0, n, 0, n, n, 0));
  const __m256i low = _mm256_shuffle_epi8(odd, _mm256_and_si256(seven, nibble)),
                high = _mm256_shuffle_epi8(odd, _mm256_and_si256(_mm256_srli_epi16(seven, 4), nibble));
  return _mm256_or_si256(seven, _mm256_xor_si256(low, high));
}

// Words of four times seven bits, and others above them.
[[gnu::target("avx2")]] inline void even_sign_bytes(const uint32_t* words, SignBytes& out) {
  for (int n = 0; n < kTileN; n += 8) {
    const __m256i w = _mm256_load_si256((const __m256i*)(words + n));
    __m256i seven = _mm256_and_si256(w, _mm256_set1_epi32(0x7f));
    seven = _mm256_or_si256(seven, _mm256_and_si256(_mm256_slli_epi32(w, 1), _mm256_set1_epi32(0x7f00)));
    seven = _mm256_or_si256(seven, _mm256_and_si256(_mm256_slli_epi32(w, 2), _mm256_set1_epi32(0x7f0000)));
    seven = _mm256_or_si256(seven, _mm256_and_si256(_mm256_slli_epi32(w, 3), _mm256_set1_epi32(0x7f000000)));
    _mm256_store_si256((__m256i*)out.at[n], with_parity(seven));
  }
}

// Entries of four rows, next to each other.
[[gnu::target("avx2")]] inline __m256i four_entries(const uint64_t* table, uint32_t a, uint32_t b, uint32_t c,
                                                    uint32_t d) {
  const __m128i first = _mm_loadl_epi64((const __m128i*)(table + a)),
                third = _mm_loadl_epi64((const __m128i*)(table + c));
  const __m128 low = _mm_loadh_pi(_mm_castsi128_ps(first), (const __m64*)(table + b)),
               high = _mm_loadh_pi(_mm_castsi128_ps(third), (const __m64*)(table + d));
  return _mm256_setr_m128i(_mm_castps_si128(low), _mm_castps_si128(high));
}

// 255 in the bytes of weights whose sign bits are set; `rows` has the sign bytes of four rows in both halves.
[[gnu::target("avx2")]] inline __m256i sign_masks(__m256i rows, int g) {
  const __m256i bits = _mm256_set1_epi64x((long long)0x8020080240100401u);
  const __m256i first = _mm256_setr_epi64x(0, 0x0404040404040404, 0x0808080808080808, 0x0c0c0c0c0c0c0c0c);
  const __m256i of_row = _mm256_shuffle_epi8(rows, _mm256_add_epi8(first, _mm256_set1_epi8((char)g)));
  return _mm256_cmpeq_epi8(_mm256_and_si256(of_row, bits), bits);
}

// `four(n, g)`: bytes of rows n ... n + 3 at k = 8 g ... 8 g + 7, without signs.
template <class Four>
[[gnu::target("avx2")]] inline void put_signed_codes(const SignBytes& signs, OpenTile& out, const Four& four) {
  for (int n = 0; n < kTileN; n += 4) {
    const __m256i rows = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)signs.at[n]));
#pragma GCC unroll 4
    for (int g = 0; g < kTileK / 8; g++) {
      const __m256i negative = sign_masks(rows, g);
      _mm256_store_si256((__m256i*)out.codes[g][n], _mm256_sub_epi8(_mm256_xor_si256(four(n, g), negative), negative));
    }
  }
}

// Entries by indices in rows of `stride` bytes, one for each eight weights.
struct ByteIndices {
  const uint64_t* table;
  Bytes codes;
  int stride;
  [[gnu::target("avx2")]] __m256i operator()(int n, int g) const {
    Bytes row = codes + stride * n + g;
    return four_entries(table, row[0], row[stride], row[2 * stride], row[3 * stride]);
  }
};

// By indices [g][n] of 16 bits.
struct HalfIndices {
  const uint64_t* table;
  const uint16_t (*index)[kTileN];
  [[gnu::target("avx2")]] __m256i operator()(int n, int g) const {
    const uint16_t* at = index[g] + n;
    return four_entries(table, at[0], at[1], at[2], at[3]);
  }
};

// By indices [n][8] of 16 bits, each of four weights.
struct PairIndices {
  const uint64_t* table;
  const uint16_t (*index)[8];
  [[gnu::target("avx2")]] __m256i operator()(int n, int g) const {
    auto at = [&](int i) { return index[n + i][2 * g]; };
    auto next = [&](int i) { return index[n + i][2 * g + 1]; };
    return _mm256_or_si256(four_entries(table, at(0), at(1), at(2), at(3)),
                           _mm256_slli_epi64(four_entries(table, next(0), next(1), next(2), next(3)), 16));
  }
};

// By indices in rows of `stride` bytes, each of four weights.
struct PairBytes {
  const uint64_t* table;
  Bytes codes;
  int stride;
  [[gnu::target("avx2")]] __m256i operator()(int n, int g) const {
    Bytes row = codes + stride * n + 2 * g;
    const int s = stride;
    return _mm256_or_si256(
        four_entries(table, row[0], row[s], row[2 * s], row[3 * s]),
        _mm256_slli_epi64(four_entries(table, row[1], row[s + 1], row[2 * s + 1], row[3 * s + 1]), 16));
  }
};

[[gnu::target("avx2")]] void open_iq2_xxs_avx2(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  alignas(32) uint32_t words[kTileN];
  for (int n = 0; n < kTileN; n++) words[n] = word_at((Bytes)codes + 8 * n + 4);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, words[n] >> 28);
  SignBytes signs;
  even_sign_bytes(words, signs);
  put_signed_codes(signs, out, ByteIndices{kWordsXxs2.at, (Bytes)codes, 8});
}

// Lower 9 bits of 16: an index; the others: signs.
[[gnu::target("avx2")]] void open_iq2_xs_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 2 + tile, n));
  SignBytes signs;
  for (int n = 0; n < kTileN; n += 8) {
    const __m256i a = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(codes + 8 * n)), 9),
                  b = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(codes + 8 * n + 32)), 9);
    const __m256i seven = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
    _mm256_store_si256((__m256i*)signs.at[n], with_parity(seven));
  }
  alignas(32) uint16_t index[kTileN][4];
  for (int n = 0; n < kTileN; n += 4)
    _mm256_store_si256((__m256i*)index[n],
                       _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(codes + 8 * n)), _mm256_set1_epi16(511)));
  struct RowIndices {
    const uint16_t (*index)[4];
    [[gnu::target("avx2")]] __m256i operator()(int n, int g) const {
      return four_entries(kWordsXs2.at, index[n][g], index[n + 1][g], index[n + 2][g], index[n + 3][g]);
    }
  };
  put_signed_codes(signs, out, RowIndices{index});
}

// Byte g of 16 rows of four bytes, as 16 bits each.
[[gnu::target("avx2")]] inline __m256i bytes_of_rows(__m256i a, __m256i b, int g) {
  const __m256i byte = _mm256_set1_epi32(255);
  const __m256i low = _mm256_packus_epi32(_mm256_and_si256(_mm256_srli_epi32(a, 8 * g), byte),
                                          _mm256_and_si256(_mm256_srli_epi32(b, 8 * g), byte));
  return _mm256_permute4x64_epi64(low, 0xd8);
}

[[gnu::target("avx2")]] void open_iq2_s_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 10 + tile, n));
  alignas(32) uint32_t low[kTileN];
  SignBytes signs;
  for (int n = 0; n < kTileN; n++) {
    low[n] = word_at((Bytes)codes + 8 * n);
    std::memcpy(signs.at[n], codes + 8 * n + 4, 4);
  }
  const __m256i a = _mm256_load_si256((const __m256i*)low), b = _mm256_load_si256((const __m256i*)(low + 8)),
                high = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(header + (2 + tile) * kTileN)));
  alignas(32) uint16_t index[kTileK / 8][kTileN];
  for (int g = 0; g < kTileK / 8; g++) {
    const __m256i two = _mm256_and_si256(_mm256_srli_epi16(high, 2 * g), _mm256_set1_epi16(3));
    _mm256_store_si256((__m256i*)index[g], _mm256_or_si256(bytes_of_rows(a, b, g), _mm256_slli_epi16(two, 8)));
  }
  put_signed_codes(signs, out, HalfIndices{kWordsS2.at, index});
}

[[gnu::target("avx2")]] void open_iq3_xxs_avx2(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  alignas(32) uint32_t words[kTileN];
  for (int n = 0; n < kTileN; n++) words[n] = word_at((Bytes)codes + 12 * n + 8);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, words[n] >> 28);
  SignBytes signs;
  even_sign_bytes(words, signs);
  put_signed_codes(signs, out, PairBytes{kWordsXxs3.at, (Bytes)codes, 12});
}

[[gnu::target("avx2")]] void open_iq3_s_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (byte_of(header, 10 + tile / 2, n) >> (4 * (tile % 2))) & 15);
  auto row = [&](int n) { return codes + 12 * n; };
  // Bit i of a byte of the header is the ninth of index i: two rows at a time.
  const __m256i bit = _mm256_broadcastsi128_si256(_mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128)),
                second = _mm256_setr_epi64x(0, 0, 0x0101010101010101, 0x0101010101010101),
                header_bytes =
                    _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(header + (2 + tile) * kTileN)));
  alignas(32) uint16_t index[kTileN][8];
  SignBytes signs;
  for (int n = 0; n < kTileN; n += 2) {
    const __m128 both =
        _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)row(n))), (const __m64*)row(n + 1));
    const __m256i low = _mm256_cvtepu8_epi16(_mm_castps_si128(both));
    const __m256i high = _mm256_shuffle_epi8(header_bytes, _mm256_add_epi8(second, _mm256_set1_epi8((char)n)));
    const __m256i above = _mm256_cmpeq_epi16(_mm256_and_si256(high, bit), bit);
    _mm256_store_si256((__m256i*)index[n], _mm256_or_si256(low, _mm256_and_si256(above, _mm256_set1_epi16(256))));
    std::memcpy(signs.at[n], row(n) + 8, 4);
    std::memcpy(signs.at[n + 1], row(n + 1) + 8, 4);
  }
  put_signed_codes(signs, out, PairIndices{kWordsS3.at, index});
}

// Indices of a k tile of IQ1, and 2 for each eight weights that are an eighth less.
struct Iq1Tile {
  alignas(32) uint16_t index[kTileK / 8][kTileN];
  alignas(16) uint8_t less[kTileK / 8][kTileN];

  // `high` of 16 rows: three bits of the index, and `below`, 1 or 0.
  [[gnu::target("avx2")]] void set(int g, __m256i low, __m256i high, __m256i below) {
    const __m256i three = _mm256_and_si256(high, _mm256_set1_epi16(7)), two = _mm256_slli_epi16(below, 1);
    _mm256_store_si256((__m256i*)index[g], _mm256_or_si256(low, _mm256_slli_epi16(three, 8)));
    _mm_store_si128((__m128i*)less[g], _mm_packus_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
  }

  [[gnu::target("avx2")]] void put_codes(OpenTile& out) {
    const __m256i first = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const HalfIndices entries{kWords1.at, index};
    for (int g = 0; g < kTileK / 8; g++) {
      const __m256i rows = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)less[g]));
#pragma GCC unroll 4
      for (int n = 0; n < kTileN; n += 4) {
        const __m256i of_row = _mm256_shuffle_epi8(rows, _mm256_add_epi8(first, _mm256_set1_epi8((char)n)));
        _mm256_store_si256((__m256i*)out.codes[g][n],
                           _mm256_xor_si256(_mm256_sub_epi8(entries(n, g), of_row), _mm256_set1_epi8((char)128)));
      }
    }
  }
};

[[gnu::target("avx2")]] void open_iq1_s_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (half_of(header, 2 + 2 * tile, n) >> 12) & 7);
  const __m256i high = _mm256_loadu_si256((const __m256i*)(header + (2 + 2 * tile) * kTileN));
  const __m256i a = _mm256_loadu_si256((const __m256i*)codes), b = _mm256_loadu_si256((const __m256i*)(codes + 32));
  Iq1Tile indices;
  for (int g = 0; g < kTileK / 8; g++)
    indices.set(g, bytes_of_rows(a, b, g), _mm256_srli_epi16(high, 3 * g), _mm256_srli_epi16(high, 15));
  indices.put_codes(out);
}

[[gnu::target("avx2")]] void open_iq1_m_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  scales_iq1_m(header, tile, out);
  const __m256i a = _mm256_loadu_si256((const __m256i*)codes), b = _mm256_loadu_si256((const __m256i*)(codes + 32));
  Iq1Tile indices;
  for (int g = 0; g < kTileK / 8; g++) {
    const __m128i byte = _mm_loadu_si128((const __m128i*)(header + (2 * tile + g / 2) * kTileN));
    const __m256i high = _mm256_srli_epi16(_mm256_cvtepu8_epi16(byte), 4 * (g % 2));
    const __m256i below = _mm256_and_si256(_mm256_srli_epi16(high, 3), _mm256_set1_epi16(1));
    indices.set(g, bytes_of_rows(a, b, g), high, below);
  }
  indices.put_codes(out);
}

// Trits of a k tile by two products in 16 bits: of a number to base 3 below 243, times 270 a fraction of 2^16, digit i
// is the upper half of 3 f, f = 270 * 3^(4 - i) times the number, modulo 2^16.
//
// Lanes are dwords (row, parity of k), each with two numbers of a row as words. For every 8 of k a dword has trits 0
// and 2 of its four from one pair of numbers and trits 1 and 3 from another.
struct TritFactors {
  alignas(16) uint16_t even[8], odd[8];  // of words for trits 0 and 2, 1 and 3
};

struct AllTritFactors {
  TritFactors at[2][kTileK / 8];  // [parity of the k tile][8 of k]
  constexpr AllTritFactors() : at() {
    constexpr uint16_t power[kTritsOfByte] = {81, 27, 9, 3, 1};
    for (int tile = 0; tile < 2; tile++)
      for (int i = 0; i < 8 * kTileK / 2; i++) {
        const int lane = i % 8, trit = i / 8, word = lane / 2 * 2 + trit % 4 / 2, parity = lane / 2 % 2;
        // The last trit of a row and parity is one of a byte that k tiles share.
        const int digit = trit < 15 ? trit % kTritsOfByte : 2 * tile + parity;
        TritFactors& of = at[tile][trit / 4];
        (trit % 2 ? of.odd : of.even)[word] = (uint16_t)(270 * power[digit]);
      }
  }
};
constexpr AllTritFactors kTritFactors;
constexpr int kFirstOfDword = 0xa0, kSecondOfDword = 0xf5;  // shuffles of words: one of two, twice

// A table of 16 bytes in both halves of a vector.
[[gnu::target("avx2")]] inline __m256i both_halves(const void* table) {
  return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
}

[[gnu::target("avx2")]] inline __m256i digits_of(__m256i numbers, const uint16_t (&factors)[8]) {
  return _mm256_mulhi_epu16(_mm256_mullo_epi16(numbers, both_halves(factors)), _mm256_set1_epi16(3));
}

// Trits 0 and 2 from `even`, 1 and 3 from `odd`: -1, 0 or 1 in bytes.
[[gnu::target("avx2")]] inline __m256i trits_of(__m256i even, __m256i odd, const TritFactors& factors) {
  const __m256i above = _mm256_slli_epi16(digits_of(odd, factors.odd), 8);
  return _mm256_add_epi8(_mm256_or_si256(digits_of(even, factors.even), above), _mm256_set1_epi8(-1));
}

// Bytes of valid numbers of four rows.
[[gnu::target("avx2")]] inline __m256i words_below_243(__m128i bytes) {
  return _mm256_cvtepu8_epi16(_mm_min_epu8(bytes, _mm_set1_epi8((char)kMostTrits)));
}

template <int words>
[[gnu::target("avx2")]] inline __m256i one_of_two(__m256i v) {
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, words), words);
}

[[gnu::target("avx2")]] void open_tq1_0_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 20, out);
  std::memset(out.odd, 1, sizeof out.odd);
  auto field = [&](int i) { return (const __m128i*)(header + i * kTileN); };
  const __m128i even = _mm_loadu_si128(field(2 * tile)), odd = _mm_loadu_si128(field(2 * tile + 1)),
                shared = _mm_loadu_si128(field(16 + tile / 2));
  const __m128i third[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)},
                last[2] = {_mm_unpacklo_epi8(shared, shared), _mm_unpackhi_epi8(shared, shared)};
  const auto& factors = kTritFactors.at[tile % 2];
  for (int n = 0; n < kTileN; n += 4) {
    const __m128i a = third[n / 8], b = last[n / 8];
    const __m128i more = n % 8 ? _mm_unpackhi_epi8(a, b) : _mm_unpacklo_epi8(a, b);
    const __m256i first = words_below_243(_mm_loadu_si128((const __m128i*)(codes + 4 * n))),
                  second = words_below_243(more);
    const __m256i middle = _mm256_or_si256(_mm256_srli_epi32(first, 16), _mm256_slli_epi32(second, 16));
    const __m256i lowest = one_of_two<kFirstOfDword>(first);
    auto put = [&](int g, __m256i trits)
                   __attribute__((target("avx2"))) { _mm256_store_si256((__m256i*)out.codes[g][n], trits); };
    put(0, trits_of(lowest, lowest, factors[0]));
    put(1, trits_of(first, one_of_two<kSecondOfDword>(first), factors[1]));
    put(2, trits_of(middle, middle, factors[2]));
    put(3, trits_of(one_of_two<kFirstOfDword>(second), second, factors[3]));
  }
}

}  // namespace
}  // namespace kt
