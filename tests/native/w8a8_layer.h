// Random layers in int8 and int4 for the native tests of W8A8, and the reference result: rounded where the kernels
// round, exact elsewhere.
#pragma once

#include <cmath>
#include <cstring>

#include "check.h"
#include "random_layer.h"

namespace kt::check {

constexpr Format format_of(Codec codec, int32_t group = 0, DType scale = DType::f32) {
  Format f;
  f.codec = codec;
  f.group = group;
  f.scale = scale;
  return f;
}

// A matrix of all experts as int8 with a scale for each row: in format int8, or int4 requantised to it.
struct Int8Matrix {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  int64_t rows, columns;
  Format format = format_of(Codec::int8);
  std::vector<uint8_t> nibbles;    // int4, as released
  std::vector<char> group_scales;  // likewise

  Int8Matrix(int32_t experts, int64_t n, int64_t k) : rows(n), columns(k) {
    codes.resize((size_t)(experts * n * k));
    scales.resize((size_t)(experts * n));
  }
  SourceMatrix source() const {
    SourceMatrix m{};
    if (format.codec == Codec::int8) {
      m.released = {(const uint8_t*)codes.data(), columns, (const char*)scales.data(), 4, 1, nullptr, nullptr, 0};
      m.codes_stride = rows * columns;
      m.scales_stride = rows * 4;
    } else {
      int64_t width = groups() * format.header();
      m.released = {nibbles.data(), ceil_div(columns, 2), group_scales.data(), width, 1, nullptr, nullptr, 0};
      m.codes_stride = rows * ceil_div(columns, 2);
      m.scales_stride = rows * width;
    }
    return m;
  }
  // The dot product of a row's codes and int8 values, each group with its own scale.
  double dot_by_group(int64_t row, const std::vector<int32_t>& bytes) const {
    double sum = 0;
    for (int64_t k = 0; k < columns; k++) {
      int code = (nibbles[(size_t)(row * ceil_div(columns, 2) + k / 2)] >> (k % 2 * 4) & 15) - 8;
      int64_t group = format.group ? k / format.group : 0;
      sum += bytes[(size_t)k] * code * element_of<double>(group_scales.data(), row * groups() + group, format.scale);
    }
    return sum;
  }
  int64_t groups() const { return format.group ? ceil_div(columns, format.group) : 1; }

  // Makes it int4, with code(row, k) from -8 to 7 and scale(row, group); the int8 values and scales follow by the
  // definition.
  template <class Code, class Scale>
  void become_int4(int32_t group, DType type, const Code& code, const Scale& scale) {
    format = format_of(Codec::int4, group, type);
    const int64_t all = (int64_t)scales.size(), row_bytes = ceil_div(columns, 2);
    nibbles.assign((size_t)(all * row_bytes), 0);
    group_scales.assign((size_t)(all * groups() * format.header()), 0);
    for (int64_t r = 0; r < all; r++) {
      std::vector<float> s;
      float largest = 0;
      for (int64_t g = 0; g < groups(); g++) {
        set_element(group_scales.data(), r * groups() + g, type, (float)scale(r, g));
        s.push_back(element_of<float>(group_scales.data(), r * groups() + g, type));
        if (std::fabs(s.back()) > std::fabs(largest) || s.back() == std::fabs(largest)) largest = s.back();
      }
      float channel = largest / 16, inverse = largest != 0 ? 8 / channel : 0;
      scales[(size_t)r] = channel;
      for (int64_t k = 0; k < columns; k++) {
        int v = code(r, k);
        nibbles[(size_t)(r * row_bytes + k / 2)] |= (uint8_t)((v + 8) << (k % 2 * 4));
        float product = s[(size_t)(group ? k / group : 0)] * inverse;
        int ratio = std::max(-127, (int)std::nearbyint(product));
        int byte = (int)std::floor((v * ratio + 4) / 8.0);
        CHECK(-128 <= byte && byte <= 127);
        codes[(size_t)(r * columns + k)] = (int8_t)byte;
      }
    }
  }
};

// Scales over a wide range, including zeros of both signs, negative ones, and whole rows of zero.
struct RandomScales {
  std::mt19937& random;
  float operator()(int64_t row, int64_t) const {
    std::uniform_int_distribution<int> kind(0, 19);
    std::uniform_real_distribution<float> exponent(-18, 3);
    int k = kind(random);
    float s = std::exp2(k < 10 ? exponent(random) / 8 : exponent(random)) / 64;
    return row % 29 == 11 ? 0.0f : k == 0 ? 0.0f : k == 1 ? -0.0f : k < 5 ? -s : s;
  }
};

inline void make_random_int4(Int8Matrix& m, int32_t group, DType type, int seed) {
  std::mt19937 random((uint32_t)seed);
  std::uniform_int_distribution<int> any(-8, 7);
  m.become_int4(group, type, [&](int64_t, int64_t) { return any(random); }, RandomScales{random});
}

struct Int8Layer {
  LayerShape shape;
  Gate gating;
  Int8Matrix gate, up, down;
  RandomLayer biases;

  Int8Layer(const LayerShape& s, const Gate& g)
      : shape(s),
        gating(g),
        gate(s.experts, s.intermediate, s.hidden),
        up(s.experts, s.intermediate, s.hidden),
        down(s.experts, s.hidden, s.intermediate),
        biases(s, true) {
    std::mt19937 random(5);
    std::uniform_int_distribution<int> any(-128, 127);
    for (Int8Matrix* m : {&gate, &up, &down}) {
      for (int8_t& c : m->codes) c = (int8_t)any(random);
      for (size_t n = 0; n < m->scales.size(); n++)
        m->scales[n] = (0.7f + 0.01f * (float)(n % 60)) / (74 * std::sqrt((float)m->columns));
    }
  }

  std::unique_ptr<Experts> packed(const KernelTable& kernels, std::shared_ptr<Engine> engine, bool biased) const {
    const LayerFormats formats{gate.format, up.format, down.format};
    auto experts = std::make_unique<Experts>(shape, gating, kernels, std::move(engine), formats);
    SourceLayer layer{};
    if (biased) layer = biases.source(0, shape.experts);
    layer.count = shape.experts;
    layer.gate = gating.gated ? gate.source() : SourceMatrix{};
    layer.up = up.source();
    layer.down = down.source();
    experts->weights().pack(layer);
    return experts;
  }
};

// A quantised row, by the definition.
struct Int8Row {
  std::vector<int32_t> bytes;
  float scale;

  explicit Int8Row(const std::vector<float>& row) {
    float largest = 0;
    for (float x : row) largest = std::max(largest, std::fabs(x));
    float inverse = largest > 0 ? 127.0f / largest : 0;
    scale = largest / 127.0f;
    for (float x : row) {
      float product = x * inverse;
      bytes.push_back((int32_t)std::nearbyint(product));
    }
  }
  // `packed_gemv`: the expert has few enough rows for it.
  double dot(const Int8Matrix& m, int64_t row, bool packed_gemv) const {
    if (packed_gemv && m.format.codec == Codec::int4) return m.dot_by_group(row, bytes) * scale;
    int64_t sum = 0;
    for (int64_t k = 0; k < m.columns; k++) sum += bytes[(size_t)k] * m.codes[(size_t)(row * m.columns + k)];
    return (float)sum * (scale * m.scales[(size_t)row]);
  }
};

inline std::vector<double> expected_w8a8(const Int8Layer& l, const RandomBatch& batch, bool biased) {
  int64_t h = l.shape.hidden, i = l.shape.intermediate;
  std::vector<double> out((size_t)(batch.tokens * h));
  for (size_t n = 0; n < batch.ids.size(); n++) {
    int64_t token = (int64_t)n / batch.top_k, e = batch.ids[n];
    if (e < 0 || e >= l.shape.experts) continue;
    auto from = batch.hidden.begin() + token * h;
    Int8Row x(std::vector<float>(from, from + h));
    bool packed_gemv = std::count(batch.ids.begin(), batch.ids.end(), batch.ids[n]) <= kPackedGemvInt8Rows;
    std::vector<float> inner;
    for (int64_t r = e * i; r < (e + 1) * i; r++) {
      double u = x.dot(l.up, r, packed_gemv) + (biased ? l.biases.up_bias[(size_t)r] : 0), g = u;
      if (l.gating.gated) {
        g = x.dot(l.gate, r, packed_gemv) + (biased ? l.biases.gate_bias[(size_t)r] : 0);
        if (l.gating.limit > 0) g = std::min(g, l.gating.limit), u = std::clamp(u, -l.gating.limit, l.gating.limit);
        if (l.gating.kind == Activation::swiglu_oai) u += 1;
      }
      double y = activated(g, l.gating.kind, l.gating.alpha) * (l.gating.gated ? u : 1);
      inner.push_back(to_float(from_float((float)y, DType::bf16), DType::bf16));
    }
    Int8Row hidden(inner);
    for (int64_t c = 0; c < h; c++) {
      double y = hidden.dot(l.down, e * h + c, packed_gemv) + (biased ? l.biases.down_bias[(size_t)(e * h + c)] : 0);
      out[(size_t)(token * h + c)] += batch.weights[n] * y;
    }
  }
  return out;
}

inline std::vector<float> run_w8a8(const Experts& experts, RandomBatch& batch) {
  Batch b = batch.batch(experts.shape());
  b.w8a8 = true;
  std::fill(batch.out.begin(), batch.out.end(), NAN);
  Call(experts, b).run();
  return batch.out;
}

inline std::vector<const KernelTable*> int8_kernels() {
  std::vector<const KernelTable*> list;
  for (const KernelTable* kernels : all_kernels())
    if (kernels->precision == Precision::bf16) list.push_back(kernels);
  return list;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace kt::check
