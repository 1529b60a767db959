// Forward: units write activated rows to the hidden panel, lanes multiply them with down and add.
//
// In W8A8 every row of x is quantised once, before the units that gather it, and every activated row once its segment
// is done and the row's largest magnitude is known.
#include <algorithm>

#include "futex.h"
#include "moe/moe.h"

namespace kt {

constexpr int32_t kMaxTokensTaken = 16;  // rows that a thread quantises at a time, at most

void Call::begin() {
  next_tokens_ = 0;
  tokens_left_ = w8a8() ? batch_.tokens : 0;
}

void Call::before_units(char*) {
  if (!w8a8()) return;
  int32_t hidden = experts_.shape().hidden;
  // All threads wait for the last row, so few rows are taken one by one.
  int32_t taken = std::clamp(batch_.tokens / (2 * experts_.engine().pool.threads()), 1, kMaxTokensTaken);
  for (int32_t t; (t = next_tokens_.fetch_add(taken, std::memory_order_relaxed)) < batch_.tokens;) {
    int32_t count = std::min(taken, batch_.tokens - t);
    const char* x = (const char*)batch_.hidden + t * batch_.hidden_stride * (int64_t)size_of(batch_.hidden_dtype);
    if (!cancelled())
      experts_.kernels().quantise({x, batch_.hidden_dtype, batch_.hidden_stride, count, hidden,
                                   workspace_.data() + plan_.x_int8_at + t * round_up(hidden, kStepK),
                                   (float*)(workspace_.data() + plan_.x_scales_at) + t});
    tokens_left_.fetch_sub(count, std::memory_order_acq_rel);
  }
  // The remaining rows are being quantised by running threads.
  for (int spins = 0; tokens_left_.load(std::memory_order_acquire); spins++)
    spins < 1000 ? relax() : (void)sched_yield();
}

void Call::run_unit(const UpUnit& unit, const UpUnit* next, char* slice) {
  const Segment& segment = routing_.segments[(size_t)unit.segment];
  Tiling whole = plan_.tilings[(size_t)unit.segment];
  int64_t row_bytes = (int64_t)kTileK * experts_.kernels().elem;
  Up up{};
  up.hidden_k_tiles = experts_.weights().hidden_k_tiles();
  up.hidden = panel_of((size_t)unit.segment) + unit.tile0 * whole.rows * row_bytes * up.hidden_k_tiles;
  if (keep_) {
    up.keep_stride = experts_.keep_row_bytes();
    up.keep = keep_ + (segment.begin + (int64_t)unit.tile0 * whole.rows) * up.keep_stride + unit.block0 * row_bytes;
  }
  multiply_up(unit, next, slice, up);
}

Call::DownPanel Call::down_panel(size_t index, int32_t tile, int32_t tiles, int32_t k, int32_t k_tiles) const {
  const Segment& segment = routing_.segments[index];
  const BlockStore& store = experts_.weights().down();
  const Tiling whole = plan_.tilings[index];
  const int64_t row_bytes = (int64_t)kTileK * experts_.kernels().elem,
                tile_bytes = whole.rows * row_bytes * store.k_tiles();
  DownPanel panel{};
  panel.rows = {panel_of(index) + tile * tile_bytes + k * whole.rows * row_bytes, (size_t)tile_bytes, nullptr, k_tiles};
  panel.tiling = {whole.rows, tiles};
  panel.live = std::min(segment.count - tile * whole.rows, tiles * whole.rows);
  if (plan_.packed_row_bytes && uses_packed_gemv(index, store)) {
    const int64_t row = segment.begin + (int64_t)tile * whole.rows;
    panel.packed = workspace_.data() + plan_.packed_rows_at +
                   (row * store.k_tiles() + (int64_t)k * panel.live) * plan_.packed_row_bytes;
  }
  return panel;
}

void Call::segment_done(size_t index, char* slice) {
  lora_shrink_hidden(index, panel_of(index), slice);
  const BlockStore& store = experts_.weights().down();
  for (int32_t k = 0; plan_.packed_row_bytes && k < store.k_tiles(); k += plan_.down_chunk)
    for_pieces(index, [&](int32_t tile, int32_t tiles) {
      const DownPanel panel = down_panel(index, tile, tiles, k, std::min(plan_.down_chunk, store.k_tiles() - k));
      if (panel.packed)
        experts_.kernels().write_packed_rows(
            {panel.rows, panel.tiling, panel.live, store.encoding(), panel.packed, plan_.x_int8});
    });
  if (!w8a8()) return;
  const Segment& segment = routing_.segments[index];
  float* scales = (float*)(workspace_.data() + plan_.hidden_scales_at) + segment.begin;
  experts_.kernels().quantise_panel(
      {panel_of(index), plan_.tilings[index], segment.count, experts_.weights().hidden_k_tiles(), scales});
}

const char* Call::lane_weights(const Lane& lane, size_t index) const {
  return experts_.weights().down().at(routing_.segments[index].expert, lane.block0);
}

void Call::run_lane_segment(const Lane& lane, size_t index, const char* next, char* slice) {
  const BlockStore& store = experts_.weights().down();
  const Segment& segment = routing_.segments[index];
  Tiling whole = plan_.tilings[index];
  int32_t k_tiles = store.k_tiles();
  const char* b = lane_weights(lane, index);

  Down down = lane_output(lane, slice);
  down.block_bytes = store.block_bytes();
  down.bias = experts_.weights().down_bias(segment.expert);
  for (int32_t k = 0; k < k_tiles; k += plan_.down_chunk) {
    int32_t now = std::min(plan_.down_chunk, k_tiles - k);
    down.first = k == 0;
    down.last = k + now == k_tiles;
    for_pieces(index, [&](int32_t tile, int32_t tiles) {
      std::vector<LoraTerm> lora_terms;
      if (down.first)
        for_runs(index, [&](const Run&, const RankPanels& ranks, const Adapter& adapter) {
          if (!adapter.down_tiles()) return;
          lora_terms.push_back(
              lora_term_of({(int32_t)index, tile, tile + tiles}, ranks, ranks.ha, adapter.down_tiles()));
          lora_terms.back().contraction.b = adapter.down_b().at(segment.expert, lane.block0);
          lora_terms.back().block_bytes = adapter.down_b().block_bytes();
        });
      down.lora_term = lora_terms.data();
      down.lora_terms = (int32_t)lora_terms.size();
      int64_t row = segment.begin + (int64_t)tile * whole.rows;
      const DownPanel panel = down_panel(index, tile, tiles, k, now);
      down.tiling = panel.tiling;
      down.live = panel.live;
      down.rows = {routing_.token.data() + row, routing_.weight.data() + row, routing_.mark.data() + row};
      down.base = panel.rows;
      down.base.b = b + store.offset(k);
      down.packed_rows = panel.packed;
      down.encoded = {store.encoding(), k, slice + plan_.decoded_at, nullptr, plan_.x_int8};
      bool packed_gemv = uses_packed_gemv(index, store);
      if (packed_gemv) down.packed_gemv = panel_rows(down.base, whole, down.live);
      if (w8a8()) {
        if (!packed_gemv) down.base.k_tiles = (int32_t)ceil_div(now, 2);
        down.encoded.channel = (float*)(slice + plan_.channels_at);
        down.row_scale = (const float*)(workspace_.data() + plan_.hidden_scales_at) + row;
      }
      const char* next_weights = down.last ? next : b + store.offset(k + now);
      down.next = tile + tiles == whole.tiles ? next_weights : nullptr;
      experts_.kernels().down(down);
    });
  }
}

}  // namespace kt
