// A made-up expert layer and batch for the native tests, and what the layer should say, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "moe/moe.h"

namespace kt::check {

inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline std::vector<uint16_t> random_bf16(size_t count, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<uint16_t> all(count);
  for (uint16_t& x : all) x = to_bf16(normal(random));
  return all;
}

inline std::vector<float> random_f32(size_t count, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> all(count);
  for (float& x : all) x = normal(random);
  return all;
}

// Weights of one layer, rows as checkpoints have them: gate and up [E, I, H], down [E, H, I].
struct MadeUpLayer {
  LayerShape shape;
  std::vector<uint16_t> gate, up, down;
  std::vector<float> gate_bias, up_bias, down_bias;  // empty: none

  MadeUpLayer(const LayerShape& s, bool biases, uint32_t seed = 1) : shape(s) {
    std::mt19937 random(seed);
    size_t e = (size_t)s.experts, h = (size_t)s.hidden, i = (size_t)s.intermediate;
    float in = 1.0f / std::sqrt((float)h), out = 1.0f / std::sqrt((float)i);
    if (s.gated) gate = random_bf16(e * i * h, in, random);
    up = random_bf16(e * i * h, in, random);
    down = random_bf16(e * h * i, out, random);
    if (!biases) return;
    if (s.gated) gate_bias = random_f32(e * i, 0.5f, random);
    up_bias = random_f32(e * i, 0.5f, random);
    down_bias = random_f32(e * h, 0.5f, random);
  }

  SourceLayer source(int32_t first, int32_t count) const {
    int64_t h = shape.hidden, i = shape.intermediate;
    auto matrix = [&](const std::vector<uint16_t>& m, int64_t columns) {
      return SourceMatrix{{m.empty() ? nullptr : m.data() + first * i * h, DType::bf16, columns, 1}, i * h};
    };
    auto vector = [&](const std::vector<float>& v, int64_t size) {
      return SourceMatrix{{v.empty() ? nullptr : v.data() + first * size, DType::f32, 1, 0}, size};
    };
    return {first,
            count,
            matrix(gate, h),
            matrix(up, h),
            matrix(down, i),
            vector(gate_bias, i),
            vector(up_bias, i),
            vector(down_bias, h)};
  }
};

struct MadeUpBatch {
  int32_t tokens, top_k;
  std::vector<float> hidden, weights, out;
  std::vector<int32_t> ids;

  MadeUpBatch(const LayerShape& s, int32_t t, int32_t k, uint32_t seed = 2) : tokens(t), top_k(k) {
    std::mt19937 random(seed);
    hidden = random_f32((size_t)t * (size_t)s.hidden, 1.0f, random);
    weights = random_f32((size_t)t * (size_t)k, 0.5f, random);
    out.assign((size_t)t * (size_t)s.hidden, NAN);
    std::uniform_int_distribution<int32_t> any(-1, s.experts);  // both ends mean "not here"
    for (int32_t n = 0; n < t * k; n++) ids.push_back(any(random));
  }

  Batch batch(const LayerShape& s) {
    Batch b;
    b.tokens = tokens, b.top_k = top_k;
    b.hidden = hidden.data(), b.hidden_dtype = DType::f32, b.hidden_stride = s.hidden;
    b.ids = ids.data(), b.ids_stride = top_k;
    b.weights = weights.data(), b.weights_dtype = DType::f32, b.weights_stride = top_k;
    b.out = out.data(), b.out_dtype = DType::f32, b.out_stride = s.hidden;
    return b;
  }
};

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

inline std::vector<double> expected(const MadeUpLayer& layer, const Gate& gate, const MadeUpBatch& batch) {
  size_t h = (size_t)layer.shape.hidden, i = (size_t)layer.shape.intermediate;
  std::vector<double> out((size_t)batch.tokens * h), inner(i);
  auto dot = [&](const std::vector<uint16_t>& m, size_t row, size_t n, auto at) {
    double sum = 0;
    for (size_t k = 0; k < n; k++) sum += (double)to_float(m[row * n + k], DType::bf16) * at(k);
    return sum;
  };
  for (size_t n = 0; n < batch.ids.size(); n++) {
    size_t token = n / (size_t)batch.top_k, e = (size_t)batch.ids[n];
    if (batch.ids[n] < 0 || batch.ids[n] >= layer.shape.experts) continue;
    auto x = [&](size_t k) { return (double)batch.hidden[token * h + k]; };
    for (size_t r = 0; r < i; r++) {
      double u = dot(layer.up, e * i + r, h, x) + (layer.up_bias.empty() ? 0 : layer.up_bias[e * i + r]), g = u;
      if (gate.gated) {
        g = dot(layer.gate, e * i + r, h, x) + (layer.gate_bias.empty() ? 0 : layer.gate_bias[e * i + r]);
        if (gate.limit > 0) g = std::min<double>(g, gate.limit), u = std::clamp<double>(u, -gate.limit, gate.limit);
        if (gate.kind == Activation::swiglu_oai) u += 1;
      }
      inner[r] = activated(g, gate.kind, gate.alpha) * (gate.gated ? u : 1);
    }
    for (size_t c = 0; c < h; c++) {
      double y = dot(layer.down, e * h + c, i, [&](size_t k) { return inner[k]; });
      if (!layer.down_bias.empty()) y += layer.down_bias[e * h + c];
      out[token * h + c] += batch.weights[n] * y;
    }
  }
  return out;
}

// Relative L2; the infinite where anything is not a number.
inline double error_of(const std::vector<float>& got, const std::vector<double>& want) {
  double off = 0, all = 0;
  for (size_t n = 0; n < got.size(); n++) {
    off += (got[n] - want[n]) * (got[n] - want[n]);
    all += want[n] * want[n];
  }
  if (all == 0) return off == 0 ? 0 : INFINITY;
  return std::isfinite(off) ? std::sqrt(off / all) : INFINITY;
}

// f32 activations err in the order of sums; bf16 ones round the hidden states and what lies between the products.
inline double tolerance(const KernelTable& kernels) { return kernels.elem == 2 ? 6e-3 : 3e-6; }

inline std::vector<const KernelTable*> all_kernels() {
  std::vector<const KernelTable*> all;
  for (int v = 0; v < variant_count(); v++)
    if (variant(v).native || variant(v).emulated) all.push_back(variant(v).table);
  return all;
}

inline std::shared_ptr<Engine> engine_of(int threads, int groups = 1) {
  PoolOptions options;
  options.threads = threads;
  options.groups = groups;
  return std::make_shared<Engine>(options);
}

inline constexpr Gate kSilu{Activation::silu, true, 0, 0};

inline std::unique_ptr<Experts> packed(const MadeUpLayer& layer, const Gate& gate, const KernelTable& kernels,
                                       std::shared_ptr<Engine> engine) {
  auto experts = std::make_unique<Experts>(layer.shape, gate, kernels, std::move(engine));
  experts->weights().pack(layer.source(0, layer.shape.experts));
  return experts;
}

}  // namespace kt::check
