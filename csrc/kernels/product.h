// One block product of an expert, the unit that an ISA's `multiply` computes, and the work that is overlapped with it:
// prefetching the next weights, the epilogue of the previous product, dequantising, transposing.
#pragma once

#include "kernels/decode_blocks.h"
#include "kernels/elementwise.h"
#include "kernels/transpose_blocks.h"

namespace kt {
namespace {

// Cache lines to prefetch during one pass over K: `lines` of 64 bytes at every k step, starting at `at`.
struct Prefetch {
  const char* at;
  int lines;
};
constexpr Prefetch kNoPrefetch = {nullptr, 0};

// A quarter of this step's lines; called four times a step, between the arithmetic instructions.
inline void prefetch_quarter(const Prefetch& prefetch, int quarter) {
  int first = prefetch.lines * quarter / 4, last = prefetch.lines * (quarter + 1) / 4;
  for (int i = first; i < last; i++) __builtin_prefetch(prefetch.at + i * 64, 0, 2);
}

// The lines that pass `pass` of `passes` prefetches of the block at `next`, which has k_tiles pairs of tiles.
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

// Arguments of `multiply`: token tiles [tile, tile + tiles) of the contraction, with `live` rows.
template <class Real>
struct ProductOf {
  Contraction contraction;
  int block, tile, tiles, rows, live;
  bool accumulate;
  Prefetch prefetch;
  Real* c;  // [tiles * rows][32]
  const LoraTerm* lora_term;
  int lora_terms, block0;
  const float* lora_sums = nullptr;  // W8A8: the sum of the LoRA terms, [tiles * rows][32], or null
};
using Product = ProductOf<float>;

// Calls act for the LoRA terms of this product's token tiles, each at the product's block.
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

// Rows of the previous product whose epilogue is still to run. `multiply` calls step() once per k step, or all() at
// once.
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
  // int8 has half as many k steps, so several rows are due in each; running a few together shares their setup.
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

// Work overlapped with a product: the epilogue of the previous one and, where blocks are encoded or transposed,
// dequantising or transposing the next ones.
template <class Rows, class Decoding, class BlockTransposer>
struct OverlappedWork {
  Rows& rows;
  Decoding* decoding;           // null: blocks are plain tiles
  BlockTransposer* transposer;  // null: blocks are not transposed

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

// Only the LoRA terms of a product, stored to p.c or added to it. Returns whether p.c holds sums.
template <class Isa>
inline bool multiply_lora_terms(const ProductOf<typename Isa::Real>& p) {
  NoOverlap no_overlap;
  ProductOf<typename Isa::Real> q = p;
  q.prefetch = kNoPrefetch;
  q.lora_terms = 0;
  for_each_lora_term(p, [&](const Contraction& s) {
    q.contraction = s;
    Isa::multiply(q, no_overlap);
    q.accumulate = true;
  });
  return q.accumulate;
}

}  // namespace
}  // namespace kt
