// Decode attention on every variant against double: groups of heads, divided if a sequence is alone, unequal head
// sizes, more keys than one split, and the same bits for a sequence whatever others are in the batch.
#include "check.h"
#include "moe/attention.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

constexpr int32_t kHeads = 22, kGroups = 2, kKey = 48, kValue = 32;

struct Sequence {
  int32_t count;
  Numbers keys, values, query, key, value;
  std::vector<char> out;

  Sequence(int32_t n, DType type, std::mt19937& random)
      : count(n),
        keys((size_t)(kGroups * n * kKey), 1.0, type, random),
        values((size_t)(kGroups * n * kValue), 1.0, type, random),
        query((size_t)(kHeads * kKey), 1.0, type, random),
        key((size_t)(kGroups * kKey), 1.0, type, random),
        value((size_t)(kGroups * kValue), 1.0, type, random),
        out((size_t)(kHeads * kValue) * size_of(type)) {}

  KVSequence kv(DType type) {
    int64_t elem = (int64_t)size_of(type);
    return {keys.bytes.data(),
            values.bytes.data(),
            count * kKey * elem,
            count * kValue * elem,
            kKey * elem,
            kValue * elem,
            count,
            query.bytes.data(),
            key.bytes.data(),
            value.bytes.data(),
            kKey * elem,
            kKey * elem,
            kValue * elem,
            out.data()};
  }

  double expected(int32_t head, int32_t column, double scale, const float* sinks) const {
    size_t group = (size_t)(head / (kHeads / kGroups)), n = (size_t)count;
    double total = sinks ? std::exp((double)sinks[head]) : 0, sum = 0;
    for (size_t j = 0; j < n; j++) {
      double score = 0;
      for (size_t i = 0; i < kKey; i++) {
        double k = j + 1 == n ? key.values[group * kKey + i] : keys.values[(group * n + j) * kKey + i];
        score += k * query.values[(size_t)head * kKey + i];
      }
      size_t at = (size_t)column;
      double v = j + 1 == n ? value.values[group * kValue + at] : values.values[(group * n + j) * kValue + at];
      total += std::exp(score * scale);
      sum += std::exp(score * scale) * v;
    }
    return sum / total;
  }
};

}  // namespace

TEST(attention_every_variant) {
  float values[kHeads];
  for (int32_t head = 0; head < kHeads; head++) values[head] = (float)(head % 5) - 1.5f;
  PoolOptions options;
  options.threads = 3;
  Pool pool(options);
  constexpr float scale = 0.125f;
  for (const KernelTable* kernels : all_kernels()) {
    if (kernels->precision != Precision::bf16) {
      CHECK(!kernels->attention_split);
      continue;
    }
    for (const float* sinks : {(const float*)nullptr, (const float*)values})
      for (DType type : {DType::f32, DType::bf16}) {
        std::mt19937 random(11);
        std::vector<Sequence> all;
        for (int32_t count : {1, 7, 64, kAttentionSplit, kAttentionSplit + 1, 2 * kAttentionSplit + 19})
          all.emplace_back(count, type, random);
        Attention together{{}, kHeads, kGroups, kKey, kValue, type, scale, sinks};
        for (Sequence& one : all) together.sequences.push_back(one.kv(type));
        attend(pool, *kernels, together);
        for (Sequence& one : all) {
          for (int32_t head = 0; head < kHeads; head++)
            for (int32_t i = 0; i < kValue; i++) {
              double actual = element_of<double>(one.out.data(), head * kValue + i, type);
              CHECK(std::abs(actual - one.expected(head, i, (double)scale, sinks)) <
                    (type == DType::f32 ? 1e-5 : 1e-2));
            }
          std::vector<char> before = one.out;
          attend(pool, *kernels, {{one.kv(type)}, kHeads, kGroups, kKey, kValue, type, scale, sinks});
          CHECK(before == one.out);
        }
      }
  }
}
