#include "moe/decode_layer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "moe/linear.h"
#include "moe/widen.h"
#include "steps.h"

namespace kt {

namespace {

enum Buffer : int {
  kNormed,
  kQuery,
  kKey,
  kValue,
  kAttended,
  kProduct,
  kLogits,
  kIds,
  kScores,
  kMiddle,
  kResult,
  kBuffers
};

// Heads in place: x cos + rotate_half(x) sin, each term rounded as torch's operators do.
template <DType type>
class Rotation {
 public:
  explicit Rotation(const Rotary& rotary) : rotary_(rotary), memory_((size_t)rotary.size * 4) {}

  void apply(char* rows, int64_t tokens, int64_t heads, int64_t head_size) {
    const int64_t size = rotary_.size, elem = (int64_t)size_of(type);
    float *cos = memory_.data(), *sin = cos + size;
    for (int64_t t = 0; t < tokens; t++) {
      widen<type>(rotary_.cos + t * rotary_.stride, cos, size);
      widen<type>(rotary_.sin + t * rotary_.stride, sin, size);
      for (int64_t h = 0; h < heads; h++)
        rotate(rows + (t * heads + h) * head_size * elem, cos, sin, sin + size, sin + 2 * size);
    }
  }

 private:
  void rotate(char* head, const float* __restrict cos, const float* __restrict sin, float* __restrict x,
              float* __restrict out) const {
    const int64_t half = rotary_.size / 2;
    widen<type>(head, x, rotary_.size);
    for (int64_t i = 0; i < half; i++) out[i] = rounded<type>(x[i] * cos[i]) + rounded<type>(-x[i + half] * sin[i]);
    for (int64_t i = half; i < 2 * half; i++)
      out[i] = rounded<type>(x[i] * cos[i]) + rounded<type>(x[i - half] * sin[i]);
    narrow<type>(out, head, rotary_.size);
  }

  const Rotary& rotary_;
  std::vector<float> memory_;  // cosines, sines, a head, its result
};

constexpr int64_t kAddedTogether = 256;

template <DType type>
void add_rows(const char* x, const char* y, char* out, int64_t count) {
  float a[kAddedTogether], b[kAddedTogether];
  for (int64_t first = 0; first < count; first += kAddedTogether) {
    const int64_t now = std::min(kAddedTogether, count - first), at = first * (int64_t)size_of(type);
    widen<type>(x + at, a, now);
    widen<type>(y + at, b, now);
    for (int64_t i = 0; i < now; i++) a[i] += b[i];
    narrow<type>(a, out + at, now);
  }
}

void add(DType type, const char* x, const char* y, char* out, int64_t count) {
  type == DType::bf16 ? add_rows<DType::bf16>(x, y, out, count) : add_rows<DType::f32>(x, y, out, count);
}

void add_bias(DType type, const char* bias, char* rows, int64_t count, int64_t size) {
  if (!bias) return;
  const int64_t bytes = size * (int64_t)size_of(type);
  for (int64_t r = 0; r < count; r++) add(type, rows + r * bytes, bias, rows + r * bytes, size);
}

// Products of the same rows: those in bf16 are one step, and so are those with codes.
class DenseProducts {
 public:
  DenseProducts(const KernelTable& kernels, int threads) : kernels_(kernels), threads_(threads) {}

  void set(const char* x, DType type, int32_t tokens, const DenseWeight* const* weights, char* const* outs, int count) {
    matrices_.clear(), coded_.clear(), biased_.clear();
    for (int i = 0; i < count; i++) {
      const DenseWeight& w = *weights[i];
      if (w.bias) biased_.push_back({w.bias, outs[i], w.rows});
      if (w.coded) {
        coded_.push_back({w.coded, {x, outs[i], type, w.columns, w.rows, tokens}});
      } else {
        matrices_.push_back({x, w.data, w.stride, w.rows, outs[i], w.rows});
      }
    }
    const int64_t columns = weights[0]->columns;
    linear_ = {columns, columns, type, tokens, matrices_.data(), (int32_t)matrices_.size()};
  }
  void add_biases() const {
    for (const Biased& b : biased_) add_bias(linear_.dtype, b.bias, b.out, linear_.tokens, b.rows);
  }
  Job* coded() {
    job_ = coded_.empty() ? nullptr : CodedLinear::product_job(coded_);
    return job_.get();
  }
  Job* plain() {
    job_ = matrices_.empty() ? nullptr : linear_job(kernels_, linear_, threads_);
    return job_.get();
  }

 private:
  struct Biased {
    const char* bias;
    char* out;
    int64_t rows;
  };
  const KernelTable& kernels_;
  const int threads_;
  std::vector<Biased> biased_;
  std::vector<Matrix> matrices_;
  std::vector<CodedLinear::Product> coded_;
  Linear linear_{};
  std::unique_ptr<Job> job_;
};

}  // namespace

// Logits of a router in float32: threads take some experts at a time.
class DecodeLayer::RouterJob : public Job {
 public:
  RouterJob(const float* weights, const float* x, float* out, int32_t experts, int32_t hidden, int32_t tokens)
      : weights_(weights), x_(x), out_(out), experts_(experts), hidden_(hidden), tokens_(tokens) {}

  void work(const Worker&) override {
    for (int32_t first; !cancelled() && (first = next_.fetch_add(kExperts, std::memory_order_relaxed)) < experts_;)
      for (int32_t e = first; e < std::min(first + kExperts, experts_); e++)
        for (int32_t t = 0; t < tokens_; t++)
          out_[(int64_t)t * experts_ + e] = dot(weights_ + (int64_t)e * hidden_, x_ + (int64_t)t * hidden_);
  }

 private:
  static constexpr int32_t kExperts = 4;

  float dot(const float* a, const float* b) const {
    typedef float V __attribute__((vector_size(16)));
    V sums[4] = {};
    int32_t i = 0;
    for (; i + 16 <= hidden_; i += 16)
      for (int s = 0; s < 4; s++) {
        V x, y;
        __builtin_memcpy(&x, a + i + 4 * s, sizeof x);
        __builtin_memcpy(&y, b + i + 4 * s, sizeof y);
        sums[s] += x * y;
      }
    V all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = (all[0] + all[1]) + (all[2] + all[3]);
    for (; i < hidden_; i++) sum += a[i] * b[i];
    return sum;
  }

  const float *weights_, *x_;
  float* out_;
  int32_t experts_, hidden_, tokens_;
  std::atomic<int32_t> next_{0};
};

char* DecodeLayer::buffer(int which, int64_t bytes) {
  if (buffers_.empty()) buffers_.resize(kBuffers);
  std::vector<char>& memory = buffers_[(size_t)which];
  if ((int64_t)memory.size() < bytes + 64) memory.resize((size_t)bytes + 64);
  return (char*)round_up((int64_t)memory.data(), 64);
}

void DecodeLayer::norm(const RmsNorm& by, const char* x, char* out, DType type, int64_t rows, int64_t size) const {
  kernels_.norm({x, by.weight, out, type, rows, size, by.epsilon});
}

// The top_k largest logits of a row in descending order, and their scores. Where logits are equal, which are chosen
// depends on the algorithm alone: it is that of torch.topk, so that stock code chooses the same experts.
void DecodeLayer::select(DType type, const char* logits, int32_t* ids, float* scores) const {
  const int32_t count = experts.num_experts, top_k = experts.top_k;
  auto logit = [&](int32_t i) {
    return type == DType::bf16 ? load<DType::bf16>(logits, i) : load<DType::f32>(logits, i);
  };
  using Choice = std::pair<float, int32_t>;
  std::vector<Choice> choices((size_t)count);
  for (int32_t i = 0; i < count; i++) choices[(size_t)i] = {logit(i), i};
  const auto larger = [](const Choice& x, const Choice& y) { return x.first > y.first; };
  const auto first = choices.begin(), last = first + top_k;
  if ((int64_t)top_k * 64 <= count) {
    std::partial_sort(first, last, choices.end(), larger);
  } else {
    std::nth_element(first, last - 1, choices.end(), larger);
    std::sort(first, last - 1, larger);
  }
  for (int32_t j = 0; j < top_k; j++) scores[j] = first[j].first, ids[j] = first[j].second;
  const float largest = scores[0];
  float sum = 0;
  if (!experts.normalise)
    for (int32_t i = 0; i < count; i++) sum += std::exp(logit(i) - largest);
  for (int32_t j = 0; j < top_k; j++) {
    scores[j] = std::exp(scores[j] - largest);
    if (experts.normalise) sum += scores[j];
  }
  for (int32_t j = 0; j < top_k; j++) {
    const float score = scores[j] / sum;
    scores[j] = type == DType::bf16 ? rounded<DType::bf16>(score) : score;
  }
}

// x + attention(norm(x)).
class DecodeLayer::AttentionPass {
 public:
  AttentionPass(DecodeLayer& layer, const HiddenRows& rows, const Rotary& rotary, const LayerCache& cache,
                int32_t window, const StepSequences& sequences)
      : layer_(layer),
        a_(layer.attention),
        rows_(rows),
        rotary_(rotary),
        threads_(layer.engine_->pool.threads()),
        products_(layer.kernels_, threads_),
        attention_{.sequences = &sequences,
                   .cache = cache,
                   .heads = a_.heads,
                   .groups = a_.groups,
                   .key_size = a_.head_size,
                   .value_size = a_.head_size,
                   .type = rows.type,
                   .scale = a_.scale,
                   .window = window,
                   .sinks = a_.sinks} {}

  void add_to(Steps& steps) {
    steps.add([this] { return begin(), products_.coded(); });
    steps.add([this] { return products_.plain(); });
    steps.add([this] { return attend(); });
    steps.add([this] { return multiply_output(), products_.coded(); });
    steps.add([this] { return products_.plain(); });
    steps.add([this]() -> Job* {
      products_.add_biases();
      add(rows_.type, rows_.x, product_, rows_.out, rows_.tokens * (int64_t)layer_.hidden_);
      return nullptr;
    });
  }

 private:
  void begin() {
    const int64_t elem = (int64_t)size_of(rows_.type), tokens = rows_.tokens, head = a_.head_size * elem;
    char* normed = layer_.buffer(kNormed, tokens * layer_.hidden_ * elem);
    q_ = layer_.buffer(kQuery, tokens * a_.heads * head), k_ = layer_.buffer(kKey, tokens * a_.groups * head);
    v_ = layer_.buffer(kValue, tokens * a_.groups * head),
    attended_ = layer_.buffer(kAttended, tokens * a_.heads * head);
    product_ = layer_.buffer(kProduct, tokens * layer_.hidden_ * elem);
    layer_.norm(a_.input, rows_.x, normed, rows_.type, tokens, layer_.hidden_);
    const DenseWeight* weights[] = {&a_.q, &a_.k, &a_.v};
    char* outs[] = {q_, k_, v_};
    products_.set(normed, rows_.type, rows_.tokens, weights, outs, 3);
  }

  Job* attend() {
    const int64_t tokens = rows_.tokens, head = a_.head_size * (int64_t)size_of(rows_.type);
    products_.add_biases();
    if (a_.query.weight) layer_.norm(a_.query, q_, q_, rows_.type, tokens * a_.heads, a_.head_size);
    if (a_.key.weight) layer_.norm(a_.key, k_, k_, rows_.type, tokens * a_.groups, a_.head_size);
    rows_.type == DType::bf16 ? rotate<DType::bf16>() : rotate<DType::f32>();
    attention_.query = {q_, a_.heads * head, head};
    attention_.key = {k_, a_.groups * head, head}, attention_.value = {v_, a_.groups * head, head};
    attention_.out = attended_, attention_.out_row_stride = a_.heads * head;
    job_ = attention_job(layer_.kernels_, attention_, threads_);
    return job_.get();
  }

  template <DType type>
  void rotate() {
    Rotation<type> rotation(rotary_);
    rotation.apply(q_, rows_.tokens, a_.heads, a_.head_size);
    rotation.apply(k_, rows_.tokens, a_.groups, a_.head_size);
  }

  void multiply_output() {
    const DenseWeight* output[] = {&a_.o};
    products_.set(attended_, rows_.type, rows_.tokens, output, &product_, 1);
  }

  DecodeLayer& layer_;
  const AttentionBlock& a_;
  const HiddenRows rows_;
  const Rotary& rotary_;
  const int threads_;
  DenseProducts products_;
  Attention attention_;
  std::unique_ptr<Job> job_;
  char *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *attended_ = nullptr, *product_ = nullptr;
};

// x + experts(norm(x)).
class DecodeLayer::ExpertPass {
 public:
  ExpertPass(DecodeLayer& layer, const HiddenRows& rows, bool w8a8, bool needs_grad)
      : layer_(layer), e_(layer.experts), rows_(rows), w8a8_(w8a8), needs_grad_(needs_grad) {}

  void add_to(Steps& steps) {
    steps.add([this] { return begin(); });
    steps.add([this] { return verify_experts(); });
    steps.add([this] { return start_experts(); });
    steps.add([this]() -> Job* {
      call_->complete();
      add(rows_.type, rows_.x, product_, rows_.out, rows_.tokens * (int64_t)layer_.hidden_);
      return nullptr;
    });
  }

 private:
  Job* begin() {
    const int64_t elem = (int64_t)size_of(rows_.type), tokens = rows_.tokens;
    normed_ = layer_.buffer(kNormed, tokens * layer_.hidden_ * elem);
    product_ = layer_.buffer(kProduct, tokens * layer_.hidden_ * elem);
    logits_ = layer_.buffer(kLogits, tokens * e_.num_experts * elem);
    layer_.norm(e_.input, rows_.x, normed_, rows_.type, tokens, layer_.hidden_);
    if (e_.router_type == DType::bf16) {
      router_ = {normed_, e_.router, (int64_t)layer_.hidden_ * 2, e_.num_experts, logits_, e_.num_experts};
      linear_ = {layer_.hidden_, layer_.hidden_, rows_.type, rows_.tokens, &router_, 1};
      job_ = linear_job(layer_.kernels_, linear_, layer_.engine_->pool.threads());
    } else {
      job_ = std::make_unique<RouterJob>((const float*)e_.router, (const float*)normed_, (float*)logits_,
                                         e_.num_experts, layer_.hidden_, rows_.tokens);
    }
    return job_.get();
  }

  // Selects experts. A step of its own reads in and checks those that no call has read before: here one thread would.
  Job* verify_experts() {
    const int64_t elem = (int64_t)size_of(rows_.type), tokens = rows_.tokens;
    ids_ = (int32_t*)layer_.buffer(kIds, tokens * e_.top_k * 4);
    scores_ = (float*)layer_.buffer(kScores, tokens * e_.top_k * 4);
    add_bias(rows_.type, e_.bias, logits_, tokens, e_.num_experts);
    for (int64_t t = 0; t < tokens; t++)
      layer_.select(rows_.type, logits_ + t * e_.num_experts * elem, ids_ + t * e_.top_k, scores_ + t * e_.top_k);
    const Weights& weights = e_.experts->weights();
    std::vector<int32_t> unverified;
    for (int64_t i = 0; i < tokens * e_.top_k; i++)
      if (!weights.verified(ids_[i])) unverified.push_back(ids_[i]);
    if (unverified.empty()) return nullptr;
    std::sort(unverified.begin(), unverified.end());
    unverified.erase(std::unique(unverified.begin(), unverified.end()), unverified.end());
    reading_.emplace(weights);
    verification_.emplace(weights, unverified);
    return verification_->job();
  }

  Job* start_experts() {
    if (verification_) verification_->finish();
    Batch batch;
    batch.tokens = rows_.tokens, batch.top_k = e_.top_k;
    batch.hidden = normed_, batch.hidden_dtype = rows_.type, batch.hidden_stride = layer_.hidden_;
    batch.ids = ids_, batch.ids_stride = e_.top_k;
    batch.weights = scores_, batch.weights_stride = e_.top_k;
    batch.out = product_, batch.out_dtype = rows_.type, batch.out_stride = layer_.hidden_;
    batch.w8a8 = w8a8_, batch.needs_grad = needs_grad_;
    call_.emplace(*e_.experts, batch);
    Job& job = call_->start();
    reading_.reset();
    return &job;
  }

  DecodeLayer& layer_;
  const ExpertBlock& e_;
  const HiddenRows rows_;
  const bool w8a8_, needs_grad_;
  char *normed_ = nullptr, *product_ = nullptr, *logits_ = nullptr;
  Matrix router_{};
  Linear linear_{};
  int32_t* ids_ = nullptr;
  float* scores_ = nullptr;
  std::unique_ptr<Job> job_;
  std::optional<Reading> reading_;  // until the call reads the weights
  std::optional<Weights::Verification> verification_;
  std::optional<Call> call_;
};

void DecodeLayer::attend(const HiddenRows& rows, const Rotary& rotary, const LayerCache& cache, int32_t window,
                         const StepSequences& sequences) {
  std::lock_guard lock(calls_);
  Steps steps;
  AttentionPass pass(*this, rows, rotary, cache, window, sequences);
  pass.add_to(steps);
  steps.run(engine_->pool);
  check_sources();
}

void DecodeLayer::check_sources() const {
  for (const DenseWeight* weight : {&attention.q, &attention.k, &attention.v, &attention.o})
    if (weight->coded) weight->coded->check_source();
}

void DecodeLayer::route(const HiddenRows& rows, bool w8a8, bool needs_grad) {
  std::lock_guard lock(calls_);
  Steps steps;
  ExpertPass pass(*this, rows, w8a8, needs_grad);
  pass.add_to(steps);
  steps.run(engine_->pool);
}

void decode_layers(const std::vector<LayerCall>& calls, const HiddenRows& rows, const Rotary& rotary,
                   const StepSequences& sequences) {
  // In order of address: another call may have the same layers in another order.
  std::vector<DecodeLayer*> layers;
  for (const LayerCall& call : calls) layers.push_back(call.layer);
  std::sort(layers.begin(), layers.end(), std::less<>());
  std::vector<std::unique_lock<std::mutex>> locks;
  for (DecodeLayer* layer : layers) locks.emplace_back(layer->calls_);
  std::deque<DecodeLayer::AttentionPass> attentions;
  std::deque<DecodeLayer::ExpertPass> experts;
  Steps steps;
  HiddenRows from = rows;
  const int64_t bytes = (int64_t)rows.tokens * calls.front().layer->hidden() * (int64_t)size_of(rows.type);
  for (const LayerCall& call : calls) {
    DecodeLayer& layer = *call.layer;
    HiddenRows middle = from, to = from;
    middle.out = layer.buffer(kMiddle, bytes);
    to.x = middle.out;
    to.out = &call == &calls.back() ? rows.out : layer.buffer(kResult, bytes);
    attentions.emplace_back(layer, middle, rotary, call.cache, call.window, sequences).add_to(steps);
    experts.emplace_back(layer, to, call.w8a8, call.needs_grad).add_to(steps);
    from.x = to.out;
  }
  steps.run(calls.front().layer->engine()->pool);
  for (const DecodeLayer* layer : layers) layer->check_sources();
}

}  // namespace kt
