// AMX: two token tiles times two weight tiles, four accumulators, one tile load per product.
//
// Activations are the A operand, one token per row; weights are the B operand in their stored layout. A tile of fewer
// token rows takes less time (8 rows about 0.85 of 16: the latency of four accumulators remains) and fewer loads, so a
// panel is divided into tiles of equal height: 17 tokens are two tiles of 9 rows, not 16 and 1 padded to 32.
#include <immintrin.h>

#include "kernels/byte_products_x86.h"
#include "kernels/gemv_amx.h"
#include "kernels/lora_wgrad.h"
#include "kernels/rate.h"

namespace kt {
namespace {

// Tiles 0-3 accumulate [token tile][weight tile], 4 holds activations, 6 and 7 weights; 5 is for half blocks and the
// register rate.
inline void configure(int rows) {
  TileConfig c = {};
  c.palette = 1;
  for (int i = 0; i < 8; i++) {
    c.colsb[i] = 64;
    c.rows[i] = (uint8_t)(i < 6 ? rows : 16);
  }
  c.use();
}

// Tile 4 times weights, into an accumulator: even ones take tile 6, odd ones tile 7.
struct Bf16Products {
  using Real = float;
  static constexpr bool halves = true;  // blocks may have one tile of zeros
  template <int to>
  static void add() {
    if constexpr (to == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (to == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (to == 2) _tile_dpbf16ps(2, 4, 6);
    if constexpr (to == 3) _tile_dpbf16ps(3, 4, 7);
  }
};

// A step is 64 of K; everything else is the same.
struct Int8Products {
  using Real = int32_t;
  using Dp4a = VnniDp4a<16>;
  static constexpr bool halves = false;
  template <int to>
  static void add() {
    if constexpr (to == 0) _tile_dpbssd(0, 4, 6);
    if constexpr (to == 1) _tile_dpbssd(1, 4, 7);
    if constexpr (to == 2) _tile_dpbssd(2, 4, 6);
    if constexpr (to == 3) _tile_dpbssd(3, 4, 7);
  }
};

// Both token tiles pass through tile 4. Compared with one tile for each and with other orders of the loads, this order
// is never slower and up to a fifth faster with all cores busy.
template <class Products, class P, class Overlap>
inline void steps_of_two(const Contraction& s, const P& p, Prefetch prefetch, Overlap& overlapped) {
  const char* a0 = s.a + p.tile * (int64_t)s.a_tile;
  const char* a1 = a0 + s.a_tile;
  int64_t step = p.rows * 64;
  for (int k = 0; k < s.k_tiles; k++, a0 += step, a1 += step) {
    const char* b = overlapped.tiles(s.b, k, kTileBytes);
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b, 64);
    Products::template add<0>();
    prefetch_quarter(prefetch, 0);
    _tile_loadd(7, b + kTileBytes, 64);
    Products::template add<1>();
    prefetch_quarter(prefetch, 1);
    _tile_loadd(4, a1, 64);
    Products::template add<2>();
    prefetch_quarter(prefetch, 2);
    Products::template add<3>();
    prefetch_quarter(prefetch, 3);
    prefetch.at += prefetch.lines * 64;
    overlapped.step();
  }
}

// Weight tiles 1, 3, 5 ... are zero: a LoRA factor of low rank.
template <class P, class Overlap>
inline void half_steps(const Contraction& s, const P& p, Overlap& overlapped) {
  const char* a = s.a + p.tile * (int64_t)s.a_tile;
  int64_t step = p.rows * 64;
  for (int k = 0; k < s.k_tiles; k++, a += step) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, overlapped.tiles(s.b, k, kTileBytes), 64);
    _tile_dpbf16ps(0, 4, 6);
    if (p.tiles == 2) {
      _tile_loadd(5, a + s.a_tile, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    overlapped.step();
  }
}

template <class Products, class P, class Overlap>
inline void multiply_two(const P& p, Overlap& overlapped) {
  auto* c1 = p.c + p.rows * kBlockN;
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
  Products::halves&& p.contraction.half ? half_steps(p.contraction, p, overlapped)
                                        : steps_of_two<Products>(p.contraction, p, p.prefetch, overlapped);
  for_each_lora_term(p, [&](const Contraction& s) {
    NoOverlap no_overlap;
    steps_of_two<Products>(s, p, kNoPrefetch, no_overlap);
  });
  _tile_stored(0, p.c, 128);
  _tile_stored(1, p.c + 16, 128);
  _tile_stored(2, c1, 128);
  _tile_stored(3, c1 + 16, 128);
}

template <class Products, class P, class Overlap>
inline void steps_of_one(const Contraction& s, const P& p, Prefetch prefetch, Overlap& overlapped) {
  const char* a = s.a + p.tile * (int64_t)s.a_tile;
  int64_t step = p.rows * 64;
  for (int k = 0; k < s.k_tiles; k++, a += step) {
    const char* b = overlapped.tiles(s.b, k, kTileBytes);
    prefetch_quarter(prefetch, 0);
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    prefetch_quarter(prefetch, 1);
    Products::template add<0>();
    prefetch_quarter(prefetch, 2);
    _tile_loadd(7, b + kTileBytes, 64);
    prefetch_quarter(prefetch, 3);
    Products::template add<1>();
    prefetch.at += prefetch.lines * 64;
    overlapped.step();
  }
}

template <class Products, class P, class Overlap>
inline void multiply_one(const P& p, Overlap& overlapped) {
  if (p.accumulate) {
    _tile_loadd(0, p.c, 128);
    _tile_loadd(1, p.c + 16, 128);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  Products::halves&& p.contraction.half ? half_steps(p.contraction, p, overlapped)
                                        : steps_of_one<Products>(p.contraction, p, p.prefetch, overlapped);
  for_each_lora_term(p, [&](const Contraction& s) {
    NoOverlap no_overlap;
    steps_of_one<Products>(s, p, kNoPrefetch, no_overlap);
  });
  _tile_stored(0, p.c, 128);
  _tile_stored(1, p.c + 16, 128);
}

// Pairs rows m and m + 1 of 32 columns: one row of each of two weight tiles. The instruction takes four columns of
// every eight for one tile and four for the other; `in_order` undoes that when the sums are stored.
inline void pair_rows(const char* a, const char* b, char* out) {
  using Row = Vec<16>::pairs;
  Row low, high;
  for (uint16_t i = 0; i < 32; i++) {
    low[i] = (uint16_t)(i / 8 * 8 + i % 8 / 2 + (i % 2) * 32);
    high[i] = (uint16_t)(low[i] + 4);
  }
  Row x = load<Row>(a), y = load<Row>(b);
  store(out, __builtin_shuffle(x, y, low));
  store(out + kTileBytes, __builtin_shuffle(x, y, high));
}

inline void in_order(F32<16> (&v)[2]) {
  I32<16> low, high;
  for (int i = 0; i < 16; i++) {
    low[i] = i / 8 * 4 + i % 4 + i % 8 / 4 * 16;
    high[i] = low[i] + 8;
  }
  F32<16> first = v[0];
  v[0] = __builtin_shuffle(first, v[1], low);
  v[1] = __builtin_shuffle(first, v[1], high);
}

constexpr int kPairsAhead = 2;      // pairs of rows prefetched while others are paired
constexpr int kPanelColumns = 128;  // of a panel, converted to tiles at a time: they fit L1

// One row of 32 columns as bf16.
inline const char* bf16_row(const LoraWgrad& o, int m, int column, char (&edge)[kBlockN * 8],
                            char (&half)[kBlockN * 2]) {
  if (m >= o.rows) {
    __builtin_memset(half, 0, sizeof half);
    return half;
  }
  const char* from = block_of_row(o, m, column, edge);
  if (o.dtype == DType::bf16 && !o.dropout.seeds) return from;
  for (int i = 0; i < kBlockN; i += 16) {
    F32<16> v = load_as<F32<16>>(from, i, o.dtype);
    if (o.dropout.seeds) v = apply_dropout(v, o.dropout, o.dropout.seeds[m], o.column + column + i);
    to_bf16<16>(half + i * 2, v);
  }
  return half;
}

// Sixteen ranks of row m as bf16, each in a lane.
inline U32<16> ranks_in_lanes(const LoraWgrad& o, int m, int rank) {
  if (m >= o.rows) return U32<16>{};
  const char* from = o.p[m] + rank / kTileK * o.p_block + rank % kTileK * 2;
  if (!o.weight) return __builtin_convertvector(load<Vec<16>::u16>(from), U32<16>);
  return bf16_bits<16>(from_bf16<16>(from) * splat<F32<16>>((float)o.weight[m]));
}

// p transposed: 16 ranks by 32 rows, [groups][steps] tiles.
inline void rank_tiles(const LoraWgrad& o, int groups, int steps, char* a) {
  alignas(64) char pairs[kTileBytes];
  for (int g = 0; g < groups; g++)
    for (int k = 0; k < steps; k++, a += kTileBytes) {
      for (int i = 0; i < kTileK / 2; i++) {
        int m = k * kTileK + 2 * i;
        store(pairs + i * 64, ranks_in_lanes(o, m, g * kTileN) | ranks_in_lanes(o, m + 1, g * kTileN) << 16);
      }
      rows_to_tile(pairs, 64, a);
    }
}

// Pairs columns [column, end) of all rows, [blocks][steps][2 tiles]. Rows of a tensor are scattered by token and read
// one pair after the other, because the hardware prefetches the lines that follow; in a panel, neighbouring lines are
// rows, and a few blocks are read at a time.
inline void wide_tiles(const LoraWgrad& o, int column, int end, int steps, char* b) {
  alignas(64) char edge[2][kBlockN * 8], half[2][kBlockN * 2];
  int64_t next_block = (int64_t)steps * 2 * kTileBytes;
  bool tensor = o.q_block == kBlockN * (int64_t)size_of(o.dtype), plain = o.dtype == DType::bf16 && !o.dropout.seeds;
  // The address to prefetch while a row is read.
  auto ahead_of = [&](int row) {
    int next = tensor ? row + kPairsAhead * 2 : row, next_column = tensor ? column : column + kPanelColumns;
    if (next >= o.rows) next -= o.rows, next_column += kWgradColumns;
    return (next < o.rows ? o.q[next] : o.q[0]) + next_column / kBlockN * o.q_block;
  };
  for (int m = 0; m < steps * kTileK; m += 2) {
    char* to = b + m / kTileK * 2 * kTileBytes + m % kTileK / 2 * 64;
    const char *ahead0 = ahead_of(m), *ahead1 = ahead_of(m + 1);
    int at = column;
    if (plain && m + 1 < o.rows) {
      const char *first = o.q[m] + at / kBlockN * o.q_block, *second = o.q[m + 1] + at / kBlockN * o.q_block;
      for (; at < end && at + kBlockN <= o.columns; at += kBlockN, to += next_block) {
        __builtin_prefetch(ahead0);
        __builtin_prefetch(ahead1);
        pair_rows(first, second, to);
        first += o.q_block, second += o.q_block, ahead0 += o.q_block, ahead1 += o.q_block;
      }
    }
    for (; at < end; at += kBlockN, to += next_block) {
      const char* first = bf16_row(o, m, at, edge[0], half[0]);
      const char* second = bf16_row(o, m + 1, at, edge[1], half[1]);
      pair_rows(first, second, to);
    }
  }
}

// Sums of 32 columns, or of 64 so that four products are in flight, over all steps.
template <bool two>
inline void add_tiles(const LoraWgrad& o, const char* a, const char* b, int steps, float* c) {
  int64_t stride = o.c_stride * 4, block = (int64_t)steps * 2 * kTileBytes;
  if (o.first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (two) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + 16, stride);
    if constexpr (two) {
      _tile_loadd(2, c + 32, stride);
      _tile_loadd(3, c + 48, stride);
    }
  }
  for (int k = 0; k < steps; k++, a += kTileBytes, b += 2 * kTileBytes) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (two) {
      _tile_loadd(6, b + block, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b + block + kTileBytes, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  if constexpr (two) {
    _tile_stored(2, c + 32, stride);
    _tile_stored(3, c + 48, stride);
  }
}

// The contraction over rows with tiles: p transposed is the A operand, as high as the rank, and q in pairs of rows the
// B operand. Both are built in scratch, q many columns at a time where rows are long.
inline void wgrad_tiles(const LoraWgrad& o) {
  int steps = (o.rows + kTileK - 1) / kTileK, groups = (o.rank + kTileN - 1) / kTileN;
  char* b = o.scratch + (int64_t)groups * steps * kTileBytes;
  rank_tiles(o, groups, steps, o.scratch);
  configure(groups > 1 ? kTileN : o.rank);
  int columns_together = o.q_block == kBlockN * (int64_t)size_of(o.dtype) ? kWgradColumns : kPanelColumns;
  for (int column0 = 0; column0 < o.columns; column0 += columns_together) {
    int end = o.columns - column0 < columns_together ? o.columns : column0 + columns_together;
    wide_tiles(o, column0, end, steps, b);
    for (int column = column0; column < end; column += 2 * kBlockN)
      for (int g = 0; g < groups; g++) {
        const char *ranks = o.scratch + (int64_t)g * steps * kTileBytes,
                   *wide = b + (column - column0) / kBlockN * (int64_t)steps * 2 * kTileBytes;
        float* c = (float*)o.c + (int64_t)g * kTileN * o.c_stride + column;
        end - column > kBlockN ? add_tiles<true>(o, ranks, wide, steps, c) : add_tiles<false>(o, ranks, wide, steps, c);
      }
  }
  _tile_release();
}

template <class Products>
struct Tiles {
  using Arithmetic = Products;
  using Real = typename Products::Real;
  static constexpr int width = 16, elem = 2, tile_bytes = kTileBytes, max_rows = kMaxRows;
  static constexpr bool overlaps = true;  // the tile unit works in parallel with the vector units
  static void enter(int rows) { configure(rows); }
  static void leave() { _tile_release(); }
  template <class Overlap>
  static void multiply(const ProductOf<Real>& p, Overlap& overlapped) {
    p.tiles == 2 ? multiply_two<Products>(p, overlapped) : multiply_one<Products>(p, overlapped);
  }
};

struct Amx : Tiles<Bf16Products> {
  using CodeProduct = VnniProduct<16>;
  using Vector = F32<16>;
  static constexpr DType panel = DType::bf16;
  static void lora_wgrad(const LoraWgrad& o) { wgrad_tiles(o); }
  static void store_grad(const StoreGrad& d) { store_grad_sums<Vector>(d, in_order); }
  static Tiling tiling(int32_t live) {
    int32_t tiles = (live + kMaxRows - 1) / kMaxRows;
    return {tiles ? (live + tiles - 1) / tiles : 1, tiles};
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

constexpr KernelTable kBf16 = table_of<Amx, Tiles<Int8Products>, GemvAmx>("amx");

}  // namespace

extern const KernelTables kernels_amx;
const KernelTables kernels_amx = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
