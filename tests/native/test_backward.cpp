// Backward natively, for the sanitizers: against finite differences of the double-precision reference, for every
// variant, with any number of threads and groups, with gate and up kept or recomputed.
#include "check.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

template <class Real>
struct BackwardResult {
  std::vector<Real> hidden, weights;
};

template <class Real>
BackwardResult<Real> backward_of(const Experts& experts, BatchOf<Real>& batch, const std::vector<Real>& grad,
                                 bool kept) {
  const LayerShape& shape = experts.shape();
  BackwardResult<Real> result{std::vector<Real>(batch.hidden.size(), NAN),
                              std::vector<Real>(batch.weights.size(), NAN)};
  std::vector<char> keep(kept ? batch.ids.size() * (size_t)experts.keep_row_bytes() : 0);
  if (kept) Call(experts, batch.batch(shape), {}, keep.data()).run();
  Batch b = batch.batch(shape);
  b.out = result.hidden.data();
  Gradients gradients;
  gradients.out = grad.data();
  gradients.out_dtype = kTypeOf<Real>;
  gradients.out_stride = shape.hidden;
  gradients.weights = result.weights.data();
  gradients.weights_dtype = kTypeOf<Real>;
  gradients.weights_stride = batch.top_k;
  gradients.keep = kept ? keep.data() : nullptr;
  Backward(experts, b, gradients).run();
  return result;
}

template <class Real>
double dot(const std::vector<Real>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t n = 0; n < x.size(); n++) sum += x[n] * y[n];
  return sum;
}

// Difference of `gradient` and the slope of <grad, layer> along random directions, relative to a typical slope.
template <class Real>
double slope_error(const RandomLayer& layer, const Gate& gate, BatchOf<Real> batch, const std::vector<Real>& grad,
                   std::vector<Real> BatchOf<Real>::* member, const std::vector<Real>& gradient) {
  std::mt19937 random(5);
  double worst = 0, norm = std::sqrt(dot(gradient, {gradient.begin(), gradient.end()}));
  const std::vector<Real> at = batch.*member;
  for (int n = 0; n < 3; n++) {
    std::vector<Real> direction = random_reals<Real>(at.size(), 1, random);
    double along = 0, step = sizeof(Real) == 8 ? 1e-5 : 1e-3, sums[2];
    for (size_t i = 0; i < at.size(); i++) along += (double)gradient[i] * direction[i];
    for (int side = 0; side < 2; side++) {
      for (size_t i = 0; i < at.size(); i++) (batch.*member)[i] = at[i] + (Real)((side ? -step : step) * direction[i]);
      sums[side] = dot(grad, expected(layer, gate, batch));
    }
    worst = std::max(worst, std::abs((sums[0] - sums[1]) / (2 * step) - along) / norm);
  }
  return worst;
}

template <class Real>
void check_backward_in(const LayerShape& shape, const Gate& gate, bool biases, int32_t tokens, int groups,
                       const KernelTable& kernels) {
  RandomLayer layer(shape, biases, kernels.precision);
  BatchOf<Real> batch(shape, tokens, 2);
  std::mt19937 random(9);
  std::vector<Real> grad = random_reals<Real>(batch.hidden.size(), 1, random);
  auto experts = packed(layer, gate, kernels, engine_of(2, groups));
  BackwardResult<Real> recomputed = backward_of(*experts, batch, grad, false);
  double limit = kernels.panel == DType::bf16 ? 3e-2 : kernels.panel == DType::f64 ? 1e-7 : 2e-3;
  CHECK(slope_error(layer, gate, batch, grad, &BatchOf<Real>::hidden, recomputed.hidden) < limit);
  CHECK(slope_error(layer, gate, batch, grad, &BatchOf<Real>::weights, recomputed.weights) < limit);
  BackwardResult<Real> from_kept = backward_of(*experts, batch, grad, true);
  CHECK(recomputed.hidden == from_kept.hidden);
  CHECK(recomputed.weights == from_kept.weights);
}

void check_backward(const LayerShape& shape, const Gate& gate, bool biases, int32_t tokens, int groups,
                    const KernelTable& kernels) {
  with_sums_of(kernels,
               [&](auto zero) { check_backward_in<decltype(zero)>(shape, gate, biases, tokens, groups, kernels); });
}

}  // namespace

TEST(backward_every_variant_and_activation) {
  for (const KernelTable* kernels : all_kernels())
    for (Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu2})
      for (bool gated : {true, false}) check_backward({3, 37, 45, gated}, {kind, gated, 0, 0}, true, 9, 1, *kernels);
}

TEST(backward_swiglu_oai) {
  for (const KernelTable* kernels : all_kernels())
    check_backward({3, 37, 45, true}, {Activation::swiglu_oai, true, 50, 1.702}, true, 9, 1, *kernels);
}

TEST(backward_sizes_chunks_and_groups) {
  for (const KernelTable* kernels : all_kernels()) {
    check_backward({2, 1, 1, true}, kSilu, false, 5, 1, *kernels);
    check_backward({2, 64, 100, true}, kSilu, false, 150, 2, *kernels);
    check_backward({1, 2700, 20, true}, kSilu, false, 40, 1, *kernels);
    check_backward({1, 20, 2300, true}, kSilu, true, 6, 2, *kernels);
  }
}

TEST(backward_same_bits_for_any_threads) {
  const LayerShape shape{4, 70, 50, true};
  RandomLayer layer(shape, true);
  RandomBatch batch(shape, 41, 3);
  std::mt19937 random(3);
  std::vector<float> grad = random_f32(batch.hidden.size(), 1.0f, random);
  for (const KernelTable* kernels : all_kernels()) {
    BackwardResult<float> first;
    for (int threads : {1, 2, 5})
      for (int groups : {1, 2}) {
        if (groups > threads) continue;
        auto experts = packed(layer, kSilu, *kernels, engine_of(threads, groups));
        BackwardResult<float> recomputed = backward_of(*experts, batch, grad, threads == 2);
        if (first.hidden.empty()) first = recomputed;
        CHECK(recomputed.hidden == first.hidden);
        CHECK(recomputed.weights == first.weights);
      }
  }
}
