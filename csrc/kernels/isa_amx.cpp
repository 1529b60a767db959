// AMX: two token tiles against two weight tiles, four accumulators, one tile load for each product.
//
// Activations are the A operand, their rows as they are; weights are the B operand as they lie in memory. A tile of
// fewer token rows takes less time (8 rows about 0.85 of 16: the latency of four accumulators remains) and fewer loads,
// so a panel is cut into tiles of equal height: 17 tokens are two tiles of 9 rows, not 16 and 1 padded to 32.
#include <immintrin.h>

#include "kernels/narrow_tiles.h"
#include "kernels/outer.h"
#include "kernels/rate.h"

namespace kt {
namespace {

// Tiles 0-3 accumulate [token tile][weight tile], 4 holds activations, 6 and 7 weights; 5 is for the bare loop alone.
inline void configure(int rows) {
  TileConfig c = {};
  c.palette = 1;
  for (int i = 0; i < 8; i++) {
    c.colsb[i] = 64;
    c.rows[i] = (uint8_t)(i < 6 ? rows : 16);
  }
  c.use();
}

// Both token tiles pass through tile 4. Measured against a tile for each, with loads moved around in several ways, this
// order is never behind and up to a fifth ahead with all cores busy.
template <class Beside>
inline void steps_of_two(const Stretch& s, const Product& p, Ahead ahead, Beside& meanwhile) {
  const char* a0 = s.a + p.tile * (int64_t)s.a_tile;
  const char* a1 = a0 + s.a_tile;
  int64_t step = p.rows * 64;
  for (int k = 0; k < s.k_tiles; k++, a0 += step, a1 += step) {
    const char* b = meanwhile.tiles(s.b, k, kTileBytes);
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    prefetch_quarter(ahead, 0);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    prefetch_quarter(ahead, 1);
    _tile_loadd(4, a1, 64);
    _tile_dpbf16ps(2, 4, 6);
    prefetch_quarter(ahead, 2);
    _tile_dpbf16ps(3, 4, 7);
    prefetch_quarter(ahead, 3);
    ahead.at += ahead.lines * 64;
    meanwhile.step();
  }
}

template <class Beside>
inline void multiply_two(const Product& p, Beside& meanwhile) {
  float* c1 = p.c + p.rows * kBlockN;
  if (p.accumulate) {
    _tile_loadd(0, p.c, 128);
    _tile_loadd(1, p.c + 16, 128);
    _tile_loadd(2, c1, 128);
    _tile_loadd(3, c1 + 16, 128);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  steps_of_two(p.s, p, p.ahead, meanwhile);
  for_each_extra(p, [&](const Stretch& s) {
    Nothing nothing;
    steps_of_two(s, p, kNothingAhead, nothing);
  });
  _tile_stored(0, p.c, 128);
  _tile_stored(1, p.c + 16, 128);
  _tile_stored(2, c1, 128);
  _tile_stored(3, c1 + 16, 128);
}

template <class Beside>
inline void steps_of_one(const Stretch& s, const Product& p, Ahead ahead, Beside& meanwhile) {
  const char* a = s.a + p.tile * (int64_t)s.a_tile;
  int64_t step = p.rows * 64;
  for (int k = 0; k < s.k_tiles; k++, a += step) {
    const char* b = meanwhile.tiles(s.b, k, kTileBytes);
    prefetch_quarter(ahead, 0);
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    prefetch_quarter(ahead, 1);
    _tile_dpbf16ps(0, 4, 6);
    prefetch_quarter(ahead, 2);
    _tile_loadd(7, b + kTileBytes, 64);
    prefetch_quarter(ahead, 3);
    _tile_dpbf16ps(1, 4, 7);
    ahead.at += ahead.lines * 64;
    meanwhile.step();
  }
}

template <class Beside>
inline void multiply_one(const Product& p, Beside& meanwhile) {
  if (p.accumulate) {
    _tile_loadd(0, p.c, 128);
    _tile_loadd(1, p.c + 16, 128);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  steps_of_one(p.s, p, p.ahead, meanwhile);
  for_each_extra(p, [&](const Stretch& s) {
    Nothing nothing;
    steps_of_one(s, p, kNothingAhead, nothing);
  });
  _tile_stored(0, p.c, 128);
  _tile_stored(1, p.c + 16, 128);
}

// Rows m and m + 1 of 32 columns, neighbours in pairs: two rows of two weight tiles.
inline void pair_rows(const char* a, const char* b, char* out) {
  using Row = Vec<16>::pairs;
  Row low, high;
  for (uint16_t i = 0; i < 32; i++) {
    low[i] = (uint16_t)(i / 2 + (i % 2) * 32);
    high[i] = (uint16_t)(low[i] + 16);
  }
  Row x = load<Row>(a), y = load<Row>(b);
  store(out, __builtin_shuffle(x, y, low));
  store(out + kTileBytes, __builtin_shuffle(x, y, high));
}

// One row of 32 columns as bf16.
inline const char* bf16_row(const Outer& o, int m, int column, char (&edge)[kBlockN * 8], char (&half)[kBlockN * 2]) {
  if (m >= o.rows) {
    __builtin_memset(half, 0, sizeof half);
    return half;
  }
  const char* from = block_of_row(o, m, column, edge);
  if (o.dtype == DType::bf16 && !o.drop.row) return from;
  for (int i = 0; i < kBlockN; i += 16) {
    F32<16> v = load_as<F32<16>>(from, i, o.dtype);
    if (o.drop.row) v = thinned(v, o.drop, o.drop.row[m], o.column + column + i);
    to_bf16<16>(half + i * 2, v);
  }
  return half;
}

// The contraction over rows with tiles: p turned becomes the A operand, 16 ranks by 32 rows, and the wide rows, taken
// in pairs, the B operand. Both are made in scratch, the wide one 32 columns at a time.
inline void outer_tiles(const Outer& o) {
  int steps = (o.rows + kTileK - 1) / kTileK, groups = (o.rank + kTileN - 1) / kTileN;
  uint16_t* a = (uint16_t*)o.scratch;  // [groups][steps][16 ranks][32 rows]
  char* b = o.scratch + (int64_t)groups * steps * kTileBytes;
  for (int g = 0; g < groups; g++)
    for (int m = 0; m < steps * kTileK; m++)
      for (int r = 0; r < kTileN; r++) {
        int rank = g * kTileN + r;
        float value = m < o.rows && rank < o.rank ? ((const float*)o.p)[(int64_t)m * o.rank + rank] : 0.0f;
        a[((g * steps + m / kTileK) * kTileN + r) * kTileK + m % kTileK] = from_float(value, DType::bf16);
      }
  configure(16);
  alignas(64) char edge[2][kBlockN * 8], half[2][kBlockN * 2];
  alignas(64) float c[kTileN][kBlockN];
  for (int column = 0; column < o.columns; column += kBlockN) {
    for (int m = 0; m < steps * kTileK; m += 2) {
      const char* first = bf16_row(o, m, column, edge[0], half[0]);
      const char* second = bf16_row(o, m + 1, column, edge[1], half[1]);
      pair_rows(first, second, b + m / kTileK * 2 * kTileBytes + m % kTileK / 2 * 64);
      // Rows lie by token, anywhere: their next columns come meanwhile.
      if (m < o.rows) __builtin_prefetch(first + o.q_block);
      if (m + 1 < o.rows) __builtin_prefetch(second + o.q_block);
    }
    for (int g = 0; g < groups; g++) {
      int ranks = o.rank - g * kTileN < kTileN ? o.rank - g * kTileN : kTileN;
      float* sums = (float*)o.c + (int64_t)g * kTileN * o.c_stride + column;
      for (int r = 0; r < ranks; r++) __builtin_memcpy(c[r], sums + r * o.c_stride, sizeof c[r]);
      _tile_loadd(0, c, sizeof c[0]);
      _tile_loadd(1, c[0] + kTileN, sizeof c[0]);
      for (int k = 0; k < steps; k++) {
        _tile_loadd(4, a + (g * steps + k) * kTileN * kTileK, 64);
        _tile_loadd(6, b + k * 2 * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + (k * 2 + 1) * kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, c, sizeof c[0]);
      _tile_stored(1, c[0] + kTileN, sizeof c[0]);
      for (int r = 0; r < ranks; r++) __builtin_memcpy(sums + r * o.c_stride, c[r], sizeof c[r]);
    }
  }
  _tile_release();
}

struct Amx {
  using Vector = F32<16>;
  using Real = float;
  static constexpr int width = 16, elem = 2, tile_bytes = kTileBytes, max_rows = kMaxRows;
  static constexpr bool overlaps = true;  // tiles are multiplied beside the vector units
  static constexpr DType panel = DType::bf16;
  static void enter(int rows) { configure(rows); }
  static void leave() { _tile_release(); }
  static void outer(const Outer& o) { outer_tiles(o); }
  static Tiling tiling(int32_t live) {
    int32_t tiles = (live + kMaxRows - 1) / kMaxRows;
    return {tiles ? (live + tiles - 1) / tiles : 1, tiles};
  }
  template <class Beside>
  static void multiply(const Product& p, Beside& meanwhile) {
    p.tiles == 2 ? multiply_two(p, meanwhile) : multiply_one(p, meanwhile);
  }
  static double registers(double seconds) {
    configure(16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    alignas(64) uint16_t data[4][kTileBytes / 2];
    fill_with_noise((char*)data, sizeof data, 2);
    asm volatile("" : : "m"(data));
    _tile_loadd(4, data[0], 64);
    _tile_loadd(5, data[1], 64);
    _tile_loadd(6, data[2], 64);
    _tile_loadd(7, data[3], 64);
    double rate = per_second(seconds, [&] {
      for (int i = 0; i < 1000; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      return 1000.0 * 4 * 2 * 16 * 16 * 32;
    });
    _tile_release();
    return rate;
  }
};

constexpr KernelTable kBf16 = table_of<Amx, FewTiles>("amx");

}  // namespace

extern const KernelTables kernels_amx;
const KernelTables kernels_amx = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
