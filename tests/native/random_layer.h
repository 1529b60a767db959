// A random expert layer and batch for the native tests, and the reference result in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "moe/moe.h"

namespace kt::check {

template <class Real>
std::vector<Real> random_reals(size_t count, Real scale, std::mt19937& random) {
  std::normal_distribution<Real> normal(0, scale);
  std::vector<Real> all(count);
  for (Real& x : all) x = normal(random);
  return all;
}

inline std::vector<float> random_f32(size_t count, float scale, std::mt19937& random) {
  return random_reals<float>(count, scale, random);
}

// Random values as a tensor of some dtype, and the same values in double.
struct Numbers {
  DType dtype = DType::bf16;
  std::vector<char> bytes;
  std::vector<double> values;

  Numbers() = default;
  Numbers(size_t count, double scale, DType type, std::mt19937& random) : dtype(type) {
    bytes.resize(count * size_of(type));
    for (double x : random_reals<double>(count, scale, random)) {
      set_element(bytes.data(), (int64_t)values.size(), type, x);
      values.push_back(element_of<double>(bytes.data(), (int64_t)values.size(), type));
    }
  }
  bool empty() const { return values.empty(); }
  double operator[](size_t n) const { return values[n]; }
  // Rows of `columns`, `size` elements an expert, from expert `first` on.
  SourceMatrix source(int32_t first, int64_t size, int64_t n_stride, int64_t k_stride) const {
    const char* at = empty() ? nullptr : bytes.data() + (size_t)(first * size) * size_of(dtype);
    return {{at, dtype, n_stride, k_stride}, size};
  }
};

// The dtype of weights that a table packs without rounding.
inline DType dtype_of(Precision precision) {
  return precision == Precision::f64 ? DType::f64 : precision == Precision::f32 ? DType::f32 : DType::bf16;
}

// Weights of one layer in checkpoint layout: gate and up [E, I, H], down [E, H, I].
struct RandomLayer {
  LayerShape shape;
  Numbers gate, up, down;
  Numbers gate_bias, up_bias, down_bias;  // empty: none

  RandomLayer(const LayerShape& s, bool biases, Precision precision = Precision::bf16) : shape(s) {
    std::mt19937 random(1);
    DType type = dtype_of(precision), bias_type = precision == Precision::f64 ? DType::f64 : DType::f32;
    size_t e = (size_t)s.experts, h = (size_t)s.hidden, i = (size_t)s.intermediate;
    double in = 1 / std::sqrt((double)h), out = 1 / std::sqrt((double)i);
    if (s.gated) gate = Numbers(e * i * h, in, type, random);
    up = Numbers(e * i * h, in, type, random);
    down = Numbers(e * h * i, out, type, random);
    if (!biases) return;
    if (s.gated) gate_bias = Numbers(e * i, 0.5, bias_type, random);
    up_bias = Numbers(e * i, 0.5, bias_type, random);
    down_bias = Numbers(e * h, 0.5, bias_type, random);
  }

  SourceLayer source(int32_t first, int32_t count) const {
    int64_t h = shape.hidden, i = shape.intermediate;
    return {first,
            count,
            gate.source(first, i * h, h, 1),
            up.source(first, i * h, h, 1),
            down.source(first, i * h, i, 1),
            gate_bias.source(first, i, 1, 0),
            up_bias.source(first, i, 1, 0),
            down_bias.source(first, h, 1, 0)};
  }
};

template <class Real>
constexpr DType kTypeOf = sizeof(Real) == 8 ? DType::f64 : DType::f32;

template <class Real>
struct BatchOf {
  int32_t tokens, top_k;
  std::vector<Real> hidden, weights, out;
  std::vector<int32_t> ids;

  BatchOf(const LayerShape& s, int32_t t, int32_t k, uint32_t seed = 2) : tokens(t), top_k(k) {
    std::mt19937 random(seed);
    hidden = random_reals<Real>((size_t)t * (size_t)s.hidden, 1, random);
    weights = random_reals<Real>((size_t)t * (size_t)k, 0.5, random);
    out.assign((size_t)t * (size_t)s.hidden, NAN);
    std::uniform_int_distribution<int32_t> any(-1, s.experts);  // both ends are not local
    for (int32_t n = 0; n < t * k; n++) ids.push_back(any(random));
  }

  Batch batch(const LayerShape& s) {
    Batch b;
    b.tokens = tokens, b.top_k = top_k;
    b.hidden = hidden.data(), b.hidden_dtype = kTypeOf<Real>, b.hidden_stride = s.hidden;
    b.ids = ids.data(), b.ids_stride = top_k;
    b.weights = weights.data(), b.weights_dtype = kTypeOf<Real>, b.weights_stride = top_k;
    b.out = out.data(), b.out_dtype = kTypeOf<Real>, b.out_stride = s.hidden;
    return b;
  }
};
using RandomBatch = BatchOf<float>;

inline double activated(double g, Activation kind, double alpha) {
  switch (kind) {
    case Activation::silu:
      return g / (1 + std::exp(-g));
    case Activation::gelu:
      return g * 0.5 * std::erfc(-g * std::sqrt(0.5));
    case Activation::gelu_tanh:
      return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
    case Activation::relu2:
      return g > 0 ? g * g : 0;
    case Activation::swiglu_oai:
      return g / (1 + std::exp(-alpha * g));
    case Activation::none:
      return g;
  }
  return NAN;
}

inline double to_bf16(double x) { return to_float(from_float((float)x, DType::bf16), DType::bf16); }

// `rounded`: hidden states and activated rows are rounded to bf16.
template <class Real>
std::vector<double> expected(const RandomLayer& layer, const Gate& gate, const BatchOf<Real>& batch,
                             bool rounded = false) {
  size_t h = (size_t)layer.shape.hidden, i = (size_t)layer.shape.intermediate;
  std::vector<double> out((size_t)batch.tokens * h), inner(i);
  auto dot = [&](const Numbers& m, size_t row, size_t n, auto at) {
    double sum = 0;
    for (size_t k = 0; k < n; k++) sum += m[row * n + k] * at(k);
    return sum;
  };
  for (size_t n = 0; n < batch.ids.size(); n++) {
    size_t token = n / (size_t)batch.top_k, e = (size_t)batch.ids[n];
    if (batch.ids[n] < 0 || batch.ids[n] >= layer.shape.experts) continue;
    auto x = [&](size_t k) {
      double value = batch.hidden[token * h + k];
      return rounded ? to_bf16(value) : value;
    };
    for (size_t r = 0; r < i; r++) {
      double u = dot(layer.up, e * i + r, h, x) + (layer.up_bias.empty() ? 0 : layer.up_bias[e * i + r]), g = u;
      if (gate.gated) {
        g = dot(layer.gate, e * i + r, h, x) + (layer.gate_bias.empty() ? 0 : layer.gate_bias[e * i + r]);
        if (gate.limit > 0) g = std::min<double>(g, gate.limit), u = std::clamp<double>(u, -gate.limit, gate.limit);
        if (gate.kind == Activation::swiglu_oai) u += 1;
      }
      inner[r] = activated(g, gate.kind, gate.alpha) * (gate.gated ? u : 1);
      if (rounded) inner[r] = to_bf16(inner[r]);
    }
    for (size_t c = 0; c < h; c++) {
      double y = dot(layer.down, e * h + c, i, [&](size_t k) { return inner[k]; });
      if (!layer.down_bias.empty()) y += layer.down_bias[e * h + c];
      out[token * h + c] += batch.weights[n] * y;
    }
  }
  return out;
}

// Relative L2 error; infinite where a value is not finite.
template <class Real>
double error_of(const std::vector<Real>& got, const std::vector<double>& want) {
  double off = 0, all = 0;
  for (size_t n = 0; n < got.size(); n++) {
    off += (got[n] - want[n]) * (got[n] - want[n]);
    all += want[n] * want[n];
  }
  if (all == 0) return off == 0 ? 0 : INFINITY;
  return std::isfinite(off) ? std::sqrt(off / all) : INFINITY;
}

// f32 and f64 activations differ by the order of summation; bf16 ones by the rounding of hidden states and activated
// rows.
inline double tolerance(const KernelTable& kernels) {
  return kernels.panel == DType::bf16 ? 6e-3 : kernels.panel == DType::f64 ? 1e-13 : 3e-6;
}

// The tables of every variant and precision.
inline std::vector<const KernelTable*> all_kernels() {
  std::vector<const KernelTable*> all;
  for (int v = 0; v < variant_count(); v++)
    for (int p = 0; p < kPrecisions; p++)
      if (const KernelTable* table = variant(v).table((Precision)p);
          table && (variant(v).native || variant(v).emulated))
        all.push_back(table);
  return all;
}

inline std::string title_of(const KernelTable& kernels) {
  return std::string(kernels.name) + " " + name_of(kernels.precision);
}

inline std::shared_ptr<Engine> engine_of(int threads, int groups = 1) {
  PoolOptions options;
  options.threads = threads;
  options.groups = groups;
  return std::make_shared<Engine>(options);
}

inline constexpr Gate kSilu{Activation::silu, true, 0, 0};

inline std::unique_ptr<Experts> packed(const RandomLayer& layer, const Gate& gate, const KernelTable& kernels,
                                       std::shared_ptr<Engine> engine) {
  auto experts = std::make_unique<Experts>(layer.shape, gate, kernels, std::move(engine));
  experts->weights().pack(layer.source(0, layer.shape.experts));
  return experts;
}

}  // namespace kt::check
