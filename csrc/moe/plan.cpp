// Sizes, in the order in which they are chosen: token tiles per unit and the chunk of K (so that the gathered rows stay
// in L2), blocks per unit (large first, smaller towards the end, so that all threads finish together), columns per lane
// (enough to reuse the hidden rows, few enough to keep every thread busy).
#include "moe/plan.h"

#include <algorithm>

#include "topology.h"

namespace kt {
namespace {

constexpr int32_t kMaxBackwardBlocks = 32;  // gate/up blocks of a backward unit that recomputes them: they stay in L2
constexpr int64_t kScratchSums = 2 * 2 * kMaxRows * kBlockN;

// Token tiles of one segment in pieces of about `most`, at most a quarter more, none much smaller than the others.
std::vector<Piece> split_tiles(int32_t segment, int32_t tiles, int32_t most) {
  int32_t count = tiles <= most + most / 4 ? 1 : (int32_t)ceil_div(tiles, most);
  std::vector<Piece> pieces;
  for (int32_t p = 0; p < count; p++)
    pieces.push_back({segment, (int32_t)((int64_t)tiles * p / count), (int32_t)((int64_t)tiles * (p + 1) / count)});
  return pieces;
}

struct UpPartitioner {
  const Weights& weights;
  int threads;
  Plan& plan;
  int32_t max_blocks;

  // Units over blocks [begin, end) of every segment, for one group of threads.
  void partition(const std::vector<Segment>& segments, int group) {
    int32_t begin = weights.up().begin(group), end = weights.up().end(group), step = weights.shape().gated ? 2 : 1;
    if (begin == end) return;  // more groups than blocks
    int64_t left = 0;
    for (const Tiling& t : plan.tilings) left += (end - begin) * block_cost(t.tiles);
    for (size_t s = 0; s < segments.size(); s++) {
      int32_t tiles = plan.tilings[s].tiles;
      std::vector<Piece> pieces = split_tiles((int32_t)s, tiles, plan.max_tiles);
      int64_t cost = (end - begin) * block_cost(tiles);
      int64_t fair = std::max<int64_t>(left / (2 * threads), 1);
      int64_t parts = std::clamp<int64_t>(ceil_div(cost / (int64_t)pieces.size(), fair), 1, (end - begin) / step);
      int32_t per_part = (int32_t)std::min<int64_t>(round_up(ceil_div(end - begin, parts), step), max_blocks);
      // Neighbours in the queue share weights: the pieces of one block range are adjacent.
      for (int32_t b = begin; b < end; b += per_part)
        for (const Piece& p : pieces)
          plan.up[(size_t)group].push_back({p.segment, p.tile0, p.tile1, b, std::min(b + per_part, end)});
      left -= cost;
    }
    for (const UpUnit& u : plan.up[(size_t)group]) plan.units_of[(size_t)u.segment]++;
  }
};

// Blocks per lane. A lane reads its own weights once and every hidden row once, from the shared cache, so wide lanes
// read rows less often; there must be a third more lanes than threads, or threads that finish early have nothing to
// take. With few rows the hidden rows are small, and single blocks balance best.
int32_t lane_width(int32_t blocks, int threads, size_t weight_bytes, int64_t row_bytes) {
  if (row_bytes * 4 < (int64_t)weight_bytes) return 1;
  return (int32_t)std::max<int64_t>(1, blocks * 3 / (4 * threads));
}

// Rounds of equal cost, then halves of what is left, down to single segments: threads that finish early take these.
std::vector<int32_t> rounds_of_lanes(const std::vector<Tiling>& tilings, int64_t k_tile_blocks) {
  int64_t left = 0;
  for (const Tiling& t : tilings) left += k_tile_blocks * block_cost(t.tiles);
  std::vector<int32_t> ends;
  for (size_t s = 0; s < tilings.size();) {
    const int64_t most = std::min(kLaneSliceCost, left / 2);
    int64_t cost = 0;
    do cost += k_tile_blocks * block_cost(tilings[s++].tiles);
    while (s < tilings.size() && cost < most);
    left -= cost;
    ends.push_back((int32_t)s);
  }
  return ends;
}

}  // namespace

Budget budget_of_machine() {
  const Topology& t = topology();
  int64_t l2 = t.l2 ? (int64_t)t.l2 : 1 << 20;
  int64_t share = l2 / std::max(1, t.l2_sharers);
  // Guests hide hyperthread siblings: an L2 is assumed to be shared by two threads even where the guest shows one.
  if (t.hypervisor && t.l2_sharers == 1) share = l2 / 2;
  share = std::max<int64_t>(share, 256 << 10);
  return {share * 5 / 8, share * 3 / 8};
}

int64_t largest_rank(const Routing& routing, const Adapters& adapters) {
  int64_t rank = 0;
  for (const Run& run : routing.runs) {
    const Adapter& adapter = *adapters[(size_t)run.adapter];
    rank = std::max<int64_t>({rank, adapter.gate_up_rank(), adapter.ranks().down});
  }
  return round_up(rank, kRankStep);
}

// A thread's memory for gradients of factors: sums of some columns and the scratch of wgrad.
static int64_t factor_bytes(int64_t rank, int64_t sum_bytes) {
  int64_t sums = round_up(rank, kTileN) * sums_stride(factor_columns(rank)) * sum_bytes;
  return rank ? sums + wgrad_scratch(rank, sum_bytes) : 0;
}

// Assigns offsets from `at` on to the rank panels of all runs, and sizes a thread's panels of a unit. Returns the end.
static int64_t place_rank_panels(const Routing& routing, const PlanInput& input, bool back, int64_t at, Plan& plan) {
  const int64_t row_bytes = (int64_t)kTileK * input.kernels.elem;
  int64_t max_panels = 0, max_sums = 0, max_transposed = 0;
  plan.ranks.clear();
  plan.pieces.clear();
  for (size_t s = 0; s < routing.segments.size(); s++) {
    Tiling t = plan.tilings[s];
    int64_t panels = 0, sums = 0, transposed = 0;
    if (back && routing.run0[s] < routing.run0[s + 1])
      for (Piece p : split_tiles((int32_t)s, t.tiles, plan.max_tiles)) plan.pieces.push_back(p);
    for (int32_t n = routing.run0[s]; n < routing.run0[s + 1]; n++) {
      const Run& run = routing.runs[(size_t)n];
      const Adapter& adapter = *input.adapters[(size_t)run.adapter];
      int64_t wide = adapter.gate_up_tiles(), down = adapter.down_tiles(), most = std::max(wide, down);
      RankPanels r{run.first / t.rows, (int32_t)ceil_div(run.first + run.count, t.rows), 0, 0, 0, 0};
      int64_t tile = t.rows * row_bytes, tiles = r.tile1 - r.tile0 + 2;
      auto take = [&](int64_t bytes) {
        int64_t start = at;
        at += round_up(bytes, 64);
        return start;
      };
      r.ha = take(tiles * tile * down);
      if (back) {
        r.xa = take(tiles * tile * wide);
        r.yb = take(tiles * tile * down);
        r.gb = take(tiles * tile * wide);
      }
      plan.ranks.push_back(r);
      int64_t in_unit = std::min<int64_t>(tiles, plan.max_tiles + plan.max_tiles / 4 + 2);
      panels += round_up(in_unit * tile * wide, 64);
      sums += in_unit * t.rows * kBlockN * input.kernels.sum_bytes * most;
      transposed += std::max(kOverlappedBlocks, kTransposedLaneBlocks) * most * 2 * input.kernels.tile_bytes;
    }
    max_panels = std::max(max_panels, panels);
    max_sums = std::max(max_sums, sums);
    max_transposed = std::max(max_transposed, transposed);
  }
  plan.rank_sums_at = max_panels;  // relative to rank_at until that is known
  plan.rank_transposed_at = plan.rank_sums_at + round_up(max_sums, 64);
  plan.thread_bytes = plan.rank_transposed_at + (back ? max_transposed : 0);
  return at;
}

namespace {

// What the steps of make_plan pass on.
struct Planner {
  const Routing& routing;
  const PlanInput& input;
  const Budget& budget;
  const int32_t tokens;
  const bool back;
  Plan& plan;

  const KernelTable& kernels = input.kernels;
  const BlockStore &up = input.weights.up(), &down = input.weights.down();
  const int64_t elem_tile = (int64_t)kTileK * kernels.elem;
  const int32_t wide = input.w8a8 ? 2 : 1;
  int32_t chunks = 1;        // of K in a unit
  int64_t hidden_bytes = 0;  // of all panels between units and lanes
  int64_t largest_rows = 0;  // of a unit
  int64_t block_sums = 0;    // bytes of a unit's sums for a block
  int32_t max_blocks = 0;    // of a unit

  void choose_chunks();
  void tile_segments();
  void divide_work();
  void place_workspace();
  void place_slice();
};

// The rows of a full unit and its chunk of K are chosen together: about 128 rows by 2048. int8 rows take half the
// space, but LoRA reads the float rows, which are gathered before them.
void Planner::choose_chunks() {
  plan.w8a8 = input.w8a8;
  plan.x_int8 = input.x_int8;
  plan.gathered_tile = plan.w8a8 && routing.runs.empty() ? elem_tile / 2 : elem_tile;
  int64_t tile_rows = kernels.tiling(1 << 20).rows;
  chunks = (int32_t)std::max<int64_t>(1, (up.k_tiles() + 16 * wide) / (64 * wide));
  plan.up_chunk = (int32_t)round_up(ceil_div(up.k_tiles(), chunks), wide);
  plan.max_tiles =
      (int32_t)std::max<int64_t>(2, budget.panel_bytes / (plan.up_chunk * plan.gathered_tile * tile_rows) / 2 * 2);
  plan.panel_k_tiles = back ? up.blocks() : down.k_tiles();
  // int32 sums cannot be split: down takes all of K at once.
  plan.down_chunk = plan.w8a8 ? plan.panel_k_tiles
                              : (int32_t)ceil_div(plan.panel_k_tiles, std::max(1, (plan.panel_k_tiles + 32) / 96));
}

void Planner::tile_segments() {
  plan.tilings.clear();
  plan.panels_at.clear();
  for (const Segment& s : routing.segments) {
    Tiling t = kernels.tiling(s.count);
    plan.tilings.push_back(t);
    plan.panels_at.push_back(hidden_bytes);
    hidden_bytes += round_up((int64_t)t.tiles * t.rows * elem_tile * plan.panel_k_tiles, 64);
    for (const Piece& p : split_tiles(0, t.tiles, plan.max_tiles))
      largest_rows = std::max<int64_t>(largest_rows, (p.tile1 - p.tile0) * t.rows);
  }
  // Between chunks of K a unit's sums stay in L2; the fewer its blocks, the more often its rows are gathered.
  block_sums = std::max<int64_t>(1, largest_rows) * kBlockN * kernels.sum_bytes;
  max_blocks = up.blocks();
  if (chunks > 1) max_blocks = (int32_t)std::max<int64_t>(2, budget.sums_bytes / block_sums / 2 * 2);
  if (back && !input.kept) max_blocks = std::min(max_blocks, kMaxBackwardBlocks);
}

void Planner::divide_work() {
  plan.units_of.assign(routing.segments.size(), 0);
  plan.up.assign((size_t)input.groups, {});
  plan.lanes.assign((size_t)input.groups, {});
  UpPartitioner partitioner{input.weights, std::max(1, input.threads / input.groups), plan, max_blocks};
  size_t weight_bytes = routing.segments.size() * down.block_bytes();
  int64_t row_bytes = (int64_t)routing.token.size() * elem_tile * plan.panel_k_tiles;
  int32_t widest = 1;
  for (int g = 0; g < input.groups; g++) {
    partitioner.partition(routing.segments, g);
    int32_t begin = down.begin(g), end = down.end(g);
    int32_t width = lane_width(end - begin, partitioner.threads, weight_bytes, row_bytes);
    widest = std::max(widest, width);
    for (int32_t b = begin; b < end; b += width) plan.lanes[(size_t)g].push_back({b, std::min(b + width, end)});
  }
  plan.lane_rounds = rounds_of_lanes(plan.tilings, (int64_t)widest * plan.panel_k_tiles);
}

// What all threads share: panels between units and lanes, rank panels, rows in the form that a kernel takes, sums.
void Planner::place_workspace() {
  plan.hidden_at.clear();
  int64_t at = hidden_bytes;
  bool needs_hidden = false;  // gradients of down's factors contract over activated rows
  for (const Run& run : routing.runs) needs_hidden |= back && input.adapters[(size_t)run.adapter]->down_tiles() > 0;
  for (size_t s = 0; needs_hidden && s < routing.segments.size(); s++) {
    plan.hidden_at.push_back(at);
    at += round_up((int64_t)plan.tilings[s].tiles * plan.tilings[s].rows * elem_tile * down.k_tiles(), 64);
  }
  at = place_rank_panels(routing, input, back, at, plan);
  plan.weight_grads_at = at;
  if (back) at += (int64_t)routing.token.size() * down.k_tiles() * kernels.sum_bytes;
  plan.x_int8_at = round_up(at, 64);
  plan.x_scales_at = plan.x_int8_at + tokens * round_up(input.weights.shape().hidden, kStepK);
  plan.hidden_scales_at = plan.x_scales_at + tokens * (int64_t)sizeof(float);
  if (plan.w8a8) at = plan.hidden_scales_at + (int64_t)(routing.token.size() * sizeof(float));

  // Many rows are written by every lane: lanes are wide then, and the rows would not stay in the caches.
  bool packs_rows = !back && !plan.w8a8 && down.encoding() && kernels.packed_row_bytes;
  plan.packed_row_bytes = packs_rows ? kernels.packed_row_bytes(*down.encoding()) : 0;
  int64_t packed_rows = (int64_t)routing.token.size() * down.k_tiles() * plan.packed_row_bytes;
  if (packed_rows * 4 > (int64_t)(routing.segments.size() * down.block_bytes()) * down.blocks())
    plan.packed_row_bytes = 0;
  plan.packed_rows_at = round_up(at, 64);
  if (plan.packed_row_bytes) at = plan.packed_rows_at + packed_rows;

  plan.sums_at = round_up(at, 4096);
  plan.threads_at = plan.sums_at + round_up((int64_t)down.blocks() * tokens * kBlockN * kernels.sum_bytes, 4096);
}

// A thread's slice: its panel, sums and scratch.
void Planner::place_slice() {
  plan.panel_bytes = round_up(
      std::max(largest_rows * plan.up_chunk * plan.gathered_tile,
               std::min<int64_t>(largest_rows * up.k_tiles() * plan.gathered_tile, budget.panel_bytes * 5 / 4)),
      4096);
  plan.partial_bytes = chunks > 1 ? round_up(max_blocks * block_sums, 4096) : 0;
  plan.scratch_at = plan.panel_bytes + plan.partial_bytes;
  plan.unit_scales_at = plan.scratch_at + kScratchSums * kernels.sum_bytes * wide;
  int64_t of_rows = round_up(largest_rows * (int64_t)sizeof(float), 64);
  int64_t of_channels = std::max(up.blocks(), down.blocks()) * kBlockN * (int64_t)sizeof(float);
  plan.channels_at = plan.unit_scales_at + (plan.w8a8 ? of_rows : 0);
  plan.slice_rows_at = plan.channels_at + (plan.w8a8 ? of_channels : 0);
  plan.decoded_at = plan.slice_rows_at + 64;
  int32_t decoded = std::max(up.encoding() ? up.k_tiles() : 0, down.encoding() ? plan.down_chunk : 0);
  int64_t decoded_bytes = decoded ? (int64_t)up.k_bytes(std::max(decoded, kRingTiles)) : 0;
  int32_t packed_gemv_rows = 0;
  for (const BlockStore* store : {&up, &down})
    if (store->encoding() && kernels.packed_gemv_rows)
      packed_gemv_rows = std::max(packed_gemv_rows, kernels.packed_gemv_rows(*store->encoding(), plan.x_int8));
  if (!back)
    decoded_bytes = std::max(
        decoded_bytes, decoded * std::min<int64_t>(largest_rows, packed_gemv_rows) * kernels.packed_gemv_row_bytes);
  plan.keep_at = plan.decoded_at + round_up(decoded_bytes, 64);
  plan.transposed_at = plan.keep_at + (back && !input.kept ? round_up(largest_rows * max_blocks * elem_tile, 4096) : 0);
  int64_t transposed = (int64_t)up.k_bytes(
      std::max({kTransposedBlocks * up.k_tiles(), kTransposedLaneBlocks * plan.down_chunk, up.blocks()}));
  plan.rank_at = plan.transposed_at + (back ? transposed : 0);
  plan.rank_sums_at += plan.rank_at;
  plan.rank_transposed_at += plan.rank_at;
  // Dropout needs a second panel of a unit's rows, or a pair of tiles as wide as I.
  int64_t pair = 2 * (int64_t)kernels.tiling(1 << 20).rows * elem_tile * down.k_tiles();
  plan.dropout_at = plan.rank_at + plan.thread_bytes;
  plan.thread_bytes += routing.dropout_seeds_x.empty() ? 0 : std::max(plan.panel_bytes, round_up(pair, 4096));
  int64_t factors = back ? factor_bytes(largest_rank(routing, input.adapters), kernels.sum_bytes) : 0;
  plan.factors_at = round_up(plan.thread_bytes + plan.rank_at, 4096);
  plan.thread_bytes = plan.factors_at + round_up(factors, 4096);
}

}  // namespace

void make_plan(const Routing& routing, const PlanInput& input, int32_t tokens, const Budget& budget,
               Direction direction, Plan& plan) {
  Planner planner{routing, input, budget, tokens, direction == Direction::backward, plan};
  planner.choose_chunks();
  planner.tile_segments();
  planner.divide_work();
  planner.place_workspace();
  planner.place_slice();
  plan.total_bytes = plan.threads_at + input.threads * plan.thread_bytes;
}

}  // namespace kt
