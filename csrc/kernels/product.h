// One product of an expert, as an ISA gets it, and what a core does beside it: fetch the weights that come next, finish
// the rows of the last product, decode.
#pragma once

#include "kernels/decode_blocks.h"
#include "kernels/elementwise.h"
#include "kernels/transpose_blocks.h"

namespace kt {
namespace {

// The lines to fetch during one pass over K: `lines` of 64 bytes at every k step, from `at` on.
struct Prefetch {
  const char* at;
  int lines;
};
constexpr Prefetch kNoPrefetch = {nullptr, 0};

// A quarter of this step's lines; called four times a step, between the instructions that keep the core busy.
inline void prefetch_quarter(const Prefetch& prefetch, int quarter) {
  int first = prefetch.lines * quarter / 4, last = prefetch.lines * (quarter + 1) / 4;
  for (int i = first; i < last; i++) __builtin_prefetch(prefetch.at + i * 64, 0, 2);
}

// Part `pass` of `passes` of the block at `next`, of k_tiles pairs of tiles.
inline Prefetch prefetch_share(const char* next, int pass, int passes, int k_tiles, int tile_bytes) {
  int all = 2 * tile_bytes / 64, lines = (all + passes - 1) / passes;
  if (!next || pass * lines >= all) return kNoPrefetch;
  return {next + (int64_t)pass * lines * 64 * k_tiles, lines};
}

// The same for an encoded block of `bytes`.
inline Prefetch prefetch_share_encoded(const char* next, int pass, int passes, int k_tiles, int64_t bytes) {
  int lines = (int)ceil_div(bytes, 64ll * passes * k_tiles);
  int64_t first = (int64_t)pass * lines * 64 * k_tiles;
  if (!next || first >= bytes) return kNoPrefetch;
  return {next + first, lines};
}

// What `multiply` gets: token tiles [tile, tile + tiles) of the stretch, `live` rows in them.
template <class Real>
struct ProductOf {
  Contraction contraction;
  int block, tile, tiles, rows, live;
  bool accumulate;
  Prefetch prefetch;
  Real* c;  // [tiles * rows][32]
  const LoraTerm* lora_term;
  int lora_terms, block0;
  const float* lora_sums = nullptr;  // of bytes: what the extras add, [tiles * rows][32], or nothing
};
using Product = ProductOf<float>;

// The stretches that join this product, each at the product's block.
template <class Real, class Act>
inline void for_each_lora_term(const ProductOf<Real>& p, Act&& act) {
  for (int i = 0; i < p.lora_terms; i++) {
    const LoraTerm& x = p.lora_term[i];
    if (x.tile1 <= p.tile || p.tile + p.tiles <= x.tile0) continue;
    Contraction s = x.contraction;
    s.b += (p.block - p.block0) * (int64_t)x.block_bytes;
    act(s);
  }
}

constexpr int kPassTiles = 2;

// The rows of the last product that are not finished yet. `multiply` calls step() once per k step, or all() at once.
template <class Real, class Epilogue>
class PendingRows {
 public:
  explicit PendingRows(const Epilogue& epilogue) : epilogue_(epilogue) {}
  void set(const ProductOf<Real>& p) {
    product_ = p;
    next_ = due_ = 0;
    per_step_ = (p.live + p.contraction.k_tiles - 1) / p.contraction.k_tiles;
  }
  void step() {
    due_ += per_step_;
    if (due_ >= next_ + kRowsTogether && next_ < product_.live) finish_rows(due_);
  }
  void all() {
    if (next_ < product_.live) finish_rows(product_.live);
  }

 private:
  // Steps of bytes are half as many, so several rows would be due in each; a few at once share what they have in
  // common.
  static constexpr int kRowsTogether = (Real)0.5 == 0 ? 4 : 1;

  __attribute__((noinline)) void finish_rows(int end) {
    if (end > product_.live) end = product_.live;
    epilogue_(product_, next_, end);
    next_ = end;
  }
  const Epilogue& epilogue_;
  ProductOf<Real> product_ = {};
  int next_ = 0, due_ = 0, per_step_ = 0;
};

// What a core does beside a product: finish the rows of the last one and, where the blocks are encoded, decode, or turn
// the next of them.
template <class Rows, class Decoding, class BlockTransposer>
struct OverlappedWork {
  Rows& rows;
  Decoding* decoding;           // null: blocks are tiles
  BlockTransposer* transposer;  // null: they lie as they are read

  // The k-th pair of weight tiles.
  const char* tiles(const char* b, int k, int tile_bytes) {
    return decoding ? decoding->tiles(k) : b + (int64_t)k * 2 * tile_bytes;
  }
  void step() {
    rows.step();
    if (transposer) transposer->step();
  }
  void all() { rows.all(); }
};

struct NoOverlap {
  static const char* tiles(const char* b, int k, int tile_bytes) { return b + (int64_t)k * 2 * tile_bytes; }
  void step() {}
  void all() {}
};

}  // namespace
}  // namespace kt
