// Decoder layers for the new tokens of a few sequences, in few calls: x + attention(norm(x)), and x + experts(norm(x))
// with a softmax router.
//
// Between two products of a decoded token there is little work and, from Python, about twenty operators whose overhead
// is longer than the products. Here all products of all layers are steps of one job (steps.h): norms, rotary embedding,
// the router's choice and residuals are computed by the thread that was the last one in the product before, while the
// others wait for the next. Numbers are rounded to the type of the hidden states where the operators of a stock model
// round them.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "moe/attention.h"
#include "moe/coded_linear.h"
#include "moe/moe.h"

namespace kt {

// The weight of one product, [rows, columns]: bf16 in the checkpoint's layout, or codes.
struct DenseWeight {
  const char* data = nullptr;
  int64_t stride = 0;  // bytes
  const CodedLinear* coded = nullptr;
  const char* bias = nullptr;  // [rows] of the type of the hidden states; null: there is none
  int32_t rows = 0, columns = 0;
};

struct RmsNorm {
  const char* weight = nullptr;  // null: there is none
  float epsilon = 0;
};

struct AttentionBlock {
  RmsNorm input, query, key;  // the last two: of each head
  DenseWeight q, k, v, o;
  int32_t heads, groups, head_size;
  float scale;
  const float* sinks;  // as in Attention
};

struct ExpertBlock {
  RmsNorm input;
  const char* router;  // [experts, hidden], dense
  DType router_type;   // bf16 or f32
  const char* bias;    // [experts], added to the logits; null: there is none
  int32_t num_experts, top_k;
  bool normalise;                    // scores are a softmax over the selected experts; otherwise over all
  std::shared_ptr<Experts> experts;  // of the layer's engine, whose threads their workspace is for
};

// Cosines and sines [tokens, size] of the type of the hidden states; element i is rotated with i + size / 2.
struct Rotary {
  const char *cos, *sin;
  int64_t stride;  // bytes
  int32_t size;
};

struct HiddenRows {
  const char* x;
  char* out;  // [tokens, hidden], dense, as x; other memory
  DType type;
  int32_t tokens;
};

struct LayerCall;

class DecodeLayer {
 public:
  DecodeLayer(std::shared_ptr<Engine> engine, const KernelTable& kernels, int32_t hidden)
      : engine_(std::move(engine)), kernels_(kernels), hidden_(hidden) {}

  AttentionBlock attention{};
  ExpertBlock experts{};
  int32_t hidden() const { return hidden_; }
  int32_t max_tokens() const { return kernels_.gemv_max_tokens; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }

  // `sequences`: one for each row.
  void attend(const HiddenRows& rows, const Rotary& rotary, const LayerCache& cache, int32_t window,
              const StepSequences& sequences);
  void route(const HiddenRows& rows, bool w8a8, bool needs_grad);

 private:
  friend void decode_layers(const std::vector<LayerCall>& calls, const HiddenRows& rows, const Rotary& rotary,
                            const StepSequences& sequences);
  class AttentionPass;
  class ExpertPass;
  class RouterJob;
  char* buffer(int which, int64_t bytes);
  void norm(const RmsNorm& by, const char* x, char* out, DType type, int64_t rows, int64_t size) const;
  void select(DType type, const char* logits, int32_t* ids, float* scores) const;
  void check_sources() const;  // throws DamagedFile if pages of the attention's mapped weights were lost

  std::shared_ptr<Engine> engine_;
  const KernelTable& kernels_;
  int32_t hidden_;
  std::mutex calls_;  // the buffers belong to one call at a time
  std::vector<std::vector<char>> buffers_;
};

// One of several layers that follow each other.
struct LayerCall {
  DecodeLayer* layer;
  LayerCache cache;
  int32_t window;  // as in Attention
  bool w8a8, needs_grad;
};

// All layers, of one pool and one hidden size; none twice.
void decode_layers(const std::vector<LayerCall>& calls, const HiddenRows& rows, const Rotary& rotary,
                   const StepSequences& sequences);

}  // namespace kt
