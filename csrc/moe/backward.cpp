// Backward with frozen weights: gradients of the hidden states and of the routing weights; those of LoRA's factors are
// in lora_backward.cpp.
//
// A unit recomputes gate and up (or reads the kept ones), multiplies the output's gradient with down transposed, and
// applies the activation's derivative, into the gradient panel. A lane multiplies that panel with gate/up transposed
// and adds. The routing weight's gradient is the inner product of h with the unscaled gradient, so down's output is
// never needed. Blocks are transposed into the thread's scratch, a few at a time, and used for all rows.
#include <algorithm>
#include <cstring>

#include "moe/moe.h"

namespace kt {

void Backward::begin() {
  size_t size = size_of(gradients_.weights_dtype);
  for (int32_t t = 0; t < batch_.tokens; t++)
    std::memset((char*)gradients_.weights + t * gradients_.weights_stride * (int64_t)size, 0,
                (size_t)batch_.top_k * size);
  begin_lora();
}

// Jobs that transpose the k tile of stored blocks [first, first + count) into one block of the transposed matrix: one
// job per NUMA part of the store.
void Backward::add_transposes(const BlockStore& store, int32_t expert, int32_t first, int32_t count, int32_t k_tile,
                              char* out, std::vector<Transpose>& jobs) const {
  for (int g = 0; g < store.parts(); g++) {
    int32_t from = std::max(first, store.begin(g)), to = std::min(first + count, store.end(g));
    if (from >= to) from = to = first;
    jobs.push_back({store.at(expert, from, k_tile), store.block_bytes(), to - from, out + store.k_bytes(from - first),
                    store.encoding(), k_tile});
  }
}

void Backward::transpose_block(const BlockStore& store, int32_t expert, int32_t first, int32_t count, int32_t k_tile,
                               char* out) const {
  std::vector<Transpose> jobs;
  add_transposes(store, expert, first, count, k_tile, out, jobs);
  for (const Transpose& job : jobs)
    if (job.count) experts_.kernels().transpose(job);
}

// Blocks [block0, block1) of the transposed matrix for one product: all of them, or with `overlap` only the first, the
// others being transposed during the products before them, into two alternating buffers.
TransposedBlocks Backward::transpose_blocks(const BlockStore& store, int32_t expert, int32_t first, int32_t count,
                                            int32_t block0, int32_t block1, bool overlap, char* out,
                                            std::vector<Transpose>& jobs) const {
  jobs.clear();
  for (int32_t i = block0; i < (overlap ? block0 + 1 : block1); i++)
    transpose_block(store, expert, first, count, i, out + (size_t)(i - block0) * store.k_bytes(count));
  for (int32_t i = block0 + 1; overlap && i < block1; i++)
    add_transposes(store, expert, first, count, i, out + (size_t)((i - block0) % 2) * store.k_bytes(count), jobs);
  return {true, jobs.data(), (int32_t)jobs.size(), store.parts()};
}

void Backward::run_unit(const UpUnit& unit, const UpUnit*, char* slice) {
  const KernelTable& kernels = experts_.kernels();
  const BlockStore& store = experts_.weights().down();
  const Segment& segment = routing_.segments[(size_t)unit.segment];
  UnitRows r = rows_of(unit);
  int64_t row_bytes = (int64_t)kTileK * kernels.elem, row0 = segment.begin + r.first;
  int32_t per_tile = experts_.shape().gated ? 2 : 1, first = unit.block0 / per_tile, last = unit.block1 / per_tile;
  wait_for_ranks((size_t)unit.segment);

  DownBackward back{};
  if (gradients_.keep) {
    back.keep_stride = experts_.keep_row_bytes();
    back.keep = gradients_.keep + row0 * back.keep_stride;
  } else {
    Up up{};
    up.keep_stride = (unit.block1 - unit.block0) * row_bytes;
    up.keep = slice + plan_.keep_at;
    multiply_up(unit, nullptr, slice, up, true);
    back.keep_stride = up.keep_stride;
    back.keep = up.keep - unit.block0 * row_bytes;
  }

  Gather gather = gather_of(unit, r, gradients_.out, gradients_.out_dtype, gradients_.out_stride, slice);
  back.tiling = r.tiling;
  back.live = r.live;
  back.gate = experts_.gate();
  back.weight = routing_.weight.data() + row0;
  back.dropout = dropout_from(routing_.dropout_seeds_h, row0);
  back.weight_grad_stride = store.k_tiles();
  back.weight_grad = workspace_.data() + plan_.weight_grads_at + row0 * back.weight_grad_stride * kernels.sum_bytes;
  back.grad_k_tiles = plan_.panel_k_tiles;
  back.grad = panel_of((size_t)unit.segment) + unit.tile0 * r.tiling.rows * row_bytes * back.grad_k_tiles;
  if (!plan_.hidden_at.empty()) {
    back.hidden_k_tiles = store.k_tiles();
    back.hidden = workspace_.data() + plan_.hidden_at[(size_t)unit.segment] +
                  unit.tile0 * r.tiling.rows * row_bytes * back.hidden_k_tiles;
  }
  back.scratch = slice + plan_.scratch_at;
  char* transposed = slice + plan_.transposed_at;
  int32_t k_tiles = store.blocks();
  int64_t block_sums = (int64_t)r.tiling.tiles * r.tiling.rows * kBlockN * kernels.sum_bytes;
  std::vector<Transpose> jobs;
  bool overlap = r.tiling.tiles <= kOverlapTiles;
  int32_t blocks_together = overlap ? kOverlappedBlocks : kTransposedBlocks;
  for (int32_t k = 0; k < k_tiles; k += r.chunk) {
    int32_t now = std::min(r.chunk, k_tiles - k);
    gather.k0 = k * kTileK;
    gather.k_tiles = now;
    kernels.gather(gather);
    if (k == 0) lora_shrink_gathered(unit, r, slice);
    back.block_bytes = store.k_bytes(now);
    back.base = {slice, (size_t)(now * r.tiling.rows * row_bytes), transposed, now};
    back.first = k == 0;
    back.last = k + now == k_tiles;
    for (int32_t j = first; j < last; j += blocks_together) {
      back.block0 = j;
      back.block1 = std::min(j + blocks_together, last);
      back.transposed = transpose_blocks(store, segment.expert, k, now, j, back.block1, overlap, transposed, jobs);
      back.sums = slice + plan_.panel_bytes + (j - first) * block_sums;
      std::vector<LoraTerm> lora_terms;
      // After all of K, as without chunks: how many chunks there are depends on the rows. With dropout they come first.
      if (back.dropout.seeds ? back.first : back.last)
        lora_terms = transposed_lora_terms(unit, Factor::down_a, j, back.block1, slice);
      back.lora_term = lora_terms.data();
      back.lora_terms = (int32_t)lora_terms.size();
      kernels.down_backward(back);
    }
  }
}

// All units of the segment are done: the gradient panel is complete.
void Backward::segment_done(size_t index, char* slice) {
  with_sums_of(experts_.kernels(), [&](auto zero) { add_weight_gradients<decltype(zero)>(index); });
  lora_shrink_gradients(index, slice);
}

// Adds up the per-block parts of the routing weights' gradients, in order.
template <class Real>
void Backward::add_weight_gradients(size_t index) {
  const Segment& segment = routing_.segments[index];
  size_t blocks = (size_t)experts_.weights().down().k_tiles();
  const Real *bias = (const Real*)experts_.weights().down_bias(segment.expert),
             *partial_sums = (const Real*)(workspace_.data() + plan_.weight_grads_at);
  for (int32_t i = 0; i < segment.count; i++) {
    size_t row = (size_t)(segment.begin + i);
    Real sum = 0;
    for (size_t s = 0; s < blocks; s++) sum += partial_sums[row * blocks + s];
    int32_t token = routing_.token[row];
    for (int32_t h = 0; bias && h < experts_.shape().hidden; h++)
      sum += element_of<Real>(gradients_.out, token * gradients_.out_stride + h, gradients_.out_dtype) * bias[h];
    set_element(gradients_.weights, token * gradients_.weights_stride + routing_.slot[row], gradients_.weights_dtype,
                sum);
  }
}

void Backward::run_lane_segment(const Lane& lane, size_t index, const char*, char* slice) {
  const BlockStore& store = experts_.weights().up();
  const Segment& segment = routing_.segments[index];
  Tiling whole = plan_.tilings[index];
  int32_t k_tiles = plan_.panel_k_tiles;
  int64_t row_bytes = (int64_t)kTileK * experts_.kernels().elem, tile_bytes = whole.rows * row_bytes * k_tiles;
  char* transposed = slice + plan_.transposed_at;
  int32_t pieces = 0;
  for_pieces(index, [&](int32_t, int32_t) { pieces++; });
  bool overlap = whole.tiles <= kOverlapTiles && pieces == 1;
  int32_t blocks_together = overlap ? kOverlappedBlocks : kTransposedLaneBlocks;
  std::vector<Transpose> jobs;
  for (int32_t k = 0; k < k_tiles; k += plan_.down_chunk) {
    int32_t now = std::min(plan_.down_chunk, k_tiles - k);
    for (int32_t j = lane.block0; j < lane.block1; j += blocks_together) {
      Down down = lane_output({j, std::min(j + blocks_together, lane.block1)}, slice);
      down.block_bytes = store.k_bytes(now);
      down.first = k == 0;
      down.last = k + now == k_tiles;
      down.transposed = transpose_blocks(store, segment.expert, k, now, j, down.block1, overlap, transposed, jobs);
      for_pieces(index, [&](int32_t tile, int32_t tiles) {
        std::vector<LoraTerm> lora_terms;
        Piece piece{(int32_t)index, tile, tile + tiles};
        if (down.first) lora_terms = transposed_lora_terms(piece, Factor::gate_up_a, j, down.block1, slice);
        down.lora_term = lora_terms.data();
        down.lora_terms = (int32_t)lora_terms.size();
        int64_t row = segment.begin + (int64_t)tile * whole.rows;
        down.tiling = {whole.rows, tiles};
        down.live = std::min(segment.count - tile * whole.rows, tiles * whole.rows);
        down.dropout = dropout_from(routing_.dropout_seeds_x, row);
        // Gradients of gate and up include the routing weight already.
        down.rows = {routing_.token.data() + row, nullptr, routing_.mark.data() + row};
        down.base = {panel_of(index) + tile * tile_bytes + k * whole.rows * row_bytes, (size_t)tile_bytes, transposed,
                     now};
        experts_.kernels().down(down);
      });
    }
  }
}

}  // namespace kt
