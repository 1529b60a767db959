// W8A8 on every variant: exact int32 sums, their scaling, and bits that do not depend on threads, groups or neighbours.
#include "w8a8_layer.h"

using namespace kt;
using namespace kt::check;

// An int8 value of an activated row may round the other way where its float is off by a bit, hence the tolerance.
TEST(w8a8_matches_reference) {
  const Gate gates[] = {kSilu, {Activation::swiglu_oai, true, 7, 1.702}, {Activation::gelu, false, 0, 0}};
  const LayerShape shapes[] = {{3, 200, 72, true}, {2, 64, 33, true}, {3, 37, 100, false}};
  for (int n = 0; n < 3; n++) {
    Int8Layer layer(shapes[n], gates[n]);
    RandomBatch batch(shapes[n], 70, 2);
    std::vector<double> want = expected_w8a8(layer, batch, n > 0);
    for (const KernelTable* kernels : int8_kernels()) {
      auto experts = layer.packed(*kernels, engine_of(2), n > 0);
      double error = error_of(run_w8a8(*experts, batch), want);
      CHECK(error < 1e-3);
      if (error >= 1e-3) std::fprintf(stderr, "%s, case %d: %g\n", kernels->name, n, error);
    }
  }
}

// Scales that are powers of two, squares of small integers between the products, one expert a token: every operation
// but the quantisation is exact, so all variants have the reference's bits.
TEST(w8a8_same_bits_in_every_variant) {
  const LayerShape s{2, 300, 90, false};
  Int8Layer layer(s, {Activation::relu2, false, 0, 0});
  std::mt19937 random(7);
  std::uniform_int_distribution<int> any(-127, 127), place(0, s.hidden - 1);
  std::fill(layer.up.codes.begin(), layer.up.codes.end(), (int8_t)0);
  for (int64_t r = 0; r < s.experts * s.intermediate; r++)
    for (int n = 0; n < 2; n++) layer.up.codes[(size_t)(r * s.hidden + place(random))] = (int8_t)(n ? 1 : -1);
  for (Int8Matrix* m : {&layer.up, &layer.down}) std::fill(m->scales.begin(), m->scales.end(), 0.125f);
  RandomBatch batch(s, 67, 1);
  for (float& x : batch.hidden) x = (float)any(random) * 0.5f;
  for (int32_t t = 0; t < batch.tokens; t++) batch.hidden[(size_t)(t * s.hidden + t)] = 63.5f;
  for (float& w : batch.weights) w = 0.5f;
  std::vector<double> want = expected_w8a8(layer, batch, false);
  for (const KernelTable* kernels : int8_kernels()) {
    std::vector<float> got = run_w8a8(*layer.packed(*kernels, engine_of(3), false), batch);
    for (size_t n = 0; n < got.size(); n++) CHECK_EQ((double)got[n], want[n]);
  }
}

// Groups of any size with scales of any type, all against the definition; gate may be int8 beside int4.
TEST(w8a8_int4_matches_reference) {
  const int32_t groups[] = {32, 64, 128, 0};
  const DType types[] = {DType::bf16, DType::f16, DType::f32};
  const LayerShape shapes[] = {{2, 200, 72, true}, {2, 288, 97, true}, {1, 64, 33, true}, {2, 321, 130, false}};
  for (int n = 0; n < 4; n++) {
    Int8Layer layer(shapes[n], {shapes[n].gated ? Activation::silu : Activation::gelu, shapes[n].gated, 0, 0});
    if (n % 2) make_random_int4(layer.gate, groups[n], types[(n + 2) % 3], 1);
    make_random_int4(layer.up, groups[n], types[n % 3], 2);
    make_random_int4(layer.down, groups[(n + 1) % 4], types[(n + 1) % 3], 3);
    RandomBatch batch(shapes[n], 70, 2);
    std::vector<double> want = expected_w8a8(layer, batch, n > 1);
    for (const KernelTable* kernels : int8_kernels()) {
      double error = error_of(run_w8a8(*layer.packed(*kernels, engine_of(2), n > 1), batch), want);
      CHECK(error < 1e-3);
      if (error >= 1e-3) std::fprintf(stderr, "%s, case %d: %g\n", kernels->name, n, error);
    }
  }
}

// As for int8 above: up has one scale, so that its sums are small integers, and down any.
TEST(w8a8_int4_same_bits_in_every_variant) {
  const LayerShape s{2, 300, 330, false};
  RandomBatch batch(s, 67, 1);
  std::mt19937 random(9);
  std::uniform_int_distribution<int> any(-127, 127), place(0, 99);
  for (float& x : batch.hidden) x = (float)any(random) * 0.5f;
  for (int32_t t = 0; t < batch.tokens; t++) batch.hidden[(size_t)(t * s.hidden + t)] = 63.5f;
  for (float& w : batch.weights) w = 0.5f;
  for (int32_t group : {32, 64, 128, 0})
    for (DType type : {DType::bf16, DType::f16, DType::f32}) {
      Int8Layer layer(s, {Activation::relu2, false, 0, 0});
      layer.up.become_int4(
          group, type, [&](int64_t, int64_t) { return place(random) ? 0 : 1; },
          [](int64_t, int64_t g) { return g == 1 ? 0.0f : 0.125f; });
      make_random_int4(layer.down, group, type, group + (int)type);
      std::vector<double> want = expected_w8a8(layer, batch, false);
      for (const KernelTable* kernels : int8_kernels()) {
        std::vector<float> got = run_w8a8(*layer.packed(*kernels, engine_of(3), false), batch);
        int off = 0;
        for (size_t n = 0; n < got.size(); n++) off += (double)got[n] != want[n];
        CHECK_EQ(off, 0);
        if (off) std::fprintf(stderr, "%s, groups of %d, type %d\n", kernels->name, group, (int)type);
      }
    }
}

// A scale that is not finite stays in its channel.
TEST(w8a8_int4_non_finite_scales) {
  const LayerShape s{1, 96, 64, false};
  Int8Layer layer(s, {Activation::relu2, false, 0, 0});
  make_random_int4(layer.up, 32, DType::bf16, 4);
  for (DType type : {DType::bf16, DType::f16, DType::f32}) {
    layer.down.become_int4(
        32, type, [](int64_t, int64_t k) { return (int)(k % 16) - 8; }, [](int64_t, int64_t) { return 0.25f; });
    set_element(layer.down.group_scales.data(), 2 * 5 + 1, type, NAN);
    set_element(layer.down.group_scales.data(), 2 * 40, type, INFINITY);
    if (type != DType::f16) set_element(layer.down.group_scales.data(), 2 * 50, type, 1e-38f);
    if (type != DType::f16) set_element(layer.down.group_scales.data(), 2 * 50 + 1, type, 1e-38f);
    RandomBatch batch(s, 64, 1);
    std::fill(batch.ids.begin(), batch.ids.end(), 0);
    for (const KernelTable* kernels : int8_kernels()) {
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
TEST(w8a8_bits_do_not_depend_on_threads_groups_or_neighbours) {
  const LayerShape s{2, 4500, 70, true};
  Int8Layer layer(s, kSilu);
  make_random_int4(layer.up, 64, DType::f16, 6);
  RandomBatch batch(s, 180, 1);
  for (const KernelTable* kernels : int8_kernels()) {
    std::vector<float> one = run_w8a8(*layer.packed(*kernels, engine_of(1), true), batch);
    CHECK(same_bits(one, run_w8a8(*layer.packed(*kernels, engine_of(3), true), batch)));
    CHECK(same_bits(one, run_w8a8(*layer.packed(*kernels, engine_of(4, 2), true), batch)));
    RandomBatch fewer = batch;
    fewer.tokens = 99;
    std::vector<float> first = run_w8a8(*layer.packed(*kernels, engine_of(2), true), fewer);
    one.resize(99 * (size_t)s.hidden), first.resize(one.size());
    CHECK(same_bits(one, first));
  }
}

// Rows of zeros give zero; non-finite values stay in their row.
TEST(w8a8_non_finite_rows) {
  const LayerShape s{1, 80, 64, true};
  Int8Layer layer(s, kSilu);
  for (const KernelTable* kernels : int8_kernels()) {
    RandomBatch batch(s, 64, 1);
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

TEST(w8a8_unsupported_experts) {
  const LayerShape s{1, 64, 64, true};
  Int8Layer layer(s, kSilu);
  auto engine = engine_of(1);
  CHECK_EQ(layer.packed(kernels("generic"), engine, false)->w8a8_unsupported(), "");
  CHECK(contains(layer.packed(kernels("generic", Precision::f32), engine, false)->w8a8_unsupported(), "f32"));
  CHECK(contains(Experts(s, kSilu, kernels("generic"), engine).w8a8_unsupported(), "integers"));
  const Format int8 = format_of(Codec::int8), int4 = format_of(Codec::int4, 32, DType::bf16);
  CHECK_EQ(Experts(s, kSilu, kernels("generic"), engine, {int8, int4, int4}).w8a8_unsupported(), "");
  const Format q4 = format_of(Codec::q4_0), fp8 = format_of(Codec::mxfp8);
  CHECK_EQ(Experts(s, kSilu, kernels("generic"), engine, {int8, int4, q4}).w8a8_unsupported(), "");
  CHECK(contains(Experts(s, kSilu, kernels("generic"), engine, {int8, int4, fp8}).w8a8_unsupported(), "integers"));
  Experts wide({1, kMaxInt8K + 1, 16, false}, {Activation::relu2, false, 0, 0}, kernels("generic"), engine,
               {int8, int8, int8});
  CHECK(contains(wide.w8a8_unsupported(), "32 bits"));
}

TEST(w8a8_rate) {
  std::vector<char> scratch(640 << 10);
  for (const KernelTable* kernels : int8_kernels())
    CHECK(kernels->rate(Rate::bytes, 1e-3, scratch.data(), scratch.size()) > 0);
}
