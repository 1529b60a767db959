// What forward and backward share: a batch, its routing and plan, and the threads that take units and lanes.
//
// Every thread first takes up units, then lanes. It claims its next up unit before it starts the current one, so that
// the last block of this one can fetch the first weights of the next; near the end of the queue it does not, lest a
// claimed unit wait while others are idle. What a unit and a lane compute is the derived class's business.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "moe/lanes.h"
#include "moe/plan.h"
#include "moe/route.h"
#include "moe/weights.h"
#include "moe/workspace.h"

namespace kt {

// What several layers share: the threads and the working memory.
struct Engine {
  explicit Engine(const PoolOptions& options) : pool(options) {}
  Pool pool;
  Arena arena;
};

class Experts {
 public:
  Experts(const LayerShape& shape, const Gate& gate, const KernelTable& kernels, std::shared_ptr<Engine> engine);

  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }
  const LayerShape& shape() const { return weights_.shape(); }
  const Gate& gate() const { return gate_; }
  const KernelTable& kernels() const { return kernels_; }
  Engine& engine() const { return *engine_; }
  // Bytes that gate and up of one row take when a forward pass keeps them for backward.
  int64_t keep_row_bytes() const { return (int64_t)weights_.up().blocks() * kBlockN * kernels_.elem; }

 private:
  std::shared_ptr<Engine> engine_;
  const KernelTable& kernels_;
  Gate gate_;
  Weights weights_;
};

class Task : private Job {
 public:
  Task(const Experts& experts, const Batch& batch, Direction direction);
  ~Task() override = default;

  void run();     // the calling thread works too
  void submit();  // routes and plans on the calling thread, then returns; waits first for a run still under way
  void wait();    // returns at once where nothing was submitted
  bool done() const;

 protected:
  virtual void begin() {}  // after routing, on the calling thread
  virtual void run_unit(const UpUnit& unit, const UpUnit* next, char* slice) = 0;
  virtual void unit_done(size_t) {}  // the last up unit of a segment is done
  virtual void run_columns(const Lane& lane, size_t segment, char* slice) = 0;
  // The weights that run_columns will read one after another from here on, worth fetching while it must wait; or null.
  virtual const char* columns_at(const Lane&, size_t) const { return nullptr; }
  void close();  // the derived destructor's first act: nothing may run while it goes

  // Rows [first, first + live) of a segment that a unit multiplies.
  struct UnitRows {
    Tiling tiling;
    int32_t first, live;
    int32_t chunk;  // k tiles of H to take at a time
  };
  UnitRows rows_of(const UpUnit& unit) const;
  // Their gathering from a [T, H] tensor into the slice; the caller says which columns.
  Gather gather_of(const UpUnit& unit, const UnitRows& rows, const void* x, DType dtype, int64_t stride,
                   char* slice) const;
  // The gate/up product of a unit; `up` brings what becomes of it (hidden, keep).
  void multiply_up(const UpUnit& unit, const UpUnit* next, char* slice, Up up) const;
  // Columns of the running sums and of the output for Down; the caller fills in the product.
  Down columns_of(const Lane& lane, char* slice) const;
  // Calls act(tile0, tiles) for pieces of a segment whose panel stays in L2.
  template <class Act>
  void for_pieces(size_t segment, Act&& act) const {
    Tiling whole = plan_.tilings[segment];
    int64_t bytes = (int64_t)whole.rows * kTileK * experts_.kernels().elem * plan_.down_chunk;
    int32_t most = (int32_t)std::max<int64_t>(2, plan_.panel_bytes / bytes / 2 * 2);
    for (int32_t tile = 0; tile < whole.tiles; tile += most) act(tile, std::min(most, whole.tiles - tile));
  }
  char* panel_of(size_t segment) const { return workspace_.data() + plan_.hidden_at[segment]; }

  const Experts& experts_;
  Batch batch_;
  Routing routing_;
  Plan plan_;
  Buffer workspace_;

 private:
  void work(const Worker& worker) override;
  void prepare();
  void finish();
  void settle();
  void clear_idle();
  void await_up(const Lane& lane, size_t segment);
  void take_units(size_t group, char* slice);
  void take_lanes(size_t group, char* slice);
  int32_t run_lane(const Lane& lane, int32_t segment, char* slice);
  const char* first_read(const UpUnit& unit) const;

  Direction direction_;
  bool reading_ = false;                       // between Weights::enter and leave
  std::vector<std::atomic<int32_t>> next_up_;  // [groups]
  std::vector<LaneQueue> lanes_;               // [groups]
  std::vector<std::atomic<int32_t>> up_left_;  // [segments]
  std::mutex mutex_;                           // submit and wait from several threads
  std::atomic<bool> under_way_{false};
};

}  // namespace kt
