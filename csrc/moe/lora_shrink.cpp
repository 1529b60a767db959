// LoRA shrink: rows of H or I elements times A (or B transposed) into rank panels, and the LoRA terms that add them to
// the base product.
//
// A rank panel has the shape of any activation panel, with the rank as its K. It belongs to one run (the rows of one
// adapter in one expert) and extends one tile beyond it on each side, because a product takes two tiles at a time and
// may begin with either; rows of other runs are zero, so that a tile may contain several adapters.
#include <algorithm>
#include <cstring>

#include "moe/task.h"

namespace kt {

LoraTerm Task::lora_term_of(const Piece& piece, const RankPanels& ranks, int64_t at, int32_t k_tiles) const {
  int64_t tile = (int64_t)plan_.tilings[(size_t)piece.segment].rows * kTileK * experts_.kernels().elem * k_tiles;
  LoraTerm term{};
  term.contraction.a = workspace_.data() + at + (piece.tile0 - (ranks.tile0 - 1)) * tile;
  term.contraction.a_tile = (size_t)tile;
  term.contraction.k_tiles = k_tiles;
  term.tile0 = std::max(ranks.tile0, piece.tile0) - piece.tile0;
  term.tile1 = std::min(ranks.tile1, piece.tile1) - piece.tile0;
  return term;
}

void Task::lora_shrink(const LoraShrink& n, const Tiling& tiling, int32_t live, char* out, int32_t k_tiles,
                       char* slice) const {
  Up up{};
  up.tiling = tiling;
  up.live = live;
  up.base = n.base;
  up.block_bytes = n.block_bytes;
  up.block0 = n.block0;
  up.block1 = n.block1;
  up.first = n.first;
  up.last = n.last;
  up.sums = n.sums;
  up.gate = {Activation::none, false, 0, 0};
  up.hidden = out;
  up.hidden_k_tiles = k_tiles;
  up.scratch = slice + plan_.scratch_at;
  experts_.kernels().up(up);
}

void Task::zero_other_rows(const Run& run, int32_t tile0, int32_t tile1, int32_t k_tiles, char* panel) const {
  const Segment& segment = routing_.segments[(size_t)run.segment];
  Tiling t = plan_.tilings[(size_t)run.segment];
  if (run.count == segment.count) return;  // the segment has no other rows
  int64_t row_bytes = (int64_t)kTileK * experts_.kernels().elem, step = t.rows * row_bytes;
  for (int32_t row = tile0 * t.rows; row < tile1 * t.rows; row++) {
    if (row >= run.first && row < run.first + run.count) continue;
    int32_t local = row - tile0 * t.rows;
    char* at = panel + (local / t.rows) * step * k_tiles + (local % t.rows) * row_bytes;
    for (int32_t k = 0; k < k_tiles; k++) std::memset(at + k * step, 0, (size_t)row_bytes);
  }
}

Dropout Task::dropout_from(const std::vector<uint32_t>& seeds, int64_t row) const {
  if (seeds.empty()) return Dropout{};
  return {seeds.data() + row, (uint32_t)(batch_.dropout * 4294967296.0), 1 / (1 - batch_.dropout)};
}

const char* Task::apply_dropout(const char* panel, const Tiling& tiling, int32_t live, int32_t column, int32_t k_tiles,
                                const Dropout& dropout, char* slice) const {
  if (!dropout.seeds) return panel;
  experts_.kernels().apply_dropout({panel, slice + plan_.dropout_at, tiling, live, column, k_tiles, dropout});
  return slice + plan_.dropout_at;
}

void Task::lora_shrink_chunk(const UpUnit& unit, const UnitRows& rows, int32_t k, int32_t now, char* slice,
                             std::vector<LoraTerm>* lora_terms) const {
  const Segment& segment = routing_.segments[(size_t)unit.segment];
  int64_t tile_bytes = (int64_t)rows.tiling.rows * kTileK * experts_.kernels().elem;
  char* panel = slice + plan_.rank_at;
  char* sums = slice + plan_.rank_sums_at;
  if (routing_.run0[(size_t)unit.segment] == routing_.run0[(size_t)unit.segment + 1]) return;
  const char* input_rows = apply_dropout(slice, rows.tiling, rows.live, k * kTileK, now,
                                         dropout_from(routing_.dropout_seeds_x, segment.begin + rows.first), slice);
  for_runs((size_t)unit.segment, [&](const Run& run, const RankPanels& ranks, const Adapter& adapter) {
    int32_t tile0 = std::max(ranks.tile0, unit.tile0), tile1 = std::min(ranks.tile1, unit.tile1);
    int32_t k_tiles = adapter.gate_up_tiles();
    if (tile0 >= tile1 || !k_tiles) return;
    Tiling tiling{rows.tiling.rows, tile1 - tile0};
    int32_t live = std::min(segment.count - tile0 * tiling.rows, tiling.tiles * tiling.rows);
    const char* b = adapter.gate_up_a().at(segment.expert, 0, k);
    LoraShrink n{{input_rows + (tile0 - unit.tile0) * tile_bytes * now, (size_t)(tile_bytes * now), b, now,
                  adapter.gate_up_half()},
                 adapter.gate_up_a().block_bytes(),
                 0,
                 k_tiles,
                 k == 0,
                 lora_terms != nullptr,
                 sums};
    lora_shrink(n, tiling, live, panel + tile_bytes * k_tiles, k_tiles, slice);
    if (lora_terms) {
      zero_other_rows(run, tile0 - 1, tile1 + 1, k_tiles, panel);
      const char* tile_0 = panel - (tile0 - unit.tile0 - 1) * tile_bytes * k_tiles;
      lora_terms->push_back(
          {{tile_0, (size_t)(tile_bytes * k_tiles), adapter.gate_up_b().at(segment.expert, unit.block0), k_tiles},
           adapter.gate_up_b().block_bytes(),
           tile0 - unit.tile0,
           tile1 - unit.tile0});
    }
    panel += round_up((tiling.tiles + 2) * tile_bytes * k_tiles, 64);
    sums += (int64_t)tiling.tiles * tiling.rows * kBlockN * k_tiles * experts_.kernels().sum_bytes;
  });
}

void Task::lora_shrink_hidden(size_t index, const char* rows, char* slice) const {
  const Segment& segment = routing_.segments[index];
  Tiling whole = plan_.tilings[index];
  int64_t tile_bytes = (int64_t)whole.rows * kTileK * experts_.kernels().elem;
  for_runs(index, [&](const Run& run, const RankPanels& ranks, const Adapter& adapter) {
    int32_t k_tiles = adapter.down_tiles();
    if (!k_tiles) return;
    const BlockStore& store = adapter.down_a();
    int64_t row_tile = tile_bytes * store.k_tiles();
    char* panel = workspace_.data() + ranks.ha;
    int32_t step = routing_.dropout_seeds_h.empty() ? ranks.tile1 - ranks.tile0 : 2;
    for (int32_t tile = ranks.tile0; tile < ranks.tile1; tile += step) {
      Tiling tiling{whole.rows, std::min(step, ranks.tile1 - tile)};
      int32_t row = tile * whole.rows, live = std::min(segment.count - row, tiling.tiles * whole.rows);
      const char* in = apply_dropout(rows + tile * row_tile, tiling, live, 0, store.k_tiles(),
                                     dropout_from(routing_.dropout_seeds_h, segment.begin + row), slice);
      LoraShrink n{{in, (size_t)row_tile, store.at(segment.expert, 0), store.k_tiles(), adapter.down_half()},
                   store.block_bytes(),
                   0,
                   k_tiles,
                   true,
                   true,
                   nullptr};
      lora_shrink(n, tiling, live, panel + (tile - ranks.tile0 + 1) * tile_bytes * k_tiles, k_tiles, slice);
    }
    zero_other_rows(run, ranks.tile0 - 1, ranks.tile1 + 1, k_tiles, panel);
  });
}

}  // namespace kt
