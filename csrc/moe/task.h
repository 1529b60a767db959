// Base of forward and backward calls: a batch, its routing and plan, and the loop in which threads take units and
// lanes.
//
// Every thread first takes up units, then lanes. It claims its next up unit before it starts the current one, so that
// the last block of the current one can prefetch the first weights of the next; near the end of the queue it does not,
// so that no claimed unit waits while other threads are idle. What a unit and a lane compute is defined by the derived
// class.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moe/buffer_pool.h"
#include "moe/lanes.h"
#include "moe/plan.h"
#include "moe/route.h"
#include "moe/weights.h"

namespace kt {

// Shared by several layers: the threads and the workspace.
struct Engine {
  explicit Engine(const PoolOptions& options) : pool(options) {}
  Pool pool;
  Arena arena;
};

// Largest K for which a sum of int8 products, -128 times 127 each, fits 32 bits.
constexpr int32_t kMaxInt8K = 132104;
constexpr const char* kNoIntegerCodes = "bf16, bf16:12, mxfp8 and fp8 have no integers times a scale";

class Experts {
 public:
  Experts(const LayerShape& shape, const Gate& gate, const KernelTable& kernels, std::shared_ptr<Engine> engine,
          const LayerFormats& formats = {});

  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }
  const LayerShape& shape() const { return weights_.shape(); }
  const Gate& gate() const { return gate_; }
  const KernelTable& kernels() const { return kernels_; }
  Engine& engine() const { return *engine_; }
  // Whether W8A8 multiplies int8 tiles: all formats are int8 or int4. In other formats codes are multiplied as they
  // lie.
  bool has_integer_tiles() const;
  // Why W8A8 is unsupported; empty: it is supported.
  std::string w8a8_unsupported() const;
  // Bytes of gate and up of one row that a forward pass keeps for backward.
  int64_t keep_row_bytes() const { return (int64_t)weights_.up().blocks() * kBlockN * kernels_.elem; }

 private:
  std::shared_ptr<Engine> engine_;
  const KernelTable& kernels_;
  Gate gate_;
  Weights weights_;
};

class Task : private Job {
 public:
  Task(const Experts& experts, const Batch& batch, Adapters adapters, Direction direction);
  ~Task() override = default;

  // In place of run(), where this is a step of another job (steps.h): the job between start() and complete().
  Job& start();
  void complete() { finish(); }
  void run();     // the calling thread works too
  void submit();  // routes and plans on the calling thread, then returns; first waits for a run in flight
  void wait();    // returns at once where nothing was submitted
  bool done() const;

 protected:
  virtual bool reads_kept_rows() const { return false; }  // backward of a forward that has kept gate and up
  virtual void begin() {}                                 // after routing, on the calling thread
  virtual void before_units(char*) {}                     // by every thread, as long as there is work
  virtual void after_lanes(char*) {}                      // likewise; other threads may still be in their last lanes
  virtual void run_unit(const UpUnit& unit, const UpUnit* next, char* slice) = 0;
  virtual void segment_done(size_t segment, char* slice) = 0;  // its units are done; lanes wait for this
  // `next`: weights that this thread reads after it, to prefetch, or null.
  virtual void run_lane_segment(const Lane& lane, size_t segment, const char* next, char* slice) = 0;
  // The weights that run_lane_segment reads sequentially, to prefetch while the lane waits; or null.
  virtual const char* lane_weights(const Lane&, size_t) const { return nullptr; }
  void close();  // called first by the derived destructor: waits for the run in flight
  // Derived classes ask it inside long steps and skip the rest; the counters that threads wait for go on, so that a
  // cancelled run ends by itself.
  using Job::cancelled;

  // Rows [first, first + live) of a segment that a unit multiplies.
  struct UnitRows {
    Tiling tiling;
    int32_t first, live;
    int32_t chunk;  // k tiles of H to take at a time
  };
  UnitRows rows_of(const Piece& piece) const;
  // Gathers them from a [T, H] tensor into the slice; the caller sets the columns.
  Gather gather_of(const Piece& piece, const UnitRows& rows, const void* x, DType dtype, int64_t stride,
                   char* slice) const;
  // What a thread's slice holds of the unit before: units of few tokens often multiply the row of the same one.
  struct SliceRows {
    int32_t token;  // whose row the gathered panel is, all of K; -1: of none
    Tiling tiling;  // of that panel
    bool packed;    // and whether the row is written for packed GEMV
  };
  // The gate/up product of a unit; `up` says where the result goes (hidden, keep). x times LoRA's A is computed chunk
  // by chunk, unless `ranks_made` says that the rank panels are in the workspace.
  void multiply_up(const UpUnit& unit, const UpUnit* next, char* slice, Up up, bool ranks_made = false) const;
  // Gathers a chunk of a unit's rows and writes them for packed GEMV, unless the slice holds them from the unit before.
  // `adapted`: LoRA's products read the panel too.
  void gather_rows(Gather gather, bool packed_gemv, bool adapted, char* slice, Up& up) const;

  // W8A8: gathers quantised rows into a panel, or, for packed GEMV, points at them in place.
  void gather_int8(const Gather& numbers, Up& up, char* slice) const;
  void point_at_int8_rows(const Gather& numbers, Up& up, char* slice) const;
  // Whether a segment has few enough rows for packed GEMV on this matrix. Its f32 form does not round weights, so it is
  // not used where backward, which does, must see the same weights.
  bool uses_packed_gemv(size_t segment, const BlockStore& store) const;
  // The rows of a panel of one tile.
  PackedGemvRows panel_rows(const Contraction& panel, const Tiling& tiling, int32_t live) const;

  const char* unit_weights(const UpUnit& unit) const;  // first gate/up block that the unit reads

  // lora_shrink.cpp: products with LoRA's factors. Calls act for the runs of a segment, with their panels and adapters.
  template <class Act>
  void for_runs(size_t segment, Act&& act) const {
    for (int32_t n = routing_.run0[segment]; n < routing_.run0[segment + 1]; n++) {
      const Run& run = routing_.runs[(size_t)n];
      act(run, plan_.ranks[(size_t)n], *adapters_[(size_t)run.adapter]);
    }
  }
  // The part of a run's rank panel for the token tiles of a piece; tile 0 is the piece's first.
  LoraTerm lora_term_of(const Piece& piece, const RankPanels& ranks, int64_t at, int32_t k_tiles) const;
  // A row panel times blocks of a factor, into a rank panel.
  struct LoraShrink {
    Contraction base;  // of the piece's tiles
    size_t block_bytes;
    int32_t block0, block1;  // columns of the rank panel
    bool first, last;
    char* sums;
  };
  void lora_shrink(const LoraShrink& n, const Tiling& tiling, int32_t live, char* out, int32_t k_tiles,
                   char* slice) const;
  // Zeroes the rows of tiles [tile0, tile1) of a rank panel (which starts at tile0) that are not the run's.
  void zero_other_rows(const Run& run, int32_t tile0, int32_t tile1, int32_t k_tiles, char* panel) const;
  // Dropout of rows from `row` on; without seeds where nothing is dropped.
  Dropout dropout_from(const std::vector<uint32_t>& seeds, int64_t row) const;
  // A panel with dropout applied, in the slice; the panel itself without dropout.
  const char* apply_dropout(const char* panel, const Tiling& tiling, int32_t live, int32_t column, int32_t k_tiles,
                            const Dropout& dropout, char* slice) const;
  // x times A of gate/up for one chunk of K, from rows gathered in the slice into rank panels in the slice.
  // `lora_terms` (in the last chunk) receives the terms for the product.
  void lora_shrink_chunk(const UpUnit& unit, const UnitRows& rows, int32_t k, int32_t now, char* slice,
                         std::vector<LoraTerm>* lora_terms) const;
  // Rows of a segment's panel times A of down, into the runs' rank panels.
  void lora_shrink_hidden(size_t segment, const char* rows, char* slice) const;

  void wait_for_segments() const;  // until segment_done has returned for all of them
  // The output columns and running sums of a lane; the caller fills in the product.
  Down lane_output(const Lane& lane, char* slice) const;
  // Calls act(tile0, tiles) for pieces of a segment whose panel fits L2.
  template <class Act>
  void for_pieces(size_t segment, Act&& act) const {
    Tiling whole = plan_.tilings[segment];
    int64_t bytes = (int64_t)whole.rows * kTileK * experts_.kernels().elem * plan_.down_chunk / (w8a8() ? 2 : 1);
    int32_t step = (int32_t)std::max<int64_t>(2, plan_.panel_bytes / bytes / 2 * 2);
    for (int32_t tile = 0; tile < whole.tiles && !cancelled(); tile += step)
      act(tile, std::min(step, whole.tiles - tile));
  }
  bool w8a8() const { return plan_.w8a8; }
  char* panel_of(size_t segment) const { return workspace_.data() + plan_.panels_at[segment]; }

  const Experts& experts_;
  Batch batch_;
  Adapters adapters_;
  Routing routing_;
  Plan plan_;
  Buffer workspace_;

 private:
  void work(const Worker& worker) override;
  void prepare();
  void verify_experts();
  void finish();
  void release();
  void wait_pending();
  void zero_idle_tokens();
  void wait_for_segment(const Lane& lane, size_t segment);
  void take_units(size_t group, char* slice);
  void take_lanes(size_t group, char* slice);

  Direction direction_;
  bool weights_entered_ = false;               // between Weights::enter and leave
  size_t adapters_entered_ = 0;                // adapters likewise
  std::vector<int32_t> unverified_;            // experts
  std::vector<std::atomic<int32_t>> next_up_;  // [groups]
  std::vector<LaneQueue> lanes_;               // [groups]
  std::vector<std::atomic<int32_t>> up_left_;  // [segments] units, and one for segment_done
  std::mutex mutex_;                           // serialises submit and wait
  bool interrupted_ = false;                   // a wait was: the destructor does not wait for the results
  std::atomic<bool> in_flight_{false};
};

}  // namespace kt
