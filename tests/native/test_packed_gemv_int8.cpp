// Packed GEMV in W8A8. Groups of int4 keep their scales; int8 has the bits of the tile path.
#include "w8a8_layer.h"

using namespace kt;
using namespace kt::check;

// Formats of every kind, mixed by matrix; experts have from one row to more than packed GEMV takes.
TEST(packed_gemv_int8_matches_reference) {
  const int32_t groups[] = {32, 64, 96, 128, 0};
  const DType types[] = {DType::bf16, DType::f16, DType::f32};
  const LayerShape shapes[] = {
      {3, 200, 72, true}, {4, 288, 97, true}, {2, 64, 33, true}, {2, 321, 130, false}, {3, 448, 31, true}};
  for (int n = 0; n < 5; n++) {
    Int8Layer layer(shapes[n], {shapes[n].gated ? Activation::silu : Activation::gelu, shapes[n].gated, 0, 0});
    if (n % 2) make_random_int4(layer.gate, groups[n], types[(n + 2) % 3], 1);
    if (n != 2) make_random_int4(layer.up, groups[n], types[n % 3], 2);
    make_random_int4(layer.down, groups[(n + 1) % 5], types[(n + 1) % 3], 3);
    for (int32_t tokens : {1, 2, 3, 4, 7}) {
      RandomBatch batch(shapes[n], tokens, 2);
      std::vector<double> want = expected_w8a8(layer, batch, n > 1);
      for (const KernelTable* kernels : int8_kernels()) {
        double error = error_of(run_w8a8(*layer.packed(*kernels, engine_of(2), n > 1), batch), want);
        CHECK(error < 1e-3);
        if (error >= 1e-3) std::fprintf(stderr, "%s, case %d, %d tokens: %g\n", kernels->name, n, tokens, error);
      }
    }
  }
}

// Extreme codes and activations, in the longest sums: no product saturates.
TEST(packed_gemv_int8_extreme_values) {
  const LayerShape s{1, 4096, 32, false};
  for (bool int4 : {false, true}) {
    Int8Layer layer(s, {Activation::relu2, false, 0, 0});
    for (size_t n = 0; n < layer.up.codes.size(); n++) layer.up.codes[n] = (int8_t)(n / 4096 % 2 ? -128 : 127);
    if (int4)
      layer.up.become_int4(
          0, DType::f32, [](int64_t r, int64_t) { return r % 2 ? -8 : 7; }, [](int64_t, int64_t) { return 1.0f; });
    RandomBatch batch(s, 4, 1);
    std::fill(batch.ids.begin(), batch.ids.end(), 0);
    for (size_t n = 0; n < batch.hidden.size(); n++) batch.hidden[n] = n / 4096 % 2 ? -1.0f : 1.0f;
    std::vector<double> want = expected_w8a8(layer, batch, false);
    for (const KernelTable* kernels : int8_kernels())
      CHECK(error_of(run_w8a8(*layer.packed(*kernels, engine_of(2), false), batch), want) < 1e-5);
  }
}

// int8 rows in large batches and small ones: K beyond one chunk, and an odd number of k tiles.
TEST(packed_gemv_int8_has_the_bits_of_tiles) {
  for (const LayerShape& s : {LayerShape{2, 4500, 70, true}, LayerShape{3, 90, 200, false}}) {
    Int8Layer layer(s, {s.gated ? Activation::silu : Activation::gelu_tanh, s.gated, 0, 0});
    RandomBatch batch(s, 40, 1);
    for (const KernelTable* kernels : int8_kernels()) {
      auto experts = layer.packed(*kernels, engine_of(2), true);
      std::vector<float> many = run_w8a8(*experts, batch);
      for (int32_t few = 1; few <= 6; few++) {
        RandomBatch fewer = batch;
        fewer.tokens = few;
        std::vector<float> some = run_w8a8(*experts, fewer);
        some.resize((size_t)(few * s.hidden));
        CHECK(same_bits(some, std::vector<float>(many.begin(), many.begin() + few * s.hidden)));
      }
    }
  }
}

TEST(packed_gemv_int8_bits_do_not_depend_on_threads_or_groups) {
  const LayerShape s{4, 1000, 70, true};
  Int8Layer layer(s, kSilu);
  make_random_int4(layer.up, 64, DType::f16, 6);
  make_random_int4(layer.down, 32, DType::bf16, 7);
  RandomBatch batch(s, 5, 2);
  for (const KernelTable* kernels : int8_kernels()) {
    std::vector<float> one = run_w8a8(*layer.packed(*kernels, engine_of(1), true), batch);
    CHECK(same_bits(one, run_w8a8(*layer.packed(*kernels, engine_of(3), true), batch)));
    CHECK(same_bits(one, run_w8a8(*layer.packed(*kernels, engine_of(4, 2), true), batch)));
  }
}

// Non-finite values stay in their row, or in their channel.
TEST(packed_gemv_int8_non_finite_values) {
  const LayerShape s{1, 96, 64, false};
  Int8Layer layer(s, {Activation::relu2, false, 0, 0});
  make_random_int4(layer.up, 32, DType::bf16, 4);
  layer.down.become_int4(
      32, DType::bf16, [](int64_t, int64_t k) { return (int)(k % 16) - 8; }, [](int64_t, int64_t) { return 0.25f; });
  set_element(layer.down.group_scales.data(), 2 * 5 + 1, DType::bf16, NAN);
  set_element(layer.down.group_scales.data(), 2 * 40, DType::bf16, INFINITY);
  for (const KernelTable* kernels : int8_kernels()) {
    RandomBatch batch(s, 4, 1);
    std::fill(batch.ids.begin(), batch.ids.end(), 0);
    auto row = [&](int t) { return batch.hidden.begin() + t * s.hidden; };
    std::fill(row(0), row(1), 0.0f);
    *(row(2) + 7) = NAN;
    *(row(3) + 79) = INFINITY;
    std::vector<float> out = run_w8a8(*layer.packed(*kernels, engine_of(2), false), batch);
    for (size_t n = 0; n < out.size(); n++) {
      size_t channel = n % (size_t)s.hidden, token = n / (size_t)s.hidden;
      CHECK_EQ(std::isfinite(out[n]), token < 2 && channel != 5 && channel != 40);
      if (token == 0 && channel != 5 && channel != 40) CHECK_EQ(out[n], 0.0f);
    }
  }
}
