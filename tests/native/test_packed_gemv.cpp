// Packed GEMV with f32 activations in inference, against the unrounded dequantised weights in double. With needs_grad,
// and for more rows, weights are rounded to bf16.
#include "check.h"
#include "random_encoded.h"

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
constexpr Format kInt8 = format_of(Codec::int8);
constexpr Format kInt4 = format_of(Codec::int4, 32, DType::bf16);

// A layer in a released format, with biases; down may be bf16.
struct CodedLayer {
  LayerShape shape;
  LayerFormats formats;
  Gate gating;
  std::mt19937 random{4};
  RandomEncoded gate, up, down;
  RandomLayer numbers;  // dequantised

  CodedLayer(const LayerShape& s, const LayerFormats& f)
      : shape(s),
        formats(f),
        gating{s.gated ? Activation::silu : Activation::relu2, s.gated, 0, 0},
        gate(f.gate, s.experts, s.intermediate, s.hidden, random),
        up(f.up, s.experts, s.intermediate, s.hidden, random),
        down(f.down.is_tiles() ? kInt8 : f.down, s.experts, s.hidden, s.intermediate, random),
        numbers(s, true, Precision::f32) {
    auto exact = packed(kernels("generic", Precision::f32), engine_of(1));
    auto decode = [&](Weights::Matrix matrix, Numbers& to) {
      std::vector<float> values((size_t)s.hidden * (size_t)s.intermediate);
      for (int32_t e = 0; e < s.experts; e++) {
        exact->weights().decode(matrix, e, (char*)values.data());
        std::copy(values.begin(), values.end(), to.values.begin() + e * (int64_t)values.size());
      }
    };
    if (s.gated) decode(Weights::Matrix::gate, numbers.gate);
    decode(Weights::Matrix::up, numbers.up);
    decode(Weights::Matrix::down, numbers.down);
  }

  std::unique_ptr<Experts> packed(const KernelTable& kernels, std::shared_ptr<Engine> engine) const {
    auto experts = std::make_unique<Experts>(shape, gating, kernels, std::move(engine), formats);
    SourceLayer layer = numbers.source(0, shape.experts);
    layer.gate = shape.gated ? gate.source : SourceMatrix{};
    layer.up = up.source;
    if (!formats.down.is_tiles()) layer.down = down.source;
    experts->weights().pack(layer);
    return experts;
  }
};

// An adapter with random factors for a layer.
struct RandomAdapter {
  std::mt19937 random{6};
  std::vector<std::vector<float>> held;
  Adapter adapter;

  RandomAdapter(const LayerShape& s, const Experts& experts)
      : adapter(s, {8, 20, 33, false}, experts.kernels(), experts.engine().pool, experts.engine().arena) {
    auto factor = [&](int64_t rows, int64_t columns) {
      float scale = 1 / std::sqrt((float)columns);
      held.push_back(random_f32((size_t)(s.experts * rows * columns), scale, random));
      return SourceMatrix{{held.back().data(), DType::f32, columns, 1}, rows * columns};
    };
    SourceLora lora{{factor(8, s.hidden), factor(s.intermediate, 8), 1.0},
                    {factor(20, s.hidden), factor(s.intermediate, 20), 1.0},
                    {factor(33, s.intermediate), factor(s.hidden, 33), 1.0}};
    adapter.pack(lora);
  }
};

// Rows that all go to one expert.
RandomBatch rows_of_one(const LayerShape& s, int32_t rows) {
  RandomBatch batch(s, rows, 1);
  std::fill(batch.ids.begin(), batch.ids.end(), s.experts - 1);
  return batch;
}

std::vector<float> run(const Experts& experts, RandomBatch& batch, bool needs_grad = false,
                       const Adapters& adapters = {}, bool w8a8 = false) {
  Batch b = batch.batch(experts.shape());
  b.needs_grad = needs_grad, b.w8a8 = w8a8;
  if (!adapters.empty()) b.every_adapter = 0;
  std::fill(batch.out.begin(), batch.out.end(), NAN);
  Call(experts, b, adapters).run();
  return batch.out;
}

int32_t packed_gemv_rows_of(const Experts& experts, const BlockStore& store, bool w8a8 = false) {
  auto* max_rows = experts.kernels().packed_gemv_rows;
  return max_rows && store.encoding() ? max_rows(*store.encoding(), w8a8) : 0;
}

// The most rows of an expert that packed GEMV takes.
int32_t packed_gemv_rows_of(const Experts& experts) {
  const Weights& weights = experts.weights();
  return std::min(packed_gemv_rows_of(experts, weights.up()), packed_gemv_rows_of(experts, weights.down()));
}

std::vector<const KernelTable*> packed_gemv_kernels() {
  std::vector<const KernelTable*> list;
  for (const KernelTable* kernels : all_kernels())
    if (kernels->packed_gemv_rows) list.push_back(kernels);
  return list;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// An activated value may round the other way where its sum is off by a bit. Rounded weights are off by 2^-9, and their
// square by twice that.
constexpr double kExact = 3e-4, kRoundedBetween = 1e-3, kRounded = 1e-2;

// `int16`: only with int16 activations.
void check_packed_gemv(const CodedLayer& layer, bool int16 = false) {
  for (const KernelTable* kernels : packed_gemv_kernels()) {
    if (int16 && kernels->panel == DType::bf16) continue;
    auto experts = layer.packed(*kernels, engine_of(2));
    const int32_t up = packed_gemv_rows_of(*experts, experts->weights().up()),
                  down = packed_gemv_rows_of(*experts, experts->weights().down());
    CHECK(up > 0 && down > 0);
    for (int32_t rows = 1; rows <= kPackedGemvRows + 1; rows++) {
      RandomBatch batch = rows_of_one(layer.shape, rows);
      std::vector<double> want = expected(layer.numbers, layer.gating, batch, kernels->panel == DType::bf16);
      double error = error_of(run(*experts, batch), want), limit = rows > up || rows > down        ? kRounded
                                                                   : kernels->panel == DType::bf16 ? kRoundedBetween
                                                                                                   : kExact;
      CHECK(error < limit);
      if (error >= limit)
        std::fprintf(stderr, "%s, %d rows of %s, %s, %s: %g\n", kernels->name, rows, layer.formats.gate.row().name,
                     layer.formats.up.row().name, layer.formats.down.row().name, error);
      CHECK(error_of(run(*experts, batch, true), want) < kRounded);
    }
  }
}

}  // namespace

// Every kind of codes, groups of all sizes and scale types, mixed in the halves of a block; odd rows and columns.
TEST(packed_gemv_unrounded_weights) {
  const auto int4 = [](int32_t group, DType scale) { return format_of(Codec::int4, group, scale); };
  const Format mxfp4 = format_of(Codec::mxfp4), q8_0 = format_of(Codec::q8_0), q4_0 = format_of(Codec::q4_0);
  check_packed_gemv({{2, 160, 98, true}, {kInt4, kInt8, int4(64, DType::f16)}});
  check_packed_gemv({{2, 202, 74, true}, {int4(128, DType::f32), int4(0, DType::f32), kInt8}});
  check_packed_gemv({{1, 322, 40, false}, {kInt4, int4(96, DType::bf16), int4(0, DType::bf16)}});
  check_packed_gemv({{1, 130, 34, false}, {kInt8, kInt8, int4(128, DType::f16)}});
  check_packed_gemv({{2, 96, 64, true}, {mxfp4, mxfp4, mxfp4}});
  check_packed_gemv({{2, 160, 96, true}, {q4_0, format_of(Codec::iq4_nl), q8_0}});
  check_packed_gemv({{2, 64, 160, true}, {q8_0, kInt4, q4_0}});
}

// Codes of any number of bits, with scales for 16 and for 32 of K, and with minima.
TEST(packed_gemv_int16_of_every_format) {
  const auto of = [](Codec codec) { return format_of(codec); };
  check_packed_gemv({{1, 512, 512, true}, {of(Codec::q4_k), of(Codec::q5_k), of(Codec::q6_k)}}, true);
  check_packed_gemv({{1, 512, 256, true}, {of(Codec::q2_k), of(Codec::q3_k), of(Codec::q4_k)}}, true);
  check_packed_gemv({{1, 256, 768, true}, {of(Codec::iq4_xs), of(Codec::tq2_0), of(Codec::q3_k)}}, true);
  check_packed_gemv({{1, 96, 160, true}, {of(Codec::q4_1), of(Codec::q5_0), of(Codec::q5_1)}}, true);
  check_packed_gemv({{1, 160, 96, true}, {of(Codec::nvfp4), of(Codec::nvfp4), of(Codec::mxfp4)}}, true);
  check_packed_gemv({{1, 256, 256, false}, {kInt4, of(Codec::q2_k), of(Codec::tq2_0)}}, true);
  check_packed_gemv({{1, 256, 256, true}, {of(Codec::mxfp8), kInt4, of(Codec::mxfp8)}}, true);
  check_packed_gemv({{1, 256, 256, true}, {of(Codec::iq1_s), of(Codec::iq2_xxs), of(Codec::iq3_s)}}, true);
  check_packed_gemv({{1, 256, 512, true}, {of(Codec::iq1_m), of(Codec::iq2_s), of(Codec::tq1_0)}}, true);
  check_packed_gemv({{1, 256, 256, true}, {of(Codec::iq2_xs), of(Codec::iq3_xxs), of(Codec::iq1_s)}}, true);
}

// K so long that it is taken in chunks, none of which begins at a group.
TEST(packed_gemv_of_a_long_k) {
  const Format wide = format_of(Codec::int4, 4096, DType::bf16);
  check_packed_gemv({{1, 36000, 16, true}, {wide, kInt8, wide}});
  check_packed_gemv({{1, 32, 9000, false}, {wide, wide, format_of(Codec::int4, 928, DType::bf16)}});
}

// Threads keep the row of a token from unit to unit: experts that take two tokens in turn, with the same formats in
// both halves of a block (rows are written once) and with different ones, give what each token gives alone.
TEST(packed_gemv_rows_are_not_taken_for_those_of_another_token) {
  constexpr int32_t experts_of_token = 3, tokens = 2;
  for (const Format& up : {kInt4, kInt8}) {
    const CodedLayer layer({experts_of_token * tokens, 224, 96, true}, {kInt4, up, kInt8});
    for (const KernelTable* kernels : packed_gemv_kernels()) {
      RandomBatch both(layer.shape, tokens, experts_of_token);
      for (int32_t i = 0; i < experts_of_token * tokens; i++)
        both.ids[(size_t)i] = i % experts_of_token * tokens + i / experts_of_token;
      const std::vector<float> together = run(*layer.packed(*kernels, engine_of(1)), both);
      CHECK(same(run(*layer.packed(*kernels, engine_of(3)), both), together));
      auto experts = layer.packed(*kernels, engine_of(1));
      for (int32_t token = 0; token < tokens; token++) {
        RandomBatch one = both;
        for (int32_t i = 0; i < experts_of_token; i++)
          one.ids[(size_t)((1 - token) * experts_of_token + i)] = -1;  // the other token is nowhere
        const std::vector<float> alone = run(*experts, one);
        const size_t row = (size_t)layer.shape.hidden, at = (size_t)token * row;
        CHECK(std::memcmp(alone.data() + at, together.data() + at, row * sizeof(float)) == 0);
      }
    }
  }
}

// With needs_grad weights are rounded, and a row's bits do not depend on the batch; without, they do not as long as its
// expert has few enough rows for packed GEMV.
TEST(packed_gemv_bits_do_not_depend_on_neighbours) {
  const Format fp8 = format_of(Codec::fp8);
  for (const LayerFormats& formats : {LayerFormats{kInt4, kInt8, kInt8}, LayerFormats{fp8, fp8, fp8}}) {
    const CodedLayer layer({2, 224, 96, true}, formats);
    for (const KernelTable* kernels : packed_gemv_kernels()) {
      auto experts = layer.packed(*kernels, engine_of(2));
      RandomBatch all = rows_of_one(layer.shape, std::min(packed_gemv_rows_of(*experts), 41)), alone = all;
      alone.tokens = 1;
      for (bool needs_grad : {false, true}) {
        std::vector<float> rows = run(*experts, all, needs_grad), one = run(*experts, alone, needs_grad);
        CHECK(std::memcmp(one.data(), rows.data(), (size_t)layer.shape.hidden * sizeof(float)) == 0);
      }
      CHECK(!same(run(*experts, alone), run(*experts, alone, true)));
      std::vector<char> kept((size_t)experts->keep_row_bytes());
      std::vector<float> with_grad = run(*experts, alone, true);
      Call(*experts, alone.batch(layer.shape), {}, kept.data()).run();
      CHECK(same(alone.out, with_grad));
    }
  }
}

// Rows alone take all of K at once, those of many in chunks where they do not fit the caches otherwise. The last bits
// of activated rows are seen where down multiplies them as they are, and where W8A8 takes its scales from them.
TEST(packed_gemv_bits_do_not_depend_on_chunks_of_k) {
  const Format q4_k = format_of(Codec::q4_k), q8_0 = format_of(Codec::q8_0);
  const int32_t hidden = 7168;
  for (const Format& up : {kInt4, q4_k})
    for (bool w8a8 : {false, true}) {
      const CodedLayer layer({1, hidden, 64, false}, {up, up, w8a8 ? q8_0 : Format{}});
      for (const KernelTable* kernels : packed_gemv_kernels()) {
        auto experts = layer.packed(*kernels, engine_of(2));
        const RandomAdapter lora(layer.shape, *experts);
        const int32_t rows = std::min(packed_gemv_rows_of(*experts, experts->weights().up(), w8a8), 30);
        RandomBatch all = rows_of_one(layer.shape, rows);
        for (const Adapters& adapters : {Adapters{}, Adapters{&lora.adapter}}) {
          const std::vector<float> together = run(*experts, all, false, adapters, w8a8);
          int32_t different = 0;
          for (int32_t row : {0, rows / 2, rows - 1}) {
            RandomBatch one = all;
            one.tokens = 1;
            std::copy_n(all.hidden.begin() + row * hidden, hidden, one.hidden.begin());
            one.weights[0] = all.weights[(size_t)row];
            const std::vector<float> alone = run(*experts, one, false, adapters, w8a8);
            different += std::memcmp(alone.data(), together.data() + row * hidden, hidden * sizeof(float)) != 0;
          }
          CHECK_EQ(different, 0);
          if (different)
            std::fprintf(stderr, "%s, %d rows of %s%s%s\n", kernels->name, rows, up.row().name, w8a8 ? ", W8A8" : "",
                         adapters.empty() ? "" : ", LoRA");
        }
      }
    }
}

// Non-finite values stay in their row, or in their channel.
TEST(packed_gemv_non_finite_values) {
  CodedLayer layer({1, 96, 64, false}, {kInt4, kInt4, kInt4});
  set_element(layer.down.scales.data(), 2 * 5 + 1, DType::bf16, NAN);
  set_element(layer.down.scales.data(), 2 * 40, DType::bf16, INFINITY);
  for (const KernelTable* kernels : packed_gemv_kernels()) {
    RandomBatch batch = rows_of_one(layer.shape, 4);
    batch.hidden[2 * 96 + 7] = NAN;
    batch.hidden[3 * 96 + 79] = INFINITY;
    std::vector<float> out = run(*layer.packed(*kernels, engine_of(2)), batch);
    for (size_t n = 0; n < out.size(); n++) CHECK_EQ(std::isfinite(out[n]), n < 2 * 96 && n % 96 != 5 && n % 96 != 40);
  }
}

TEST(packed_gemv_bits_do_not_depend_on_threads_or_groups) {
  const CodedLayer layer({4, 1000, 70, true}, {kInt8, kInt4, kInt4});
  for (const KernelTable* kernels : packed_gemv_kernels()) {
    RandomBatch batch(layer.shape, 5, 2);
    std::vector<float> one = run(*layer.packed(*kernels, engine_of(1)), batch);
    CHECK(same(one, run(*layer.packed(*kernels, engine_of(3)), batch)));
    CHECK(same(one, run(*layer.packed(*kernels, engine_of(4, 2)), batch)));
  }
}

// LoRA is added to the sums, whatever the number of chunks.
TEST(packed_gemv_with_lora) {
  for (const LayerShape& s : {LayerShape{2, 288, 160, true}, LayerShape{1, 36000, 16, true}}) {
    const CodedLayer layer(s, {kInt4, kInt4, kInt8});
    for (const KernelTable* kernels : packed_gemv_kernels()) {
      auto experts = layer.packed(*kernels, engine_of(2));
      const RandomAdapter lora(s, *experts);
      const Adapter& adapter = lora.adapter;
      RandomBatch batch = rows_of_one(s, 3);
      auto wide = [](const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); };
      std::vector<double> tiles = wide(run(*experts, batch, true, {&adapter}));
      std::vector<float> without = run(*experts, batch), with = run(*experts, batch, false, {&adapter});
      CHECK(error_of(with, tiles) < kRounded);
      CHECK(error_of(without, tiles) > 2e-2);
      CHECK(!same(with, run(*experts, batch, true, {&adapter})));
    }
  }
}
