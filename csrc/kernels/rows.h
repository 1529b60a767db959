// `multiply` for CPUs without tiles: a few token rows at a time in vector registers, weights widened on the fly.
//
// A weight vector holds, for W outputs, the neighbours k and k + 1 as bf16. Where the CPU has no bf16 product, a shift
// and a mask make two f32 vectors of it (exactly), each multiplied with the broadcast activation of its k. The exact
// precisions (f32, f64) have one k per vector. NV vectors and MR rows fill the register file; a block of 32 outputs
// takes 32 / (NV * W) sweeps over K, or one for few rows.
#pragma once

#include "kernels/gemm.h"
#include "kernels/lora_wgrad.h"

namespace kt {
namespace {

// acc[m] += x[m][k] * w[k] in the type of the sums.
template <class V>
struct Exact {
  using Vector = V;
  static constexpr int elem = sizeof(Lane<V>), step_k = 1, step_bytes = elem, tile_bytes = kTileK * kTileN * elem;
  static constexpr DType panel = kDouble<V> ? DType::f64 : DType::f32;
  static V unpack(const char* w) { return load<V>(w); }
  static V step(V acc, const char* x, const V& w) { return acc + load<Lane<V>>(x) * w; }
};

// acc[m] += x[m][k] * w[k] + x[m][k + 1] * w[k + 1] in f32, activations f32.
template <int W>
struct WidenToF32 {
  using Vector = F32<W>;
  static constexpr int elem = 4, step_k = 2, step_bytes = 8, tile_bytes = kTileBytes;
  static constexpr DType panel = DType::f32;
  using F32Tiles = Exact<F32<W>>;  // takes the same panel
  struct Pair {
    F32<W> low, high;
  };
  static Pair unpack(const char* w) {
    U32<W> u = load<U32<W>>(w);
    return {(F32<W>)(u << 16), (F32<W>)(u & 0xffff0000u)};
  }
  static F32<W> step(F32<W> acc, const char* x, const Pair& w) {
    acc = acc + load<float>(x) * w.low;
    return acc + load<float>(x + 4) * w.high;
  }
};

// acc[m] += four int8 products by a dp4a. A row of an int8 tile is as long as one of bf16 pairs, and the panel's row
// stride is that of the variant's floats. Weights that are too large for the dp4a by `offset` are compensated: the sums
// of a row start from -offset times the sum of its activations.
template <class Dot, DType panel_type = DType::f32>
struct Int8Product {
  static constexpr int W = Dot::width, elem = (int)size_of(panel_type), step_k = 2, step_bytes = 4;
  static constexpr int tile_bytes = kTileBytes;
  static constexpr DType panel = panel_type;
  using Vector = I32<W>;
  using Dp4a = Dot;
  static auto unpack(const char* w) { return Dp4a::unpack(load<U32<W>>(w)); }
  template <class Unpacked>
  static I32<W> step(I32<W> acc, const char* x, const Unpacked& w) {
    return Dp4a::add(acc, w, Dp4a::unpack_x(U32<W>{} + load<uint32_t>(x)));
  }
  static void begin(const char* a, int live, int tile_rows, int steps, bool accumulate, int32_t* c)
    requires(Dot::offset > 0)
  {
    constexpr int row = kTileK * elem;
    for (int m = 0; m < live; m++, a += row, c += kBlockN) {
      I32<W> sums = {};
      for (int s = 0; s < steps; s++)
        for (int i = 0; i < kStepK; i += 4 * W)
          sums =
              Dp4a::add(sums, U32<W>{} + Dot::offset * 0x01010101u, load<U32<W>>(a + s * (int64_t)tile_rows * row + i));
      int32_t sum = 0;
      for (int i = 0; i < W; i++) sum += sums[i];
      for (int i = 0; i < kBlockN; i += W) store(c + i, (accumulate ? load<I32<W>>(c + i) : I32<W>{}) - sum);
    }
  }
};

// Both sides widened to pairs of 16 bits.
template <int W>
using WidenInt8 = Int8Product<WideningDp4a<W>>;

// The same with one lane per byte, for CPUs without a product of 16-bit pairs.
template <int W>
struct WidenInt8PerLane {
  using Vector = I32<W>;
  static constexpr int elem = 4, step_k = 2, step_bytes = 4, tile_bytes = kTileBytes;
  static constexpr DType panel = DType::f32;
  using Dp4a = WideningDp4a<W>;
  struct Four {
    I32<W> k[4];
  };
  static Four unpack(const char* w) {
    I32<W> v = load<I32<W>>(w);
    return {{v << 24 >> 24, v << 16 >> 24, v << 8 >> 24, v >> 24}};
  }
  static I32<W> step(I32<W> acc, const char* x, const Four& w) {
    for (int i = 0; i < 4; i++) acc += w.k[i] * (int32_t)(int8_t)x[i];
    return acc;
  }
};

// Byte offset of output n in a block.
template <class Arith>
constexpr int column_at(int n) {
  return n / kTileN * Arith::tile_bytes + n % kTileN * (Arith::tile_bytes / kTileK / kTileN) * Arith::step_k;
}

// Steps whose activations one load of a row brings; `step<i>` then takes the i-th of them.
template <class Arith>
constexpr int kStepsTogether = 1;
template <class Arith>
  requires requires { Arith::steps_together; }
constexpr int kStepsTogether<Arith> = Arith::steps_together;

template <class Arith, int i, class V, class Unpacked>
inline V step_of(V acc, const char* x, const Unpacked& w) {
  if constexpr (kStepsTogether<Arith> > 1) {
    return Arith::template step<i>(acc, x, w);
  } else {
    return Arith::step(acc, x, w);
  }
}

// One step of K. The loops over rows and vectors are unrolled by hand: gcc leaves long ones, and their accumulators in
// memory. Rows at `x` times NV vectors of weights at `b`.
template <class Arith, int i, int NV, int rows>
inline void add_step(const char* x, const char* b, typename Arith::Vector (&acc)[rows][NV]) {
  constexpr int W = kLanes<typename Arith::Vector>, row = kTileK * Arith::elem;
  auto weights = [&](int v) { return Arith::unpack(b + column_at<Arith>(v * W)); };
  if constexpr (rows > NV) {
    decltype(Arith::unpack(b)) w[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) w[v] = weights(v);
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[m][v] = step_of<Arith, i>(acc[m][v], x + m * row, w[v]);
  } else {
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      auto w = weights(v);
#pragma GCC unroll 16
      for (int m = 0; m < rows; m++) acc[m][v] = step_of<Arith, i>(acc[m][v], x + m * row, w);
    }
  }
}

template <class Arith, int NV, int rows>
inline void rows_by_columns(const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate,
                            Prefetch prefetch, Lane<typename Arith::Vector>* c) {
  using V = typename Arith::Vector;
  // A row of a tile holds step_k steps of K for 16 outputs.
  constexpr int W = kLanes<V>, steps = kTileK / Arith::step_k, row_bytes = Arith::tile_bytes / steps;
  V acc[rows][NV];
#pragma GCC unroll 16
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[m][v] = accumulate ? load<V>(c + m * kBlockN + v * W) : V{};
  for (int kt = 0; kt < k_tiles; kt++) {
    for (int p = 0; p < steps; p += kStepsTogether<Arith>) {
      if (p % (steps / 4) == 0) prefetch_quarter(prefetch, p / (steps / 4));
      const char *x = a + p * Arith::step_bytes, *w = b + p * row_bytes;
      add_step<Arith, 0>(x, w, acc);
      if constexpr (kStepsTogether<Arith> == 2) add_step<Arith, 1>(x, w + row_bytes, acc);
    }
    a += tile_rows * kTileK * Arith::elem;
    b += 2 * Arith::tile_bytes;
    prefetch.at += prefetch.lines * 64;
  }
#pragma GCC unroll 16
  for (int m = 0; m < rows; m++)
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) store(c + m * kBlockN + v * W, acc[m][v]);
}

// Vectors of outputs in one sweep over K. Few rows leave registers for the whole block, whose weights are then read in
// one sequential sweep.
template <class Arith, int NV, int rows>
constexpr int vectors_of_rows() {
  constexpr int all = kBlockN / kLanes<typename Arith::Vector>;
  if constexpr (requires { Arith::template vectors<rows>; }) {
    return Arith::template vectors<rows>;
  } else {
    return rows * all <= 8 ? all : NV;
  }
}

// k tiles that all sweeps of a block take before the next ones, so that activations and weights stay in L1 between
// them; 0: all at once.
template <class Arith>
constexpr int kChunkTiles = 0;
template <class Arith>
  requires requires { Arith::chunk_tiles; }
constexpr int kChunkTiles<Arith> = Arith::chunk_tiles;

// Dispatches to the instance for exactly `live` rows, 1 ... rows.
template <class Arith, int NV, int rows>
inline void tile_by_block(int live, const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate,
                          Prefetch prefetch, Lane<typename Arith::Vector>* c) {
  constexpr int W = kLanes<typename Arith::Vector>;
  if (live == rows) {
    constexpr int NW = vectors_of_rows<Arith, NV, rows>();
    const int chunk = kChunkTiles<Arith> && NW * W < kBlockN ? kChunkTiles<Arith> : k_tiles;
    for (int k = 0; k < k_tiles; k += chunk) {
      const int now = k_tiles - k < chunk ? k_tiles - k : chunk;
      Prefetch ahead = prefetch;
      for (int column = 0; column < kBlockN; column += NW * W) {
        const char* at = b + column_at<Arith>(column);
        if constexpr (requires { Arith::template sweep<NW, rows>(a, tile_rows, at, now, accumulate, ahead, c); }) {
          Arith::template sweep<NW, rows>(a, tile_rows, at, now, accumulate, ahead, c + column);
        } else {
          rows_by_columns<Arith, NW, rows>(a, tile_rows, at, now, accumulate, ahead, c + column);
        }
        ahead.lines = 0;
      }
      a += (int64_t)now * tile_rows * kTileK * Arith::elem;
      b += (int64_t)now * 2 * Arith::tile_bytes;
      prefetch.at += (int64_t)now * prefetch.lines * 64;
      accumulate = true;
    }
  } else if constexpr (rows > 1) {
    tile_by_block<Arith, NV, rows - 1>(live, a, tile_rows, b, k_tiles, accumulate, prefetch, c);
  }
}

// The int8 form, compiled once for all callers. `Arith::begin`, where it exists, initialises the sums that the products
// add to.
template <class Arith, int NV, int MR>
__attribute__((noinline)) void int8_tile_by_block(int live, const char* a, int tile_rows, const char* b, int steps,
                                                  bool accumulate, Prefetch prefetch, int32_t* c) {
  if constexpr (requires { Arith::begin(a, live, tile_rows, steps, accumulate, c); }) {
    Arith::begin(a, live, tile_rows, steps, accumulate, c);
    accumulate = true;
  }
  tile_by_block<Arith, NV, MR>(live, a, tile_rows, b, steps, accumulate, prefetch, c);
}

template <class Arith, int NV, int MR>
struct RowIsa;

// The form of an ISA that multiplies tiles of f32, where its own are of bf16 and widened.
template <class Arith, int NV, int MR>
struct F32TilesOf {};
template <class Arith, int NV, int MR>
  requires requires { typename Arith::F32Tiles; }
struct F32TilesOf<Arith, NV, MR> {
  using F32Tiles = RowIsa<typename Arith::F32Tiles, NV, MR>;
};

// An ISA that multiplies rows: MR rows by NV vectors in registers.
template <class Arith, int NV, int MR>
struct RowIsa : F32TilesOf<Arith, NV, MR> {
  using Arithmetic = Arith;
  using Vector = typename Arith::Vector;
  using Real = Lane<Vector>;
  static constexpr int width = kLanes<Vector>, elem = Arith::elem, tile_bytes = Arith::tile_bytes, max_rows = MR;
  static constexpr bool overlaps = false;
  static constexpr DType panel = Arith::panel;
  static void enter(int) {}
  static void leave() {}
  static Tiling tiling(int32_t live) { return {MR, (live + MR - 1) / MR}; }
  static void lora_wgrad(const LoraWgrad& o) { run_lora_wgrad<Vector, panel>(o); }
  static void store_grad(const StoreGrad& d) {
    store_grad_sums<Vector>(d, [](auto&) {});
  }
  // The vector units compute the product itself, so interleaving an epilogue with it gains nothing.
  template <class Overlap>
  static void multiply(const ProductOf<Real>& p, Overlap& overlapped) {
    overlapped.all();
    for (int t = 0; t < p.tiles; t++) {
      int live = p.live - t * p.rows < p.rows ? p.live - t * p.rows : p.rows;
      Prefetch prefetch = p.prefetch;
      if (t > 0) prefetch.lines = 0;
      Real* c = p.c + t * p.rows * kBlockN;
      auto add = [&](const Contraction& s, bool accumulate, Prefetch fetch) {
        const char* a = s.a + (p.tile + t) * (int64_t)s.a_tile;
        if constexpr (kIntegerSums<RowIsa>) {
          int8_tile_by_block<Arith, NV, MR>(live, a, p.rows, s.b, s.k_tiles, accumulate, fetch, c);
        } else {
          tile_by_block<Arith, NV, MR>(live, a, p.rows, s.b, s.k_tiles, accumulate, fetch, c);
        }
      };
      add(p.contraction, p.accumulate, prefetch);
      for_each_lora_term(p, [&](const Contraction& s) { add(s, true, kNoPrefetch); });
    }
  }
};

}  // namespace
}  // namespace kt
