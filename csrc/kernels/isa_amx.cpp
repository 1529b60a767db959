// AMX: two token tiles against two weight tiles, four accumulators, one tile load for each product.
//
// Activations are the A operand, their rows as they are; weights are the B operand as they lie in memory. A tile of
// fewer token rows takes less time (8 rows about 0.85 of 16: the latency of four accumulators remains) and fewer loads,
// so a panel is cut into tiles of equal height: 17 tokens are two tiles of 9 rows, not 16 and 1 padded to 32.
#include <immintrin.h>

#include "kernels/rate.h"

namespace kt {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];
};

// Tiles 0-3 accumulate [token tile][weight tile], 4 holds activations, 6 and 7 weights; 5 is for the bare loop alone.
inline void configure(int rows) {
  TileConfig c = {};
  c.palette = 1;
  for (int i = 0; i < 8; i++) {
    c.colsb[i] = 64;
    c.rows[i] = (uint8_t)(i < 6 ? rows : 16);
  }
  // The compiler's own header names 8 of the 64 bytes as read.
  asm volatile("" : : "m"(c));
  _tile_loadconfig(&c);
}

// Both token tiles pass through tile 4. Measured against a tile for each, with loads moved around in several ways, this
// order is never behind and up to a fifth ahead with all cores busy.
template <class Rows>
inline void steps_of_two(const Stretch& s, const Product& p, Ahead ahead, Rows& unfinished) {
  const char* a0 = s.a + p.tile * (int64_t)s.a_tile;
  const char* a1 = a0 + s.a_tile;
  const char* b = s.b;
  int64_t step = p.rows * 64;
  for (int k = 0; k < s.k_tiles; k++, a0 += step, a1 += step, b += 2 * kTileBytes) {
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
    unfinished.step();
  }
}

template <class Rows>
inline void multiply_two(const Product& p, Rows& unfinished) {
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
  steps_of_two(p.s, p, p.ahead, unfinished);
  for_each_extra(p, [&](const Stretch& s) {
    Nothing nothing;
    steps_of_two(s, p, {nullptr, 0}, nothing);
  });
  _tile_stored(0, p.c, 128);
  _tile_stored(1, p.c + 16, 128);
  _tile_stored(2, c1, 128);
  _tile_stored(3, c1 + 16, 128);
}

template <class Rows>
inline void steps_of_one(const Stretch& s, const Product& p, Ahead ahead, Rows& unfinished) {
  const char* a = s.a + p.tile * (int64_t)s.a_tile;
  const char* b = s.b;
  int64_t step = p.rows * 64;
  for (int k = 0; k < s.k_tiles; k++, a += step, b += 2 * kTileBytes) {
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
    unfinished.step();
  }
}

template <class Rows>
inline void multiply_one(const Product& p, Rows& unfinished) {
  if (p.accumulate) {
    _tile_loadd(0, p.c, 128);
    _tile_loadd(1, p.c + 16, 128);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  steps_of_one(p.s, p, p.ahead, unfinished);
  for_each_extra(p, [&](const Stretch& s) {
    Nothing nothing;
    steps_of_one(s, p, {nullptr, 0}, nothing);
  });
  _tile_stored(0, p.c, 128);
  _tile_stored(1, p.c + 16, 128);
}

struct Amx {
  static constexpr int width = 16, elem = 2, max_rows = kMaxRows;
  static void enter(int rows) { configure(rows); }
  static void leave() { _tile_release(); }
  static Tiling tiling(int32_t live) {
    int32_t tiles = (live + kMaxRows - 1) / kMaxRows;
    return {tiles ? (live + tiles - 1) / tiles : 1, tiles};
  }
  template <class Rows>
  static void multiply(const Product& p, Rows& unfinished) {
    p.tiles == 2 ? multiply_two(p, unfinished) : multiply_one(p, unfinished);
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

}  // namespace

extern const KernelTable kernels_amx;
const KernelTable kernels_amx = table_of<Amx>("amx");
}  // namespace kt
