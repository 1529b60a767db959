// Gradients of LoRA's factors.
//
// With x, h the inputs of gate/up and down, g the gradient of gate/up, y that of the output (times the routing weight w
// where it says so), B' = scale * B, and sums over the rows of one expert that carry the adapter:
//
//   gate/up:  dA = (g B')^T x    dB = scale g^T (x A^T)    and g B' A joins the gradient of x
//   down:     dA = (w y B')^T h  dB = scale (w y)^T (h A^T)  and y B' A joins the gradient of h
//
// So there are four rank panels. Those of x and y are made before anything else, those of h and g once a segment's
// units are done; the contractions over rows come last, a few hundred columns of one factor of one expert at a time,
// each by one thread in the order of the rows, so that the bits do not depend on the threads.
#include <algorithm>
#include <cstring>

#include "futex.h"
#include "moe/moe.h"

namespace kt {

// Pieces of rows: x times A of gate/up, and y times B of down.
void Backward::before_units(char* slice) {
  for (int32_t n; (n = next_piece_++) < (int32_t)plan_.pieces.size();) {
    const Piece& piece = plan_.pieces[(size_t)n];
    narrow_piece(piece, slice);
    ranks_left_[(size_t)piece.segment].fetch_sub(1, std::memory_order_acq_rel);
  }
}

void Backward::await_ranks(size_t segment) const {
  for (int looks = 0; ranks_left_[segment].load(std::memory_order_acquire); looks++)
    looks < 1000 ? relax() : (void)sched_yield();
}

void Backward::narrow_piece(const Piece& piece, char* slice) {
  const KernelTable& kernels = experts_.kernels();
  const Segment& segment = routing_.segments[(size_t)piece.segment];
  UnitRows r = rows_of(piece);
  int64_t tile_bytes = (int64_t)r.tiling.rows * kTileK * kernels.elem;
  int32_t all = experts_.weights().up().k_tiles();
  char* turned = slice + plan_.turned_at;
  const std::vector<uint32_t> none;

  for (bool output : {false, true}) {
    Gather gather = output ? gather_of(piece, r, gradients_.out, gradients_.out_dtype, gradients_.out_stride, slice)
                           : gather_of(piece, r, batch_.hidden, batch_.hidden_dtype, batch_.hidden_stride, slice);
    for (int32_t k = 0; k < all; k += r.chunk) {
      int32_t now = std::min(r.chunk, all - k);
      gather.k0 = k * kTileK;
      gather.k_tiles = now;
      bool gathered = false;
      const char* rows_in = slice;
      char* sums = slice + plan_.rank_sums_at;
      for_runs((size_t)piece.segment, [&](const Run& run, const RankPanels& ranks, const Adapter& adapter) {
        int32_t k_tiles = output ? adapter.down_tiles() : adapter.wide_tiles();
        int32_t tile0 = std::max(ranks.tile0, piece.tile0), tile1 = std::min(ranks.tile1, piece.tile1);
        if (tile0 >= tile1 || !k_tiles) return;
        if (!gathered) {
          kernels.gather(gather);
          // Dropout is of LoRA's inputs: of x here, not of y.
          rows_in = thin(slice, r.tiling, r.live, gather.k0, now,
                         drop_from(output ? none : routing_.drop_x, segment.begin + r.first), slice);
        }
        gathered = true;
        Tiling tiling{r.tiling.rows, tile1 - tile0};
        int32_t live = std::min(segment.count - tile0 * tiling.rows, tiling.tiles * tiling.rows);
        int64_t panel_tile = tile_bytes * k_tiles;
        char* panel = workspace_.data() + (output ? ranks.yb : ranks.xa) + (tile0 - (ranks.tile0 - 1)) * panel_tile;
        Stretch base{rows_in + (tile0 - piece.tile0) * tile_bytes * now, (size_t)(tile_bytes * now), nullptr, now};
        bool first = k == 0, last = k + now == all;
        int64_t block_sums = (int64_t)tiling.tiles * tiling.rows * kBlockN * kernels.sum_bytes;
        if (output) {
          for (int32_t i = 0; i < k_tiles; i++) {
            turn(adapter.down_b(), segment.expert, k, now, i, turned);
            base.b = turned;
            narrow({base, 0, i, i + 1, first, last, sums}, tiling, live, panel, k_tiles, slice);
            sums += block_sums;
          }
        } else {
          base.b = adapter.wide_a().at(segment.expert, 0, k);
          narrow({base, adapter.wide_a().block_bytes(), 0, k_tiles, first, last, sums}, tiling, live, panel, k_tiles,
                 slice);
          sums += block_sums * k_tiles;
        }
        if (!last) return;
        // The ends of the run's panel belong to its first and its last piece.
        int32_t before = tile0 == ranks.tile0 ? 1 : 0, after = tile1 == ranks.tile1 ? 1 : 0;
        clear_others(run, tile0 - before, tile1 + after, k_tiles, panel - before * panel_tile);
      });
    }
  }
}

// h times A of down, and g times B of gate/up.
void Backward::narrow_gradients(size_t index, char* slice) {
  if (!plan_.rows_at.empty()) narrow_rows(index, workspace_.data() + plan_.rows_at[index], slice);
  const Segment& segment = routing_.segments[index];
  Tiling whole = plan_.tilings[index];
  int64_t tile_bytes = (int64_t)whole.rows * kTileK * experts_.kernels().elem;
  char* turned = slice + plan_.turned_at;
  for_runs(index, [&](const Run& run, const RankPanels& ranks, const Adapter& adapter) {
    int32_t k_tiles = adapter.wide_tiles();
    if (!k_tiles) return;
    Tiling tiling{whole.rows, ranks.tile1 - ranks.tile0};
    int32_t live = std::min(segment.count - ranks.tile0 * whole.rows, tiling.tiles * whole.rows);
    int64_t row_tile = tile_bytes * plan_.panel_k_tiles;
    Stretch base{panel_of(index) + ranks.tile0 * row_tile, (size_t)row_tile, turned, plan_.panel_k_tiles};
    char* panel = workspace_.data() + ranks.gb;
    for (int32_t i = 0; i < k_tiles; i++) {
      turn(adapter.wide_b(), segment.expert, 0, plan_.panel_k_tiles, i, turned);
      narrow({base, 0, i, i + 1, true, true, nullptr}, tiling, live, panel + tile_bytes * k_tiles, k_tiles, slice);
    }
    clear_others(run, ranks.tile0 - 1, ranks.tile1 + 1, k_tiles, panel);
  });
}

// A of down (or of gate/up) transposed, at columns of blocks [block0, block1), against the panels of y (or of g).
std::vector<Extra> Backward::turned_extras(const Piece& piece, Factor factor, int32_t block0, int32_t block1,
                                           char* slice) const {
  std::vector<Extra> extras;
  const Segment& segment = routing_.segments[(size_t)piece.segment];
  bool down = factor == Factor::down_a;
  char* turned = slice + plan_.rank_turned_at;
  for_runs((size_t)piece.segment, [&](const Run&, const RankPanels& ranks, const Adapter& adapter) {
    const BlockStore& store = down ? adapter.down_a() : adapter.wide_a();
    int32_t k_tiles = store.blocks();
    if (!k_tiles || ranks.tile1 <= piece.tile0 || piece.tile1 <= ranks.tile0) return;
    Extra extra = extra_of(piece, ranks, down ? ranks.yb : ranks.gb, k_tiles);
    extra.s.b = turned;
    extra.block_bytes = store.k_bytes(k_tiles);
    for (int32_t i = block0; i < block1; i++, turned += extra.block_bytes)
      turn(store, segment.expert, 0, k_tiles, i, turned);
    extras.push_back(extra);
  });
  return extras;
}

// Pieces of all factors of all experts of all adapters; experts without rows get zeros.
void Backward::after_lanes(char* slice) {
  if (gradients_.lora.empty()) return;
  const LayerShape& s = experts_.shape();
  int32_t blocks[4] = {experts_.weights().down().blocks(), experts_.weights().up().blocks(),
                       experts_.weights().down().k_tiles(), experts_.weights().down().blocks()};
  int32_t pieces[4], per_expert = 0;
  for (int f = 0; f < 4; f++) per_expert += pieces[f] = (int32_t)ceil_div(blocks[f] * kBlockN, columns_);
  int64_t all = (int64_t)adapters_.size() * s.experts * per_expert;
  for (int64_t n; (n = next_factor_++) < all;) {
    int32_t piece = (int32_t)(n % per_expert), expert = (int32_t)(n / per_expert % s.experts), factor = 0;
    while (piece >= pieces[factor]) piece -= pieces[factor++];
    factor_gradient((size_t)(n / per_expert / s.experts), expert, (Factor)factor, piece * columns_, slice);
  }
}

// The wide side of a contraction: rows of x or y by token, or of a panel.
Backward::WideRows Backward::wide_rows(Factor factor, const Run& run) const {
  Tiling t = plan_.tilings[(size_t)run.segment];
  DType panel_type = experts_.kernels().panel;
  int64_t block = (int64_t)t.rows * kTileK * experts_.kernels().elem;
  switch (factor) {
    case Factor::wide_a:
      return {(const char*)batch_.hidden, batch_.hidden_dtype, batch_.hidden_stride, 0, 0};
    case Factor::down_b:
      return {(const char*)gradients_.out, gradients_.out_dtype, gradients_.out_stride, 0, 0};
    case Factor::wide_b:
      return {panel_of((size_t)run.segment), panel_type, 0, block, plan_.panel_k_tiles};
    case Factor::down_a:
      break;
  }
  return {workspace_.data() + plan_.rows_at[(size_t)run.segment], panel_type, 0, block,
          experts_.weights().down().k_tiles()};
}

// `columns` columns of one factor's gradient from `column` on, into sums [rank][sums_stride()].
void Backward::contract(Factor factor, int32_t n, int32_t column, int32_t columns, int32_t rank, char* sums,
                        char* scratch) const {
  const Run& run = routing_.runs[(size_t)n];
  const RankPanels& ranks = plan_.ranks[(size_t)n];
  const Adapter& adapter = *adapters_[(size_t)run.adapter];
  int32_t begin = routing_.segments[(size_t)run.segment].begin, tile_rows = plan_.tilings[(size_t)run.segment].rows;
  const int32_t* token = routing_.token.data() + begin;
  bool down = factor == Factor::down_a || factor == Factor::down_b;
  int64_t panels[] = {ranks.gb, ranks.xa, ranks.yb, ranks.ha};  // in the order of Factor
  int64_t rank_row = (int64_t)kTileK * experts_.kernels().elem, rank_block = rank_row * tile_rows;
  int64_t rank_tile = rank_block * (down ? adapter.down_tiles() : adapter.wide_tiles());
  const char* panel = workspace_.data() + panels[(size_t)factor] - (ranks.tile0 - 1) * rank_tile;
  WideRows wide = wide_rows(factor, run);
  int64_t size = (int64_t)size_of(wide.dtype);
  const char *p[kOuterRows], *q[kOuterRows];
  for (int32_t row0 = run.first, end = run.first + run.count; row0 < end; row0 += kOuterRows) {
    int32_t rows = std::min(kOuterRows, end - row0);
    for (int32_t i = 0; i < rows; i++) {
      int32_t row = row0 + i, tile = row / tile_rows, in_tile = row % tile_rows;
      p[i] = panel + tile * rank_tile + in_tile * rank_row;
      q[i] = wide.data + (wide.block
                              ? (tile * (int64_t)wide.blocks + column / kBlockN) * wide.block + in_tile * kTileK * size
                              : (token[row] * wide.stride + column) * size);
    }
    Outer outer{};
    outer.p = p;
    outer.p_block = rank_block;
    outer.weight = down ? routing_.weight.data() + begin + row0 : nullptr;
    outer.rows = rows;
    outer.rank = rank;
    outer.q = q;
    outer.q_block = wide.block ? wide.block : kBlockN * size;
    outer.dtype = wide.dtype;
    outer.columns = columns;
    if (factor == Factor::wide_a) outer.drop = drop_from(routing_.drop_x, begin + row0);
    if (factor == Factor::down_a) outer.drop = drop_from(routing_.drop_h, begin + row0);
    outer.column = column;
    outer.first = row0 == run.first;
    outer.c = sums;
    outer.c_stride = sums_stride(columns_);
    outer.scratch = scratch;
    experts_.kernels().outer(outer);
  }
}

void Backward::factor_gradient(size_t index, int32_t expert, Factor factor, int32_t column, char* slice) {
  const Adapter& adapter = *adapters_[index];
  const LayerShape& s = experts_.shape();
  bool wide = factor == Factor::wide_a || factor == Factor::wide_b;
  int32_t rank = (int32_t)round_up(wide ? adapter.wide_rank() : adapter.ranks().down, kRankStep);
  if (!rank) return;
  int32_t width = s.hidden;
  if (factor == Factor::wide_b) width = experts_.weights().up().blocks() * kBlockN;
  if (factor == Factor::down_a) width = experts_.weights().down().k_tiles() * kTileK;
  int32_t columns = std::min(columns_, width - column);
  int64_t row_bytes = sums_stride(columns_) * experts_.kernels().sum_bytes;
  int32_t n = run_of_[index * (size_t)s.experts + (size_t)expert];
  if (n >= 0) {
    contract(factor, n, column, columns, rank, slice, slice + round_up(rank, kTileN) * row_bytes);
  } else {
    std::memset(slice, 0, (size_t)(rank * row_bytes));
  }
  deliver(index, expert, factor, column, columns, slice);
}

// Sums [rank][columns] into the caller's tensors: A as it lies, B turned and scaled.
void Backward::deliver(size_t index, int32_t expert, Factor factor, int32_t column, int32_t columns,
                       const char* sums) const {
  const LoraTargets& to = gradients_.lora[index];
  const Adapter& adapter = *adapters_[index];
  const LoraRanks& ranks = adapter.ranks();
  const LayerShape& s = experts_.shape();
  Deliver d{};
  d.c_stride = sums_stride(columns_);
  // Ranks [first, first + count) of the sums; element (r, n) of the tensor is `at` on.
  auto send = [&](const Target& t, int32_t first, int32_t count, int64_t at, int64_t r_stride, int64_t n_stride) {
    if (!t.data) return;
    d.c = sums + first * d.c_stride * experts_.kernels().sum_bytes;
    d.ranks = count;
    d.data = (char*)t.data + (expert * t.expert_stride + at) * (int64_t)size_of(t.dtype);
    d.dtype = t.dtype;
    d.r_stride = r_stride;
    d.n_stride = n_stride;
    experts_.kernels().deliver(d);
  };
  // They are rows of an A ...
  auto send_a = [&](const Target& t, int32_t first, int32_t count, int32_t width) {
    d.from = 0, d.each = kBlockN, d.count = std::min(columns, width - column), d.scale = 1;
    send(t, first, count, column * t.k_stride, t.n_stride, t.k_stride);
  };
  // ... or columns of a B, whose rows from `n` on are all of the sums' columns, or 16 of every 32.
  auto send_b = [&](const Target& t, int32_t first, int32_t count, double scale, int32_t from, int32_t each,
                    int32_t rows) {
    int32_t n = column / kBlockN * each;
    d.from = from, d.each = each, d.count = std::min(columns / kBlockN * each + columns % kBlockN, rows - n);
    d.scale = scale;
    send(t, first, count, n * t.n_stride, t.k_stride, t.n_stride);
  };
  switch (factor) {
    case Factor::wide_a:
      send_a(to.gate_a, 0, ranks.gate, s.hidden);
      if (!ranks.shared) send_a(to.up_a, adapter.up_at(), ranks.up, s.hidden);
      break;
    case Factor::down_a:
      send_a(to.down_a, 0, ranks.down, s.intermediate);
      break;
    case Factor::down_b:
      send_b(to.down_b, 0, ranks.down, to.down_scale, 0, kBlockN, s.hidden);
      break;
    case Factor::wide_b:
      if (s.gated) send_b(to.gate_b, 0, ranks.gate, to.gate_scale, 0, kTileN, s.intermediate);
      send_b(to.up_b, adapter.up_at(), ranks.up, to.up_scale, s.gated ? kTileN : 0, s.gated ? kTileN : kBlockN,
             s.intermediate);
  }
}

}  // namespace kt
