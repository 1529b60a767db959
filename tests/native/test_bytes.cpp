// W8A8 on every variant: exact sums of bytes, the numbers that they become, and that nothing depends on threads, groups
// or neighbours. The reference rounds where the kernels round and is exact elsewhere.
#include <cmath>
#include <cstring>

#include "check.h"
#include "moe_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

// A matrix of all experts in format int8.
struct ByteMatrix {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  int64_t rows, columns;

  ByteMatrix(int32_t experts, int64_t n, int64_t k) : rows(n), columns(k) {
    codes.resize((size_t)(experts * n * k));
    scales.resize((size_t)(experts * n));
  }
  SourceMatrix source() const {
    SourceMatrix m{};
    m.released = {(const uint8_t*)codes.data(), columns, (const char*)scales.data(), 4, 1, nullptr};
    m.codes_stride = rows * columns;
    m.scales_stride = rows * 4;
    return m;
  }
};

struct ByteLayer {
  LayerShape shape;
  Gate gating;
  ByteMatrix gate, up, down;
  MadeUpLayer biases;

  ByteLayer(const LayerShape& s, const Gate& g)
      : shape(s),
        gating(g),
        gate(s.experts, s.intermediate, s.hidden),
        up(s.experts, s.intermediate, s.hidden),
        down(s.experts, s.hidden, s.intermediate),
        biases(s, true) {
    std::mt19937 random(5);
    std::uniform_int_distribution<int> any(-128, 127);
    for (ByteMatrix* m : {&gate, &up, &down}) {
      for (int8_t& c : m->codes) c = (int8_t)any(random);
      for (size_t n = 0; n < m->scales.size(); n++)
        m->scales[n] = (0.7f + 0.01f * (float)(n % 60)) / (74 * std::sqrt((float)m->columns));
    }
  }

  std::unique_ptr<Experts> packed(const KernelTable& kernels, std::shared_ptr<Engine> engine, bool biased) const {
    Format int8;
    int8.codec = Codec::int8;
    auto experts = std::make_unique<Experts>(shape, gating, kernels, std::move(engine), LayerFormats{int8, int8, int8});
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

// A row as bytes, by the definition.
struct ByteRow {
  std::vector<int32_t> bytes;
  float scale;

  explicit ByteRow(const std::vector<float>& row) {
    float largest = 0;
    for (float x : row) largest = std::max(largest, std::fabs(x));
    float inverse = largest > 0 ? 127.0f / largest : 0;
    scale = largest / 127.0f;
    for (float x : row) {
      float product = x * inverse;
      bytes.push_back((int32_t)std::nearbyint(product));
    }
  }
  float times(const ByteMatrix& m, int64_t row) const {
    int64_t sum = 0;
    for (int64_t k = 0; k < m.columns; k++) sum += bytes[(size_t)k] * m.codes[(size_t)(row * m.columns + k)];
    return (float)sum * (scale * m.scales[(size_t)row]);
  }
};

std::vector<double> expected_w8a8(const ByteLayer& l, const MadeUpBatch& batch, bool biased) {
  int64_t h = l.shape.hidden, i = l.shape.intermediate;
  std::vector<double> out((size_t)(batch.tokens * h));
  for (size_t n = 0; n < batch.ids.size(); n++) {
    int64_t token = (int64_t)n / batch.top_k, e = batch.ids[n];
    if (e < 0 || e >= l.shape.experts) continue;
    auto from = batch.hidden.begin() + token * h;
    ByteRow x(std::vector<float>(from, from + h));
    std::vector<float> inner;
    for (int64_t r = e * i; r < (e + 1) * i; r++) {
      double u = x.times(l.up, r) + (biased ? l.biases.up_bias[(size_t)r] : 0), g = u;
      if (l.gating.gated) {
        g = x.times(l.gate, r) + (biased ? l.biases.gate_bias[(size_t)r] : 0);
        if (l.gating.limit > 0) g = std::min(g, l.gating.limit), u = std::clamp(u, -l.gating.limit, l.gating.limit);
        if (l.gating.kind == Activation::swiglu_oai) u += 1;
      }
      double y = activated(g, l.gating.kind, l.gating.alpha) * (l.gating.gated ? u : 1);
      inner.push_back(to_float(from_float((float)y, DType::bf16), DType::bf16));
    }
    ByteRow hidden(inner);
    for (int64_t c = 0; c < h; c++) {
      double y = hidden.times(l.down, e * h + c) + (biased ? l.biases.down_bias[(size_t)(e * h + c)] : 0);
      out[(size_t)(token * h + c)] += batch.weights[n] * y;
    }
  }
  return out;
}

std::vector<float> run_w8a8(const Experts& experts, MadeUpBatch& batch) {
  Batch b = batch.batch(experts.shape());
  b.w8a8 = true;
  std::fill(batch.out.begin(), batch.out.end(), NAN);
  Call(experts, b).run();
  return batch.out;
}

std::vector<const KernelTable*> kernels_of_bytes() {
  std::vector<const KernelTable*> found;
  for (const KernelTable* kernels : all_kernels())
    if (kernels->precision == Precision::bf16) found.push_back(kernels);
  return found;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

// One byte of an activated row may round the other way where its float is off by a bit, hence the tolerance.
TEST(bytes_are_what_they_should_be) {
  const Gate gates[] = {kSilu, {Activation::swiglu_oai, true, 7, 1.702}, {Activation::gelu, false, 0, 0}};
  const LayerShape shapes[] = {{3, 200, 72, true}, {2, 64, 33, true}, {3, 37, 100, false}};
  for (int n = 0; n < 3; n++) {
    ByteLayer layer(shapes[n], gates[n]);
    MadeUpBatch batch(shapes[n], 70, 2);
    std::vector<double> want = expected_w8a8(layer, batch, n > 0);
    for (const KernelTable* kernels : kernels_of_bytes()) {
      auto experts = layer.packed(*kernels, engine_of(2), n > 0);
      double error = error_of(run_w8a8(*experts, batch), want);
      CHECK(error < 1e-3);
      if (error >= 1e-3) std::fprintf(stderr, "%s, case %d: %g\n", kernels->name, n, error);
    }
  }
}

// Scales that are powers of two, squares of small integers between the products, one expert a token: every operation
// but the rounding to bytes is exact, so all variants have the reference's bits.
TEST(bytes_have_the_same_bits_everywhere) {
  const LayerShape s{2, 300, 90, false};
  ByteLayer layer(s, {Activation::relu2, false, 0, 0});
  std::mt19937 random(7);
  std::uniform_int_distribution<int> any(-127, 127), place(0, s.hidden - 1);
  std::fill(layer.up.codes.begin(), layer.up.codes.end(), (int8_t)0);
  for (int64_t r = 0; r < s.experts * s.intermediate; r++)
    for (int n = 0; n < 2; n++) layer.up.codes[(size_t)(r * s.hidden + place(random))] = (int8_t)(n ? 1 : -1);
  for (ByteMatrix* m : {&layer.up, &layer.down}) std::fill(m->scales.begin(), m->scales.end(), 0.125f);
  MadeUpBatch batch(s, 67, 1);
  for (float& x : batch.hidden) x = (float)any(random) * 0.5f;
  for (int32_t t = 0; t < batch.tokens; t++) batch.hidden[(size_t)(t * s.hidden + t)] = 63.5f;
  for (float& w : batch.weights) w = 0.5f;
  std::vector<double> want = expected_w8a8(layer, batch, false);
  for (const KernelTable* kernels : kernels_of_bytes()) {
    std::vector<float> got = run_w8a8(*layer.packed(*kernels, engine_of(3), false), batch);
    for (size_t n = 0; n < got.size(); n++) CHECK_EQ((double)got[n], want[n]);
  }
}

// K beyond one chunk of gate/up, and rows beyond one unit.
TEST(bytes_do_not_depend_on_threads_groups_or_neighbours) {
  const LayerShape s{2, 4500, 70, true};
  ByteLayer layer(s, kSilu);
  MadeUpBatch batch(s, 180, 1);
  for (const KernelTable* kernels : kernels_of_bytes()) {
    std::vector<float> one = run_w8a8(*layer.packed(*kernels, engine_of(1), true), batch);
    CHECK(same_bits(one, run_w8a8(*layer.packed(*kernels, engine_of(3), true), batch)));
    CHECK(same_bits(one, run_w8a8(*layer.packed(*kernels, engine_of(4, 2), true), batch)));
    MadeUpBatch fewer = batch;
    fewer.tokens = 99;
    std::vector<float> first = run_w8a8(*layer.packed(*kernels, engine_of(2), true), fewer);
    one.resize(99 * (size_t)s.hidden), first.resize(one.size());
    CHECK(same_bits(one, first));
  }
}

TEST(bytes_begin_where_tokens_are_many) {
  const LayerShape s{2, 96, 64, true};
  ByteLayer layer(s, kSilu);
  MadeUpBatch batch(s, kBytesFrom - 1, 2);
  auto experts = layer.packed(kernels("generic"), engine_of(2), false);
  Call(*experts, batch.batch(s)).run();
  std::vector<float> numbers = batch.out;
  CHECK(same_bits(run_w8a8(*experts, batch), numbers));
}

// Rows of zeros give zero, what is not finite stays in its row.
TEST(bytes_of_rows_without_a_scale) {
  const LayerShape s{1, 80, 64, true};
  ByteLayer layer(s, kSilu);
  for (const KernelTable* kernels : kernels_of_bytes()) {
    MadeUpBatch batch(s, 64, 1);
    std::fill(batch.ids.begin(), batch.ids.end(), 0);
    auto row = [&](int t) { return batch.hidden.begin() + t * s.hidden; };
    std::fill(row(3), row(4), 0.0f);
    *(row(5) + 7) = NAN;
    *(row(6) + 79) = INFINITY;
    std::fill(row(8), row(9), 1e-38f);
    std::vector<float> out = run_w8a8(*layer.packed(*kernels, engine_of(2), false), batch);
    for (int t = 0; t < batch.tokens; t++) {
      float y = out[(size_t)(t * s.hidden)];
      CHECK_EQ(std::isfinite(y), t != 5 && t != 6);
      if (t == 3 || t == 8) CHECK_EQ(y, 0.0f);
    }
  }
}

TEST(bytes_are_refused_by_what_cannot_have_them) {
  const LayerShape s{1, 64, 64, true};
  ByteLayer layer(s, kSilu);
  auto engine = engine_of(1);
  CHECK_EQ(layer.packed(kernels("generic"), engine, false)->why_no_bytes(), "");
  CHECK(contains(layer.packed(kernels("generic", Precision::f32), engine, false)->why_no_bytes(), "f32"));
  CHECK(contains(Experts(s, kSilu, kernels("generic"), engine).why_no_bytes(), "int8"));
  Format int8;
  int8.codec = Codec::int8;
  Experts wide({1, kMostBytes + 1, 16, false}, {Activation::relu2, false, 0, 0}, kernels("generic"), engine,
               {int8, int8, int8});
  CHECK(contains(wide.why_no_bytes(), "32 bits"));
}

TEST(bytes_have_a_rate) {
  std::vector<char> scratch(640 << 10);
  for (const KernelTable* kernels : kernels_of_bytes())
    CHECK(kernels->rate(Rate::bytes, 1e-3, scratch.data(), scratch.size()) > 0);
}
