// Weights of W8A8 as int8 tiles: blocks of format int8 are reordered, blocks of format int4 requantised, when they are
// read.
//
// A tile is [16 words of K][16 outputs][4 k], 64 of K: the B operand of AMX's int8 products. A strip of int8 holds the
// even and the odd k of every eight in two words of four bytes, side by side. Quantised rows have the same order, so
// unpacking a block moves whole words: the even words of two vectors are one row of a tile, the odd ones the next.
//
// int4 has a scale per group of k, int32 sums can have one per channel only: c, a sixteenth of the channel scale with
// the largest magnitude. A group's scale s becomes r = round(8 s / c), at least -127 and at most 128, and a weight v s
// becomes the int8 (v r + 4) >> 3, within -128 and 127. For the largest s that is 16 v, without loss. All steps are
// integers or exact floats, so the int8 weights are the same on every CPU.
#pragma once

#include "kernels/formats.h"

namespace kt {
namespace {

constexpr int kCodesAhead = 8;                 // k tiles whose codes are prefetched into L1
constexpr int kHalfTile = kTileBytes / 2;      // a k tile in int8
constexpr float kMinChannelScale = 0x1p-104f;  // below, a channel counts as zero
constexpr float kRounding = 12582912.0f;       // 1.5 * 2^23: adding it rounds to the nearest, ties to even

// Words 0, 2, 4 ... of two vectors, or 1, 3, 5 ...
template <int W, int first>
inline U32<W> deinterleave(U32<W> a, U32<W> b) {
  I32<W> at;
  for (int i = 0; i < W; i++) at[i] = 2 * i + first;
  return __builtin_shuffle(a, b, at);
}

// Reorders one k tile of int8 codes, [4][16 outputs][2 words], into half an int8 tile.
template <int W>
inline void int8_tile(const char* codes, char* out) {
#pragma GCC unroll 4
  for (int row = 0; row < 4; row++)
    for (int n = 0; n < kTileN; n += W) {
      const char* from = codes + (row * kTileN + n) * 8;
      U32<W> a = load<U32<W>>(from), b = load<U32<W>>(from + W * 4);
      store(out + 2 * row * 64 + n * 4, deinterleave<W, 0>(a, b));
      store(out + (2 * row + 1) * 64 + n * 4, deinterleave<W, 1>(a, b));
    }
}

template <int W>
struct Halves {
  typedef int16_t type __attribute__((vector_size(W * 4)));
  typedef uint16_t plain __attribute__((vector_size(W * 4)));
  typedef uint8_t bytes __attribute__((vector_size(W * 4)));
};

// (v r + 4) >> 3 for codes v in the top 4 bits of their lanes.
template <int W>
inline typename Halves<W>::plain times_ratio(typename Halves<W>::plain v, typename Halves<W>::plain r) {
  using Signed = typename Halves<W>::type;
  using Plain = typename Halves<W>::plain;
#ifdef __AVX512BW__
  if constexpr (W == 16) return (Plain)_mm512_mulhrs_epi16((__m512i)v, (__m512i)r);
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (Plain)_mm256_mulhrs_epi16((__m256i)v, (__m256i)r);
#endif
  return (Plain)((Signed)((Plain)((Signed)v >> 12) * r + 4) >> 3);
}

// The lower or the higher four of eight 4-bit codes of a word (highest bit flipped) as int8. Every byte of two codes is
// duplicated, so that a shift alone brings one to the top and a mask keeps the other.
template <int W, int higher>
inline U32<W> widened(U32<W> codes, U32<W> ratio) {
  using Plain = typename Halves<W>::plain;
  using Bytes = typename Halves<W>::bytes;
  Bytes at;
  for (int i = 0; i < 4 * W; i++) at[i] = (uint8_t)(i / 4 * 4 + 2 * higher + i % 4 / 2);
  Plain two_per_byte = (Plain)__builtin_shuffle((Bytes)codes, at);
  Plain even = times_ratio<W>(two_per_byte << 12, (Plain)ratio),
        odd = times_ratio<W>(two_per_byte & 0xf000, (Plain)ratio);
  return (U32<W>)((even & 0xff) | (odd << 8));
}

// Requantises one k tile of int4 codes, [2][16 outputs][even and odd k] words, into half an int8 tile.
template <int W>
inline void int4_tile_to_int8(const char* codes, const U32<W> (&ratio)[kTileN / W], char* out) {
#pragma GCC unroll 2
  for (int word = 0; word < 2; word++)
    for (int n = 0; n < kTileN; n += W) {
      const char* from = codes + (word * kTileN + n) * 8;
      char* to = out + word * 4 * 64 + n * 4;
      U32<W> a = load<U32<W>>(from) ^ 0x88888888u, b = load<U32<W>>(from + W * 4) ^ 0x88888888u;
      U32<W> even = deinterleave<W, 0>(a, b), odd = deinterleave<W, 1>(a, b), r = ratio[n / W];
      store(to, widened<W, 0>(even, r));
      store(to + 64, widened<W, 0>(odd, r));
      store(to + 128, widened<W, 1>(even, r));
      store(to + 192, widened<W, 1>(odd, r));
    }
}

// W int4 scales from row n on.
template <int W>
inline F32<W> scales_at(const char* scales, int n, DType type) {
  if (type == DType::bf16) return from_bf16<W>(scales + n * 2);
  if (type == DType::f16) return from_f16<W>(scales + n * 2);
  return load<F32<W>>(scales + n * 4);
}

// The scale of the largest magnitude of each of 16 rows, in the scales' type. Magnitudes compare as integers, a NaN
// being the largest; positive and negative maxima are kept separately.
template <class V>
inline void largest_scales(const char* headers, int spans, int span_bytes, char* out) {
  constexpr int lane = sizeof(V{}[0]), lanes = sizeof(V) / lane;
  constexpr int sign = lane == 2 ? INT16_MIN : INT32_MIN;
  for (int n = 0; n < kTileN; n += lanes) {
    V above = {}, below = {};
    for (int i = 0; i < spans; i++) {
      V plain = load<V>(headers + (int64_t)i * span_bytes + n * lane), flipped = plain ^ sign;
      above = plain > above ? plain : above;
      below = flipped > below ? flipped : below;
    }
    store(out + n * lane, below > above ? below ^ sign : above);
  }
}

// The scales of a block's 32 channels.
template <int W>
__attribute__((noinline)) void channel_scales(const Encoding& e, const char* block, float* out) {
  for (int half = 0; half < 2; half++, out += kTileN) {
    const Format& f = e.format[half];
    const Strip& s = e.strip[half];
    const char* headers = block + half * e.strip[0].bytes + s.headers;
    if (f.codec == Codec::int8) {
      __builtin_memcpy(out, headers, kTileN * sizeof(float));
      continue;
    }
    const int spans = (int)ceil_div(e.k_tiles, s.span_tiles);
    alignas(64) char largest[kTileN * sizeof(float)] = {};
    if (f.scale == DType::f32) {
      largest_scales<I32<W>>(headers, spans, s.span_bytes, largest);
    } else {
      largest_scales<typename Halves<(W < 8 ? W : 8)>::type>(headers, spans, s.span_bytes, largest);
    }
    for (int n = 0; n < kTileN; n += W) store(out + n, scales_at<W>(largest, n, f.scale) * splat<F32<W>>(0.0625f));
  }
}

// The factor of a group's codes, twice in every lane. `times` is 8 / c.
template <int W>
inline U32<W> ratio_of(const char* scales, int n, DType type, F32<W> times) {
  F32<W> r = vmax<F32<W>>(scales_at<W>(scales, n, type) * times, splat<F32<W>>(-127.0f));
  U32<W> bits = (U32<W>)(r + splat<F32<W>>(kRounding));
  return (bits & 0xffffu) | bits << 16;
}

// Steps [step0, step0 + count) of an int8 strip, tiles 2 * kTileBytes apart. Never inlined: every product unpacks
// blocks.
template <int W>
__attribute__((noinline)) void int8_strip_to_tiles(const Strip& s, const char* strip, int k_tiles, int step0, int count,
                                                   char* out) {
  const char* codes = strip + s.codes + (int64_t)step0 * 2 * kHalfTile;
  for (int k = 2 * step0; k < 2 * (step0 + count); k += 2, codes += 2 * kHalfTile, out += 2 * kTileBytes) {
    for (int line = 0; line < 2 * kHalfTile; line += 64)
      __builtin_prefetch(codes + kCodesAhead * kHalfTile + line, 0, 3);
    int8_tile<W>(codes, out);
    if (k + 1 < k_tiles) {
      int8_tile<W>(codes + kHalfTile, out + kHalfTile);
    } else {
      __builtin_memset(out + kHalfTile, 0, kHalfTile);
    }
  }
}

// The same for int4. `channel`: the output of channel_scales.
template <int W>
__attribute__((noinline)) void int4_strip_to_tiles(DType type, const Strip& s, const char* strip, const float* channel,
                                                   int k_tiles, int step0, int count, char* out) {
  constexpr int tile_bytes = kHalfTile / 2;
  F32<W> times[kTileN / W];
  for (int n = 0; n < kTileN; n += W) {
    F32<W> c = load<F32<W>>(channel + n);
    // A channel whose scale is not finite keeps it, so that its results are not finite either.
    F32<W> size = (F32<W>)((U32<W>)c & 0x7fffffffu);
    Mask<F32<W>> usable = (size >= splat<F32<W>>(kMinChannelScale)) & (size < splat<F32<W>>(__builtin_inff()));
    times[n / W] = select<F32<W>>(usable, splat<F32<W>>(8.0f) / c, F32<W>{});
  }
  const int first = 2 * step0, last = first + 2 * count, span_tiles = s.span_tiles, span = first / span_tiles;
  const int64_t span_bytes = s.span_bytes;
  const char* codes = strip + s.codes + (int64_t)first * tile_bytes;
  const char* header = strip + s.headers + span * span_bytes;
  int begun = first - span * span_tiles,
      left = 0;  // k tiles of the first group before `first`; k tiles left in the current group
  U32<W> ratio[kTileN / W];
  for (int k = first; k < last && k < k_tiles; k++, codes += tile_bytes, left--) {
    for (int line = 0; line < tile_bytes; line += 64) __builtin_prefetch(codes + kCodesAhead * tile_bytes + line, 0, 3);
    if (!left) {
      for (int n = 0; n < kTileN; n += W) ratio[n / W] = ratio_of<W>(header, n, type, times[n / W]);
      header += span_bytes;
      left = span_tiles - begun;
      begun = 0;
    }
    int4_tile_to_int8<W>(codes, ratio, out);
    out += k & 1 ? 2 * kTileBytes - kHalfTile : kHalfTile;
  }
  if (last > k_tiles) __builtin_memset(out, 0, kHalfTile);
}

// Unpacks steps [step0, step0 + count) of a block as [count][2 tiles].
template <int W>
inline void block_to_int8_tiles(const Encoding& e, const char* block, const float* channel, int step0, int count,
                                char* out) {
  for (int half = 0; half < 2; half++) {
    const Strip& s = e.strip[half];
    const char* strip = block + half * e.strip[0].bytes;
    char* to = out + half * kTileBytes;
    if (e.format[half].codec == Codec::int8) {
      int8_strip_to_tiles<W>(s, strip, e.k_tiles, step0, count, to);
    } else {
      int4_strip_to_tiles<W>(e.format[half].scale, s, strip, channel + half * kTileN, e.k_tiles, step0, count, to);
    }
  }
}

}  // namespace
}  // namespace kt
