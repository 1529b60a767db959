// Transposes int8 and int4 blocks before they are widened.
//
// Sixteen bytes of a strip hold eight k of two neighbouring outputs, or sixteen k in int4. They are shuffled into the
// order of a row of a transposed tile (k by k, the two outputs side by side) and then widened, scaled and rounded as in
// dequantising, so the bits are those of a tile that was dequantised first and then transposed. Shuffling bytes takes a
// quarter of the shuffles of 32-bit values, and a row's two scales are the same for all of its k.
#pragma once

#include "kernels/int8_tiles.h"

namespace kt {
namespace {

constexpr int kPairBytes = 16;                        // of two outputs
constexpr int kPieces = 4;                            // of eight k in a k tile
constexpr int kPieceBytes = kTileN / 2 * kPairBytes;  // a piece: all pairs of a strip

// W signed bytes as floats.
template <int W>
inline F32<W> signed_bytes(const char* at) {
#ifdef __AVX512F__  // masked: without one, gcc's header reads an undefined vector and warns of it
  if constexpr (W == 16)
    return __builtin_convertvector((I32<W>)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)at)),
                                   F32<W>);
#endif
#ifdef __AVX2__
  if constexpr (W == 8)
    return __builtin_convertvector((I32<W>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)), F32<W>);
#endif
  F32<W> v;
  for (int i = 0; i < W; i++) v[i] = (int8_t)at[i];
  return v;
}

// Reorders each sixteen bytes from [2 outputs][even k, odd k][4] to [4][even k, odd k][2 outputs].
template <int W>
inline typename Halves<W>::bytes by_k(typename Halves<W>::bytes v) {
  typename Halves<W>::bytes order;
  for (int i = 0; i < 4 * W; i++) order[i] = (uint8_t)(i / 16 * 16 + i % 2 * 8 + i % 4 / 2 * 4 + i % 16 / 4);
  return __builtin_shuffle(v, order);
}

// Unpacks a k tile of codes into pieces of signed bytes, [4 pieces][8 pairs][8 k][2 outputs].
template <Codec>
struct PairOrder;

template <>
struct PairOrder<Codec::int8> {
  template <int W>
  static void unpack(const char* codes, char* pieces) {
    using Bytes = typename Halves<W>::bytes;
#pragma GCC unroll 4
    for (int at = 0; at < kPieces * kPieceBytes; at += 4 * W) store(pieces + at, by_k<W>(load<Bytes>(codes + at)));
  }
};

template <>
struct PairOrder<Codec::int4> {
  template <int W>
  static void unpack(const char* codes, char* pieces) {
    using Bytes = typename Halves<W>::bytes;
    I32<W> lower, upper;  // shuffles that take four bytes of one vector, then four of the other
    for (int i = 0; i < W; i++) {
      lower[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * W;
      upper[i] = lower[i] + 2;
    }
#pragma GCC unroll 2
    for (int word = 0; word < 2; word++)
      for (int at = 0; at < kPieceBytes; at += 4 * W) {
        U32<W> both = (U32<W>)by_k<W>(load<Bytes>(codes + word * kPieceBytes + at));
        U32<W> low = (U32<W>)((Bytes)(both & 0x0f0f0f0fu) - (uint8_t)8),
               high = (U32<W>)((Bytes)(both >> 4 & 0x0f0f0f0fu) - (uint8_t)8);
        store(pieces + 2 * word * kPieceBytes + at, __builtin_shuffle(low, high, lower));
        store(pieces + (2 * word + 1) * kPieceBytes + at, __builtin_shuffle(low, high, upper));
      }
  }
};

// One k tile of a strip into rows `row0` ... of two transposed tiles, k 0-15 and 16-31. Never inlined, like
// decode_strip_as.
template <int W, Codec C>
__attribute__((noinline)) void transpose_strip(const Format& f, const Strip& s, const char* strip, int k_tile, int row0,
                                               char* out) {
  alignas(64) char pieces[kPieces * kPieceBytes];
  PairOrder<C>::template unpack<W>(strip + s.codes + (int64_t)k_tile * s.tile_bytes, pieces);
  const int span = k_tile / s.span_tiles;
  RowScales scales;
  Decoder<C>::template scales<W>(f, {strip + s.headers + (int64_t)span * s.span_bytes}, k_tile - span * s.span_tiles,
                                 strip, scales);
#pragma GCC unroll 8
  for (int pair = 0; pair < kTileN / 2; pair++) {
    using Doubles = typename Vec<W>::u64;
    F32<W> scale = (F32<W>)(Doubles{} + load<uint64_t>((const char*)scales.s[0] + pair * 8));
    for (int tile = 0; tile < 2; tile++)
      for (int lane = 0; lane < kLanesOfTile; lane += 2 * W) {
        auto number = [&](int at) {
          const char* from = pieces + (2 * tile + at / kPairBytes) * kPieceBytes + pair * kPairBytes + at % kPairBytes;
          return signed_bytes<W>(from) * scale;
        };
        TileRow<Bf16Pairs>::template put<W>(out + tile * kTileBytes, row0 + pair, lane, number(lane), number(lane + W));
      }
  }
}

inline bool transposes_as_codes(Codec c) { return c == Codec::int8 || c == Codec::int4; }

// One half of a block.
template <int W>
inline void transpose_codes(const Encoding& e, const char* block, int k_tile, int half, char* out) {
  auto transpose =
      e.format[half].codec == Codec::int8 ? &transpose_strip<W, Codec::int8> : &transpose_strip<W, Codec::int4>;
  transpose(e.format[half], e.strip[half], block + (half ? e.strip[0].bytes : 0), k_tile, half * kTileN / 2, out);
}

}  // namespace
}  // namespace kt
