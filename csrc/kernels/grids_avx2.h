// Look-ups of grids.cpp with AVX2: the same tables and the same bytes, signs and indices of a k tile in vectors.
//
// Entries are loaded one by one into their places; then 32 bytes at a time are negated by sign bits. Gathers take
// longer where microcode mitigates gather data sampling: 20 to 30 cycles for eight entries. Functions have
// `target("avx2")`, since the file is compiled for the baseline; grids.cpp, which has the tables and includes it, calls
// them if the CPU has AVX2.
#pragma once

#include <immintrin.h>

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

// Negates the weights whose sign bits are set.
[[gnu::target("avx2")]] inline void negate_codes(const SignBytes& signs, OpenTile& out) {
  const __m256i bits = _mm256_set1_epi64x((long long)0x8020080240100401u);
  const __m256i first = _mm256_setr_epi64x(0, 0x0404040404040404, 0x0808080808080808, 0x0c0c0c0c0c0c0c0c);
  for (int n = 0; n < kTileN; n += 4) {
    const __m256i rows = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)signs.at[n]));
    for (int g = 0; g < kTileK / 8; g++) {
      const __m256i of_row = _mm256_shuffle_epi8(rows, _mm256_add_epi8(first, _mm256_set1_epi8((char)g)));
      const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(of_row, bits), bits);
      __m256i* at = (__m256i*)out.codes[g][n];
      _mm256_store_si256(at, _mm256_sub_epi8(_mm256_xor_si256(_mm256_load_si256(at), negative), negative));
    }
  }
}

[[gnu::target("avx2")]] void open_iq2_xxs_avx2(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  auto row = [&](int n) { return (Bytes)codes + 8 * n; };
  put_codes(out, [&](int n, int g) { return kWordsXxs2.at[row(n)[g]]; });
  alignas(32) uint32_t words[kTileN];
  for (int n = 0; n < kTileN; n++) words[n] = word_at(row(n) + 4);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, words[n] >> 28);
  SignBytes signs;
  even_sign_bytes(words, signs);
  negate_codes(signs, out);
}

[[gnu::target("avx2")]] void open_iq2_xs_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 2 + tile, n));
  put_codes(out, [&](int n, int g) { return kWordsXs2.at[half_at((Bytes)codes + 8 * n + 2 * g) & 511]; });
  SignBytes signs;
  for (int n = 0; n < kTileN; n += 8) {
    const __m256i a = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(codes + 8 * n)), 9),
                  b = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(codes + 8 * n + 32)), 9);
    const __m256i seven = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
    _mm256_store_si256((__m256i*)signs.at[n], with_parity(seven));
  }
  negate_codes(signs, out);
}

[[gnu::target("avx2")]] void open_iq2_s_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 10 + tile, n));
  auto row = [&](int n) { return (Bytes)codes + 8 * n; };
  put_codes(
      out, [&](int n, int g) { return kWordsS2.at[row(n)[g] | ((byte_of(header, 2 + tile, n) >> (2 * g)) & 3) << 8]; });
  SignBytes signs;
  for (int n = 0; n < kTileN; n++) std::memcpy(signs.at[n], row(n) + 4, 4);
  negate_codes(signs, out);
}

[[gnu::target("avx2")]] void open_iq3_xxs_avx2(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  auto row = [&](int n) { return (Bytes)codes + 12 * n; };
  put_codes(out, [&](int n, int g) { return kWordsXxs3.at[row(n)[2 * g]] | kWordsXxs3.at[row(n)[2 * g + 1]] << 16; });
  alignas(32) uint32_t words[kTileN];
  for (int n = 0; n < kTileN; n++) words[n] = word_at(row(n) + 8);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, words[n] >> 28);
  SignBytes signs;
  even_sign_bytes(words, signs);
  negate_codes(signs, out);
}

[[gnu::target("avx2")]] void open_iq3_s_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (byte_of(header, 10 + tile / 2, n) >> (4 * (tile % 2))) & 15);
  auto row = [&](int n) { return (Bytes)codes + 12 * n; };
  alignas(32) uint16_t index[kTileN][8];
  const __m128i bit = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
  for (int n = 0; n < kTileN; n++) {
    const __m128i high = _mm_and_si128(_mm_set1_epi16((short)byte_of(header, 2 + tile, n)), bit);
    const __m128i low = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)row(n)));
    const __m128i above = _mm_and_si128(_mm_cmpeq_epi16(high, bit), _mm_set1_epi16(256));
    _mm_store_si128((__m128i*)index[n], _mm_or_si128(low, above));
  }
  put_codes(out, [&](int n, int g) { return kWordsS3.at[index[n][2 * g]] | kWordsS3.at[index[n][2 * g + 1]] << 16; });
  SignBytes signs;
  for (int n = 0; n < kTileN; n++) std::memcpy(signs.at[n], row(n) + 8, 4);
  negate_codes(signs, out);
}

[[gnu::target("avx2")]] void open_iq1_s_avx2(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (half_of(header, 2 + 2 * tile, n) >> 12) & 7);
  const __m256i high = _mm256_loadu_si256((const __m256i*)(header + (2 + 2 * tile) * kTileN));
  const __m256i a = _mm256_loadu_si256((const __m256i*)codes), b = _mm256_loadu_si256((const __m256i*)(codes + 32));
  const __m256i byte = _mm256_set1_epi32(255);
  alignas(32) uint16_t index[kTileK / 8][kTileN];
  for (int g = 0; g < kTileK / 8; g++) {
    const __m256i low = _mm256_packus_epi32(_mm256_and_si256(_mm256_srli_epi32(a, 8 * g), byte),
                                            _mm256_and_si256(_mm256_srli_epi32(b, 8 * g), byte));
    const __m256i three = _mm256_and_si256(_mm256_srli_epi16(high, 3 * g), _mm256_set1_epi16(7));
    _mm256_store_si256((__m256i*)index[g],
                       _mm256_or_si256(_mm256_permute4x64_epi64(low, 0xd8), _mm256_slli_epi16(three, 8)));
  }
  put_codes(out, [&](int n, int g) { return kWords1.at[index[g][n]]; });
  // 2 in the rows whose weights are an eighth less.
  const __m256i two = _mm256_slli_epi16(_mm256_srli_epi16(high, 15), 1);
  const __m128i delta = _mm_packus_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
  const __m256i first = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  for (int n = 0; n < kTileN; n += 4) {
    const __m256i rows =
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(delta), _mm256_add_epi8(first, _mm256_set1_epi8((char)n)));
    for (int g = 0; g < kTileK / 8; g++) {
      __m256i* at = (__m256i*)out.codes[g][n];
      _mm256_store_si256(at,
                         _mm256_xor_si256(_mm256_sub_epi8(_mm256_load_si256(at), rows), _mm256_set1_epi8((char)128)));
    }
  }
}

}  // namespace
}  // namespace kt
