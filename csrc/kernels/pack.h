// Packs the checkpoint's rows into weight tiles and gathers token rows into activation panels.
//
// Packing a weight tile is a transpose of 16 x 16 dwords (a dword is two neighbours along K), done as sixteen 4 x 4
// transposes that every ISA has, some k tiles at a time. bf16 rows are read in place; a source with other strides or in
// f16 or f32 is first converted to a small bf16 square of 16 outputs x 32 of K, so any layout is handled by two
// strides.
#pragma once

#include "kernels/elementwise.h"

namespace kt {
namespace {

inline uint16_t one_bf16(const void* base, int64_t index, DType type) {
  if (type == DType::bf16) return ((const uint16_t*)base)[index];
  return (uint16_t)bf16_bits<4>(splat<F32<4>>(element_of<float>(base, index, type)))[0];
}

// square[n][k] = source(n0 + n, k0 + k) as bf16, zero outside n_valid and k_valid.
template <int W>
inline void load_square(uint16_t (&square)[kTileN][kTileK], const Source& s, int n0, int n_valid, int k0, int k_valid) {
  int ns = n_valid - n0 < kTileN ? n_valid - n0 : kTileN;
  int ks = k_valid - k0 < kTileK ? k_valid - k0 : kTileK;
  if (ns < kTileN || ks < kTileK) __builtin_memset(square, 0, sizeof square);
  if (s.k_stride == 1 && ks == kTileK) {
    for (int n = 0; n < ns; n++) {
      int64_t at = (n0 + n) * s.n_stride + k0;
      for (int k = 0; k < kTileK; k += W) to_bf16<W>(&square[n][k], load_as<F32<W>>(s.data, at + k, s.dtype));
    }
    return;
  }
  for (int k = 0; k < ks; k++)
    for (int n = 0; n < ns; n++)
      square[n][k] = one_bf16(s.data, (n0 + n) * s.n_stride + (k0 + k) * s.k_stride, s.dtype);
}

constexpr int kPackTiles = 8;  // k tiles that are packed at a time

// Four rows of 32 bf16, `stride` bytes apart, into a tile, at that of row 0.
inline void four_rows_to_tile(const char* row, int64_t stride, char* out) {
  using Four = U32<4>;
  for (int p = 0; p < kTileK / 2; p += 4, out += 4 * 64) {
    Four r0 = load<Four>(row + 4 * p), r1 = load<Four>(row + stride + 4 * p);
    Four r2 = load<Four>(row + 2 * stride + 4 * p), r3 = load<Four>(row + 3 * stride + 4 * p);
    Four a = __builtin_shuffle(r0, r1, Four{0, 4, 1, 5}), b = __builtin_shuffle(r2, r3, Four{0, 4, 1, 5});
    Four c = __builtin_shuffle(r0, r1, Four{2, 6, 3, 7}), d = __builtin_shuffle(r2, r3, Four{2, 6, 3, 7});
    store(out, __builtin_shuffle(a, b, Four{0, 1, 4, 5}));
    store(out + 64, __builtin_shuffle(a, b, Four{2, 3, 6, 7}));
    store(out + 128, __builtin_shuffle(c, d, Four{0, 1, 4, 5}));
    store(out + 192, __builtin_shuffle(c, d, Four{2, 3, 6, 7}));
  }
}

inline void rows_to_tile(const char* rows, int64_t stride, char* tile) {
  for (int n = 0; n < kTileN; n += 4) four_rows_to_tile(rows + n * stride, stride, tile + n * 4);
}

// 16 rows into the tiles of one half, `count` k tiles of them. Sixteen rows, often a power of two apart, are more
// streams than the hardware prefetcher follows and than a set of the L1 cache holds: four rows are read over all of
// these tiles while the next four (of `next`, the rows that come after these, in the end) and the lines to be written
// next are prefetched.
inline void rows_to_tiles(const char* rows, int64_t stride, int count, const char* next, char* tiles,
                          char* next_tiles) {
  for (int n = 0; n < kTileN; n += 4) {
    const char *row = rows + n * stride, *then = n + 4 < kTileN ? row + 4 * stride : next;
    for (int kt = 0; kt < count; kt++) {
      for (int i = 0; i < 4; i++) {
        __builtin_prefetch(then + i * stride + kt * kTileK * 2);
        __builtin_prefetch(next_tiles + kt * 2 * kTileBytes + (n + i) * 64, 1);
      }
      four_rows_to_tile(row + kt * kTileK * 2, stride, tiles + kt * 2 * kTileBytes + n * 4);
    }
  }
}

template <int W>
void pack_block(const Pack& p) {
  alignas(64) uint16_t square[kTileN][kTileK];
  auto rows_at = [&](int half, int kt) {
    return (const char*)((const uint16_t*)p.half[half].data + p.n0[half] * p.half[half].n_stride + kt * kTileK);
  };
  const int block_rows = p.n0[0] == p.n0[1] ? kTileN : kBlockN;
  const char* next_block = rows_at(0, 0) + block_rows * p.half[0].n_stride * 2;
  for (int kt0 = 0; kt0 < p.k_tiles; kt0 += kPackTiles) {
    const int count = p.k_tiles - kt0 < kPackTiles ? p.k_tiles - kt0 : kPackTiles;
    for (int half = 0; half < 2; half++) {
      const Source& s = p.half[half];
      char* tiles = p.out + (kt0 * 2 + half) * (int64_t)kTileBytes;
      const bool in_place = s.dtype == DType::bf16 && s.k_stride == 1 && p.n0[half] + kTileN <= p.n_valid;
      if (in_place && (kt0 + count) * kTileK <= p.k) {
        const char* next = half == 0 ? rows_at(1, kt0) : kt0 + count < p.k_tiles ? rows_at(0, kt0 + count) : next_block;
        char* next_tiles = half == 0 ? tiles + kTileBytes : p.out + (kt0 + count) * 2 * (int64_t)kTileBytes;
        rows_to_tiles(rows_at(half, kt0), s.n_stride * 2, count, next, tiles, next_tiles);
        continue;
      }
      for (int kt = kt0; kt < kt0 + count; kt++, tiles += 2 * kTileBytes) {
        if (p.n0[half] >= p.n_valid) {
          __builtin_memset(tiles, 0, kTileBytes);
        } else if (in_place && (kt + 1) * kTileK <= p.k) {
          rows_to_tile(rows_at(half, kt), s.n_stride * 2, tiles);
        } else {
          load_square<W>(square, s, p.n0[half], p.n_valid, kt * kTileK, p.k);
          rows_to_tile((const char*)square, sizeof square[0], tiles);
        }
      }
    }
  }
}

// Tiles of precisions f32 and f64: [32 k][16 n] in the type of the sums.
template <class V>
void pack_exact(const Pack& p) {
  using Real = Lane<V>;
  Real* out = (Real*)p.out;
  for (int kt = 0; kt < p.k_tiles; kt++)
    for (int half = 0; half < 2; half++)
      for (int k = kt * kTileK; k < (kt + 1) * kTileK; k++)
        for (int n = p.n0[half]; n < p.n0[half] + kTileN; n++) {
          const Source& s = p.half[half];
          bool inside = n < p.n_valid && k < p.k;
          *out++ = inside ? element_of<Real>(s.data, n * s.n_stride + k * s.k_stride, s.dtype) : Real(0);
        }
}

// Stores W values at element i of a panel row; get_element loads them.
template <class Isa>
inline void put_element(char* row, int i, typename Isa::Vector v) {
  if constexpr (Isa::elem == 2) {
#ifdef __AVX512BF16__  // values too small for a normal bf16 become zero, as the products treat them
    if constexpr (Isa::width == 16) return store(row + i * 2, _mm512_cvtneps_pbh((__m512)v));
#endif
    to_bf16<Isa::width>(row + i * 2, v);
  } else {
    store(row + i * Isa::elem, v);
  }
}

template <class Isa>
inline typename Isa::Vector get_element(const char* row, int i) {
  if constexpr (Isa::elem == 2) return from_bf16<Isa::width>(row + i * 2);
  return load<typename Isa::Vector>(row + i * Isa::elem);
}

// Converts one token's 32 columns into a panel row.
template <class Isa>
inline void put_columns(char* out, const Gather& g, int64_t at, int valid) {
  if (valid >= kTileK) {
    if (Isa::elem == 2 && g.dtype == DType::bf16) {
      __builtin_memcpy(out, (const uint16_t*)g.x + at, kTileK * 2);
      return;
    }
    for (int k = 0; k < kTileK; k += Isa::width)
      put_element<Isa>(out, k, load_as<typename Isa::Vector>(g.x, at + k, g.dtype));
    return;
  }
  alignas(64) char tail[kTileK * 8] = {};
  __builtin_memcpy(tail, (const char*)g.x + at * (int64_t)size_of(g.dtype), valid * size_of(g.dtype));
  Gather padded = g;
  padded.x = tail;
  put_columns<Isa>(out, padded, 0, kTileK);
}

template <class Isa>
void gather_panel(const Gather& g) {
  int64_t row_bytes = kTileK * Isa::elem;
  int64_t step = row_bytes * g.tiling.rows;
  for (int r = 0; r < g.tiling.rows * g.tiling.tiles; r++) {
    char* out = g.out + (r / g.tiling.rows) * step * g.k_tiles + (r % g.tiling.rows) * row_bytes;
    if (r >= g.live) {
      for (int kt = 0; kt < g.k_tiles; kt++) __builtin_memset(out + kt * step, 0, row_bytes);
      continue;
    }
    int64_t at = g.token[r] * g.x_stride + g.k0;
    for (int kt = 0; kt < g.k_tiles; kt++)
      put_columns<Isa>(out + kt * step, g, at + kt * kTileK, g.width - g.k0 - kt * kTileK);
  }
}

}  // namespace
}  // namespace kt
