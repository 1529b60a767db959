// The expert layer: packed weights, an activation, and calls that run on a thread pool.
//
//   Experts experts(shape, gate, kernels, engine);
//   experts.weights().pack(source);
//   Call call(experts, batch);  call.run();            // or call.submit(); ... call.wait();
//
// A Call is bound to its buffers once and may be run repeatedly, as by a replayed CUDA graph; each run reads the
// routing anew. `submit` and `wait` may be called from different threads, including a CUDA host callback.
#pragma once

#include "moe/task.h"

namespace kt {

class Call final : public Task {
 public:
  // `keep` receives gate and up of every row, in routing order, for a Backward of the same batch; or null.
  Call(const Experts& experts, const Batch& batch, Adapters adapters = {}, char* keep = nullptr)
      : Task(experts, batch, std::move(adapters), Direction::forward), keep_(keep) {
    batch_.needs_grad |= keep || batch.dropout > 0;
  }
  ~Call() override { close(); }

 private:
  void begin() override;
  void before_units(char* slice) override;
  void run_unit(const UpUnit& unit, const UpUnit* next, char* slice) override;
  void segment_done(size_t segment, char* slice) override;
  void run_lane_segment(const Lane& lane, size_t segment, const char* next, char* slice) override;
  const char* lane_weights(const Lane& lane, size_t segment) const override;
  // Some activated rows of a segment, and some of their k tiles.
  struct DownPanel {
    Contraction rows;  // b: null
    Tiling tiling;
    int32_t live;
    char* packed;  // where write_packed_rows writes them; null: nowhere
  };
  DownPanel down_panel(size_t segment, int32_t tile, int32_t tiles, int32_t k, int32_t k_tiles) const;

  char* keep_;
  std::atomic<int32_t> next_tokens_{0}, tokens_left_{0};  // W8A8: rows of x to quantise
};

// Destination of the gradient of one factor, for all experts: element (n, k) of expert e as in SourceMatrix; data null:
// not computed.
struct Target {
  void* data;
  DType dtype;
  int64_t n_stride, k_stride, expert_stride;
};

// The gradients of one adapter; shared: up_a is absent, and gate_a receives the sum of both.
struct LoraTargets {
  Target gate_a, gate_b, up_a, up_b, down_a, down_b;
  double gate_scale, up_scale, down_scale;  // as packed
};

// Inputs and outputs of a backward call besides the batch, whose `out` receives the gradient of the hidden states.
struct Gradients {
  const void* out = nullptr;  // [T, H], gradient of the forward output
  DType out_dtype = DType::bf16;
  int64_t out_stride = 0;
  void* weights = nullptr;  // [T, k], gradient of the routing weights
  DType weights_dtype = DType::f32;
  int64_t weights_stride = 0;
  const char* keep = nullptr;     // kept by the forward call; null: gate and up are recomputed
  std::vector<LoraTargets> lora;  // [adapters], or empty: factors are frozen
};

class Backward final : public Task {
 public:
  Backward(const Experts& experts, const Batch& batch, const Gradients& gradients, Adapters adapters = {})
      : Task(experts, batch, std::move(adapters), Direction::backward), gradients_(gradients) {}
  ~Backward() override { close(); }

 private:
  bool reads_kept_rows() const override { return gradients_.keep; }
  void begin() override;
  void before_units(char* slice) override;
  void after_lanes(char* slice) override;
  void run_unit(const UpUnit& unit, const UpUnit* next, char* slice) override;
  void segment_done(size_t segment, char* slice) override;
  void run_lane_segment(const Lane& lane, size_t segment, const char* next, char* slice) override;
  void transpose_block(const BlockStore& store, int32_t expert, int32_t first, int32_t count, int32_t k_tile,
                       char* out) const;
  void add_transposes(const BlockStore& store, int32_t expert, int32_t first, int32_t count, int32_t k_tile, char* out,
                      std::vector<Transpose>& jobs) const;
  TransposedBlocks transpose_blocks(const BlockStore& store, int32_t expert, int32_t first, int32_t count,
                                    int32_t block0, int32_t block1, bool overlap, char* out,
                                    std::vector<Transpose>& jobs) const;
  template <class Real>
  void add_weight_gradients(size_t segment);

  // lora_backward.cpp
  enum class Factor : uint8_t { gate_up_a, gate_up_b, down_a, down_b };
  void begin_lora();
  void lora_shrink_piece(const Piece& piece, bool output, char* slice);
  void lora_shrink_gathered(const UpUnit& unit, const UnitRows& rows, char* slice);
  // Gathered rows of a piece, to be multiplied into rank panels: rows of y where `output`, else of x.
  struct ShrinkInput {
    Piece piece;
    UnitRows rows;
    bool output;
    int32_t k, now;  // k tiles: first, and number
    const char* in;
    char* sums;  // between chunks of K; advanced from run to run
  };
  void lora_shrink_run(int32_t run, ShrinkInput& from, char* slice) const;
  void lora_shrink_gradients(size_t segment, char* slice);
  void wait_for_ranks(size_t segment) const;
  std::vector<LoraTerm> transposed_lora_terms(const Piece& piece, Factor factor, int32_t block0, int32_t block1,
                                              char* slice) const;
  void prefetch_next_factor(size_t segment, const BlockStore& store, bool down, int32_t block0, int32_t block1) const;
  struct WgradRows {
    const char* data;
    DType dtype;
    int64_t stride;  // of a tensor: elements from token to token
    int64_t block;   // of a panel: bytes from one block of columns to the next; 0: a tensor
    int32_t blocks;
    int32_t tile0;  // first tile of the panel within the segment
    bool dropped;   // dropout is already applied
  };
  WgradRows wgrad_rows(Factor factor, const Run& run) const;
  struct Sums {
    int32_t rank;
    char *sums, *scratch;
  };
  void contract(Factor factor, int32_t run, const WgradRows& wide, int32_t begin, int32_t end, int32_t column,
                int32_t columns, const Sums& to) const;
  void contract_gathered(int32_t run, const Sums& to, char* slice);
  void factor_gradient(size_t adapter, int32_t expert, Factor factor, int32_t column, char* slice);
  void store_grad(size_t adapter, int32_t expert, Factor factor, int32_t column, int32_t columns,
                  const char* sums) const;

  Gradients gradients_;
  std::atomic<int32_t> next_piece_{0}, next_factor_{0};
  bool gathers_full_k_ = false;                   // all of K is gathered at a time: units compute the panels yb
  bool wgrad_gathers_x_ = false;                  // likewise the gradient of A of gate/up gathers x
  bool wgrad_makes_xa_ = false;                   // and computes the panels xa from it
  std::vector<std::atomic<int32_t>> ranks_left_;  // [segments] pieces that before_units has not finished
  enum class PanelState : uint8_t { missing, in_progress, ready };
  std::vector<std::atomic<PanelState>> yb_state_;  // [pieces]
  std::vector<std::atomic<PanelState>> xa_state_;  // [runs]
  std::vector<int32_t> piece0_;                    // [segments + 1]: first index in the plan's pieces
  std::vector<int32_t> run_of_;                    // [adapters][experts], -1: no rows
  int32_t columns_ = 0;                            // of a factor's gradient, computed at a time
};

}  // namespace kt
