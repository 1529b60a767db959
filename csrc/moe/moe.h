// The expert layer: packed weights, an activation, and calls that run on a pool.
//
//   Experts experts(shape, gate, kernels, engine);
//   experts.weights().pack(source);
//   Call call(experts, batch);  call.run();            // or call.submit(); ... call.wait();
//
// A Call is bound to its buffers once and may be run again and again, as a captured CUDA graph does; the routing is
// read anew each time. `submit` and `wait` may come from different threads, a CUDA host callback's among them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

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

 private:
  std::shared_ptr<Engine> engine_;
  const KernelTable& kernels_;
  Gate gate_;
  Weights weights_;
};

class Call final : private Job {
 public:
  Call(const Experts& experts, const Batch& batch);
  ~Call() override;

  void run();     // the calling thread works too
  void submit();  // routes and plans on the calling thread, then returns; waits first for a run still under way
  void wait();    // returns at once where nothing was submitted
  bool done() const;

 private:
  void work(const Worker& worker) override;
  void prepare();
  void finish();
  void settle();
  void await_up(size_t segment);
  void take_units(size_t group, char* slice);
  void take_lanes(size_t group, char* slice);
  const char* first_read(const UpUnit& unit) const;
  void run_up(const UpUnit& unit, const UpUnit* next, char* slice);
  int32_t run_lane(const Lane& lane, int32_t segment, char* slice);
  void run_down(const Lane& lane, size_t segment, char* slice);
  void clear_idle();

  const Experts& experts_;
  Batch batch_;
  Routing routing_;
  Plan plan_;
  Buffer workspace_;
  bool reading_ = false;                       // between Weights::enter and leave
  std::vector<std::atomic<int32_t>> next_up_;  // [groups]
  std::vector<LaneQueue> lanes_;               // [groups]
  std::vector<std::atomic<int32_t>> up_left_;  // [segments]
  std::mutex mutex_;                           // submit and wait from several threads
  std::atomic<bool> under_way_{false};
};

}  // namespace kt
