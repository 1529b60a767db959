// The expert layer natively, for the sanitizers: every variant, odd sizes, several groups, many callers at once.
#include <thread>

#include "check.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

template <class Real>
void check_layer_in(const LayerShape& shape, const Gate& gate, bool biases, int32_t tokens, int32_t top_k, int threads,
                    int groups, const KernelTable& kernels) {
  RandomLayer layer(shape, biases, kernels.precision);
  BatchOf<Real> batch(shape, tokens, top_k);
  auto experts = packed(layer, gate, kernels, engine_of(threads, groups));
  Call(*experts, batch.batch(shape)).run();
  double error = error_of(batch.out, expected(layer, gate, batch));
  if (error > tolerance(kernels))
    fail(__FILE__, __LINE__,
         title_of(kernels) + ", H " + std::to_string(shape.hidden) + ", I " + std::to_string(shape.intermediate) +
             ", T " + std::to_string(tokens) + ", groups " + std::to_string(groups) + ": error " +
             std::to_string(error));
}

// Weights and tensors in the precision of the kernels.
void check_layer(const LayerShape& shape, const Gate& gate, bool biases, int32_t tokens, int32_t top_k, int threads,
                 int groups, const KernelTable& kernels) {
  with_sums_of(kernels, [&](auto zero) {
    check_layer_in<decltype(zero)>(shape, gate, biases, tokens, top_k, threads, groups, kernels);
  });
}

}  // namespace

TEST(moe_every_variant_odd_sizes) {
  for (const KernelTable* kernels : all_kernels())
    for (int32_t hidden : {1, 31, 33, 70})
      for (int32_t intermediate : {1, 16, 47})
        check_layer({3, hidden, intermediate, true}, kSilu, true, 19, 2, 2, 1, *kernels);
}

TEST(moe_every_activation) {
  for (const KernelTable* kernels : all_kernels())
    for (int kind = 0; kind <= (int)Activation::swiglu_oai; kind++)
      for (bool gated : {true, false}) {
        Activation activation = (Activation)kind;
        if (activation == Activation::swiglu_oai && !gated) continue;
        Gate gate{activation, gated, gated ? 1.5 : 0.0, activation == Activation::swiglu_oai ? 1.702 : 0.0};
        check_layer({2, 40, 24, gated}, gate, true, 9, 2, 2, 1, *kernels);
      }
}

TEST(moe_groups_and_threads) {
  for (const KernelTable* kernels : all_kernels())
    for (int groups : {1, 2, 3, 5})  // five: more than there are blocks
      for (bool gated : {true, false})
        check_layer({3, 65, 70, gated}, {Activation::silu, gated, 0, 0}, true, 21, 2, 5, groups, *kernels);
}

TEST(moe_chunks_of_k) {
  // Hidden above 2560 and intermediate above 4096 are multiplied in chunks; more rows than a unit holds make it happen.
  for (const KernelTable* kernels : all_kernels()) {
    check_layer({1, 2600, 17, true}, kSilu, true, 150, 1, 2, 1, *kernels);
    check_layer({1, 17, 4200, true}, kSilu, true, 5, 1, 2, 1, *kernels);
  }
}

TEST(moe_rows_beyond_one_unit) {
  for (const KernelTable* kernels : all_kernels()) check_layer({1, 33, 18, true}, kSilu, false, 450, 1, 3, 1, *kernels);
}

TEST(moe_same_bits_for_any_threads_and_batch) {
  const LayerShape shape{4, 70, 50, true};
  RandomLayer layer(shape, true);
  for (const KernelTable* kernels : all_kernels()) {
    std::vector<float> first;
    for (int threads : {1, 2, 5})
      for (int groups : {1, 2}) {
        if (groups > threads) continue;
        RandomBatch batch(shape, 37, 3);
        auto experts = packed(layer, kSilu, *kernels, engine_of(threads, groups));
        Call(*experts, batch.batch(shape)).run();
        if (first.empty()) first = batch.out;
        CHECK(batch.out == first);
        Batch one = batch.batch(shape);
        one.tokens = 1;
        std::vector<float> alone(70);
        one.hidden = batch.hidden.data() + 20 * 70;
        one.ids = batch.ids.data() + 20 * 3;
        one.weights = batch.weights.data() + 20 * 3;
        one.out = alone.data();
        Call(*experts, one).run();
        CHECK(std::equal(alone.begin(), alone.end(), first.begin() + 20 * 70));
      }
  }
}

// One memory in the layout of one node, read by any number of groups, verified or not.
TEST(moe_adopted_memory_is_read_in_place_by_all_groups) {
  const LayerShape shape{4, 170, 90, true};
  RandomLayer layer(shape, true);
  auto source = packed(layer, kSilu, kernels(), engine_of(1));
  RandomBatch want(shape, 37, 3);
  Call(*source, want.batch(shape)).run();
  const Weights& w = source->weights();
  AdoptedLayer adopted{
      w.up().whole(), w.down().whole(), w.up_biases()->data(), w.down_biases()->data(), nullptr, {}, ""};
  std::vector<uint32_t> checksums;
  for (int32_t e = 0; e < shape.experts; e++) checksums.push_back(w.checksum(e));
  for (int groups : {1, 2, 4, 7})  // seven: more than there are blocks of down
    for (bool verified : {false, true}) {
      auto experts = packed(layer, kSilu, kernels(), engine_of(8, groups));
      adopted.checksums = verified ? checksums : std::vector<uint32_t>{};
      experts->weights().adopt(adopted);
      CHECK_EQ(experts->weights().up().whole() == w.up().whole(), true);
      CHECK_EQ(experts->weights().verified(0), groups == 1 && !verified);
      experts->weights().place_pages();
      RandomBatch batch(shape, 37, 3);
      Call(*experts, batch.batch(shape)).run();
      CHECK(batch.out == want.out);
      for (int32_t e = 0; e < shape.experts; e++) CHECK_EQ(experts->weights().checksum(e), checksums[(size_t)e]);
    }
}

TEST(moe_calls_of_many_threads) {
  const LayerShape shape{5, 40, 35, true};
  RandomLayer layer(shape, true);
  auto engine = engine_of(3);
  auto experts = packed(layer, kSilu, kernels(), engine), other = packed(layer, kSilu, kernels(), engine);
  std::vector<std::thread> callers;
  for (uint32_t c = 0; c < 6; c++)
    callers.emplace_back([&, c] {
      for (uint32_t round = 0; round < 40; round++) {
        RandomBatch batch(shape, (int32_t)(c * 7 + round * 3) % 40, 2, 100 * c + round);
        Call call(c % 2 ? *experts : *other, batch.batch(shape));
        if (round % 2) {
          call.run();
        } else {
          call.submit();
          call.wait();
        }
        CHECK(call.done());
        CHECK(error_of(batch.out, expected(layer, kSilu, batch)) < tolerance(kernels()));
      }
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(moe_submit_and_wait_across_threads) {
  const LayerShape shape{3, 40, 35, true};
  RandomLayer layer(shape, false);
  auto experts = packed(layer, kSilu, kernels(), engine_of(2));
  RandomBatch batch(shape, 12, 2);
  std::vector<double> want = expected(layer, kSilu, batch);
  Call call(*experts, batch.batch(shape));
  call.wait();  // nothing to wait for
  CHECK(call.done());
  for (int round = 0; round < 50; round++) {
    std::fill(batch.out.begin(), batch.out.end(), NAN);
    std::thread([&] { call.submit(); }).join();
    std::thread first([&] { call.wait(); }), second([&] { call.wait(); });
    while (!call.done()) std::this_thread::yield();
    first.join();
    second.join();
    CHECK(error_of(batch.out, want) < tolerance(kernels()));
  }
  for (int round = 0; round < 20; round++) call.submit();  // each waits for the one before
  call.wait();
  CHECK(error_of(batch.out, want) < tolerance(kernels()));
}

TEST(moe_call_destroyed_under_way) {
  const LayerShape shape{3, 64, 64, true};
  RandomLayer layer(shape, false);
  auto experts = packed(layer, kSilu, kernels(), engine_of(2));
  for (int round = 0; round < 30; round++) {
    RandomBatch batch(shape, 30, 2);
    Call(*experts, batch.batch(shape)).submit();
    CHECK(std::none_of(batch.out.begin(), batch.out.end(), [](float x) { return std::isnan(x); }));
  }
}

// The job of a verification is worked on by whichever threads call it: here by one that is no pool's.
TEST(moe_verification_in_two_parts) {
  const LayerShape shape{3, 170, 90, true};
  RandomLayer layer(shape, true);
  auto experts = packed(layer, kSilu, kernels(), engine_of(1));
  const auto source = packed(layer, kSilu, kernels(), engine_of(1));
  const Weights &from = source->weights(), &w = experts->weights();
  AdoptedLayer adopted{
      from.up().whole(), from.down().whole(), from.up_biases()->data(), from.down_biases()->data(), nullptr, {}, ""};
  for (int32_t e = 0; e < shape.experts; e++) adopted.checksums.push_back(from.checksum(e));
  adopted.checksums[2]++;
  experts->weights().adopt(adopted);
  Weights::Verification first(w, {0, 1});
  CHECK(first.job());
  first.job()->work({0, 0});
  CHECK(!w.verified(0));
  first.finish();
  CHECK(w.verified(0) && w.verified(1) && !w.verified(2));
  CHECK(!Weights::Verification(w, {1, 0}).job());
  Weights::Verification damaged(w, {1, 2});
  damaged.job()->work({0, 0});
  CHECK(contains(thrown([&] { damaged.finish(); }), "expert 2"));
  CHECK(!w.verified(2));
}

// As where the steps that it is one of are interrupted.
TEST(moe_call_that_was_started_alone_releases_the_weights) {
  const LayerShape shape{2, 40, 35, true};
  RandomLayer layer(shape, true);
  auto experts = packed(layer, kSilu, kernels(), engine_of(2));
  RandomBatch batch(shape, 3, 2);
  {
    Call call(*experts, batch.batch(shape));
    call.start();
    CHECK(contains(thrown([&] { experts->weights().pack(layer.source(0, 1)); }), "calls read them"));
  }
  experts->weights().pack(layer.source(0, 1));
}

TEST(moe_pack_and_calls_exclude_each_other) {
  const LayerShape shape{4, 40, 35, true};
  RandomLayer layer(shape, true);
  auto engine = engine_of(2);
  Experts experts(shape, kSilu, kernels(), engine);
  RandomBatch batch(shape, 30, 2);
  CHECK(contains(thrown([&] { Call(experts, batch.batch(shape)).run(); }), "expert 0 of 4 is not packed"));
  std::vector<std::thread> packers;
  for (int32_t e = 0; e < 4; e++) packers.emplace_back([&, e] { experts.weights().pack(layer.source(e, 1)); });
  for (std::thread& packer : packers) packer.join();
  CHECK_EQ(experts.weights().first_missing(), -1);

  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) {
      std::string refused = thrown([&] { Call(experts, batch.batch(shape)).run(); });
      CHECK(refused.empty() || contains(refused, "while another thread packs"));
    }
  });
  for (int round = 0; round < 200; round++) {
    std::string refused = thrown([&] { experts.weights().pack(layer.source(round % 4, 1)); });
    CHECK(refused.empty() || contains(refused, "calls read them"));
  }
  stop = true;
  caller.join();
  Call(experts, batch.batch(shape)).run();
  CHECK(error_of(batch.out, expected(layer, kSilu, batch)) < tolerance(kernels()));
}

TEST(moe_repacked_expert_loses_its_biases) {
  const LayerShape shape{2, 20, 20, true};
  RandomLayer biased(shape, true), plain(shape, false);
  plain.gate = biased.gate, plain.up = biased.up, plain.down = biased.down;
  auto experts = packed(biased, kSilu, kernels(), engine_of(1));
  experts->weights().pack(plain.source(0, 2));
  RandomBatch batch(shape, 6, 2);
  Call(*experts, batch.batch(shape)).run();
  CHECK(error_of(batch.out, expected(plain, kSilu, batch)) < tolerance(kernels()));
}
