// bf16:12, lossless: the tiles of a strip have the bits of plain bf16, in 12 bits a weight and a few patches.
//
// The low byte of a bf16 (the lowest bit of the exponent and the mantissa) is as good as random and stays as it is. The
// high byte (the sign and the rest of the exponent) of trained weights takes few values: 16 rows by 128 columns share a
// table of the 16 most frequent ones, and a weight has a 4-bit index into it. So a tile is two byte shuffles and an
// interleave, without arithmetic on exponents, and zeros, subnormal, infinite and NaN values need no code of their own.
// High bytes that are not in the table are patches, applied after the tile is decoded.
//
// Of a k tile come first the low bytes, then the indices. Low bytes: for each two rows of the tile (64 bytes each,
// types.h) four quarters, each with eight values of the first row and the same eight of the second, which an interleave
// of bytes within 16 puts into two rows. Indices lie two in a byte in the order of the low bytes: those of two rows in
// the low halves, those of the next two rows in the high halves.
#pragma once

#include "kernels/code_bytes.h"
#include "kernels/transpose_tiles.h"

namespace kt {
namespace {

constexpr int kLowBytes = kTileN * kTileK;  // of a k tile; the indices follow

// Bytes of a and b alternating, from the lower or the upper eight of every 16.
template <int W, bool upper>
inline U8<W> interleave_bytes(U8<W> a, U8<W> b) {
#ifdef __AVX512BW__
  if constexpr (W == 16)
    return upper ? (U8<W>)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b)
                 : (U8<W>)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
#endif
#ifdef __AVX2__
  if constexpr (W == 8)
    return upper ? (U8<W>)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b)
                 : (U8<W>)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
#endif
  U8<W> order;
  for (int i = 0; i < 4 * W; i++)
    order[i] = (uint8_t)(i / 16 * 16 + i % 16 / 2 + (upper ? 8 : 0) + (i % 2 ? 4 * W : 0));
  return __builtin_shuffle(a, b, order);
}

// The 16 high bytes of a span in every quarter of a vector.
template <int W>
inline U8<W> load_table(const char* header) {
  U8<W> table;
  for (int q = 0; q < W / 4; q++) __builtin_memcpy((char*)&table + 16 * q, header, 16);
  return table;
}

// A k tile without its patches.
template <int W>
inline void decode_indexed_tile(U8<W> table, const char* codes, char* __restrict tile) {
#pragma GCC unroll 4
  for (int two = 0; two < kTileK / 8; two++)
    for (int at = 0; at < 64; at += 4 * W) {
      const U8<W> indices = load<U8<W>>(codes + kLowBytes + two * 64 + at);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const U8<W> index = (part ? (U8<W>)((U16<W>)indices >> (uint16_t)4) : indices) & (uint8_t)15;
        const U8<W> low = load<U8<W>>(codes + (2 * two + part) * 64 + at), high = shuffle_bytes<W>(table, index);
        char* rows = tile + (2 * two + part) * 128 + at;
        store(rows, interleave_bytes<W, false>(low, high));
        store(rows + 64, interleave_bytes<W, true>(low, high));
      }
    }
}

// The patches of a strip. A damaged file may name more of them than there are, but no position outside of its tile.
class Patches {
 public:
  Patches(const Strip& s, const char* strip)
      : first_(strip + s.patches), at_(first_ + patch_index_bytes(s.k_tiles)), count_(patches_of(s.k_tiles)) {}

  // Those of a k tile, into a tile of bf16.
  void apply(int k, char* tile) const {
    const uint32_t both = load<uint32_t>(first_ + 2 * k);
    const int first = (int)(both & 0xffff), end = (int)(both >> 16) < count_ ? (int)(both >> 16) : count_;
    for (int i = first; i < end; i++) {
      const uint32_t patch = load<uint32_t>(at_ + 4 * i);
      tile[2 * (patch >> 8 & (kLowBytes - 1)) + 1] = (char)patch;
    }
  }

 private:
  const char *first_, *at_;
  int count_;
};

// Tile `k` of a strip as bf16 pairs.
template <int W>
inline void decode_bf16_12(const Strip& s, const char* strip, int k, const Patches& patches, char* tile) {
  const char* header = strip + s.headers + (int64_t)(k / s.span_tiles) * s.span_bytes;
  decode_indexed_tile<W>(load_table<W>(header), strip + s.codes + (int64_t)k * s.tile_bytes, tile);
  patches.apply(k, tile);
}

}  // namespace
}  // namespace kt
