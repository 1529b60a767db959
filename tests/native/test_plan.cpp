// The plan: every unit of work is in it exactly once, whatever the shape, the threads and the groups, and offsets stay
// inside the workspace.
#include <map>

#include "check.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

Routing rows_of(const std::vector<int32_t>& counts) {
  Routing r;
  int32_t begin = 0;
  for (size_t e = 0; e < counts.size(); e++) {
    if (counts[e]) r.segments.push_back({(int32_t)e, begin, counts[e]});
    begin += counts[e];
  }
  r.run0.assign(r.segments.size() + 1, 0);
  return r;
}

// Each (token tile, block) of each segment once, each output block in one lane.
void check_cover(const Plan& plan, const Routing& routing, const Weights& weights) {
  std::map<std::pair<int32_t, int64_t>, int> seen;
  std::vector<int32_t> units(routing.segments.size());
  int64_t blocks = weights.up().blocks();
  for (const auto& group : plan.up)
    for (const UpUnit& u : group) {
      units[(size_t)u.segment]++;
      CHECK(u.tile0 < u.tile1 && u.block0 < u.block1);
      CHECK_EQ(weights.up().group_of(u.block0), weights.up().group_of(u.block1 - 1));
      for (int64_t t = u.tile0; t < u.tile1; t++)
        for (int64_t b = u.block0; b < u.block1; b++) seen[{u.segment, t * blocks + b}]++;
    }
  int64_t all = 0;
  for (const Tiling& t : plan.tilings) all += t.tiles * blocks;
  CHECK_EQ((int64_t)seen.size(), all);
  for (const auto& [what, times] : seen) CHECK_EQ(times, 1);
  CHECK(units == plan.units_of);

  std::vector<int> lanes((size_t)weights.down().blocks());
  for (const auto& group : plan.lanes)
    for (const Lane& lane : group)
      for (int32_t b = lane.block0; b < lane.block1; b++) lanes[(size_t)b]++;
  for (int times : lanes) CHECK_EQ(times, 1);
  // Rounds of lanes cover all segments in order, and the last ones are short.
  int32_t covered = 0;
  for (int32_t end : plan.lane_rounds) {
    CHECK(end > covered);
    covered = end;
  }
  CHECK_EQ(covered, (int32_t)routing.segments.size());
  if (size_t rounds = plan.lane_rounds.size(); rounds > 1)
    CHECK_EQ(plan.lane_rounds[rounds - 1] - plan.lane_rounds[rounds - 2], 1);
}

// How a call uses its plan.
struct Pass {
  Direction direction;
  bool kept;  // gate and up, by forward
};
constexpr Pass kPasses[] = {{Direction::forward, false}, {Direction::backward, false}, {Direction::backward, true}};

void check_space(const Plan& plan, const Weights& weights, const KernelTable& kernels, int threads, Pass pass) {
  int64_t elem_tile = (int64_t)kTileK * kernels.elem, k_tiles = weights.up().k_tiles();
  for (const auto& group : plan.up)
    for (const UpUnit& u : group) {
      int64_t rows = (int64_t)(u.tile1 - u.tile0) * plan.tilings[(size_t)u.segment].rows;
      if (pass.direction == Direction::backward && !pass.kept)
        CHECK((u.block1 - u.block0) * rows * elem_tile <= plan.transposed_at - plan.keep_at);
      if (rows * k_tiles * elem_tile <= plan.panel_bytes) continue;  // gathered whole
      CHECK(rows * plan.up_chunk * elem_tile <= plan.panel_bytes);
      if (plan.up_chunk < k_tiles)
        CHECK((u.block1 - u.block0) * rows * kBlockN * kernels.sum_bytes <= plan.partial_bytes);
    }
  CHECK(plan.threads_at >= plan.sums_at);
  CHECK_EQ(plan.total_bytes, plan.threads_at + threads * plan.thread_bytes);
}

}  // namespace

TEST(plan_covers_everything_once) {
  const std::vector<std::vector<int32_t>> routings = {{}, {1}, {0, 3, 0, 1}, {17, 1, 400, 16}, {5000}};
  for (const KernelTable* kernels : all_kernels())
    for (int groups : {1, 2, 4})
      for (int threads : {groups, 7, 16}) {
        if (threads < groups) continue;
        auto engine = engine_of(threads, groups);
        for (LayerShape shape :
             {LayerShape{4, 1, 1, true}, {4, 96, 40, true}, {4, 130, 33, false}, {4, 5200, 100, true}}) {
          Weights weights(shape, {}, *kernels, engine->pool);
          for (const auto& counts : routings)
            for (int64_t l2 : {128 << 10, 2 << 20}) {
              Routing routing = rows_of(counts);
              for (Pass pass : kPasses) {
                Plan plan;
                make_plan(routing, {weights, *kernels, {}, threads, groups, false, false, pass.kept}, 5000,
                          {l2 / 2, l2 / 4}, pass.direction, plan);
                check_cover(plan, routing, weights);
                check_space(plan, weights, *kernels, threads, pass);
              }
            }
        }
      }
}

TEST(plan_keeps_every_thread_busy_with_few_tokens) {
  // Eight experts of one token each on 16 threads: a lane and several units for every thread.
  auto engine = engine_of(16);
  Weights weights({8, 2048, 768, true}, {}, kernels(), engine->pool);
  Plan plan;
  make_plan(rows_of({1, 1, 1, 1, 1, 1, 1, 1}), {weights, kernels(), {}, 16, 1}, 1, {512 << 10, 256 << 10},
            Direction::forward, plan);
  CHECK(plan.up[0].size() >= 32);
  CHECK(plan.lanes[0].size() >= 16);
}

TEST(plan_down_chunk_depends_on_the_layer_alone) {
  // Sums are formed chunk by chunk, so a token's bits would depend on its batch otherwise.
  auto engine = engine_of(2);
  Weights weights({2, 32, 9000, true}, {}, kernels(), engine->pool);
  Plan one, many;
  make_plan(rows_of({1, 0}), {weights, kernels(), {}, 2, 1}, 1, {512 << 10, 256 << 10}, Direction::forward, one);
  make_plan(rows_of({900, 3}), {weights, kernels(), {}, 2, 1}, 900, {512 << 10, 256 << 10}, Direction::forward, many);
  CHECK_EQ(one.down_chunk, many.down_chunk);
}

TEST(plan_of_backward_gathers_a_gradient_once_where_gate_and_up_are_kept) {
  // Recomputed rows of a unit must stay in L2, kept ones are read where they lie.
  auto engine = engine_of(2);
  Weights weights({64, 64, 768, true}, {}, kernels(), engine->pool);
  Routing routing = rows_of(std::vector<int32_t>(64, 64));
  auto blocks_of_unit = [&](bool kept) {
    Plan plan;
    make_plan(routing, {weights, kernels(), {}, 2, 1, false, false, kept}, 64, {512 << 10, 256 << 10},
              Direction::backward, plan);
    return plan.up[0][0].block1 - plan.up[0][0].block0;
  };
  CHECK_EQ(blocks_of_unit(true), weights.up().blocks());
  CHECK_EQ(blocks_of_unit(false), 32);
}
