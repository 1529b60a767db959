// Scales of some k tiles of a strip, read once for all rows that are multiplied with its codes.
#pragma once

#include "kernels/packed_gemv.h"

namespace kt {
namespace {

constexpr int kSegmentTiles = 16;  // k tiles whose scales are read at a time

// Scales of `count` k tiles from `k0` on, and the numbers that are added, as [tile][half][row].
struct SegmentScales {
  alignas(64) float s[kSegmentTiles * 2 * kTileN], m[kSegmentTiles * 2 * kTileN];
};

template <int W, Codec C>
__attribute__((noinline, flatten)) void read_scales_as(const Format& f, const Strip& s, const char* strip, int k0,
                                                       int count, SegmentScales& out) {
  using D = Decoder<C>;
  constexpr int step = D::halves * kTileN;
  constexpr size_t bytes = step * sizeof(float);
  const int span = k0 / s.span_tiles;
  Header header{strip + s.headers + (int64_t)span * s.span_bytes};
  SpanScales shared = {};
  RowScales scales = {};
  for (int k = 0, in_span = k0 - span * s.span_tiles; k < count; k++, in_span++) {
    if (in_span == s.span_tiles) {
      in_span = 0;
      header.at += s.span_bytes;
    }
    const bool begins = k == 0 || in_span == 0;
    if constexpr (requires { D::template begin<W>(header, shared); }) {
      if (begins) D::template begin<W>(header, shared);
      D::template tile_scales<W>(header, in_span, shared, scales);
    } else if (begins) {
      D::template scales<W>(f, header, in_span, strip, scales);
    }
    __builtin_memcpy(out.s + k * step, scales.s, bytes);
    if constexpr (D::offset) __builtin_memcpy(out.m + k * step, scales.m, bytes);
  }
}

// The codec whose instantiation reads the scales of another: kinds of scales are fewer than formats.
constexpr Codec reads_scales_as(Codec codec) {
  for (int c = 1; c < kCodecs; c++)
    if (kFormats[c].scales == kFormats[(int)codec].scales &&
        kFormats[c].header[0].type == kFormats[(int)codec].header[0].type)
      return (Codec)c;
  return codec;
}

constexpr bool has_scales(const FormatRow& row) {
  return !row.in_grid() && row.scales != ScaleKind::none && row.scales != ScaleKind::high_bytes;
}

template <int W>
inline void read_scales(const Format& f, const Strip& s, const char* strip, int k0, int count, SegmentScales& out) {
  switch (f.codec) {
#define KT_FORMAT(name, ...)                                                               \
  case Codec::name:                                                                        \
    if constexpr (has_scales(kFormats[(int)Codec::name]))                                  \
      return read_scales_as<W, reads_scales_as(Codec::name)>(f, s, strip, k0, count, out); \
    return;
#include "kernels/format_table.h"
  }
}

typedef float TwoFloats __attribute__((vector_size(8)));

// Each number twice, in the two lanes of an output.
inline F32<4> twice(TwoFloats v) { return __builtin_shufflevector(v, v, 0, 0, 1, 1); }
inline F32<8> twice(F32<4> v) { return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3); }
inline F32<16> twice(F32<8> v) { return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7); }

template <int W>
inline F32<W> scales_of_lanes_at(const float* scales, int lane) {
  if constexpr (W == 4) return twice(load<TwoFloats>(scales + lane / 2));
  if constexpr (W == 8) return twice(load<F32<4>>(scales + lane / 2));
  if constexpr (W == 16) return twice(load<F32<8>>(scales + lane / 2));
}

inline void prefetch_tile(const char* tile, int tile_bytes, int64_t next) {
  for (int line = 0; line < tile_bytes; line += 64) {
    __builtin_prefetch(tile + kPackedGemvAhead * tile_bytes + line, 0, 3);
    __builtin_prefetch(tile + next + line, 0, 2);
  }
}

}  // namespace
}  // namespace kt
