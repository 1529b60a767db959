// The schedule of a call and the steps that forward and backward share.
#include "moe/task.h"

#include <algorithm>
#include <cstring>

#include "default_arithmetic.h"
#include "futex.h"
#include "interrupt.h"

namespace kt {

constexpr int64_t kPrefetchWaiting = 256 << 10;  // bytes of weights that a waiting thread prefetches into L2

Experts::Experts(const LayerShape& shape, const Gate& gate, const KernelTable& kernels, std::shared_ptr<Engine> engine,
                 const LayerFormats& formats)
    : engine_(std::move(engine)), kernels_(kernels), gate_(gate), weights_(shape, formats, kernels, engine_->pool) {}

bool Experts::has_integer_tiles() const {
  const LayerFormats& f = weights_.formats();
  auto is_integer = [](const Format& format) { return format.codec == Codec::int8 || format.codec == Codec::int4; };
  return is_integer(f.up) && is_integer(f.down) && (!shape().gated || is_integer(f.gate));
}

std::string Experts::w8a8_unsupported() const {
  if (!kernels_.quantise) return std::string("precision ") + name_of(kernels_.precision) + " rounds nothing";
  if (!has_integer_tiles()) {
    for (const BlockStore* store : {&weights_.up(), &weights_.down()})
      if (!store->encoding() || !kernels_.packed_gemv_rows(*store->encoding(), true)) return kNoIntegerCodes;
    return "";
  }
  if (std::max(shape().hidden, shape().intermediate) > kMaxInt8K)
    return "sums of more than " + std::to_string(kMaxInt8K) + " products do not fit 32 bits";
  return "";
}

Task::Task(const Experts& experts, const Batch& batch, Adapters adapters, Direction direction)
    : experts_(experts), batch_(batch), adapters_(std::move(adapters)), direction_(direction) {
  size_t groups = (size_t)experts.engine().pool.groups();
  next_up_ = std::vector<std::atomic<int32_t>>(groups);
  lanes_ = std::vector<LaneQueue>(groups);
}

void Task::close() {
  Pool& pool = experts_.engine().pool;
  std::lock_guard lock(mutex_);
  if (!in_flight_) return weights_entered_ ? release() : void();  // started by steps that were interrupted
  try {
    if (interrupted_) {
      pool.wait_cancelled(*this);
    } else {
      pool.wait(*this);
    }
  } catch (const Interrupted&) {
    pool.wait_cancelled(*this);
  } catch (...) {
    return;  // only after fork(), in the child: the pool has no threads there
  }
  release();
}

// Zeroes the output of tokens that no local expert takes.
void Task::zero_idle_tokens() {
  size_t size = size_of(batch_.out_dtype);
  for (int32_t token : routing_.idle)
    std::memset((char*)batch_.out + token * batch_.out_stride * (int64_t)size, 0,
                (size_t)experts_.shape().hidden * size);
}

// Acquires what a run needs; finish() releases it, also where prepare() or the pool throws.
void Task::prepare() {
  static const Budget budget = budget_of_machine();
  Pool& pool = experts_.engine().pool;
  experts_.weights().enter();
  weights_entered_ = true;
  for (const Adapter* adapter : adapters_) adapter->enter(), adapters_entered_++;
  route(batch_, experts_.shape().experts, routing_);
  verify_experts();
  zero_idle_tokens();
  const bool rounds = batch_.w8a8 && direction_ == Direction::forward, tiles = rounds && experts_.has_integer_tiles();
  make_plan(routing_,
            {experts_.weights(), experts_.kernels(), adapters_, pool.threads(), pool.groups(), tiles, rounds && !tiles,
             reads_kept_rows()},
            batch_.tokens, budget, direction_, plan_);
  workspace_ = experts_.engine().arena.acquire((size_t)plan_.total_bytes);
  begin();
  for (auto& n : next_up_) n.store(0, std::memory_order_relaxed);
  for (size_t g = 0; g < lanes_.size(); g++) lanes_[g].reset(plan_.lanes[g].size(), plan_.lane_rounds);
  if (up_left_.size() < routing_.segments.size())
    up_left_ = std::vector<std::atomic<int32_t>>(routing_.segments.size());
  for (size_t s = 0; s < routing_.segments.size(); s++)
    up_left_[s].store(plan_.units_of[s] + 1, std::memory_order_relaxed);
}

// Checks the experts that this run reads for the first time.
void Task::verify_experts() {
  unverified_.clear();
  for (const Segment& segment : routing_.segments)
    if (!experts_.weights().verified(segment.expert)) unverified_.push_back(segment.expert);
  if (!unverified_.empty()) experts_.weights().verify(unverified_);
}

// Ends a run whose results are complete, unless pages of the weights were lost meanwhile.
void Task::finish() {
  release();
  experts_.weights().check_source();
}

void Task::release() {
  experts_.engine().arena.release(std::move(workspace_));
  if (weights_entered_) experts_.weights().leave();
  while (adapters_entered_) adapters_[--adapters_entered_]->leave();
  weights_entered_ = false;
  in_flight_.store(false, std::memory_order_release);
}

// Waits for a run in flight.
void Task::wait_pending() {
  if (!in_flight_) return;
  try {
    experts_.engine().pool.wait(*this);
  } catch (const Interrupted&) {
    interrupted_ = true;
    throw;
  }
  interrupted_ = false;
  finish();
}

Job& Task::start() {
  try {
    prepare();
  } catch (...) {
    release();
    throw;
  }
  return *this;
}

void Task::run() {
  std::lock_guard lock(mutex_);
  wait_pending();
  if (batch_.tokens == 0) return;
  try {
    prepare();
    experts_.engine().pool.run(*this);
  } catch (...) {
    release();
    throw;
  }
  finish();
}

void Task::submit() {
  std::lock_guard lock(mutex_);
  wait_pending();
  if (batch_.tokens == 0) return;
  try {
    prepare();
    in_flight_.store(true, std::memory_order_release);
    experts_.engine().pool.submit(*this);
  } catch (...) {
    release();
    throw;
  }
}

void Task::wait() {
  std::lock_guard lock(mutex_);
  wait_pending();
}

bool Task::done() const { return !in_flight_.load(std::memory_order_acquire) || experts_.engine().pool.done(*this); }

// Units of the worker's own group first, then those of the others.
void Task::work(const Worker& worker) {
  const DefaultArithmetic arithmetic;
  char* slice = workspace_.data() + plan_.threads_at + worker.index * plan_.thread_bytes;
  size_t groups = plan_.up.size();
  *(SliceRows*)(slice + plan_.slice_rows_at) = {-1, {}, false};
  before_units(slice);
  for (size_t i = 0; i < groups; i++) take_units((size_t)(worker.group + (int)i) % groups, slice);
  for (size_t i = 0; i < groups; i++) take_lanes((size_t)(worker.group + (int)i) % groups, slice);
  after_lanes(slice);
}

void Task::take_units(size_t group, char* slice) {
  const std::vector<UpUnit>& units = plan_.up[group];
  int32_t count = (int32_t)units.size(), tail = count - 2 * experts_.engine().pool.threads();
  auto claim = [&] { return next_up_[group].fetch_add(1, std::memory_order_relaxed); };
  for (int32_t n = claim(); n < count;) {
    int32_t after = n < tail ? claim() : -1;
    const UpUnit& unit = units[(size_t)n];
    if (!cancelled()) run_unit(unit, after >= 0 && after < count ? &units[(size_t)after] : nullptr, slice);
    std::atomic<int32_t>& left = up_left_[(size_t)unit.segment];
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 2) {
      if (!cancelled()) segment_done((size_t)unit.segment, slice);
      left.store(0, std::memory_order_release);
    }
    n = after >= 0 ? after : claim();
  }
}

// The next slice is taken before the current one starts, so that its first weights can be prefetched.
void Task::take_lanes(size_t group, char* slice) {
  LaneQueue& queue = lanes_[group];
  auto lane_of = [&](const LaneQueue::Slice& taken) -> const Lane& { return plan_.lanes[group][(size_t)taken.lane]; };
  LaneQueue::Slice current, next;
  for (bool more = queue.take(current); more; current = next) {
    more = queue.take(next);
    queue.wait_for_previous(current);
    const char* after = more ? lane_weights(lane_of(next), (size_t)next.begin) : nullptr;
    for (int32_t segment = current.begin; segment < current.end; segment++) {
      const Lane& lane = lane_of(current);
      wait_for_segment(lane, (size_t)segment);
      const char* weights = segment + 1 < current.end ? lane_weights(lane, (size_t)segment + 1) : after;
      if (!cancelled()) run_lane_segment(lane, (size_t)segment, weights, slice);
    }
    queue.finish(current);
  }
}

const char* Task::unit_weights(const UpUnit& unit) const {
  return experts_.weights().up().at(routing_.segments[(size_t)unit.segment].expert, unit.block0);
}

Task::UnitRows Task::rows_of(const Piece& unit) const {
  Tiling whole = plan_.tilings[(size_t)unit.segment];
  UnitRows r;
  r.tiling = {whole.rows, unit.tile1 - unit.tile0};
  r.first = unit.tile0 * whole.rows;
  int32_t rows = r.tiling.tiles * r.tiling.rows, k_tiles = experts_.weights().up().k_tiles();
  r.live = std::min(routing_.segments[(size_t)unit.segment].count - r.first, rows);
  bool fits = (int64_t)rows * k_tiles * plan_.gathered_tile <= plan_.panel_bytes;
  r.chunk = fits ? k_tiles : plan_.up_chunk;
  return r;
}

Gather Task::gather_of(const Piece& unit, const UnitRows& rows, const void* x, DType dtype, int64_t stride,
                       char* slice) const {
  const int32_t* token = routing_.token.data() + routing_.segments[(size_t)unit.segment].begin + rows.first;
  return {x, dtype, stride, token, rows.live, rows.tiling, 0, 0, experts_.shape().hidden, slice};
}

void Task::multiply_up(const UpUnit& unit, const UpUnit* next, char* slice, Up up, bool ranks_made) const {
  const BlockStore& store = experts_.weights().up();
  const KernelTable& kernels = experts_.kernels();
  const Segment& segment = routing_.segments[(size_t)unit.segment];
  UnitRows r = rows_of(unit);
  int32_t k_tiles = store.k_tiles();
  const char* b = unit_weights(unit);

  Gather gather = gather_of(unit, r, batch_.hidden, batch_.hidden_dtype, batch_.hidden_stride, slice);
  up.tiling = r.tiling;
  up.live = r.live;
  up.block_bytes = store.block_bytes();
  up.block0 = unit.block0;
  up.block1 = unit.block1;
  up.sums = slice + plan_.panel_bytes;
  up.scratch = slice + plan_.scratch_at;
  up.gate = experts_.gate();
  up.bias = experts_.weights().up_bias(segment.expert);
  std::vector<LoraTerm> lora_terms;
  auto gate_up_b = [&](const Adapter& adapter) { return adapter.gate_up_b().at(segment.expert, unit.block0); };
  if (ranks_made)
    for_runs((size_t)unit.segment, [&](const Run&, const RankPanels& ranks, const Adapter& adapter) {
      if (!adapter.gate_up_tiles()) return;
      lora_terms.push_back(lora_term_of(unit, ranks, ranks.xa, adapter.gate_up_tiles()));
      lora_terms.back().contraction.b = gate_up_b(adapter);
      lora_terms.back().block_bytes = adapter.gate_up_b().block_bytes();
    });
  bool adapted = routing_.run0[(size_t)unit.segment] < routing_.run0[(size_t)unit.segment + 1];
  bool packed_gemv = uses_packed_gemv((size_t)unit.segment, store);
  for (int32_t k = 0; k < k_tiles; k += r.chunk) {
    int32_t now = std::min(r.chunk, k_tiles - k);
    gather.k0 = k * kTileK;
    gather.k_tiles = now;
    size_t tile_bytes = (size_t)now * (size_t)r.tiling.rows * kTileK * (size_t)kernels.elem;
    up.base = {slice, tile_bytes, b + store.offset(k), now};
    up.encoded = {store.encoding(), k, slice + plan_.decoded_at, nullptr, plan_.x_int8, plan_.up_chunk};
    if (!w8a8() || adapted) gather_rows(gather, packed_gemv, adapted, slice, up);
    up.first = k == 0;
    up.last = k + now == k_tiles;
    if (!ranks_made) lora_shrink_chunk(unit, r, k, now, slice, up.last ? &lora_terms : nullptr);
    if (w8a8()) {
      if (packed_gemv && !up.last) continue;
      packed_gemv ? point_at_int8_rows(gather, up, slice) : gather_int8(gather, up, slice);
    } else if (packed_gemv) {
      up.packed_gemv = panel_rows(up.base, r.tiling, r.live);
    }
    up.lora_term = lora_terms.data();
    up.lora_terms = up.last ? (int32_t)lora_terms.size() : 0;
    up.next = !up.last ? b + store.offset(k + now) : next ? unit_weights(*next) : nullptr;
    kernels.up(up);
  }
}

void Task::gather_rows(Gather gather, bool packed_gemv, bool adapted, char* slice, Up& up) const {
  const KernelTable& kernels = experts_.kernels();
  SliceRows& rows = *(SliceRows*)(slice + plan_.slice_rows_at);
  const Encoding* encoding = up.encoded.encoding;
  const bool one = direction_ == Direction::forward && !w8a8() && gather.live == 1 &&
                   gather.k_tiles == experts_.weights().up().k_tiles();
  const bool packs = one && packed_gemv && kernels.packed_row_bytes && kernels.packed_row_bytes(*encoding);
  if (packs && !adapted) gather.tiling = {1, 1};  // zeros below the row are read by products of tiles alone
  const int32_t token = one ? gather.token[0] : -1;
  const bool held =
      one && rows.token == token && rows.tiling.rows == gather.tiling.rows && rows.tiling.tiles == gather.tiling.tiles;
  if (!held) {
    kernels.gather(gather);
    rows = {token, gather.tiling, false};
  }
  char* written = slice + plan_.decoded_at;
  if (packs && !rows.packed)
    kernels.write_packed_rows({{slice, up.base.a_tile, nullptr, gather.k_tiles},
                               gather.tiling,
                               gather.live,
                               encoding,
                               written,
                               plan_.x_int8});
  rows.packed = packs;  // a product with dequantised tiles writes to the same scratch
  up.packed_rows = packs ? written : nullptr;
}

bool Task::uses_packed_gemv(size_t segment, const BlockStore& store) const {
  const int32_t rows = routing_.segments[segment].count;
  if (w8a8()) return rows <= kPackedGemvInt8Rows;
  if (direction_ == Direction::backward || batch_.needs_grad || !store.encoding()) return false;
  auto* max_rows = experts_.kernels().packed_gemv_rows;
  return max_rows && rows <= max_rows(*store.encoding(), plan_.x_int8);
}

PackedGemvRows Task::panel_rows(const Contraction& panel, const Tiling& tiling, int32_t live) const {
  int64_t row_bytes = (int64_t)kTileK * experts_.kernels().elem;
  PackedGemvRows rows{};
  for (int32_t r = 0; r < std::min(live, kPackedGemvRows); r++) rows.row[r] = panel.a + r * row_bytes;
  rows.step = tiling.rows * row_bytes;
  return rows;
}

// The same rows and columns as int8, in place of the float panel.
void Task::gather_int8(const Gather& numbers, Up& up, char* slice) const {
  int32_t steps = (int32_t)ceil_div(numbers.k_tiles, 2), step0 = numbers.k0 / kStepK;
  float* scales = (float*)(slice + plan_.unit_scales_at);
  const char* x = workspace_.data();
  experts_.kernels().gather_int8({x + plan_.x_int8_at, (const float*)(x + plan_.x_scales_at),
                                  round_up(experts_.shape().hidden, kStepK), numbers.token, numbers.live,
                                  numbers.tiling, step0, steps, slice, scales});
  up.base.a_tile = (size_t)steps * (size_t)numbers.tiling.rows * kTileK * (size_t)experts_.kernels().elem;
  up.base.k_tiles = steps;
  up.encoded.k0 = step0;
  up.encoded.channel = (float*)(slice + plan_.channels_at);
  up.row_scale = scales;
}

// Points at the quantised rows in place, all of K at once, in the chunk in which LoRA is complete.
void Task::point_at_int8_rows(const Gather& numbers, Up& up, char* slice) const {
  float* scales = (float*)(slice + plan_.unit_scales_at);
  const char* x = workspace_.data() + plan_.x_int8_at;
  for (int32_t r = 0; r < numbers.live; r++) {
    up.packed_gemv.row[r] = x + numbers.token[r] * round_up(experts_.shape().hidden, kStepK);
    scales[r] = ((const float*)(workspace_.data() + plan_.x_scales_at))[numbers.token[r]];
  }
  up.packed_gemv.step = kStepK;
  up.first = true;
  up.base.k_tiles = experts_.weights().up().k_tiles();
  up.encoded.k0 = 0;
  up.encoded.channel = (float*)(slice + plan_.channels_at);
  up.row_scale = scales;
}

Down Task::lane_output(const Lane& lane, char* slice) const {
  Down down{};
  down.block0 = lane.block0;
  down.block1 = lane.block1;
  down.sum_block = (int64_t)batch_.tokens * kBlockN;
  down.sum = workspace_.data() + plan_.sums_at + lane.block0 * down.sum_block * experts_.kernels().sum_bytes;
  down.out = batch_.out;
  down.dtype = batch_.out_dtype;
  down.out_stride = batch_.out_stride;
  down.width = experts_.shape().hidden;
  down.scratch = slice + plan_.scratch_at;
  return down;
}

void Task::wait_for_segments() const {
  for (size_t s = 0; s < routing_.segments.size(); s++)
    for (int spins = 0; up_left_[s].load(std::memory_order_acquire); spins++)
      spins < 1000 ? relax() : (void)sched_yield();
}

// The remaining units are being computed by running threads; yields, in case this loop has taken a cpu from one of
// them. With few tokens all threads wait here for the last units: the lane's weights are prefetched into L2 meanwhile.
void Task::wait_for_segment(const Lane& lane, size_t segment) {
  const int64_t bytes = (int64_t)(lane.block1 - lane.block0) * (int64_t)experts_.weights().down().block_bytes();
  int64_t fetched = 0, at = 0;
  size_t from = segment;
  for (int spins = 0; up_left_[segment].load(std::memory_order_acquire); spins++) {
    const char* weights = from < routing_.segments.size() ? lane_weights(lane, from) : nullptr;
    if (weights && fetched < kPrefetchWaiting) {
      for (int line = 0; line < 8; line++) __builtin_prefetch(weights + at + line * 64, 0, 2);
      fetched += 512, at += 512;
      if (at >= bytes) at = 0, from++;
    } else if (spins < 1000) {
      relax();
    } else {
      sched_yield();
    }
  }
}

}  // namespace kt
