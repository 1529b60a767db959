// Gradients of LoRA's factors.
//
// With x, h the inputs of gate/up and down, g the gradient of gate/up, y that of the output (times the routing weight w
// where given), B' = scale * B, and sums over the rows of one expert that have the adapter:
//
//   gate/up:  dA = (g B')^T x    dB = scale g^T (x A^T)    and g B' A is added to the gradient of x
//   down:     dA = (w y B')^T h  dB = scale (w y)^T (h A^T)  and y B' A is added to the gradient of h
//
// So there are four rank panels. Gathering rows of x and y by token costs more than a product with a rank, so both are
// gathered once for all uses: y by the units, the first of which computes the panel of a piece, and x by the wgrad that
// computes dA of gate/up. Where K is too long to be gathered whole, or gate and up are recomputed, which needs the
// panel of x, the panels are computed before the units. Those of h and g are computed once a segment's units are done.
// The contractions over rows come last, a few hundred columns of one factor of one expert at a time, each by one thread
// in row order, so that the bits do not depend on the number of threads.
#include <algorithm>
#include <cstring>

#include "futex.h"
#include "moe/moe.h"

namespace kt {

void Backward::begin_lora() {
  next_piece_ = next_factor_ = 0;
  const BlockStore& up = experts_.weights().up();
  columns_ = factor_columns(largest_rank(routing_, adapters_));
  gathers_full_k_ = plan_.up_chunk >= up.k_tiles();
  wgrad_gathers_x_ = gathers_full_k_ && columns_ >= experts_.shape().hidden;
  wgrad_makes_xa_ = wgrad_gathers_x_ && gradients_.keep;
  size_t segments = routing_.segments.size(), runs = routing_.runs.size();
  if (ranks_left_.size() < segments) ranks_left_ = std::vector<std::atomic<int32_t>>(segments);
  if (yb_state_.size() < plan_.pieces.size()) yb_state_ = std::vector<std::atomic<PanelState>>(plan_.pieces.size());
  if (xa_state_.size() < runs) xa_state_ = std::vector<std::atomic<PanelState>>(runs);
  for (auto& left : ranks_left_) left.store(0, std::memory_order_relaxed);
  for (auto& state : yb_state_) state.store(PanelState::missing, std::memory_order_relaxed);
  for (auto& state : xa_state_)
    state.store(wgrad_makes_xa_ ? PanelState::missing : PanelState::ready, std::memory_order_relaxed);
  piece0_.assign(segments + 1, 0);
  for (const Piece& p : plan_.pieces) piece0_[(size_t)p.segment + 1]++;
  for (size_t n = 0; n < segments; n++) {
    if (!gathers_full_k_ || !wgrad_makes_xa_) ranks_left_[n] = piece0_[n + 1];
    piece0_[n + 1] += piece0_[n];
  }
  size_t experts = (size_t)experts_.shape().experts;
  run_of_.assign(adapters_.size() * experts, -1);
  for (size_t n = 0; n < runs; n++) {
    const Run& run = routing_.runs[n];
    run_of_[(size_t)run.adapter * experts + (size_t)routing_.segments[(size_t)run.segment].expert] = (int32_t)n;
  }
}

// Computes the panels that units and wgrad cannot: x times A of gate/up, and y times B of down.
void Backward::before_units(char* slice) {
  if (gathers_full_k_ && wgrad_makes_xa_) return;
  for (int32_t n; (n = next_piece_++) < (int32_t)plan_.pieces.size();) {
    const Piece& piece = plan_.pieces[(size_t)n];
    if (!wgrad_makes_xa_ && !cancelled()) lora_shrink_piece(piece, false, slice);
    if (!gathers_full_k_ && !cancelled()) lora_shrink_piece(piece, true, slice);
    ranks_left_[(size_t)piece.segment].fetch_sub(1, std::memory_order_acq_rel);
  }
}

namespace {
template <class Number>
void wait_for(const std::atomic<Number>& number, Number value) {
  for (int spins = 0; number.load(std::memory_order_acquire) != value; spins++)
    spins < 1000 ? relax() : (void)sched_yield();
}
}  // namespace

void Backward::wait_for_ranks(size_t segment) const { wait_for(ranks_left_[segment], 0); }

// y times B of down, from the rows that a unit has just gathered; done by the first unit of a piece, the others wait.
void Backward::lora_shrink_gathered(const UpUnit& unit, const UnitRows& r, char* slice) {
  size_t n = (size_t)piece0_[(size_t)unit.segment], end = (size_t)piece0_[(size_t)unit.segment + 1];
  if (n == end || !gathers_full_k_) return;
  while (plan_.pieces[n].tile0 != unit.tile0) n++;
  PanelState before = PanelState::missing;
  if (!yb_state_[n].compare_exchange_strong(before, PanelState::in_progress, std::memory_order_acq_rel))
    return wait_for(yb_state_[n], PanelState::ready);
  ShrinkInput input{unit, r, true, 0, experts_.weights().up().k_tiles(), slice, slice + plan_.rank_sums_at};
  for (int32_t run = routing_.run0[(size_t)unit.segment]; run < routing_.run0[(size_t)unit.segment + 1]; run++)
    lora_shrink_run(run, input, slice);
  yb_state_[n].store(PanelState::ready, std::memory_order_release);
}

void Backward::lora_shrink_piece(const Piece& piece, bool output, char* slice) {
  const Segment& segment = routing_.segments[(size_t)piece.segment];
  UnitRows r = rows_of(piece);
  int32_t all = experts_.weights().up().k_tiles();
  const std::vector<uint32_t> none;
  Gather gather = output ? gather_of(piece, r, gradients_.out, gradients_.out_dtype, gradients_.out_stride, slice)
                         : gather_of(piece, r, batch_.hidden, batch_.hidden_dtype, batch_.hidden_stride, slice);
  for (int32_t k = 0; k < all; k += r.chunk) {
    int32_t now = std::min(r.chunk, all - k);
    gather.k0 = k * kTileK;
    gather.k_tiles = now;
    experts_.kernels().gather(gather);
    // Dropout applies to LoRA's inputs: to x here, not to y.
    const char* input_rows =
        apply_dropout(slice, r.tiling, r.live, gather.k0, now,
                      dropout_from(output ? none : routing_.dropout_seeds_x, segment.begin + r.first), slice);
    ShrinkInput input{piece, r, output, k, now, input_rows, slice + plan_.rank_sums_at};
    for (int32_t run = routing_.run0[(size_t)piece.segment]; run < routing_.run0[(size_t)piece.segment + 1]; run++)
      lora_shrink_run(run, input, slice);
  }
}

// The product of one run's rows in a chunk of a piece.
void Backward::lora_shrink_run(int32_t n, ShrinkInput& from, char* slice) const {
  const Run& run = routing_.runs[(size_t)n];
  const RankPanels& ranks = plan_.ranks[(size_t)n];
  const Adapter& adapter = *adapters_[(size_t)run.adapter];
  const Segment& segment = routing_.segments[(size_t)run.segment];
  int32_t k_tiles = from.output ? adapter.down_tiles() : adapter.gate_up_tiles();
  int32_t tile0 = std::max(ranks.tile0, from.piece.tile0), tile1 = std::min(ranks.tile1, from.piece.tile1);
  if (tile0 >= tile1 || !k_tiles) return;
  Tiling tiling{from.rows.tiling.rows, tile1 - tile0};
  int32_t live = std::min(segment.count - tile0 * tiling.rows, tiling.tiles * tiling.rows);
  int64_t tile_bytes = (int64_t)tiling.rows * kTileK * experts_.kernels().elem, panel_tile = tile_bytes * k_tiles;
  char* panel = workspace_.data() + (from.output ? ranks.yb : ranks.xa) + (tile0 - (ranks.tile0 - 1)) * panel_tile;
  Contraction base{from.in + (tile0 - from.piece.tile0) * tile_bytes * from.now, (size_t)(tile_bytes * from.now),
                   nullptr, from.now, from.output ? adapter.down_half() : adapter.gate_up_half()};
  bool first = from.k == 0, last = from.k + from.now == experts_.weights().up().k_tiles();
  int64_t block_sums = (int64_t)tiling.tiles * tiling.rows * kBlockN * experts_.kernels().sum_bytes;
  if (from.output) {
    char* transposed = slice + plan_.transposed_at;
    for (int32_t i = 0; i < k_tiles; i++, from.sums += block_sums) {
      transpose_block(adapter.down_b(), segment.expert, from.k, from.now, i, transposed);
      base.b = transposed;
      lora_shrink({base, 0, i, i + 1, first, last, from.sums}, tiling, live, panel, k_tiles, slice);
    }
  } else {
    const BlockStore& store = adapter.gate_up_a();
    base.b = store.at(segment.expert, 0, from.k);
    lora_shrink({base, store.block_bytes(), 0, k_tiles, first, last, from.sums}, tiling, live, panel, k_tiles, slice);
    from.sums += block_sums * k_tiles;
  }
  if (!last) return;
  // The outer tiles of the run's panel are zeroed with its first and its last piece.
  int32_t before = tile0 == ranks.tile0 ? 1 : 0, after = tile1 == ranks.tile1 ? 1 : 0;
  zero_other_rows(run, tile0 - before, tile1 + after, k_tiles, panel - before * panel_tile);
}

// h times A of down, and g times B of gate/up.
void Backward::lora_shrink_gradients(size_t index, char* slice) {
  if (!plan_.hidden_at.empty()) lora_shrink_hidden(index, workspace_.data() + plan_.hidden_at[index], slice);
  const Segment& segment = routing_.segments[index];
  Tiling whole = plan_.tilings[index];
  int64_t tile_bytes = (int64_t)whole.rows * kTileK * experts_.kernels().elem;
  char* transposed = slice + plan_.transposed_at;
  for_runs(index, [&](const Run& run, const RankPanels& ranks, const Adapter& adapter) {
    int32_t k_tiles = adapter.gate_up_tiles();
    if (!k_tiles) return;
    Tiling tiling{whole.rows, ranks.tile1 - ranks.tile0};
    int32_t live = std::min(segment.count - ranks.tile0 * whole.rows, tiling.tiles * whole.rows);
    int64_t row_tile = tile_bytes * plan_.panel_k_tiles;
    Contraction base{panel_of(index) + ranks.tile0 * row_tile, (size_t)row_tile, transposed, plan_.panel_k_tiles,
                     adapter.gate_up_half()};
    char* panel = workspace_.data() + ranks.gb;
    for (int32_t i = 0; i < k_tiles; i++) {
      transpose_block(adapter.gate_up_b(), segment.expert, 0, plan_.panel_k_tiles, i, transposed);
      lora_shrink({base, 0, i, i + 1, true, true, nullptr}, tiling, live, panel + tile_bytes * k_tiles, k_tiles, slice);
    }
    zero_other_rows(run, ranks.tile0 - 1, ranks.tile1 + 1, k_tiles, panel);
  });
}

// Prefetches into L2 the factor blocks to transpose next: of A of down a unit's next blocks, of A of gate/up a lane's
// own blocks of the next expert. They are too short for the hardware prefetcher.
void Backward::prefetch_next_factor(size_t segment, const BlockStore& store, bool down, int32_t block0,
                                    int32_t block1) const {
  int32_t first = down ? block1 : block0, count = std::min(block1 - block0, store.k_tiles() - first);
  if (!down) segment++;
  if (segment == routing_.segments.size()) return;
  for (int32_t b = 0; b < store.blocks(); b++) {
    const char* at = store.at(routing_.segments[segment].expert, b, first);
    for (int64_t i = 0; i < (int64_t)store.k_bytes(std::max(0, count)); i += 64) __builtin_prefetch(at + i, 0, 2);
  }
}

// LoRA terms of A of down (or of gate/up) transposed, at the columns of blocks [block0, block1), with the panels of y
// (or of g).
std::vector<LoraTerm> Backward::transposed_lora_terms(const Piece& piece, Factor factor, int32_t block0, int32_t block1,
                                                      char* slice) const {
  std::vector<LoraTerm> lora_terms;
  const Segment& segment = routing_.segments[(size_t)piece.segment];
  bool down = factor == Factor::down_a;
  char* transposed = slice + plan_.rank_transposed_at;
  for_runs((size_t)piece.segment, [&](const Run&, const RankPanels& ranks, const Adapter& adapter) {
    const BlockStore& store = down ? adapter.down_a() : adapter.gate_up_a();
    int32_t k_tiles = store.blocks();
    if (!k_tiles || ranks.tile1 <= piece.tile0 || piece.tile1 <= ranks.tile0) return;
    LoraTerm term = lora_term_of(piece, ranks, down ? ranks.yb : ranks.gb, k_tiles);
    term.contraction.b = transposed;
    term.block_bytes = store.k_bytes(k_tiles);
    for (int32_t i = block0; i < block1; i++, transposed += term.block_bytes)
      transpose_block(store, segment.expert, 0, k_tiles, i, transposed);
    prefetch_next_factor((size_t)piece.segment, store, down, block0, block1);
    lora_terms.push_back(term);
  });
  return lora_terms;
}

// Takes parts of all factors of all experts of all adapters; experts without rows get zeros. A of gate/up comes first:
// it computes the panels of x that the wgrad of B waits for.
void Backward::after_lanes(char* slice) {
  if (gradients_.lora.empty()) return;
  wait_for_segments();
  int32_t blocks[4] = {experts_.weights().down().blocks(), experts_.weights().up().blocks(),
                       experts_.weights().down().k_tiles(), experts_.weights().down().blocks()};
  int32_t pieces[4], others = 0;
  for (int f = 0; f < 4; f++) pieces[f] = (int32_t)ceil_div(blocks[f] * kBlockN, columns_);
  for (int f = 1; f < 4; f++) others += pieces[f];
  int64_t experts = experts_.shape().experts, each = (int64_t)adapters_.size() * experts, first = each * pieces[0];
  for (int64_t n; !cancelled() && (n = next_factor_++) < first + each * others;) {
    int64_t count = n < first ? pieces[0] : others, number = n < first ? n : n - first, of = number / count;
    int32_t piece = (int32_t)(number % count), factor = n < first ? 0 : 1;
    while (piece >= pieces[factor]) piece -= pieces[factor++];
    factor_gradient((size_t)(of / experts), (int32_t)(of % experts), (Factor)factor, piece * columns_, slice);
  }
}

// The wide operand of wgrad: rows of x or y by token, or of a panel.
Backward::WgradRows Backward::wgrad_rows(Factor factor, const Run& run) const {
  Tiling t = plan_.tilings[(size_t)run.segment];
  DType panel_type = experts_.kernels().panel;
  int64_t block = (int64_t)t.rows * kTileK * experts_.kernels().elem;
  switch (factor) {
    case Factor::gate_up_a:
      return {(const char*)batch_.hidden, batch_.hidden_dtype, batch_.hidden_stride, 0, 0, 0, false};
    case Factor::down_b:
      return {(const char*)gradients_.out, gradients_.out_dtype, gradients_.out_stride, 0, 0, 0, false};
    case Factor::gate_up_b:
      return {panel_of((size_t)run.segment), panel_type, 0, block, plan_.panel_k_tiles, 0, false};
    case Factor::down_a:
      break;
  }
  return {workspace_.data() + plan_.hidden_at[(size_t)run.segment],
          panel_type,
          0,
          block,
          experts_.weights().down().k_tiles(),
          0,
          false};
}

// Accumulates rows [begin, end) of a run into `columns` columns of one factor's gradient from `column` on, in sums
// [rank][sums_stride()].
void Backward::contract(Factor factor, int32_t n, const WgradRows& wide, int32_t begin, int32_t end, int32_t column,
                        int32_t columns, const Sums& to) const {
  const Run& run = routing_.runs[(size_t)n];
  const RankPanels& ranks = plan_.ranks[(size_t)n];
  const Adapter& adapter = *adapters_[(size_t)run.adapter];
  int32_t row_of_all = routing_.segments[(size_t)run.segment].begin;
  int32_t tile_rows = plan_.tilings[(size_t)run.segment].rows;
  const int32_t* token = routing_.token.data() + row_of_all;
  bool down = factor == Factor::down_a || factor == Factor::down_b;
  int64_t panels[] = {ranks.gb, ranks.xa, ranks.yb, ranks.ha};  // in the order of Factor
  int64_t rank_row = (int64_t)kTileK * experts_.kernels().elem, rank_block = rank_row * tile_rows;
  int64_t rank_tile = rank_block * (down ? adapter.down_tiles() : adapter.gate_up_tiles());
  const char* panel = workspace_.data() + panels[(size_t)factor] - (ranks.tile0 - 1) * rank_tile;
  int64_t size = (int64_t)size_of(wide.dtype);
  const char *p[kWgradRows], *q[kWgradRows];
  for (int32_t row0 = begin; row0 < end && !cancelled(); row0 += kWgradRows) {
    int32_t rows = std::min(kWgradRows, end - row0);
    for (int32_t i = 0; i < rows; i++) {
      int32_t row = row0 + i, tile = row / tile_rows, in_tile = row % tile_rows;
      p[i] = panel + tile * rank_tile + in_tile * rank_row;
      q[i] = wide.data + (wide.block ? ((tile - wide.tile0) * (int64_t)wide.blocks + column / kBlockN) * wide.block +
                                           in_tile * kTileK * size
                                     : (token[row] * wide.stride + column) * size);
    }
    LoraWgrad lora_wgrad{};
    lora_wgrad.p = p;
    lora_wgrad.p_block = rank_block;
    lora_wgrad.weight = down ? routing_.weight.data() + row_of_all + row0 : nullptr;
    lora_wgrad.rows = rows;
    lora_wgrad.rank = to.rank;
    lora_wgrad.q = q;
    lora_wgrad.q_block = wide.block ? wide.block : kBlockN * size;
    lora_wgrad.dtype = wide.dtype;
    lora_wgrad.columns = columns;
    if (factor == Factor::gate_up_a && !wide.dropped)
      lora_wgrad.dropout = dropout_from(routing_.dropout_seeds_x, row_of_all + row0);
    if (factor == Factor::down_a) lora_wgrad.dropout = dropout_from(routing_.dropout_seeds_h, row_of_all + row0);
    lora_wgrad.column = column;
    lora_wgrad.first = row0 == run.first;
    lora_wgrad.c = to.sums;
    lora_wgrad.c_stride = sums_stride(columns_);
    lora_wgrad.scratch = to.scratch;
    experts_.kernels().lora_wgrad(lora_wgrad);
  }
}

// Wgrad of A of gate/up from gathered x, a piece of a run's rows at a time; also computes x times A where that panel is
// missing.
void Backward::contract_gathered(int32_t n, const Sums& to, char* slice) {
  const Run& run = routing_.runs[(size_t)n];
  const RankPanels& ranks = plan_.ranks[(size_t)n];
  size_t index = (size_t)run.segment;
  const Segment& segment = routing_.segments[index];
  int32_t k_tiles = experts_.weights().up().k_tiles(), tile_rows = plan_.tilings[index].rows;
  for (int32_t i = piece0_[index]; i < piece0_[index + 1]; i++) {
    Piece piece = plan_.pieces[(size_t)i];
    piece.tile0 = std::max(piece.tile0, ranks.tile0), piece.tile1 = std::min(piece.tile1, ranks.tile1);
    if (piece.tile0 >= piece.tile1) continue;
    UnitRows r = rows_of(piece);
    Gather gather = gather_of(piece, r, batch_.hidden, batch_.hidden_dtype, batch_.hidden_stride, slice);
    gather.k_tiles = k_tiles;
    experts_.kernels().gather(gather);
    const char* input_rows = apply_dropout(slice, r.tiling, r.live, 0, k_tiles,
                                           dropout_from(routing_.dropout_seeds_x, segment.begin + r.first), slice);
    ShrinkInput input{piece, r, false, 0, k_tiles, input_rows, slice + plan_.rank_sums_at};
    if (wgrad_makes_xa_) lora_shrink_run(n, input, slice);
    int64_t block = (int64_t)tile_rows * kTileK * experts_.kernels().elem;
    WgradRows wide{input_rows, experts_.kernels().panel, 0, block, k_tiles, piece.tile0, true};
    contract(Factor::gate_up_a, n, wide, std::max(run.first, piece.tile0 * tile_rows),
             std::min(run.first + run.count, piece.tile1 * tile_rows), 0, experts_.shape().hidden, to);
  }
  xa_state_[(size_t)n].store(PanelState::ready, std::memory_order_release);
}

void Backward::factor_gradient(size_t index, int32_t expert, Factor factor, int32_t column, char* slice) {
  const Adapter& adapter = *adapters_[index];
  const LayerShape& s = experts_.shape();
  bool of_gate_up = factor == Factor::gate_up_a || factor == Factor::gate_up_b;
  int32_t rank = (int32_t)round_up(of_gate_up ? adapter.gate_up_rank() : adapter.ranks().down, kRankStep);
  if (!rank) return;
  int32_t width = s.hidden;
  if (factor == Factor::gate_up_b) width = experts_.weights().up().blocks() * kBlockN;
  if (factor == Factor::down_a) width = experts_.weights().down().k_tiles() * kTileK;
  int32_t columns = std::min(columns_, width - column);
  int64_t row_bytes = sums_stride(columns_) * experts_.kernels().sum_bytes;
  char* sums = slice + plan_.factors_at;
  Sums to{rank, sums, sums + round_up(rank, kTileN) * row_bytes};
  int32_t n = run_of_[index * (size_t)s.experts + (size_t)expert];
  if (n < 0) {
    std::memset(sums, 0, (size_t)(rank * row_bytes));
  } else if (factor == Factor::gate_up_a && wgrad_gathers_x_) {
    contract_gathered(n, to, slice);
  } else {
    const Run& run = routing_.runs[(size_t)n];
    // A cancelled thread leaves its panels missing.
    if (factor == Factor::gate_up_b)
      for (int spins = 0; xa_state_[(size_t)n].load(std::memory_order_acquire) != PanelState::ready; spins++) {
        if (cancelled()) return;
        spins < 1000 ? relax() : (void)sched_yield();
      }
    contract(factor, n, wgrad_rows(factor, run), run.first, run.first + run.count, column, columns, to);
  }
  store_grad(index, expert, factor, column, columns, sums);
}

// Stores sums [rank][columns] into the caller's tensors: A in its own order, B transposed and scaled.
void Backward::store_grad(size_t index, int32_t expert, Factor factor, int32_t column, int32_t columns,
                          const char* sums) const {
  const LoraTargets& to = gradients_.lora[index];
  const Adapter& adapter = *adapters_[index];
  const LoraRanks& ranks = adapter.ranks();
  const LayerShape& s = experts_.shape();
  StoreGrad d{};
  d.c_stride = sums_stride(columns_);
  // Stores ranks [first, first + count) of the sums; the tensor's element (r, n) starts at `at`.
  auto store = [&](const Target& t, int32_t first, int32_t count, int64_t at, int64_t r_stride, int64_t n_stride) {
    if (!t.data) return;
    d.c = sums + first * d.c_stride * experts_.kernels().sum_bytes;
    d.ranks = count;
    d.data = (char*)t.data + (expert * t.expert_stride + at) * (int64_t)size_of(t.dtype);
    d.dtype = t.dtype;
    d.r_stride = r_stride;
    d.n_stride = n_stride;
    experts_.kernels().store_grad(d);
  };
  // Ranks are rows of an A ...
  auto store_a = [&](const Target& t, int32_t first, int32_t count, int32_t width) {
    d.from = 0, d.each = kBlockN, d.count = std::min(columns, width - column), d.scale = 1;
    store(t, first, count, column * t.k_stride, t.n_stride, t.k_stride);
  };
  // ... or columns of a B, whose rows from `n` on are all columns of the sums, or 16 of every 32.
  auto store_b = [&](const Target& t, int32_t first, int32_t count, double scale, int32_t from, int32_t each,
                     int32_t rows) {
    int32_t n = column / kBlockN * each;
    d.from = from, d.each = each, d.count = std::min(columns / kBlockN * each + columns % kBlockN, rows - n);
    d.scale = scale;
    store(t, first, count, n * t.n_stride, t.k_stride, t.n_stride);
  };
  switch (factor) {
    case Factor::gate_up_a:
      store_a(to.gate_a, 0, ranks.gate, s.hidden);
      if (!ranks.shared) store_a(to.up_a, adapter.up_at(), ranks.up, s.hidden);
      break;
    case Factor::down_a:
      store_a(to.down_a, 0, ranks.down, s.intermediate);
      break;
    case Factor::down_b:
      store_b(to.down_b, 0, ranks.down, to.down_scale, 0, kBlockN, s.hidden);
      break;
    case Factor::gate_up_b:
      if (s.gated) store_b(to.gate_b, 0, ranks.gate, to.gate_scale, 0, kTileN, s.intermediate);
      store_b(to.up_b, adapter.up_at(), ranks.up, to.up_scale, s.gated ? kTileN : 0, s.gated ? kTileN : kBlockN,
              s.intermediate);
  }
}

}  // namespace kt
