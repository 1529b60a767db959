// Look-ups in grids, row by row: four words of eight codes make the lanes of a row. Entries are laid out so that eight
// weights take two loads and an OR.
#include "kernels/grids.h"

#include <cstring>

#include "kernels/grid_tables.h"

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

// Signs of eight codes from a byte.
constexpr uint32_t signs_of(int byte) {
  uint32_t signs = 0;
  for (int i = 0; i < 8; i++) signs |= (uint32_t)((byte >> i) & 1) << (shift_of(i) + 3);
  return signs;
}

constexpr Entries<256> all_signs() {
  Entries<256> all{};
  for (int byte = 0; byte < 256; byte++) all.at[byte] = signs_of(byte);
  return all;
}

// Signs of eight codes from seven bits: the number of minus signs is even.
constexpr Entries<128> even_signs() {
  Entries<128> all{};
  for (int seven = 0; seven < 128; seven++) {
    int odd = 0;
    for (int i = 0; i < 7; i++) odd ^= (seven >> i) & 1;
    all.at[seven] = signs_of(seven | odd << 7);
  }
  return all;
}

// Five codes next to each other.
constexpr Entries<256> all_trits() {
  Entries<256> all{};
  for (int byte = 0; byte < 256; byte++)
    for (int i = 0, rest = byte; i < kTritsOfByte; i++, rest /= 3) all.at[byte] |= (uint32_t)(rest % 3) << (4 * i);
  return all;
}

constexpr auto kTwoXxs = entries_of(kIq2Xxs, 2);
constexpr auto kTwoXs = entries_of(kIq2Xs, 2);
constexpr auto kTwoS = entries_of(kIq2S, 2);
constexpr auto kOne = entries_of(kIq1, 2);
constexpr auto kThreeXxs = entries_of(kIq3Xxs, 4);
constexpr auto kThreeS = entries_of(kIq3S, 4);
constexpr auto kSigns = all_signs();
constexpr auto kEvenSigns = even_signs();
constexpr auto kTrits = all_trits();

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

void put_lanes(OpenTile& out, int n, int word, uint32_t even, uint32_t odd) {
  out.codes[word][2 * n] = even;
  out.codes[word][2 * n + 1] = odd;
}

// `eight(n, g)`: codes of row n at k = 8 g ... 8 g + 7.
template <class Eight>
void put_codes(OpenTile& out, Eight eight) {
  for (int n = 0; n < kTileN; n++)
    for (int word = 0; word < 2; word++) {
      uint32_t a = eight(n, 2 * word), b = eight(n, 2 * word + 1);
      put_lanes(out, n, word, (a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
    }
}

void open_iq2_xxs(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  auto row = [&](int n) { return (Bytes)codes + 8 * n; };
  for (int n = 0; n < kTileN; n++) put_scale(out, n, row(n)[7] >> 4);
  put_codes(
      out, [&](int n, int g) { return kTwoXxs.at[row(n)[g]] | kEvenSigns.at[(word_at(row(n) + 4) >> (7 * g)) & 127]; });
}

void open_iq2_xs(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 2 + tile, n));
  put_codes(out, [&](int n, int g) {
    uint32_t both = half_at((Bytes)codes + 8 * n + 2 * g);
    return kTwoXs.at[both & 511] | kEvenSigns.at[both >> 9];
  });
}

void open_iq2_s(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scales(out, n, byte_of(header, 10 + tile, n));
  put_codes(out, [&](int n, int g) {
    Bytes row = (Bytes)codes + 8 * n;
    uint32_t high = (byte_of(header, 2 + tile, n) >> (2 * g)) & 3;
    return kTwoS.at[row[g] | high << 8] | kSigns.at[row[4 + g]];
  });
}

void open_iq3_xxs(const char* header, int, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  auto row = [&](int n) { return (Bytes)codes + 12 * n; };
  for (int n = 0; n < kTileN; n++) put_scale(out, n, row(n)[11] >> 4);
  put_codes(out, [&](int n, int g) {
    uint32_t eight = kThreeXxs.at[row(n)[2 * g]] | kThreeXxs.at[row(n)[2 * g + 1]] << 8;
    return eight | kEvenSigns.at[(word_at(row(n) + 8) >> (7 * g)) & 127];
  });
}

void open_iq3_s(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (byte_of(header, 10 + tile / 2, n) >> (4 * (tile % 2))) & 15);
  put_codes(out, [&](int n, int g) {
    Bytes row = (Bytes)codes + 12 * n;
    uint32_t high = byte_of(header, 2 + tile, n) << 8;
    auto four = [&](int i) { return kThreeS.at[row[i] | ((high >> i) & 256u)]; };
    return four(2 * g) | four(2 * g + 1) << 8 | kSigns.at[row[8 + g]];
  });
}

// Flips the sign of delta, which is part of the levels, for all eight codes.
uint32_t delta_of(uint32_t below) { return below ? 0x88888888u : 0; }

void open_iq1_s(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 0, out);
  for (int n = 0; n < kTileN; n++) put_scale(out, n, (half_of(header, 2 + 2 * tile, n) >> 12) & 7);
  put_codes(out, [&](int n, int g) {
    uint32_t high = half_of(header, 2 + 2 * tile, n);
    return kOne.at[((Bytes)codes)[4 * n + g] | ((high >> (3 * g)) & 7) << 8] | delta_of(high & 0x8000u);
  });
}

void open_iq1_m(const char* header, int tile, const char* codes, OpenTile& out) {
  auto scales = [&](int i, int n) { return half_of(header, 16 + 2 * i, n); };
  for (int n = 0; n < kTileN; n++) {
    // The four words of scales have a quarter of d each.
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) d |= (scales(i, n) >> 12) << (4 * i);
    out.d[n] = (uint16_t)d;
    uint32_t both = scales(tile / 2, n) >> (6 * (tile % 2));
    for (int half = 0; half < 2; half++) out.odd[half][n] = (uint8_t)(2 * ((both >> (3 * half)) & 7) + 1);
  }
  put_codes(out, [&](int n, int g) {
    uint32_t high = byte_of(header, 2 * tile + g / 2, n) >> (4 * (g % 2));
    return kOne.at[((Bytes)codes)[4 * n + g] | (high & 7) << 8] | delta_of(high & 8);
  });
}

// A row's 32 trits: those of even k in two bytes of the tile, one of the header and a last one; those of odd k alike.
void open_tq1_0(const char* header, int tile, const char* codes, OpenTile& out) {
  read_d(header, 20, out);
  std::memset(out.odd, 1, sizeof out.odd);
  for (int n = 0; n < kTileN; n++) {
    uint32_t last = kTrits.at[byte_of(header, 16 + tile / 2, n)] >> (8 * (tile % 2));
    uint64_t lane[2];
    for (int odd = 0; odd < 2; odd++) {
      Bytes two = (Bytes)codes + 4 * n + 2 * odd;
      uint64_t third = kTrits.at[byte_of(header, 2 * tile + odd, n)], fourth = (last >> (4 * odd)) & 15;
      lane[odd] = kTrits.at[two[0]] | (uint64_t)kTrits.at[two[1]] << 20 | third << 40 | fourth << 60;
    }
    for (int word = 0; word < 2; word++)
      put_lanes(out, n, word, (uint32_t)(lane[0] >> (32 * word)), (uint32_t)(lane[1] >> (32 * word)));
  }
}

// Levels whose sign is bit 3 of the code.
template <int N>
constexpr Grid both_signs(decltype(Grid::open) open, const Entries<N>& entries, const float (&levels)[8]) {
  Grid grid{open, {}, entries.at, N};
  for (int i = 0; i < 8; i++) {
    grid.levels[i] = levels[i];
    grid.levels[8 + i] = -levels[i];
  }
  return grid;
}

// -1, 0 and 1, more or less an eighth.
constexpr Grid ones(decltype(Grid::open) open) {
  return {open, {-0.875f, 0.125f, 1.125f, 0, 0, 0, 0, 0, -1.125f, -0.125f, 0.875f}, kOne.at, 2048};
}

// Levels of the formats times the power of two in their definition: 8, 25 and 43 eighths; 4, 12 ... 52 and 62 quarters.
constexpr float kTwo[8] = {1, 3.125f, 5.375f}, kThree[8] = {1, 3, 5, 7, 9, 11, 13, 15.5f},
                kOdd[8] = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr Grid kGridIq1S = ones(open_iq1_s), kGridIq1M = ones(open_iq1_m);
constexpr Grid kGridIq2Xxs = both_signs(open_iq2_xxs, kTwoXxs, kTwo);
constexpr Grid kGridIq2Xs = both_signs(open_iq2_xs, kTwoXs, kTwo);
constexpr Grid kGridIq2S = both_signs(open_iq2_s, kTwoS, kTwo);
constexpr Grid kGridIq3Xxs = both_signs(open_iq3_xxs, kThreeXxs, kThree);
constexpr Grid kGridIq3S = both_signs(open_iq3_s, kThreeS, kOdd);
constexpr Grid kGridTq1 = {open_tq1_0, {-1, 0, 1}, nullptr, 0};

}  // namespace

const Grid& grid_of(Codec codec) {
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
