// How one call is divided into units of work: a pure function, evaluated before anything runs.
//
// There are two kinds of unit. An UpUnit multiplies some token tiles of one expert with a range of gate/up blocks and
// writes the activated rows to the hidden panel. A Lane owns a range of output columns and sweeps over all experts in
// order, adding their down products to the sums of those columns: lanes share nothing, so sums need no locks and no
// second pass, and their order is fixed whatever the number of threads. A lane may enter an expert once all of its up
// units are done.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "moe/lora.h"
#include "moe/route.h"
#include "moe/weights.h"

namespace kt {

// Forward, the panel between units and lanes holds activated rows [I]; backward, gradients of gate and up [2 I].
enum class Direction : uint8_t { forward, backward };

// Token tiles [tile0, tile1) of a segment.
struct Piece {
  int32_t segment;
  int32_t tile0, tile1;
};

struct UpUnit : Piece {
  int32_t block0, block1;
};

// The tiles of a run, and offsets of its rank panels in the workspace, each one tile longer on both sides. A panel that
// the direction does not need has no bytes.
struct RankPanels {
  int32_t tile0, tile1;
  int64_t xa;  // x times A of gate/up; backward only, forward computes them in the thread's slice
  int64_t ha;  // activated rows times A of down
  int64_t yb;  // the output's gradient times B of down
  int64_t gb;  // the gradient of gate/up times their B
};

// Columns of a factor's gradient that a thread computes at a time: its sums stay in L2.
constexpr int32_t factor_columns(int64_t rank) {
  int64_t most = (64 << 10) / (rank ? rank : 1) / 256 * 256;
  return (int32_t)(most < 256 ? 256 : most > 2048 ? 2048 : most);
}
// Elements from one rank's sums to the next: not a power of two, so that rows do not share cache sets.
constexpr int64_t sums_stride(int32_t columns) { return columns + 16; }
// Blocks that a thread transposes at a time: of a unit, and of a lane.
constexpr int32_t kTransposedBlocks = 2, kTransposedLaneBlocks = 4;
// Up to kOverlapTiles token tiles, few products share a transposed block, and the next block is transposed during them:
// one product then covers up to kOverlappedBlocks blocks, two of them in scratch.
constexpr int32_t kOverlapTiles = 3, kOverlappedBlocks = 16;

struct Lane {
  int32_t block0, block1;
};

// Target sizes of a plan, derived from the machine's caches.
struct Budget {
  int64_t panel_bytes;  // activations that one thread keeps in L2 while weights are streamed
  int64_t sums_bytes;   // partial sums between chunks of K
};

struct Plan {
  bool w8a8;                       // W8A8 by int8 tiles
  bool x_int8;                     // W8A8 by packed GEMV
  int32_t up_chunk;                // k tiles of gate/up per pass where a unit's rows do not fit the panel otherwise;
                                   // depends on H alone
  int32_t panel_k_tiles;           // width of the panel between units and lanes
  int32_t down_chunk;              // k tiles of down per pass; depends on I alone
  std::vector<Tiling> tilings;     // [segments]
  std::vector<int64_t> panels_at;  // [segments] byte offset of the hidden panel
  std::vector<int32_t> units_of;   // [segments] up units to wait for
  std::vector<RankPanels> ranks;   // [runs]
  std::vector<int64_t> hidden_at;  // [segments] activated rows, where backward needs them; else empty
  int64_t weight_grads_at;    // backward: per-block parts of the routing weights' gradients, sums [rows][down k tiles]
  int32_t max_tiles;          // token tiles that a thread gathers at a time, approximately
  std::vector<Piece> pieces;  // backward: pieces of all segments that have runs
  std::vector<std::vector<UpUnit>> up;   // [groups]
  std::vector<std::vector<Lane>> lanes;  // [groups]
  std::vector<int32_t> lane_rounds;      // the segment at which each round of LaneQueue ends
  // The workspace: panels between units and lanes, running sums, then one slice per thread.
  int64_t sums_at, threads_at, total_bytes;
  int64_t x_int8_at, x_scales_at,
      hidden_scales_at;  // W8A8: quantised x [T], its scales, scales of activated rows [rows]
  // Forward: activated rows as packed GEMV takes them, and the bytes of a k tile of one; 0: lanes write them
  // themselves.
  int64_t packed_rows_at;
  int32_t packed_row_bytes;
  // A thread's slice: gathered panel, partial sums, scratch, a dequantised block; backward also transposed blocks, and
  // the rows of a unit that it recomputes, unless forward kept them.
  int64_t panel_bytes, partial_bytes, scratch_at, decoded_at, keep_at, transposed_at;
  int64_t slice_rows_at;                // which rows the gathered panel holds (SliceRows in task.h)
  int64_t gathered_tile;                // bytes of a k tile of a row in the gathered panel
  int64_t unit_scales_at, channels_at;  // W8A8: scales of a unit's rows; of the channels of a unit's or lane's blocks
  // For LoRA: rank panels of a unit's runs, their partial sums, transposed blocks of factors.
  int64_t rank_at, rank_sums_at, rank_transposed_at, dropout_at, thread_bytes;
  int64_t factors_at;  // sums of a factor's gradient and their scratch
};

// Cost of one k tile of a block, in passes of two token tiles over it: reading the weights from memory costs about six.
constexpr int64_t block_cost(int64_t tiles) { return 6 + ceil_div(tiles, 2); }
constexpr int64_t kLaneSliceCost = 2000;  // at most, of a lane in one round: about a tenth of a millisecond

Budget budget_of_machine();

// Properties of a call that its plan depends on.
struct PlanInput {
  const Weights& weights;
  const KernelTable& kernels;
  const Adapters& adapters;
  int threads, groups;
  bool w8a8 = false, x_int8 = false;  // as in Plan
  bool kept = false;                  // backward: forward has kept gate and up
};
int64_t largest_rank(const Routing& routing, const Adapters& adapters);  // a multiple of kRankStep
void make_plan(const Routing& routing, const PlanInput& input, int32_t tokens, const Budget& budget,
               Direction direction, Plan& plan);

}  // namespace kt
