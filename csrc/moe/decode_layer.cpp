// The calling thread takes part in every product and computes what lies between them.
#include "moe/decode_layer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "moe/linear.h"

namespace kt {

namespace {

enum Buffer : int { kNormed, kQuery, kKey, kValue, kAttended, kProduct, kLogits, kIds, kScores, kBuffers };

template <DType type>
inline float load(const char* at, int64_t i) {
  return type == DType::bf16 ? to_float(((const uint16_t*)at)[i], type) : ((const float*)at)[i];
}

template <DType type>
inline void store(char* at, int64_t i, float value) {
  if (type == DType::bf16) {
    ((uint16_t*)at)[i] = from_float(value, type);
  } else {
    ((float*)at)[i] = value;
  }
}

template <DType type>
inline float rounded(float value) {
  return type == DType::bf16 ? to_float(from_float(value, type), type) : value;
}

// One head in place: x cos + rotate_half(x) sin, each term rounded as torch's operators do.
template <DType type>
void rotate_head(char* head, const char* cos, const char* sin, int32_t size) {
  const int32_t half = size / 2;
  for (int32_t i = 0; i < half; i++) {
    const float low = load<type>(head, i), high = load<type>(head, i + half);
    store<type>(head, i, rounded<type>(low * load<type>(cos, i)) + rounded<type>(-high * load<type>(sin, i)));
    store<type>(head, i + half,
                rounded<type>(high * load<type>(cos, i + half)) + rounded<type>(low * load<type>(sin, i + half)));
  }
}

template <DType type>
void rotate_rows(char* rows, int64_t tokens, int64_t heads, int64_t head_size, const Rotary& rotary) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++)
      rotate_head<type>(rows + (t * heads + h) * head_size * (int64_t)size_of(type), rotary.cos + t * rotary.stride,
                        rotary.sin + t * rotary.stride, rotary.size);
}

template <DType type>
void add_rows(const char* x, const char* y, char* out, int64_t count) {
  for (int64_t i = 0; i < count; i++) store<type>(out, i, load<type>(x, i) + load<type>(y, i));
}

void add(DType type, const char* x, const char* y, char* out, int64_t count) {
  type == DType::bf16 ? add_rows<DType::bf16>(x, y, out, count) : add_rows<DType::f32>(x, y, out, count);
}

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

// Products of the same rows: those in bf16 are one job, and so are those with codes.
void DecodeLayer::multiply(const HiddenRows& x, const DenseWeight* const* weights, char* const* outs, int count) const {
  std::vector<Matrix> matrices;
  std::vector<CodedLinear::Product> coded;
  for (int i = 0; i < count; i++) {
    const DenseWeight& w = *weights[i];
    if (w.coded) {
      coded.push_back({w.coded, {x.x, outs[i], x.type, w.columns, w.rows, x.tokens}});
    } else {
      matrices.push_back({x.x, w.data, w.stride, w.rows, outs[i], w.rows});
    }
  }
  CodedLinear::multiply_all(coded);
  if (matrices.empty()) return;
  const int64_t columns = weights[0]->columns;
  kt::multiply(engine_->pool, kernels_,
               {columns, columns, x.type, x.tokens, matrices.data(), (int32_t)matrices.size()});
}

void DecodeLayer::attend(const HiddenRows& rows, const Rotary& rotary, std::vector<KVSequence> sequences) {
  std::lock_guard lock(calls_);
  const AttentionBlock& a = attention;
  const int64_t elem = (int64_t)size_of(rows.type), tokens = rows.tokens, head = a.head_size * elem;
  char* normed = buffer(kNormed, tokens * hidden_ * elem);
  char *q = buffer(kQuery, tokens * a.heads * head), *k = buffer(kKey, tokens * a.groups * head),
       *v = buffer(kValue, tokens * a.groups * head), *attended = buffer(kAttended, tokens * a.heads * head),
       *product = buffer(kProduct, tokens * hidden_ * elem);
  norm(a.input, rows.x, normed, rows.type, tokens, hidden_);
  const DenseWeight* weights[] = {&a.q, &a.k, &a.v};
  char* outs[] = {q, k, v};
  multiply({normed, nullptr, rows.type, rows.tokens}, weights, outs, 3);
  if (a.query.weight) norm(a.query, q, q, rows.type, tokens * a.heads, a.head_size);
  if (a.key.weight) norm(a.key, k, k, rows.type, tokens * a.groups, a.head_size);
  auto* rotate = rows.type == DType::bf16 ? rotate_rows<DType::bf16> : rotate_rows<DType::f32>;
  rotate(q, tokens, a.heads, a.head_size, rotary);
  rotate(k, tokens, a.groups, a.head_size, rotary);
  for (int64_t t = 0; t < tokens; t++) {
    KVSequence& s = sequences[(size_t)t];
    s.query = q + t * a.heads * head;
    s.key = k + t * a.groups * head;
    s.value = v + t * a.groups * head;
    s.query_head_stride = s.key_head_stride = s.value_head_stride = head;
    s.out = attended + t * a.heads * head;
  }
  kt::attend(engine_->pool, kernels_,
             {std::move(sequences), a.heads, a.groups, a.head_size, a.head_size, rows.type, a.scale});
  const DenseWeight* output[] = {&a.o};
  multiply({attended, nullptr, rows.type, rows.tokens}, output, &product, 1);
  add(rows.type, rows.x, product, rows.out, tokens * hidden_);
}

void DecodeLayer::logits(const HiddenRows& rows, const char* x, char* out) {
  const ExpertBlock& e = experts;
  if (e.router_type == DType::bf16) {
    const Matrix matrix{x, e.router, (int64_t)hidden_ * 2, e.num_experts, out, e.num_experts};
    kt::multiply(engine_->pool, kernels_, {hidden_, hidden_, rows.type, rows.tokens, &matrix, 1});
  } else {
    RouterJob job((const float*)e.router, (const float*)x, (float*)out, e.num_experts, hidden_, rows.tokens);
    engine_->pool.run(job);
  }
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

void DecodeLayer::route(const HiddenRows& rows, bool w8a8, bool needs_grad) {
  std::lock_guard lock(calls_);
  const ExpertBlock& e = experts;
  const int64_t elem = (int64_t)size_of(rows.type), tokens = rows.tokens;
  char *normed = buffer(kNormed, tokens * hidden_ * elem), *product = buffer(kProduct, tokens * hidden_ * elem),
       *scored = buffer(kLogits, tokens * e.num_experts * elem);
  auto* ids = (int32_t*)buffer(kIds, tokens * e.top_k * 4);
  auto* scores = (float*)buffer(kScores, tokens * e.top_k * 4);
  norm(e.input, rows.x, normed, rows.type, tokens, hidden_);
  logits(rows, normed, scored);
  for (int64_t t = 0; t < tokens; t++)
    select(rows.type, scored + t * e.num_experts * elem, ids + t * e.top_k, scores + t * e.top_k);
  Batch batch;
  batch.tokens = rows.tokens, batch.top_k = e.top_k;
  batch.hidden = normed, batch.hidden_dtype = rows.type, batch.hidden_stride = hidden_;
  batch.ids = ids, batch.ids_stride = e.top_k;
  batch.weights = scores, batch.weights_stride = e.top_k;
  batch.out = product, batch.out_dtype = rows.type, batch.out_stride = hidden_;
  batch.w8a8 = w8a8, batch.needs_grad = needs_grad;
  Call(*e.experts, batch).run();
  add(rows.type, rows.x, product, rows.out, tokens * hidden_);
}

}  // namespace kt
