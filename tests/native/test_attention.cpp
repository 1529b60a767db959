// Decode attention on every variant against double: groups of heads, divided if a sequence is alone, unequal head
// sizes, blocks in any order and shared ones, windows and chunks that begin inside a block, more keys than one split,
// and the same bits for a sequence whatever others are in the batch.
#include <algorithm>
#include <numeric>

#include "check.h"
#include "moe/attention.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

constexpr int32_t kHeads = 22, kGroups = 2, kKey = 48, kValue = 32;
// Of a layer in a block: its keys and values. Another layer lies behind them.
constexpr int32_t kKeyNumbers = kGroups * kBlockTokens * kKey, kValueNumbers = kGroups * kBlockTokens * kValue;
constexpr int32_t kBlockNumbers = kKeyNumbers + kValueNumbers + 80;
constexpr int32_t kCounts[] = {1, 7, 64, kAttentionSplit, kAttentionSplit + 1, 2 * kAttentionSplit + 19, 530};
constexpr int32_t kTokens = std::size(kCounts), kWidth = 17, kBlocks = 40;
constexpr int32_t kSharing = 6, kShared = 5, kSharedBlocks = 8;

struct Step {
  Numbers pool, query, key, value;
  StepSequences sequences;

  Step(DType type, std::mt19937& random)
      : pool((size_t)(kBlocks * kBlockNumbers), 1.0, type, random),
        query((size_t)(kTokens * kHeads * kKey), 1.0, type, random),
        key((size_t)(kTokens * kGroups * kKey), 1.0, type, random),
        value((size_t)(kTokens * kGroups * kValue), 1.0, type, random) {
    std::vector<int32_t> free(kBlocks);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    sequences.table.assign(kTokens * kWidth, -1);
    sequences.table_width = kWidth;
    for (int32_t s = 0; s < kTokens; s++) {
      sequences.rows.push_back(kTokens - 1 - s), sequences.positions.push_back(kCounts[s] - 1);
      int32_t* blocks = sequences.table.data() + s * kWidth;
      for (int32_t b = 0; b * kBlockTokens < kCounts[s]; b++) {
        if (s == kSharing && b < kSharedBlocks) {
          blocks[b] = sequences.blocks(kShared)[b];
        } else {
          blocks[b] = free.back(), free.pop_back();
        }
      }
    }
  }

  StepSequences alone(int64_t s) const {
    const int32_t* blocks = sequences.blocks(s);
    return {{sequences.rows[(size_t)s]}, {sequences.positions[(size_t)s]}, {blocks, blocks + kWidth}, kWidth};
  }

  std::vector<char> attend_to(Pool& threads, const KernelTable& kernels, const StepSequences& to, Attention attention) {
    const int64_t elem = (int64_t)size_of(attention.type), block = kBlockNumbers * elem;
    std::vector<char> out((size_t)(kTokens * kHeads * kValue * elem));
    attention.sequences = &to;
    attention.cache.keys = {pool.bytes.data(), block, kBlockTokens * kKey * elem, kKey * elem};
    attention.cache.values = {pool.bytes.data() + kKeyNumbers * elem, block, kBlockTokens * kValue * elem,
                              kValue * elem};
    attention.query = {query.bytes.data(), kHeads * kKey * elem, kKey * elem};
    attention.key = {key.bytes.data(), kGroups * kKey * elem, kKey * elem};
    attention.value = {value.bytes.data(), kGroups * kValue * elem, kValue * elem};
    attention.out = out.data(), attention.out_row_stride = kHeads * kValue * elem;
    attend(threads, kernels, attention);
    return out;
  }

  std::vector<double> expected(int32_t s, int32_t head, const Attention& a) const {
    const int32_t position = kCounts[s] - 1, group = head / (kHeads / kGroups), row = sequences.rows[(size_t)s];
    const int32_t chunk = a.chunk ? a.chunk : position + 1, window = a.window ? a.window : position + 1;
    double total = a.sinks ? std::exp((double)a.sinks[head]) : 0;
    std::vector<double> sums(kValue);
    for (int32_t j = 0; j <= position; j++) {
      if (j <= position - window || j / chunk != position / chunk) continue;
      const size_t block = (size_t)(sequences.blocks(s)[j / kBlockTokens] * kBlockNumbers);
      const size_t token = (size_t)(group * kBlockTokens + j % kBlockTokens), fresh = (size_t)(row * kGroups + group);
      double score = 0;
      for (size_t i = 0; i < kKey; i++)
        score += query.values[(size_t)(row * kHeads + head) * kKey + i] *
                 (j == position ? key.values[fresh * kKey + i] : pool.values[block + token * kKey + i]);
      const double weight = std::exp(score * (double)a.scale);
      total += weight;
      for (size_t i = 0; i < kValue; i++)
        sums[i] += weight * (j == position ? value.values[fresh * kValue + i]
                                           : pool.values[block + kKeyNumbers + token * kValue + i]);
    }
    for (double& sum : sums) sum /= total;
    return sums;
  }
};

}  // namespace

TEST(attention_every_variant) {
  float values[kHeads];
  for (int32_t head = 0; head < kHeads; head++) values[head] = (float)(head % 5) - 1.5f;
  PoolOptions options;
  options.threads = 3;
  Pool pool(options);
  Attention plain{.heads = kHeads, .groups = kGroups, .key_size = kKey, .value_size = kValue, .scale = 0.125f};
  Attention with_sinks = plain, with_window = plain, with_chunk = plain;
  with_sinks.sinks = values, with_window.window = 100, with_chunk.chunk = 520;
  for (const KernelTable* kernels : all_kernels()) {
    if (kernels->precision != Precision::bf16) {
      CHECK(!kernels->attention_split);
      continue;
    }
    for (Attention attention : {plain, with_sinks, with_window, with_chunk})
      for (DType type : {DType::f32, DType::bf16}) {
        std::mt19937 random(11);
        Step step(type, random);
        attention.type = type;
        const std::vector<char> together = step.attend_to(pool, *kernels, step.sequences, attention);
        for (int32_t s = 0; s < kTokens; s++) {
          const StepSequences one = step.alone(s);
          const std::vector<char> alone = step.attend_to(pool, *kernels, one, attention);
          for (int32_t head = 0; head < kHeads; head++) {
            const std::vector<double> expected = step.expected(s, head, attention);
            for (int32_t i = 0; i < kValue; i++) {
              const int64_t at = (one.rows[0] * kHeads + head) * kValue + i;
              const double actual = element_of<double>(together.data(), at, type);
              CHECK(std::abs(actual - expected[(size_t)i]) < (type == DType::f32 ? 1e-5 : 1e-2));
              CHECK(actual == element_of<double>(alone.data(), at, type));
            }
          }
        }
      }
  }
}
