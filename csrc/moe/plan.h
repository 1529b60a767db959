// How one call is cut into units of work: a pure decision, taken before anything runs.
//
// Two kinds of unit. An UpUnit multiplies some token tiles of one expert with a range of gate/up blocks and leaves the
// activated rows in the hidden panel. A Lane owns a range of output columns and walks all experts in order, adding
// their down products into those columns' sums: lanes share nothing, so sums need no locks and no second pass, and
// their order is fixed whatever the number of threads. A lane may enter an expert once all of its up units are done.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "moe/route.h"
#include "moe/weights.h"

namespace kt {

// Forward, a panel between units and lanes holds activated rows [I]; backward, gradients of gate and up [2 I].
enum class Direction : uint8_t { forward, backward };

struct UpUnit {
  int32_t segment;
  int32_t tile0, tile1;  // token tiles of the segment
  int32_t block0, block1;
};

constexpr int32_t kTurnedBlocks = 2;  // blocks that a thread transposes at a time

struct Lane {
  int32_t block0, block1;
};

// The sizes that a plan works towards, from the caches of the machine.
struct Budget {
  int64_t panel_bytes;  // activations that one thread keeps in L2 while weights pass by
  int64_t sums_bytes;   // partial sums between chunks of K
};

struct Plan {
  int32_t up_chunk;                      // k tiles of gate/up taken at a time where a unit's rows do not fit otherwise
  int32_t panel_k_tiles;                 // width of the panel between units and lanes
  int32_t down_chunk;                    // k tiles of down taken at a time; depends on I alone
  std::vector<Tiling> tilings;           // [segments]
  std::vector<int64_t> hidden_at;        // [segments] byte offset of the hidden panel
  std::vector<int32_t> units_of;         // [segments] up units to wait for
  std::vector<std::vector<UpUnit>> up;   // [groups]
  std::vector<std::vector<Lane>> lanes;  // [groups]
  // The workspace: panels between units and lanes, running sums, then one slice per thread.
  int64_t sums_at, threads_at, total_bytes;
  // A slice: gathered panel, partial sums, scratch; backward also the kept rows of a unit and transposed blocks.
  int64_t panel_bytes, partial_bytes, scratch_at, keep_at, turned_at, thread_bytes;
};

// What one k tile of a block costs, in passes of two token tiles over it: fetching the weights is worth about six.
constexpr int64_t block_cost(int64_t tiles) { return 6 + ceil_div(tiles, 2); }
constexpr int64_t kTurnCost = 2000;  // of a lane in one thread's hands: about a tenth of a millisecond

Budget budget_of_machine();
void make_plan(const Routing& routing, const Weights& weights, const KernelTable& kernels, int32_t tokens, int threads,
               int groups, const Budget& budget, Plan& plan, Direction direction = Direction::forward);

}  // namespace kt
