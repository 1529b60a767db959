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
    with_sums_of(experts_.kernels(), [&](auto zero) {
      size_t adapter = (size_t)(n / per_expert / s.experts);
      factor_gradient<decltype(zero)>(adapter, expert, (Factor)factor, piece * columns_, slice);
    });
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

// Rows [row0, row0 + rows) of a rank panel as [rows][rank] numbers, times the routing weight for the factors of down.
template <class Real>
void Backward::spread_ranks(Factor factor, int32_t n, int32_t row0, int32_t rows, int32_t rank, Real* out) const {
  const Run& run = routing_.runs[(size_t)n];
  const RankPanels& ranks = plan_.ranks[(size_t)n];
  const Adapter& adapter = *adapters_[(size_t)run.adapter];
  const double* weight = routing_.weight.data() + routing_.segments[(size_t)run.segment].begin;
  bool wide = factor == Factor::wide_a || factor == Factor::wide_b;
  int64_t at[] = {ranks.gb, ranks.xa, ranks.yb, ranks.ha};  // in the order of Factor
  const char* panel = workspace_.data() + at[(size_t)factor];
  int32_t tile_rows = plan_.tilings[(size_t)run.segment].rows;
  int64_t row_bytes = (int64_t)kTileK * experts_.kernels().elem, tile_bytes = row_bytes * tile_rows;
  int32_t k_tiles = wide ? adapter.wide_tiles() : adapter.down_tiles();
  for (int32_t row = row0; row < row0 + rows; row++, out += rank) {
    const char* from =
        panel + (row / tile_rows - (ranks.tile0 - 1)) * tile_bytes * k_tiles + (row % tile_rows) * row_bytes;
    Real scale = wide ? Real(1) : (Real)weight[row];
    for (int32_t c = 0; c < rank; c++) {
      const char* tile = from + (c / kTileK) * tile_bytes;
      out[c] = scale * element_of<Real>(tile, c % kTileK, experts_.kernels().panel);
    }
  }
}

// `columns` columns of one factor's gradient from `column` on, into sums [rank][columns_].
template <class Real>
void Backward::contract(Factor factor, int32_t n, int32_t column, int32_t columns, int32_t rank, Real* sums) const {
  const Run& run = routing_.runs[(size_t)n];
  int32_t begin = routing_.segments[(size_t)run.segment].begin, tile_rows = plan_.tilings[(size_t)run.segment].rows;
  const int32_t* token = routing_.token.data() + begin;
  WideRows wide = wide_rows(factor, run);
  int64_t size = (int64_t)size_of(wide.dtype);
  Real* p = sums + (int64_t)rank * columns_;
  const char* q[kOuterRows];
  for (int32_t row0 = run.first, end = run.first + run.count; row0 < end; row0 += kOuterRows) {
    int32_t rows = std::min(kOuterRows, end - row0);
    spread_ranks(factor, n, row0, rows, rank, p);
    for (int32_t i = 0; i < rows; i++) {
      int32_t row = row0 + i, tile = row / tile_rows;
      q[i] = wide.data + (wide.block ? (tile * (int64_t)wide.blocks + column / kBlockN) * wide.block +
                                           (row % tile_rows) * kTileK * size
                                     : (token[row] * wide.stride + column) * size);
    }
    Drop drop = factor == Factor::wide_a   ? drop_from(routing_.drop_x, begin + row0)
                : factor == Factor::down_a ? drop_from(routing_.drop_h, begin + row0)
                                           : Drop{};
    experts_.kernels().outer({(const char*)p, rows, rank, q, wide.block ? wide.block : kBlockN * size, wide.dtype,
                              columns, drop, column, (char*)sums, columns_, (char*)(p + (int64_t)kOuterRows * rank)});
  }
}

template <class Real>
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
  Real* sums = (Real*)slice;
  std::memset(sums, 0, (size_t)rank * columns_ * sizeof(Real));
  int32_t n = run_of_[index * (size_t)s.experts + (size_t)expert];
  if (n >= 0) contract(factor, n, column, columns, rank, sums);
  store_columns(index, expert, factor, column, columns, sums);
}

namespace {

// target(n + i, k + j) = scale * sums[i * i_step + j * j_step] for i < n_count, j < k_count.
template <class Real>
void store_piece(const Target& t, int32_t expert, int64_t n, int32_t n_count, int64_t k, int32_t k_count, Real scale,
                 const Real* sums, int64_t i_step, int64_t j_step) {
  if (!t.data) return;
  int64_t at = expert * t.expert_stride + n * t.n_stride + k * t.k_stride;
  for (int32_t i = 0; i < n_count; i++, at += t.n_stride, sums += i_step)
    for (int32_t j = 0; j < k_count; j++) set_element(t.data, at + j * t.k_stride, t.dtype, scale * sums[j * j_step]);
}

}  // namespace

// Sums [rank][columns] into the caller's tensors: A as it lies, B turned and scaled.
template <class Real>
void Backward::store_columns(size_t index, int32_t expert, Factor factor, int32_t column, int32_t columns,
                             const Real* sums) const {
  const LoraTargets& to = gradients_.lora[index];
  const Adapter& adapter = *adapters_[index];
  const LoraRanks& ranks = adapter.ranks();
  const LayerShape& s = experts_.shape();
  // Ranks [first, first + count) of the sums are rows of an A ...
  auto store_a = [&](const Target& t, int32_t first, int32_t count, int32_t width) {
    store_piece(t, expert, 0, count, column, std::min(columns, width - column), Real(1), sums + first * columns_,
                columns_, 1);
  };
  // ... or columns of a B, whose rows from n on are the sums' columns from c on.
  auto store_b = [&](const Target& t, int32_t first, int32_t count, double scale, int32_t n, int32_t n_count,
                     int32_t c) {
    store_piece(t, expert, n, n_count, 0, count, (Real)scale, sums + first * columns_ + c, 1, columns_);
  };
  if (factor == Factor::wide_a) {
    store_a(to.gate_a, 0, ranks.gate, s.hidden);
    if (!ranks.shared) store_a(to.up_a, adapter.up_at(), ranks.up, s.hidden);
  } else if (factor == Factor::down_a) {
    store_a(to.down_a, 0, ranks.down, s.intermediate);
  } else if (factor == Factor::down_b) {
    store_b(to.down_b, 0, ranks.down, to.down_scale, column, columns, 0);
  } else if (!s.gated) {
    store_b(to.up_b, adapter.up_at(), ranks.up, to.up_scale, column, std::min(columns, s.intermediate - column), 0);
  } else {
    for (int32_t c = 0; c < columns; c += kBlockN) {
      int32_t n = (column + c) / kBlockN * kTileN, count = std::min(kTileN, s.intermediate - n);
      store_b(to.gate_b, 0, ranks.gate, to.gate_scale, n, count, c);
      store_b(to.up_b, adapter.up_at(), ranks.up, to.up_scale, n, count, c + kTileN);
    }
  }
}

}  // namespace kt
