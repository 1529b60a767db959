// One call, run: every thread first takes up units, then lanes.
//
// A thread claims its next up unit before it starts the current one, so that the last block of this one can fetch the
// first weights of the next; near the end of the queue it does not, lest a claimed unit wait while others are idle.
#include <algorithm>
#include <cstring>

#include "futex.h"
#include "moe/moe.h"

namespace kt {
Experts::Experts(const LayerShape& shape, const Gate& gate, const KernelTable& kernels, std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)), kernels_(kernels), gate_(gate), weights_(shape, kernels, engine_->pool) {}

Call::Call(const Experts& experts, const Batch& batch) : experts_(experts), batch_(batch) {
  size_t groups = (size_t)experts.engine().pool.groups();
  next_up_ = std::vector<std::atomic<int32_t>>(groups);
  lanes_ = std::vector<LaneQueue>(groups);
}

Call::~Call() {
  try {
    wait();
  } catch (...) {
    // Only after fork(), in the child: nobody is at work here.
  }
}

// Borrows what a run needs; finish() gives it back, also where prepare() or the pool throws.
// Tokens that no expert here takes: their output is zero.
void Call::clear_idle() {
  size_t size = size_of(batch_.out_dtype);
  for (int32_t token : routing_.idle)
    std::memset((char*)batch_.out + token * batch_.out_stride * (int64_t)size, 0,
                (size_t)experts_.shape().hidden * size);
}

void Call::prepare() {
  static const Budget budget = budget_of_machine();
  Pool& pool = experts_.engine().pool;
  experts_.weights().enter();
  reading_ = true;
  route(batch_, experts_.shape().experts, routing_);
  clear_idle();
  make_plan(routing_, experts_.weights(), experts_.kernels(), batch_.tokens, pool.threads(), pool.groups(), budget,
            plan_);
  workspace_ = experts_.engine().arena.borrow((size_t)plan_.total_bytes);
  for (auto& n : next_up_) n.store(0, std::memory_order_relaxed);
  for (size_t g = 0; g < lanes_.size(); g++) lanes_[g].reset(plan_.lanes[g].size(), (int32_t)routing_.segments.size());
  if (up_left_.size() < routing_.segments.size())
    up_left_ = std::vector<std::atomic<int32_t>>(routing_.segments.size());
  for (size_t s = 0; s < routing_.segments.size(); s++) up_left_[s].store(plan_.units_of[s], std::memory_order_relaxed);
}

void Call::finish() {
  experts_.engine().arena.give_back(std::move(workspace_));
  if (reading_) experts_.weights().leave();
  reading_ = false;
  under_way_.store(false, std::memory_order_release);
}

// Waits for what is under way.
void Call::settle() {
  if (!under_way_) return;
  experts_.engine().pool.wait(*this);
  finish();
}

void Call::run() {
  std::lock_guard lock(mutex_);
  settle();
  if (batch_.tokens == 0) return;
  try {
    prepare();
    experts_.engine().pool.run(*this);
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

void Call::submit() {
  std::lock_guard lock(mutex_);
  settle();
  if (batch_.tokens == 0) return;
  try {
    prepare();
    under_way_.store(true, std::memory_order_release);
    experts_.engine().pool.submit(*this);
  } catch (...) {
    finish();
    throw;
  }
}

void Call::wait() {
  std::lock_guard lock(mutex_);
  settle();
}

bool Call::done() const { return !under_way_.load(std::memory_order_acquire) || experts_.engine().pool.done(*this); }

// Units of the worker's own group first, then those of the others.
void Call::work(const Worker& worker) {
  char* slice = workspace_.data() + plan_.threads_at + worker.index * plan_.thread_bytes;
  size_t groups = plan_.up.size();
  for (size_t i = 0; i < groups; i++) take_units((size_t)(worker.group + (int)i) % groups, slice);
  for (size_t i = 0; i < groups; i++) take_lanes((size_t)(worker.group + (int)i) % groups, slice);
}

void Call::take_units(size_t group, char* slice) {
  const std::vector<UpUnit>& units = plan_.up[group];
  int32_t count = (int32_t)units.size(), tail = count - 2 * experts_.engine().pool.threads();
  auto claim = [&] { return next_up_[group].fetch_add(1, std::memory_order_relaxed); };
  for (int32_t n = claim(); n < count;) {
    int32_t after = n < tail ? claim() : -1;
    run_up(units[(size_t)n], after >= 0 && after < count ? &units[(size_t)after] : nullptr, slice);
    n = after >= 0 ? after : claim();
  }
}

void Call::take_lanes(size_t group, char* slice) {
  int32_t segment = 0;
  for (int32_t n; (n = lanes_[group].take(segment)) >= 0;)
    lanes_[group].put_back(n, run_lane(plan_.lanes[group][(size_t)n], segment, slice));
}

const char* Call::first_read(const UpUnit& unit) const {
  return experts_.weights().up().at(routing_.segments[(size_t)unit.segment].expert, unit.block0);
}

void Call::run_up(const UpUnit& unit, const UpUnit* next, char* slice) {
  const Weights& weights = experts_.weights();
  const KernelTable& kernels = experts_.kernels();
  const Segment& segment = routing_.segments[(size_t)unit.segment];
  Tiling whole = plan_.tilings[(size_t)unit.segment];
  Tiling tiling = {whole.rows, unit.tile1 - unit.tile0};
  int32_t row0 = unit.tile0 * whole.rows, live = std::min(segment.count - row0, tiling.tiles * tiling.rows);
  int32_t k_tiles = weights.up().k_tiles();
  int64_t elem_tile = (int64_t)kTileK * kernels.elem, rows = (int64_t)tiling.tiles * tiling.rows;
  int32_t chunk = rows * k_tiles * elem_tile <= plan_.panel_bytes ? k_tiles : plan_.up_chunk;
  const char* b = first_read(unit);

  Gather gather{batch_.hidden,
                batch_.hidden_dtype,
                batch_.hidden_stride,
                routing_.token.data() + segment.begin + row0,
                live,
                tiling,
                0,
                0,
                experts_.shape().hidden,
                slice};
  Up up{};
  up.tiling = tiling;
  up.live = live;
  up.block_bytes = weights.up().block_bytes();
  up.block0 = unit.block0;
  up.block1 = unit.block1;
  up.sums = (float*)(slice + plan_.panel_bytes);
  up.scratch = (float*)(slice + plan_.panel_bytes + plan_.partial_bytes);
  up.gate = experts_.gate();
  up.bias = weights.up_bias(segment.expert);
  up.hidden_k_tiles = weights.hidden_k_tiles();
  up.hidden = workspace_.data() + plan_.hidden_at[(size_t)unit.segment] +
              unit.tile0 * whole.rows * elem_tile * up.hidden_k_tiles;
  for (int32_t k = 0; k < k_tiles; k += chunk) {
    int32_t now = std::min(chunk, k_tiles - k);
    gather.k0 = k * kTileK;
    gather.k_tiles = now;
    kernels.gather(gather);
    up.base = {slice, (size_t)(now * tiling.rows * elem_tile), b + (size_t)k * 2 * kTileBytes, now};
    up.first = k == 0;
    up.last = k + now == k_tiles;
    up.next = !up.last ? b + (size_t)(k + now) * 2 * kTileBytes : next ? first_read(*next) : nullptr;
    kernels.up(up);
  }
  up_left_[(size_t)unit.segment].fetch_sub(1, std::memory_order_release);
}

// The units are in the hands of running threads; one that lost its cpu to this very loop must get it back.
void Call::await_up(size_t segment) {
  for (int looks = 0; up_left_[segment].load(std::memory_order_acquire); looks++)
    looks < 1000 ? relax() : (void)sched_yield();
}

// Brings a lane forward from `segment` by a turn's worth of work; where it stands then.
int32_t Call::run_lane(const Lane& lane, int32_t segment, char* slice) {
  int64_t cost = 0, per_block = (int64_t)(lane.block1 - lane.block0) * experts_.weights().down().k_tiles();
  int32_t end = (int32_t)routing_.segments.size();
  do {
    await_up((size_t)segment);
    run_down(lane, (size_t)segment, slice);
    cost += per_block * block_cost(plan_.tilings[(size_t)segment].tiles);
  } while (++segment < end && cost < kTurnCost);
  return segment;
}

void Call::run_down(const Lane& lane, size_t index, char* slice) {
  const BlockStore& store = experts_.weights().down();
  const KernelTable& kernels = experts_.kernels();
  const Segment& segment = routing_.segments[index];
  Tiling whole = plan_.tilings[index];
  int32_t k_tiles = store.k_tiles();
  int64_t elem_tile = (int64_t)kTileK * kernels.elem, tile_bytes = whole.rows * elem_tile * k_tiles;
  const char* panel = workspace_.data() + plan_.hidden_at[index];
  const char* b = store.at(segment.expert, lane.block0);
  bool more = index + 1 < routing_.segments.size();
  const char* after = more ? store.at(routing_.segments[index + 1].expert, lane.block0) : nullptr;

  Down down{};
  down.block_bytes = store.block_bytes();
  down.block0 = lane.block0;
  down.block1 = lane.block1;
  down.bias = experts_.weights().down_bias(segment.expert);
  down.sum_block = (int64_t)batch_.tokens * kBlockN;
  down.sum = (float*)(workspace_.data() + plan_.sums_at) + lane.block0 * down.sum_block;
  down.out = batch_.out;
  down.dtype = batch_.out_dtype;
  down.out_stride = batch_.out_stride;
  down.width = experts_.shape().hidden;
  down.scratch = (float*)(slice + plan_.panel_bytes + plan_.partial_bytes);
  // Rows in pieces whose hidden panel stays in L2 while the lane's blocks pass over it.
  int32_t most = (int32_t)std::max<int64_t>(2, plan_.panel_bytes / (whole.rows * elem_tile * plan_.down_chunk) / 2 * 2);
  for (int32_t k = 0; k < k_tiles; k += plan_.down_chunk) {
    int32_t now = std::min(plan_.down_chunk, k_tiles - k);
    down.first = k == 0;
    down.last = k + now == k_tiles;
    for (int32_t tile = 0; tile < whole.tiles; tile += most) {
      down.tiling = {whole.rows, std::min(most, whole.tiles - tile)};
      int32_t row0 = tile * whole.rows;
      down.live = std::min(segment.count - row0, down.tiling.tiles * whole.rows);
      int64_t row = segment.begin + row0;
      down.rows = {routing_.token.data() + row, routing_.weight.data() + row, routing_.mark.data() + row};
      down.base = {panel + tile * tile_bytes + k * whole.rows * elem_tile, (size_t)tile_bytes,
                   b + (size_t)k * 2 * kTileBytes, now};
      down.next = down.last && tile + most >= whole.tiles ? after : nullptr;
      kernels.down(down);
    }
  }
}

}  // namespace kt
