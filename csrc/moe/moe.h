// The expert layer: packed weights, an activation, and calls that run on a pool.
//
//   Experts experts(shape, gate, kernels, engine);
//   experts.weights().pack(source);
//   Call call(experts, batch);  call.run();            // or call.submit(); ... call.wait();
//
// A Call is bound to its buffers once and may be run again and again, as a captured CUDA graph does; the routing is
// read anew each time. `submit` and `wait` may come from different threads, a CUDA host callback's among them.
#pragma once

#include "moe/task.h"

namespace kt {

class Call final : public Task {
 public:
  // `keep` takes gate and up of every row, in the order of the routing, for a Backward of the same batch; or null.
  Call(const Experts& experts, const Batch& batch, char* keep = nullptr)
      : Task(experts, batch, Direction::forward), keep_(keep) {}
  ~Call() override { close(); }

 private:
  void run_unit(const UpUnit& unit, const UpUnit* next, char* slice) override;
  void run_columns(const Lane& lane, size_t segment, char* slice) override;
  const char* columns_at(const Lane& lane, size_t segment) const override;

  char* keep_;
};

// What a backward call gets and gives besides the batch, whose `out` takes the gradient of the hidden states.
struct Gradients {
  const void* out = nullptr;  // [T, H], gradient of the forward output
  DType out_dtype = DType::bf16;
  int64_t out_stride = 0;
  float* weights = nullptr;  // [T, k], gradient of the routing weights
  int64_t weights_stride = 0;
  const char* keep = nullptr;  // what the forward call kept; null: gate and up are computed again
};

class Backward final : public Task {
 public:
  Backward(const Experts& experts, const Batch& batch, const Gradients& gradients)
      : Task(experts, batch, Direction::backward), gradients_(gradients) {}
  ~Backward() override { close(); }

 private:
  void begin() override;
  void run_unit(const UpUnit& unit, const UpUnit* next, char* slice) override;
  void unit_done(size_t segment) override;
  void run_columns(const Lane& lane, size_t segment, char* slice) override;
  void turn(const BlockStore& store, int32_t expert, int32_t first, int32_t count, int32_t k_tile, char* out) const;

  Gradients gradients_;
  std::vector<float> parts_;  // [rows][down k tiles]: shares of the routing weights' gradients
  std::vector<float> ones_;   // [rows]: gradients of gate and up carry the routing weight already
};

}  // namespace kt
