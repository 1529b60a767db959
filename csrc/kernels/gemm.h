// The two products of an expert, written once for every ISA.
//
// An ISA brings `multiply`: up to two token tiles against one weight block of 32 outputs, into f32 [rows][32]. Around it
// stand the loops over blocks and token tiles, the activation that turns gate and up into the hidden panel, and the
// scaled addition of down's rows into the running sums. Weights are the stream: while one block is multiplied, the next
// one is fetched into L2, its lines spread evenly over all the k steps of the current one, so that memory and arithmetic
// work at the same time. What one token gets does not depend on its neighbours in the tile or on the number of threads:
// every row sees the same additions in the same order.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/pack.h"

namespace kt {
namespace {

// The lines to fetch during one pass over K: `lines` of 64 bytes at every k step, from `at` on.
struct Ahead {
  const char* at;
  int lines;
};

inline void prefetch(Ahead& ahead) {
  for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.at + i * 64, 0, 2);
  ahead.at += ahead.lines * 64;
}

// Part `pass` of `passes` of the block at `next`, which is k_tiles * 2 KB long.
inline Ahead share(const char* next, int pass, int passes, int k_tiles) {
  if (!next) return {nullptr, 0};
  int lines = (2 * kTileBytes / 64 + passes - 1) / passes;
  int64_t from = (int64_t)pass * lines * 64 * k_tiles;
  if (from >= (int64_t)k_tiles * 2 * kTileBytes) return {nullptr, 0};
  return {next + from, lines};
}

// What `multiply` gets: token tiles [tile, tile + tiles) of the stretch, `live` rows in them.
struct Product {
  Stretch s;
  int tile, tiles, rows, live;
  bool accumulate;
  Ahead ahead;
  float* c;  // [tiles * rows][32]
};

constexpr int kPassTiles = 2;

template <class Isa, Activation A>
inline void hidden_row(const float* c, const Gate& gate, const float* bias, char* out) {
  constexpr int W = Isa::width;
  for (int i = 0; i < (gate.gated ? kTileN : kBlockN); i += W) {
    F32<W> g = load<F32<W>>(c + i), h;
    if (bias) g += load<F32<W>>(bias + i);
    if (gate.gated) {
      F32<W> u = load<F32<W>>(c + kTileN + i);
      if (bias) u += load<F32<W>>(bias + kTileN + i);
      h = gated<W, A>(g, u, gate);
    } else {
      h = activate<W, A>(g, gate.alpha);
    }
    if (Isa::elem == 2) {
      to_bf16<W>(out + i * 2, h);
    } else {
      store(out + i * 4, h);
    }
  }
}

template <class Isa, Activation A>
inline void hidden_rows(const Up& u, int block, int tile, int live, const float* c) {
  const float* bias = u.bias ? u.bias + (int64_t)block * kBlockN : nullptr;
  int column = u.gate.gated ? block * kTileN : block * kBlockN;
  int64_t row_bytes = kTileK * Isa::elem, tile_bytes = row_bytes * u.tiling.rows * u.hidden_k_tiles;
  char* panel = u.hidden + (column / kTileK) * row_bytes * u.tiling.rows + (column % kTileK) * Isa::elem;
  for (int r = 0; r < live; r++) {
    char* out = panel + (tile + r / u.tiling.rows) * tile_bytes + (r % u.tiling.rows) * row_bytes;
    hidden_row<Isa, A>(c + r * kBlockN, u.gate, bias, out);
  }
}

template <class Isa>
inline void activate_rows(const Up& u, int block, int tile, int live, const float* c) {
  switch (u.gate.kind) {
    case Activation::silu: return hidden_rows<Isa, Activation::silu>(u, block, tile, live, c);
    case Activation::gelu: return hidden_rows<Isa, Activation::gelu>(u, block, tile, live, c);
    case Activation::gelu_tanh: return hidden_rows<Isa, Activation::gelu_tanh>(u, block, tile, live, c);
    case Activation::relu2: return hidden_rows<Isa, Activation::relu2>(u, block, tile, live, c);
    case Activation::swiglu_oai: return hidden_rows<Isa, Activation::swiglu_oai>(u, block, tile, live, c);
  }
}

// Calls `body(block, tile, product)` for every block and every pair of token tiles, weights prefetched one block ahead.
template <class Isa, class Unit, class Body>
inline void for_each_product(const Unit& u, Body&& body) {
  int passes = (u.tiling.tiles + kPassTiles - 1) / kPassTiles;
  Isa::enter(u.tiling.rows);
  for (int block = u.block0; block < u.block1; block++) {
    Product p;
    p.s = u.base;
    p.s.b += (block - u.block0) * u.block_bytes;
    p.rows = u.tiling.rows;
    const char* next = block + 1 < u.block1 ? p.s.b + u.block_bytes : u.next;
    for (int pass = 0; pass < passes; pass++) {
      p.tile = pass * kPassTiles;
      p.tiles = u.tiling.tiles - p.tile < kPassTiles ? u.tiling.tiles - p.tile : kPassTiles;
      p.live = u.live - p.tile * p.rows < p.tiles * p.rows ? u.live - p.tile * p.rows : p.tiles * p.rows;
      p.ahead = share(next, pass, passes, u.base.k_tiles);
      body(block, p);
    }
  }
  Isa::leave();
}

template <class Isa>
void run_up(const Up& u) {
  bool whole = u.first && u.last;
  int64_t block_sums = (int64_t)u.tiling.tiles * u.tiling.rows * kBlockN;
  for_each_product<Isa>(u, [&](int block, Product& p) {
    p.accumulate = !u.first;
    p.c = whole ? u.scratch : u.sums + (block - u.block0) * block_sums + (int64_t)p.tile * p.rows * kBlockN;
    Isa::multiply(p);
    if (u.last) activate_rows<Isa>(u, block, p.tile, p.live, p.c);
  });
}

template <int W>
inline void write_columns(const Down& d, int token, int column, const F32<W> (&v)[kBlockN / W]) {
  int64_t at = token * d.out_stride + column;
  if (column + kBlockN <= d.width) {
    for (int i = 0; i < kBlockN / W; i++) store_as<W>(d.out, at + i * W, d.dtype, v[i]);
    return;
  }
  alignas(64) char edge[kBlockN * 4];
  for (int i = 0; i < kBlockN / W; i++) store_as<W>(edge, i * W, d.dtype, v[i]);
  size_t size = size_of(d.dtype);
  __builtin_memcpy((char*)d.out + at * (int64_t)size, edge, (d.width - column) * size);
}

// Row r of one expert's block joins its token's sum: stored if first, added otherwise, rounded into the output if last.
template <int W>
inline void add_row(const Down& d, int block, int r, const float* c) {
  int token = d.rows.token[r];
  uint8_t mark = d.rows.mark[r];
  bool starts = d.first && (mark & kFirst), ends = d.last && (mark & kLast);
  float* sum = d.sum + (block - d.block0) * d.sum_block + (int64_t)token * kBlockN;
  F32<W> v[kBlockN / W], scale = splat<W>(d.rows.weight[r]);
  for (int i = 0; i < kBlockN / W; i++) {
    F32<W> x = load<F32<W>>(c + i * W);
    if (d.bias && d.first) x += load<F32<W>>(d.bias + (int64_t)block * kBlockN + i * W);
    v[i] = starts ? x * scale : load<F32<W>>(sum + i * W) + x * scale;
  }
  if (ends) {
    write_columns<W>(d, token, block * kBlockN, v);
  } else {
    for (int i = 0; i < kBlockN / W; i++) store(sum + i * W, v[i]);
  }
}

template <class Isa>
void run_down(const Down& d) {
  for_each_product<Isa>(d, [&](int block, Product& p) {
    p.accumulate = false;
    p.c = d.scratch;
    Isa::multiply(p);
    for (int r = 0; r < p.live; r++) add_row<Isa::width>(d, block, p.tile * p.rows + r, p.c + r * kBlockN);
  });
}

}  // namespace
}  // namespace kt
