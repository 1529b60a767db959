// W8A8 on every variant: exact sums of bytes, the numbers that they become, and that nothing depends on threads, groups
// or neighbours. The reference rounds where the kernels round and is exact elsewhere.
#include <cmath>
#include <cstring>

#include "check.h"
#include "moe_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

constexpr Format format_of(Codec codec, int32_t group = 0, DType scale = DType::f32) {
  Format f;
  f.codec = codec;
  f.group = group;
  f.scale = scale;
  return f;
}

// A matrix of all experts as bytes with a scale for each row: in format int8, or what int4 is to become.
struct ByteMatrix {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  int64_t rows, columns;
  Format format = format_of(Codec::int8);
  std::vector<uint8_t> nibbles;    // int4, as released
  std::vector<char> group_scales;  // likewise

  ByteMatrix(int32_t experts, int64_t n, int64_t k) : rows(n), columns(k) {
    codes.resize((size_t)(experts * n * k));
    scales.resize((size_t)(experts * n));
  }
  SourceMatrix source() const {
    SourceMatrix m{};
    if (format.codec == Codec::int8) {
      m.released = {(const uint8_t*)codes.data(), columns, (const char*)scales.data(), 4, 1, nullptr};
      m.codes_stride = rows * columns;
      m.scales_stride = rows * 4;
    } else {
      int64_t width = groups() * format.header();
      m.released = {nibbles.data(), ceil_div(columns, 2), group_scales.data(), width, 1, nullptr};
      m.codes_stride = rows * ceil_div(columns, 2);
      m.scales_stride = rows * width;
    }
    return m;
  }
  int64_t groups() const { return format.group ? ceil_div(columns, format.group) : 1; }

  // Becomes int4, with code(row, k) from -8 to 7 and scale(row, group); bytes and scales follow by the definition.
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

// Scales over a wide range, with zeros of both signs and negative ones among them, and whole rows of zero.
struct WildScales {
  std::mt19937& random;
  float operator()(int64_t row, int64_t) const {
    std::uniform_int_distribution<int> kind(0, 19);
    std::uniform_real_distribution<float> exponent(-18, 3);
    int k = kind(random);
    float s = std::exp2(k < 10 ? exponent(random) / 8 : exponent(random)) / 64;
    return row % 29 == 11 ? 0.0f : k == 0 ? 0.0f : k == 1 ? -0.0f : k < 5 ? -s : s;
  }
};

void make_wild(ByteMatrix& m, int32_t group, DType type, int seed) {
  std::mt19937 random((uint32_t)seed);
  std::uniform_int_distribution<int> any(-8, 7);
  m.become_int4(group, type, [&](int64_t, int64_t) { return any(random); }, WildScales{random});
}

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

// Groups of any size with scales of any type, all of them against the definition; gate may be int8 beside them.
TEST(bytes_of_int4_are_what_they_should_be) {
  const int32_t groups[] = {32, 64, 128, 0};
  const DType types[] = {DType::bf16, DType::f16, DType::f32};
  const LayerShape shapes[] = {{2, 200, 72, true}, {2, 288, 97, true}, {1, 64, 33, true}, {2, 321, 130, false}};
  for (int n = 0; n < 4; n++) {
    ByteLayer layer(shapes[n], {shapes[n].gated ? Activation::silu : Activation::gelu, shapes[n].gated, 0, 0});
    if (n % 2) make_wild(layer.gate, groups[n], types[(n + 2) % 3], 1);
    make_wild(layer.up, groups[n], types[n % 3], 2);
    make_wild(layer.down, groups[(n + 1) % 4], types[(n + 1) % 3], 3);
    MadeUpBatch batch(shapes[n], 70, 2);
    std::vector<double> want = expected_w8a8(layer, batch, n > 1);
    for (const KernelTable* kernels : kernels_of_bytes()) {
      double error = error_of(run_w8a8(*layer.packed(*kernels, engine_of(2), n > 1), batch), want);
      CHECK(error < 1e-3);
      if (error >= 1e-3) std::fprintf(stderr, "%s, case %d: %g\n", kernels->name, n, error);
    }
  }
}

// As for int8 above: up has one scale, so that its sums are small integers, and down any.
TEST(bytes_of_int4_have_the_same_bits_everywhere) {
  const LayerShape s{2, 300, 330, false};
  MadeUpBatch batch(s, 67, 1);
  std::mt19937 random(9);
  std::uniform_int_distribution<int> any(-127, 127), place(0, 99);
  for (float& x : batch.hidden) x = (float)any(random) * 0.5f;
  for (int32_t t = 0; t < batch.tokens; t++) batch.hidden[(size_t)(t * s.hidden + t)] = 63.5f;
  for (float& w : batch.weights) w = 0.5f;
  for (int32_t group : {32, 64, 128, 0})
    for (DType type : {DType::bf16, DType::f16, DType::f32}) {
      ByteLayer layer(s, {Activation::relu2, false, 0, 0});
      layer.up.become_int4(
          group, type, [&](int64_t, int64_t) { return place(random) ? 0 : 1; },
          [](int64_t, int64_t g) { return g == 1 ? 0.0f : 0.125f; });
      make_wild(layer.down, group, type, group + (int)type);
      std::vector<double> want = expected_w8a8(layer, batch, false);
      for (const KernelTable* kernels : kernels_of_bytes()) {
        std::vector<float> got = run_w8a8(*layer.packed(*kernels, engine_of(3), false), batch);
        int off = 0;
        for (size_t n = 0; n < got.size(); n++) off += (double)got[n] != want[n];
        CHECK_EQ(off, 0);
        if (off) std::fprintf(stderr, "%s, groups of %d, type %d\n", kernels->name, group, (int)type);
      }
    }
}

// A scale that is not finite stays in its channel.
TEST(bytes_of_int4_without_a_scale) {
  const LayerShape s{1, 96, 64, false};
  ByteLayer layer(s, {Activation::relu2, false, 0, 0});
  make_wild(layer.up, 32, DType::bf16, 4);
  for (DType type : {DType::bf16, DType::f16, DType::f32}) {
    layer.down.become_int4(
        32, type, [](int64_t, int64_t k) { return (int)(k % 16) - 8; }, [](int64_t, int64_t) { return 0.25f; });
    set_element(layer.down.group_scales.data(), 2 * 5 + 1, type, NAN);
    set_element(layer.down.group_scales.data(), 2 * 40, type, INFINITY);
    if (type != DType::f16) set_element(layer.down.group_scales.data(), 2 * 50, type, 1e-38f);
    if (type != DType::f16) set_element(layer.down.group_scales.data(), 2 * 50 + 1, type, 1e-38f);
    MadeUpBatch batch(s, 64, 1);
    std::fill(batch.ids.begin(), batch.ids.end(), 0);
    for (const KernelTable* kernels : kernels_of_bytes()) {
      std::vector<float> out = run_w8a8(*layer.packed(*kernels, engine_of(2), false), batch);
      for (size_t n = 0; n < out.size(); n++) {
        size_t channel = n % (size_t)s.hidden;
        CHECK_EQ(std::isfinite(out[n]), channel != 5 && channel != 40);
        if (channel == 50 && type != DType::f16) CHECK_EQ(out[n], 0.0f);
      }
    }
  }
}

// K beyond one chunk of gate/up, and rows beyond one unit.
TEST(bytes_do_not_depend_on_threads_groups_or_neighbours) {
  const LayerShape s{2, 4500, 70, true};
  ByteLayer layer(s, kSilu);
  make_wild(layer.up, 64, DType::f16, 6);
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
  CHECK(contains(Experts(s, kSilu, kernels("generic"), engine).why_no_bytes(), "int8 or int4"));
  const Format int8 = format_of(Codec::int8), int4 = format_of(Codec::int4, 32, DType::bf16);
  CHECK_EQ(Experts(s, kSilu, kernels("generic"), engine, {int8, int4, int4}).why_no_bytes(), "");
  const Format q4 = format_of(Codec::q4_0);
  CHECK(contains(Experts(s, kSilu, kernels("generic"), engine, {int8, int4, q4}).why_no_bytes(), "int8 or int4"));
  Experts wide({1, kMostBytes + 1, 16, false}, {Activation::relu2, false, 0, 0}, kernels("generic"), engine,
               {int8, int8, int8});
  CHECK(contains(wide.why_no_bytes(), "32 bits"));
}

TEST(bytes_have_a_rate) {
  std::vector<char> scratch(640 << 10);
  for (const KernelTable* kernels : kernels_of_bytes())
    CHECK(kernels->rate(Rate::bytes, 1e-3, scratch.data(), scratch.size()) > 0);
}
