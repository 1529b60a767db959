// Look-ups in grids: eight weights at a time, a word of 64 bits from a table of entries, and signs as a mask from a
// table of masks. The largest table, IQ1's, has 16 KB and stays in L1. grids_avx2.h has signs and indices in vectors,
// grids_avx512.h entries of IQ3 too; both compute trits.
#include "kernels/grids.h"

#include <cstring>

#include "kernels/grid_tables.h"
#include "kernels/grids_portable.h"

namespace kt {
namespace {

template <int N>
struct Entries {
  uint32_t at[N];
};

// The bit at which code i of an entry begins.
constexpr int shift_of(int i) { return i / 2 * 4 + i % 2 * 16; }

template <int N>
constexpr Entries<N> entries_of(const uint16_t (&grid)[N], int bits) {
  Entries<N> all{};
  for (int n = 0; n < N; n++)
    for (int i = 0; i < 16 / bits; i++)
      all.at[n] |= (uint32_t)((grid[n] >> (i * bits)) & ((1 << bits) - 1)) << shift_of(i);
  return all;
}

// Eight signed bytes as `OpenTile` has them: those of even k, then those of odd k.
constexpr int byte_of_code(int i) { return i / 2 + i % 2 * 4; }

template <int N>
struct Words {
  uint64_t at[N];
};

// Entries as bytes; an entry of four codes fills the first two bytes of each half.
template <int N>
constexpr Words<N> words_of(const uint16_t (&grid)[N], int bits, const int8_t (&levels)[8]) {
  Words<N> all{};
  for (int n = 0; n < N; n++)
    for (int i = 0; i < 16 / bits; i++)
      all.at[n] |= (uint64_t)(uint8_t)levels[(grid[n] >> (i * bits)) & ((1 << bits) - 1)] << (8 * byte_of_code(i));
  return all;
}

// 255 in the bytes of negative codes.
constexpr uint64_t signs_of(int byte) {
  uint64_t signs = 0;
  for (int i = 0; i < 8; i++) signs |= (uint64_t)((byte >> i) & 1) * 255 << (8 * byte_of_code(i));
  return signs;
}

constexpr Words<256> all_signs() {
  Words<256> all{};
  for (int byte = 0; byte < 256; byte++) all.at[byte] = signs_of(byte);
  return all;
}

// Signs of eight codes from seven bits: the number of minus signs is even.
constexpr Words<128> even_signs() {
  Words<128> all{};
  for (int seven = 0; seven < 128; seven++) {
    int odd = 0;
    for (int i = 0; i < 7; i++) odd ^= (seven >> i) & 1;
    all.at[seven] = signs_of(seven | odd << 7);
  }
  return all;
}

constexpr int kMostTrits = 242;  // five of them; larger bytes count as this one

// Five bytes next to each other, -1, 0 or 1.
constexpr Words<256> all_trits() {
  Words<256> all{};
  for (int byte = 0; byte < 256; byte++)
    for (int i = 0, rest = byte < kMostTrits ? byte : kMostTrits; i < kTritsOfByte; i++, rest /= 3)
      all.at[byte] |= (uint64_t)(uint8_t)(rest % 3 - 1) << (8 * i);
  return all;
}

// Levels in units: 1 / 8 for IQ1 and IQ2, 1 / 2 for IQ3_XXS, 1 for IQ3_S. IQ1 has -1, 0 and 1, more or less an eighth;
// the bytes of its table are 128 too large, so that a subtraction in all of them at once leaves the others alone.
constexpr int8_t kLevelsOne[8] = {121, -127, -119}, kLevelsTwo[8] = {8, 25, 43},
                 kLevelsXxs[8] = {2, 6, 10, 14, 18, 22, 26, 31}, kLevelsS[8] = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr auto kWords1 = words_of(kIq1, 2, kLevelsOne);
constexpr auto kWordsXxs2 = words_of(kIq2Xxs, 2, kLevelsTwo);
constexpr auto kWordsXs2 = words_of(kIq2Xs, 2, kLevelsTwo);
constexpr auto kWordsS2 = words_of(kIq2S, 2, kLevelsTwo);
constexpr auto kWordsXxs3 = words_of(kIq3Xxs, 4, kLevelsXxs);
constexpr auto kWordsS3 = words_of(kIq3S, 4, kLevelsS);
constexpr auto kSigns = all_signs();
constexpr auto kEvenSigns = even_signs();
constexpr auto kTrits = all_trits();

constexpr auto kTwoXxs = entries_of(kIq2Xxs, 2);
constexpr auto kTwoXs = entries_of(kIq2Xs, 2);
constexpr auto kTwoS = entries_of(kIq2S, 2);
constexpr auto kOne = entries_of(kIq1, 2);
constexpr auto kThreeXxs = entries_of(kIq3Xxs, 4);
constexpr auto kThreeS = entries_of(kIq3S, 4);

using Bytes = const uint8_t*;

uint32_t word_at(Bytes at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return word;
}

uint32_t half_at(Bytes at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  return half;
}

// Byte `field` of row n's header, and a field of two bytes that begins there.
uint32_t byte_of(const char* header, int field, int n) { return ((Bytes)header)[field * kTileN + n]; }
uint32_t half_of(const char* header, int field, int n) { return half_at((Bytes)header + field * kTileN + 2 * n); }

void read_d(const char* header, int field, OpenTile& out) { std::memcpy(out.d, header + field * kTileN, sizeof out.d); }

void put_scale(OpenTile& out, int n, uint32_t s) { out.odd[0][n] = out.odd[1][n] = (uint8_t)(2 * s + 1); }

// Nibbles of a byte, for 16 of K each.
void put_scales(OpenTile& out, int n, uint32_t both) {
  out.odd[0][n] = (uint8_t)(2 * (both & 15) + 1);
  out.odd[1][n] = (uint8_t)(2 * (both >> 4) + 1);
}

// A byte in all eight bytes of a word.
constexpr uint64_t each(uint64_t byte) { return byte * 0x0101010101010101u; }

// Bytes 1 to 127, negated where `signs` has 255.
uint64_t negate(uint64_t bytes, uint64_t signs) { return (bytes ^ signs) + (signs & each(1)); }

// `eight(n, g)`: bytes of row n at k = 8 g ... 8 g + 7.
template <class Eight>
void put_codes(OpenTile& out, Eight eight) {
  for (int n = 0; n < kTileN; n++)
    for (int g = 0; g < kTileK / 8; g++) {
      uint64_t bytes = eight(n, g);
      std::memcpy(out.codes[g][n], &bytes, 8);
    }
}

void open_iq2_xxs(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  auto row = [&](int n) { return (Bytes)codes + 8 * n; };
  for (int n = 0; n < kTileN; n++) put_scale(out, n, row(n)[7] >> 4);
  put_codes(out, [&](int n, int g) {
    return negate(kWordsXxs2.at[row(n)[g]], kEvenSigns.at[(word_at(row(n) + 4) >> (7 * g)) & 127]);
  });
}

void open_iq2_xs(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 2 + tile, n));
  put_codes(out, [&](int n, int g) {
    uint32_t both = half_at((Bytes)codes + 8 * n + 2 * g);
    return negate(kWordsXs2.at[both & 511], kEvenSigns.at[both >> 9]);
  });
}

void open_iq2_s(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 10 + tile, n));
  put_codes(out, [&](int n, int g) {
    Bytes row = (Bytes)codes + 8 * n;
    uint32_t high = (byte_of(header, 2 + tile, n) >> (2 * g)) & 3;
    return negate(kWordsS2.at[row[g] | high << 8], kSigns.at[row[4 + g]]);
  });
}

void open_iq3_xxs(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  auto row = [&](int n) { return (Bytes)codes + 12 * n; };
  for (int n = 0; n < kTileN; n++) put_scale(out, n, row(n)[11] >> 4);
  put_codes(out, [&](int n, int g) {
    uint64_t eight = kWordsXxs3.at[row(n)[2 * g]] | kWordsXxs3.at[row(n)[2 * g + 1]] << 16;
    return negate(eight, kEvenSigns.at[(word_at(row(n) + 8) >> (7 * g)) & 127]);
  });
}

void open_iq3_s(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (byte_of(header, 10 + tile / 2, n) >> (4 * (tile % 2))) & 15);
  put_codes(out, [&](int n, int g) {
    Bytes row = (Bytes)codes + 12 * n;
    uint32_t high = byte_of(header, 2 + tile, n) << 8;
    auto four = [&](int i) { return kWordsS3.at[row[i] | ((high >> i) & 256u)]; };
    return negate(four(2 * g) | four(2 * g + 1) << 16, kSigns.at[row[8 + g]]);
  });
}

// An entry of IQ1 plus an eighth, or minus one where `below` is 1.
uint64_t with_delta(uint32_t index, uint32_t below) { return (kWords1.at[index] - each(2) * below) ^ each(128); }

void open_iq1_s(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (half_of(header, 2 + 2 * tile, n) >> 12) & 7);
  put_codes(out, [&](int n, int g) {
    uint32_t high = half_of(header, 2 + 2 * tile, n);
    return with_delta(((Bytes)codes)[4 * n + g] | ((high >> (3 * g)) & 7) << 8, high >> 15);
  });
}

void scales_iq1_m(const char* header, int tile, OpenTile& out) {
  auto scales = [&](int i, int n) { return half_of(header, 16 + 2 * i, n); };
  for (int n = 0; n < kTileN; n++) {
    // The four words of scales have a quarter of d each.
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) d |= (scales(i, n) >> 12) << (4 * i);
    out.d[n] = (uint16_t)d;
    uint32_t both = scales(tile / 2, n) >> (6 * (tile % 2));
    for (int half = 0; half < 2; half++) out.odd[half][n] = (uint8_t)(2 * ((both >> (3 * half)) & 7) + 1);
  }
}

void open_iq1_m(const char* header, int tile, const char* codes, OpenTile& out) {
  scales_iq1_m(header, tile, out);
  put_codes(out, [&](int n, int g) {
    uint32_t high = byte_of(header, 2 * tile + g / 2, n) >> (4 * (g % 2));
    return with_delta(((Bytes)codes)[4 * n + g] | (high & 7) << 8, high >> 3 & 1);
  });
}

// A row's 32 trits: those of even k in two bytes of the tile, one of the header and a last one; those of odd k alike.
void open_tq1_0(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 20, out);
  std::memset(out.odd, 1, sizeof out.odd);
  for (int n = 0; n < kTileN; n++) {
    uint64_t last = kTrits.at[byte_of(header, 16 + tile / 2, n)] >> (16 * (tile % 2));
    for (int odd = 0; odd < 2; odd++) {
      Bytes two = (Bytes)codes + 4 * n + 2 * odd;
      uint64_t second = kTrits.at[two[1]], third = kTrits.at[byte_of(header, 2 * tile + odd, n)];
      uint64_t sixteen[2] = {kTrits.at[two[0]] | second << 40,
                             second >> 24 | third << 16 | ((last >> (8 * odd)) & 255) << 56};
      for (int g = 0; g < kTileK / 8; g++) std::memcpy(out.codes[g][n][odd], (const char*)sixteen + 4 * g, 4);
    }
  }
}

// Levels whose sign is bit 3 of the code.
template <int N>
constexpr Grid both_signs(decltype(Grid::open) open, float unit, const Entries<N>& entries, const float (&levels)[8]) {
  Grid grid{open, unit, {}, entries.at, N};
  for (int i = 0; i < 8; i++) {
    grid.levels[i] = levels[i];
    grid.levels[8 + i] = -levels[i];
  }
  return grid;
}

// -1, 0 and 1, more or less an eighth.
constexpr Grid ones(decltype(Grid::open) open) {
  return {open, 0.125f, {-0.875f, 0.125f, 1.125f, 0, 0, 0, 0, 0, -1.125f, -0.125f, 0.875f}, kOne.at, 2048};
}

// Levels of the formats times the power of two in their definition: 8, 25 and 43 eighths; 4, 12 ... 52 and 62 quarters.
constexpr float kTwo[8] = {1, 3.125f, 5.375f}, kThree[8] = {1, 3, 5, 7, 9, 11, 13, 15.5f},
                kOdd[8] = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr Grid kGridIq1S = ones(open_iq1_s), kGridIq1M = ones(open_iq1_m);
constexpr Grid kGridIq2Xxs = both_signs(open_iq2_xxs, 0.125f, kTwoXxs, kTwo);
constexpr Grid kGridIq2Xs = both_signs(open_iq2_xs, 0.125f, kTwoXs, kTwo);
constexpr Grid kGridIq2S = both_signs(open_iq2_s, 0.125f, kTwoS, kTwo);
constexpr Grid kGridIq3Xxs = both_signs(open_iq3_xxs, 0.5f, kThreeXxs, kThree);
constexpr Grid kGridIq3S = both_signs(open_iq3_s, 1, kThreeS, kOdd);
constexpr Grid kGridTq1 = {open_tq1_0, 1, {-1, 0, 1}, nullptr, 0};

}  // namespace

const Grid& portable_grid_of(Codec codec) {
  switch (codec) {
    case Codec::iq1_s:
      return kGridIq1S;
    case Codec::iq1_m:
      return kGridIq1M;
    case Codec::iq2_xxs:
      return kGridIq2Xxs;
    case Codec::iq2_xs:
      return kGridIq2Xs;
    case Codec::iq2_s:
      return kGridIq2S;
    case Codec::iq3_xxs:
      return kGridIq3Xxs;
    case Codec::iq3_s:
      return kGridIq3S;
    default:
      return kGridTq1;
  }
}

}  // namespace kt

#if defined(__x86_64__)
#include "kernels/grids_avx2.h"
#include "kernels/grids_avx512.h"

namespace kt {
namespace {

constexpr Grid opened_by(Grid grid, decltype(Grid::open) open) {
  grid.open = open;
  return grid;
}

constexpr Grid kTq1Avx2 = opened_by(kGridTq1, open_tq1_0_avx2);
constexpr Grid kIq1SAvx2 = opened_by(kGridIq1S, open_iq1_s_avx2);
constexpr Grid kIq1MAvx2 = opened_by(kGridIq1M, open_iq1_m_avx2);
constexpr Grid kIq2XxsAvx2 = opened_by(kGridIq2Xxs, open_iq2_xxs_avx2);
constexpr Grid kIq2XsAvx2 = opened_by(kGridIq2Xs, open_iq2_xs_avx2);
constexpr Grid kIq2SAvx2 = opened_by(kGridIq2S, open_iq2_s_avx2);
constexpr Grid kIq3XxsAvx2 = opened_by(kGridIq3Xxs, open_iq3_xxs_avx2);
constexpr Grid kIq3SAvx2 = opened_by(kGridIq3S, open_iq3_s_avx2);
constexpr Grid kTq1Avx512 = opened_by(kGridTq1, open_tq1_0_avx512);
constexpr Grid kIq3XxsAvx512 = opened_by(kGridIq3Xxs, open_iq3_xxs_avx512);
constexpr Grid kIq3SAvx512 = opened_by(kGridIq3S, open_iq3_s_avx512);

const Grid& avx2_grid_of(Codec codec) {
  switch (codec) {
    case Codec::iq1_s:
      return kIq1SAvx2;
    case Codec::iq1_m:
      return kIq1MAvx2;
    case Codec::iq2_xxs:
      return kIq2XxsAvx2;
    case Codec::iq2_xs:
      return kIq2XsAvx2;
    case Codec::iq2_s:
      return kIq2SAvx2;
    case Codec::iq3_xxs:
      return kIq3XxsAvx2;
    case Codec::iq3_s:
      return kIq3SAvx2;
    default:
      return kTq1Avx2;
  }
}

const Grid& avx512_grid_of(Codec codec) {
  switch (codec) {
    case Codec::iq3_xxs:
      return kIq3XxsAvx512;
    case Codec::iq3_s:
      return kIq3SAvx512;
    case Codec::tq1_0:
      return kTq1Avx512;
    default:
      return avx2_grid_of(codec);
  }
}

}  // namespace

const Grid& grid_of(Codec codec, int width) {
  // And the operating system saves their registers.
  static const bool has_avx2 = __builtin_cpu_supports("avx2"), has_avx512 = __builtin_cpu_supports("avx512bw");
  if (has_avx512 && width >= 16) return avx512_grid_of(codec);
  return has_avx2 && width >= 8 ? avx2_grid_of(codec) : portable_grid_of(codec);
}

}  // namespace kt
#else
namespace kt {
const Grid& grid_of(Codec codec, int) { return portable_grid_of(codec); }
}  // namespace kt
#endif
