// LoRA natively: several adapters and none in one call against a layer with merged weights, in double; gradients of all
// factors against slopes of that layer; and the same bits for any number of threads.
#include "check.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

// Factors of one adapter, all experts: a [E, r, in], b [E, out, r]; for precision bf16, values that bf16 represents
// exactly.
template <class Real>
struct LoraOf {
  LoraRanks ranks;
  double gate_scale = 0.5, up_scale = 2.0, down_scale = 1.0;
  std::vector<Real> gate_a, gate_b, up_a, up_b, down_a, down_b;

  LoraOf(const LayerShape& s, const LoraRanks& r, uint32_t seed, Precision precision = Precision::bf16) : ranks(r) {
    std::mt19937 random(seed);
    if (precision != Precision::bf16) gate_scale = 0.3, up_scale = 1.7, down_scale = 0.9;
    auto numbers = [&](int64_t count, double scale) {
      std::vector<double> all = Numbers((size_t)(s.experts * count), scale, dtype_of(precision), random).values;
      return std::vector<Real>(all.begin(), all.end());
    };
    double in = 1 / std::sqrt((double)s.hidden), inner = 1 / std::sqrt((double)s.intermediate);
    gate_a = numbers((int64_t)r.gate * s.hidden, in), gate_b = numbers((int64_t)r.gate * s.intermediate, 0.5);
    up_a = numbers(r.shared ? 0 : (int64_t)r.up * s.hidden, in), up_b = numbers((int64_t)r.up * s.intermediate, 0.5);
    down_a = numbers((int64_t)r.down * s.intermediate, inner), down_b = numbers((int64_t)r.down * s.hidden, 0.5);
  }

  SourceLora source(const LayerShape& s) const {
    auto matrix = [](const std::vector<Real>& v, int64_t rows, int64_t columns) {
      return SourceMatrix{{v.data(), kTypeOf<Real>, columns, 1}, rows * columns};
    };
    return {{matrix(gate_a, ranks.gate, s.hidden), matrix(gate_b, s.intermediate, ranks.gate), gate_scale},
            {matrix(up_a, ranks.up, s.hidden), matrix(up_b, s.intermediate, ranks.up), up_scale},
            {matrix(down_a, ranks.down, s.intermediate), matrix(down_b, s.hidden, ranks.down), down_scale}};
  }
};

using RandomLora = LoraOf<float>;

template <class Real>
constexpr std::vector<Real> LoraOf<Real>::* kFactors[] = {&LoraOf<Real>::gate_a, &LoraOf<Real>::gate_b,
                                                          &LoraOf<Real>::up_a,   &LoraOf<Real>::up_b,
                                                          &LoraOf<Real>::down_a, &LoraOf<Real>::down_b};

// w + scale * b a for all experts.
template <class Real>
std::vector<double> folded(const Numbers& w, const std::vector<Real>& a, const std::vector<Real>& b, double scale,
                           int64_t experts, int64_t rows, int64_t columns, int64_t rank) {
  std::vector<double> all(w.values.size());
  if (w.empty()) return all;
  for (int64_t e = 0; e < experts; e++)
    for (int64_t n = 0; n < rows; n++)
      for (int64_t k = 0; k < columns; k++) {
        double sum = 0;
        for (int64_t r = 0; r < rank; r++)
          sum += (double)b[(size_t)((e * rows + n) * rank + r)] * a[(size_t)((e * rank + r) * columns + k)];
        size_t at = (size_t)((e * rows + n) * columns + k);
        all[at] = w[at] + scale * sum;
      }
  return all;
}

// The whole layer in double; adapter[t] < 0: none.
template <class Real>
std::vector<double> expected_with(const RandomLayer& layer, const Gate& gate, const BatchOf<Real>& batch,
                                  const std::vector<LoraOf<Real>>& loras, const std::vector<int32_t>& adapter) {
  const LayerShape& s = layer.shape;
  size_t h = (size_t)s.hidden, i = (size_t)s.intermediate;
  std::vector<double> out((size_t)batch.tokens * h), inner(i);
  for (int32_t id = -1; id < (int32_t)loras.size(); id++) {
    LoraRanks none{0, 0, 0, false};
    LoraOf<Real> lora = id < 0 ? LoraOf<Real>(s, none, 0) : loras[(size_t)id];
    const LoraRanks& r = lora.ranks;
    auto gate_w = folded(layer.gate, lora.gate_a, lora.gate_b, lora.gate_scale, s.experts, s.intermediate, s.hidden,
                         s.gated ? r.gate : 0);
    auto up_w = folded(layer.up, r.shared ? lora.gate_a : lora.up_a, lora.up_b, lora.up_scale, s.experts,
                       s.intermediate, s.hidden, r.up);
    auto down_w =
        folded(layer.down, lora.down_a, lora.down_b, lora.down_scale, s.experts, s.hidden, s.intermediate, r.down);
    for (size_t n = 0; n < batch.ids.size(); n++) {
      size_t token = n / (size_t)batch.top_k, e = (size_t)batch.ids[n];
      if (adapter[token] != id || batch.ids[n] < 0 || batch.ids[n] >= s.experts) continue;
      for (size_t row = 0; row < i; row++) {
        double u = layer.up_bias.empty() ? 0 : layer.up_bias[e * i + row];
        double g = layer.gate_bias.empty() ? 0 : layer.gate_bias[e * i + row];
        for (size_t k = 0; k < h; k++) {
          double x = batch.hidden[token * h + k];
          u += up_w[(e * i + row) * h + k] * x;
          if (s.gated) g += gate_w[(e * i + row) * h + k] * x;
        }
        inner[row] = s.gated ? activated(g, gate.kind, gate.alpha) * u : activated(u, gate.kind, gate.alpha);
      }
      for (size_t c = 0; c < h; c++) {
        double y = layer.down_bias.empty() ? 0 : layer.down_bias[e * h + c];
        for (size_t k = 0; k < i; k++) y += down_w[(e * h + c) * i + k] * inner[k];
        out[token * h + c] += batch.weights[n] * y;
      }
    }
  }
  return out;
}

std::vector<int32_t> some_adapters(int32_t tokens, int32_t count) {
  std::mt19937 random(8);
  std::uniform_int_distribution<int32_t> any(-1, count - 1);
  std::vector<int32_t> all;
  for (int32_t t = 0; t < tokens; t++) all.push_back(any(random));
  return all;
}

struct Packed {
  std::vector<std::unique_ptr<Adapter>> all;
  Adapters table() const {
    Adapters t;
    for (const auto& a : all) t.push_back(a.get());
    return t;
  }
};

template <class Real>
Packed packed_loras(const std::vector<LoraOf<Real>>& loras, const Experts& experts) {
  Packed p;
  for (const LoraOf<Real>& lora : loras) {
    Engine& engine = experts.engine();
    p.all.push_back(
        std::make_unique<Adapter>(experts.shape(), lora.ranks, experts.kernels(), engine.pool, engine.arena));
    p.all.back()->pack(lora.source(experts.shape()));
  }
  return p;
}

template <class Real>
struct BackwardResult {
  std::vector<Real> hidden, weights;
  std::vector<std::vector<Real>> factors;  // six of every adapter
};

template <class Real>
BackwardResult<Real> backward_of(const Experts& experts, const Packed& adapters, const std::vector<LoraOf<Real>>& loras,
                                 BatchOf<Real>& batch, const std::vector<int32_t>& ids, const std::vector<Real>& grad,
                                 bool kept, double dropout = 0) {
  const LayerShape& s = experts.shape();
  BackwardResult<Real> result{
      std::vector<Real>(batch.hidden.size(), NAN), std::vector<Real>(batch.weights.size(), NAN), {}};
  std::vector<char> keep(kept ? batch.ids.size() * (size_t)experts.keep_row_bytes() : 0);
  Batch b = batch.batch(s);
  b.adapter = ids.data();
  b.dropout = dropout, b.dropout_seed = 77;
  if (kept) Call(experts, b, adapters.table(), keep.data()).run();
  b.out = result.hidden.data();
  Gradients gradients;
  gradients.out = grad.data(), gradients.out_dtype = kTypeOf<Real>, gradients.out_stride = s.hidden;
  gradients.weights = result.weights.data(), gradients.weights_dtype = kTypeOf<Real>;
  gradients.weights_stride = batch.top_k;
  gradients.keep = kept ? keep.data() : nullptr;
  for (const LoraOf<Real>& lora : loras)
    for (auto factor : kFactors<Real>) result.factors.emplace_back((lora.*factor).size(), NAN);
  size_t n = 0;
  for (const LoraOf<Real>& lora : loras) {
    const LoraRanks& r = lora.ranks;
    auto target = [&](int64_t rows, int64_t columns) {
      std::vector<Real>& to = result.factors[n++];
      return Target{to.empty() ? nullptr : to.data(), kTypeOf<Real>, columns, 1, rows * columns};
    };
    LoraTargets t{target(r.gate, s.hidden),
                  target(s.intermediate, r.gate),
                  target(r.up, s.hidden),
                  target(s.intermediate, r.up),
                  target(r.down, s.intermediate),
                  target(s.hidden, r.down),
                  lora.gate_scale,
                  lora.up_scale,
                  lora.down_scale};
    gradients.lora.push_back(t);
  }
  Backward(experts, b, gradients, adapters.table()).run();
  return result;
}

// Difference of `gradient` and the slope of `value` along random directions of `at`, relative to a typical slope.
template <class Real, class Value>
double slope_error(std::vector<Real>& at, const std::vector<Real>& gradient, Value&& value) {
  std::mt19937 random(5);
  double worst = 0, norm = 0, step = sizeof(Real) == 8 ? 1e-5 : 1e-3;
  for (Real x : gradient) norm += (double)x * x;
  if (gradient.empty()) return 0;
  if (norm == 0 || !std::isfinite(norm)) return INFINITY;
  const std::vector<Real> before = at;
  for (int n = 0; n < 2; n++) {
    std::vector<Real> direction = random_reals<Real>(at.size(), 1, random);
    double along = 0, sums[2];
    for (size_t i = 0; i < at.size(); i++) along += (double)gradient[i] * direction[i];
    for (int side = 0; side < 2; side++) {
      for (size_t i = 0; i < at.size(); i++) at[i] = before[i] + (Real)((side ? -step : step) * direction[i]);
      sums[side] = value();
    }
    at = before;
    worst = std::max(worst, std::abs((sums[0] - sums[1]) / (2 * step) - along) / std::sqrt(norm));
  }
  return worst;
}

const std::vector<LoraRanks> kManyRanks = {{3, 5, 2, false}, {16, 16, 0, true}, {0, 40, 33, false}};

template <class Real>
void check_lora_in(const LayerShape& shape, const Gate& gate, const std::vector<LoraRanks>& ranks, int32_t tokens,
                   bool biases, const KernelTable& kernels, int threads, int groups) {
  RandomLayer layer(shape, biases, kernels.precision);
  BatchOf<Real> batch(shape, tokens, 2);
  std::vector<LoraOf<Real>> loras;
  for (size_t n = 0; n < ranks.size(); n++) {
    LoraRanks r = ranks[n];
    if (!shape.gated) r.gate = 0, r.shared = false;
    loras.emplace_back(shape, r, (uint32_t)n + 20, kernels.precision);
  }
  std::vector<int32_t> ids = some_adapters(tokens, (int32_t)loras.size());
  auto experts = packed(layer, gate, kernels, engine_of(threads, groups));
  Packed adapters = packed_loras(loras, *experts);
  Batch b = batch.batch(shape);
  b.adapter = ids.data();
  Call(*experts, b, adapters.table()).run();
  CHECK(error_of(batch.out, expected_with(layer, gate, batch, loras, ids)) < 2 * tolerance(kernels));

  std::mt19937 random(9);
  std::vector<Real> grad = random_reals<Real>(batch.hidden.size(), 1, random);
  BackwardResult<Real> recomputed = backward_of(*experts, adapters, loras, batch, ids, grad, false);
  auto value = [&] {
    double sum = 0;
    std::vector<double> out = expected_with(layer, gate, batch, loras, ids);
    for (size_t n = 0; n < grad.size(); n++) sum += grad[n] * out[n];
    return sum;
  };
  double limit = kernels.panel == DType::bf16 ? 4e-2 : kernels.panel == DType::f64 ? 1e-7 : 4e-3;
  CHECK(slope_error(batch.hidden, recomputed.hidden, value) < limit);
  CHECK(slope_error(batch.weights, recomputed.weights, value) < limit);
  for (size_t n = 0; n < recomputed.factors.size(); n++)
    CHECK(slope_error(loras[n / 6].*kFactors<Real>[n % 6], recomputed.factors[n], value) < limit);
  BackwardResult<Real> from_kept = backward_of(*experts, adapters, loras, batch, ids, grad, true);
  CHECK(recomputed.hidden == from_kept.hidden);
  CHECK(recomputed.weights == from_kept.weights);
  CHECK(recomputed.factors == from_kept.factors);
}

// Weights, factors and tensors in the precision of the kernels.
void check_lora(const LayerShape& shape, const Gate& gate, const std::vector<LoraRanks>& ranks, int32_t tokens,
                bool biases, const KernelTable& kernels, int threads = 2, int groups = 1) {
  with_sums_of(kernels, [&](auto zero) {
    check_lora_in<decltype(zero)>(shape, gate, ranks, tokens, biases, kernels, threads, groups);
  });
}

// With dropout: against slopes of forward itself, which applies the same mask; and the same bits with gate and up kept.
template <class Real>
void check_dropout_in(const KernelTable& kernels) {
  const LayerShape shape{3, 37, 45, true};
  RandomLayer layer(shape, true, kernels.precision);
  BatchOf<Real> batch(shape, 23, 2);
  std::vector<LoraOf<Real>> loras;
  for (size_t n = 0; n < kManyRanks.size(); n++)
    loras.emplace_back(shape, kManyRanks[n], (uint32_t)n, kernels.precision);
  std::vector<int32_t> ids = some_adapters(23, 3);
  auto experts = packed(layer, kSilu, kernels, engine_of(2));
  std::mt19937 random(9);
  std::vector<Real> grad = random_reals<Real>(batch.hidden.size(), 1, random);
  Packed adapters = packed_loras(loras, *experts);
  BackwardResult<Real> recomputed = backward_of(*experts, adapters, loras, batch, ids, grad, false, 0.3);
  auto value = [&] {
    Packed now = packed_loras(loras, *experts);
    Batch b = batch.batch(shape);
    b.adapter = ids.data();
    b.dropout = 0.3, b.dropout_seed = 77;
    Call(*experts, b, now.table()).run();
    double sum = 0;
    for (size_t n = 0; n < grad.size(); n++) sum += (double)grad[n] * batch.out[n];
    return sum;
  };
  double limit = kernels.panel == DType::f64 ? 1e-7 : 2e-2;
  CHECK(slope_error(batch.hidden, recomputed.hidden, value) < limit);
  CHECK(slope_error(batch.weights, recomputed.weights, value) < limit);
  for (size_t n = 0; n < recomputed.factors.size(); n++)
    CHECK(slope_error(loras[n / 6].*kFactors<Real>[n % 6], recomputed.factors[n], value) < limit);
  BackwardResult<Real> from_kept = backward_of(*experts, adapters, loras, batch, ids, grad, true, 0.3);
  CHECK(recomputed.hidden == from_kept.hidden);
  CHECK(recomputed.weights == from_kept.weights);
  CHECK(recomputed.factors == from_kept.factors);
}

}  // namespace

TEST(lora_every_variant) {
  for (const KernelTable* kernels : all_kernels()) {
    check_lora({3, 37, 45, true}, kSilu, kManyRanks, 23, true, *kernels);
    check_lora({2, 40, 33, false}, {Activation::gelu, false, 0, 0}, kManyRanks, 19, true, *kernels);
  }
}

TEST(lora_one_adapter_many_rows_and_chunks) {
  for (const KernelTable* kernels : all_kernels()) {
    check_lora({1, 64, 40, true}, kSilu, {{8, 8, 8, false}}, 300, false, *kernels);
    check_lora({1, 2700, 20, true}, kSilu, {{4, 4, 4, true}, {1, 0, 0, false}}, 30, false, *kernels, 2, 2);
  }
}

// More rows than are gathered at a time, of two adapters that share a piece.
TEST(lora_pieces_of_rows) {
  for (const KernelTable* kernels : all_kernels())
    if (kernels->precision == Precision::bf16 && (!std::strcmp(kernels->name, "generic") || kernels->elem == 2))
      check_lora({1, 2040, 4, true}, kSilu, {{3, 5, 2, false}, {8, 8, 8, true}}, 300, false, *kernels);
}

TEST(lora_dropout_where_slopes_are_fine_enough) {
  for (const KernelTable* kernels : all_kernels())
    if (kernels->precision != Precision::bf16)
      with_sums_of(*kernels, [&](auto zero) { check_dropout_in<decltype(zero)>(*kernels); });
}

TEST(lora_same_bits_for_any_threads) {
  const LayerShape shape{4, 70, 50, true};
  RandomLayer layer(shape, true);
  RandomBatch batch(shape, 61, 3);
  std::vector<RandomLora> loras;
  for (size_t n = 0; n < kManyRanks.size(); n++) loras.emplace_back(shape, kManyRanks[n], (uint32_t)n);
  std::vector<int32_t> ids = some_adapters(61, 3);
  std::mt19937 random(3);
  std::vector<float> grad = random_f32(batch.hidden.size(), 1.0f, random);
  for (const KernelTable* kernels : all_kernels()) {
    BackwardResult<float> first;
    std::vector<float> out;
    for (int threads : {1, 2, 5})
      for (int groups : {1, 2}) {
        if (groups > threads) continue;
        auto experts = packed(layer, kSilu, *kernels, engine_of(threads, groups));
        Packed adapters = packed_loras(loras, *experts);
        Batch b = batch.batch(shape);
        b.adapter = ids.data();
        Call(*experts, b, adapters.table()).run();
        BackwardResult<float> recomputed = backward_of(*experts, adapters, loras, batch, ids, grad, threads == 2);
        if (out.empty()) first = recomputed, out = batch.out;
        CHECK(batch.out == out);
        CHECK(recomputed.hidden == first.hidden);
        CHECK(recomputed.factors == first.factors);
      }
  }
}

// A token's result does not depend on other adapters in the batch, and without an adapter it is exactly the base
// layer's.
TEST(lora_bits_do_not_depend_on_other_adapters) {
  const LayerShape shape{3, 64, 48, true};
  RandomLayer layer(shape, false);
  RandomBatch batch(shape, 40, 2);
  std::vector<RandomLora> loras;
  for (size_t n = 0; n < kManyRanks.size(); n++) loras.emplace_back(shape, kManyRanks[n], (uint32_t)n);
  std::vector<int32_t> ids = some_adapters(40, 3);
  for (const KernelTable* kernels : all_kernels()) {
    auto experts = packed(layer, kSilu, *kernels, engine_of(2));
    Packed adapters = packed_loras(loras, *experts);
    Batch b = batch.batch(shape);
    b.adapter = ids.data();
    Call(*experts, b, adapters.table()).run();
    std::vector<float> mixed = batch.out;
    for (int32_t id = -1; id < 3; id++) {
      Batch alone = batch.batch(shape);
      alone.every_adapter = id;
      Call(*experts, alone, adapters.table()).run();
      for (size_t t = 0; t < 40; t++)
        for (size_t h = 0; ids[t] == id && h < 64; h++) CHECK_EQ(batch.out[t * 64 + h], mixed[t * 64 + h]);
    }
  }
}
