#include "moe/attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "moe/widen.h"

namespace kt {

namespace {

constexpr int32_t kHeadsTogether = 4;  // that the kernel computes with one pass over the keys
constexpr int64_t kUnitsOfThread = 2;

// Nearest code of e4m3, ties to even, of a number of at most 448.
inline uint8_t e4m3_code(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
  // Below 2^-6 codes are multiples of 2^-9, which is the last place of 2^14.
  const uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
  return (uint8_t)((bits >> 24 & 0x80u) | (magnitude < 121u << 23 ? tiny : normal));
}

// A row in codes of e4m3 and its scale of e8m0, the smallest with which the largest number is at most 448. A row with
// infinities or NaNs has the scale NaN.
void encode_row(const char* row, DType type, int32_t size, uint8_t* codes, uint8_t* scale) {
  uint32_t largest = 0;
  for (int32_t i = 0; i < size; i++)
    largest = std::max(largest, std::bit_cast<uint32_t>(element_of<float>(row, i, type)) & 0x7fffffffu);
  const int32_t exponent = (int32_t)(largest >> 23) - 8 + ((largest & 0x7fffffu) > 0x600000u);  // 448 is 1.75 * 2^8
  const bool finite = largest < 255u << 23;
  *scale = (uint8_t)(finite ? std::max(exponent, 1) : 255);
  const float inverse = std::bit_cast<float>((uint32_t)(254 - (finite ? *scale : 127)) << 23);
  for (int32_t i = 0; i < size; i++) codes[i] = finite ? e4m3_code(element_of<float>(row, i, type) * inverse) : 0;
}

void add_scaled(const float* values, float by, std::vector<float>& sums) {
  for (size_t i = 0; i < sums.size(); i++) sums[i] += values[i] * by;
}

// A unit is a part of the heads of one GQA group of one sequence and one split of its keys. Splits begin at multiples
// of kAttentionSplit in the sequence, so that they consist of whole blocks apart from the first and the last one. A
// group is divided only if there would be too few units for the threads, as with latents, which all heads share: each
// part reads the keys again. The thread that finishes the last split of a part merges them, in order, so the result
// does not depend on the number of threads, nor on the parts, since a head's does not depend on the others.
class AttentionJob : public Job {
 public:
  AttentionJob(const KernelTable& kernels, const Attention& attention, int threads)
      : kernels_(kernels), a_(attention), sequences_(*attention.sequences) {
    const int32_t per_group = a_.heads / a_.groups, count = (int32_t)sequences_.size();
    int64_t units = 0;
    for (int32_t s = 0; s < count; s++) units += a_.groups * splits_of(s);
    const int64_t parts = std::clamp<int64_t>(ceil_div(kUnitsOfThread * threads, std::max<int64_t>(units, 1)), 1,
                                              ceil_div(per_group, kHeadsTogether));
    max_heads_ = (int32_t)std::min<int64_t>(round_up(ceil_div(per_group, parts), kHeadsTogether), per_group);
    for (int32_t s = 0; s < count; s++)
      for (int32_t head = 0; head < a_.heads;) {
        const int32_t group = head / per_group, splits = splits_of(s), first_split = first_key(s) / kAttentionSplit;
        const int32_t heads = std::min(max_heads_, (group + 1) * per_group - head);
        for (int32_t i = 0; i < splits; i++) units_.push_back({s, group, head, heads, first_split + i, parts_.size()});
        parts_.push_back({(int32_t)units_.size() - splits, splits});
        head += heads;
      }
    left_ = std::vector<std::atomic<int32_t>>(parts_.size());
    for (size_t p = 0; p < parts_.size(); p++) left_[p].store(parts_[p].splits, std::memory_order_relaxed);
    result_size_ = 2 * max_heads_ + max_heads_ * a_.value_size;
    results_.resize(units_.size() * (size_t)result_size_);
    for (int32_t s = 0; s < count; s++) {
      store_new(s, a_.cache.keys, a_.key, a_.key_size);
      // Values that begin the keys are stored with them.
      if (!values_are_keys()) store_new(s, a_.cache.values, a_.value, a_.value_size);
    }
  }

  void work(const Worker&) override {
    std::vector<float> scratch((size_t)max_heads_ * (size_t)(a_.key_size + kAttentionSplit));
    std::vector<uint16_t> decoded(has_codes() ? (size_t)kAttentionSplit * (size_t)(a_.key_size + a_.value_size) : 0);
    for (size_t at; !cancelled() && (at = next_.fetch_add(1)) < units_.size();) {
      const Unit& unit = units_[at];
      compute(unit, results_.data() + at * (size_t)result_size_, scratch.data(), decoded.data());
      if (left_[unit.part].fetch_sub(1, std::memory_order_acq_rel) == 1) merge_splits(unit);
    }
  }

 private:
  struct Unit {
    int32_t sequence, group, first_head, heads, split;
    size_t part;
  };
  struct Part {
    int32_t first_unit, splits;
  };

  bool has_codes() const { return a_.cache.keys.scales; }
  bool values_are_keys() const { return a_.cache.values.data == a_.cache.keys.data; }
  int32_t position(int32_t sequence) const { return sequences_.positions[(size_t)sequence]; }
  int32_t row(int32_t sequence) const { return sequences_.rows[(size_t)sequence]; }

  // Of those to which the new token attends.
  int32_t first_key(int32_t sequence) const {
    const int32_t at = position(sequence);
    return std::max(a_.window ? std::max(at - a_.window + 1, 0) : 0, a_.chunk ? at - at % a_.chunk : 0);
  }

  int32_t splits_of(int32_t sequence) const {
    return position(sequence) / kAttentionSplit - first_key(sequence) / kAttentionSplit + 1;
  }

  void store_new(int32_t sequence, const CachePart& part, const HeadRows& rows, int32_t size) const {
    const int32_t token = position(sequence) % kBlockTokens;
    const int32_t block = sequences_.blocks(sequence)[position(sequence) / kBlockTokens];
    for (int32_t g = 0; g < a_.groups; g++) {
      const char* from = rows.at(row(sequence), g);
      if (part.scales) {
        encode_row(from, a_.type, size, (uint8_t*)part.at(block, g, token), part.scales_at(block, g, token));
      } else {
        std::memcpy(part.at(block, g, token), from, (size_t)size * size_of(a_.type));
      }
    }
  }

  // `decoded`: for the keys and values of a split that are codes.
  void compute(const Unit& unit, float* result, float* scratch, uint16_t* decoded) const {
    const int32_t begin = unit.split * kAttentionSplit, first = std::max(begin, first_key(unit.sequence)),
                  end = std::min(begin + kAttentionSplit, position(unit.sequence) + 1);
    for (int32_t h = 0; h < unit.heads; h++) {
      float* query = scratch + h * a_.key_size;
      widen(a_.type, a_.query.at(row(unit.sequence), unit.first_head + h), query, a_.key_size);
      for (int32_t i = 0; i < a_.key_size; i++) query[i] *= a_.scale;
    }
    const char* blocks[2][kAttentionSplit / kBlockTokens];
    AttentionSplit split{scratch,
                         blocks[0],
                         blocks[1],
                         has_codes() ? 2 * a_.key_size : a_.cache.keys.token_stride,
                         has_codes() ? 2 * a_.value_size : a_.cache.values.token_stride,
                         has_codes() ? DType::bf16 : a_.type,
                         unit.heads,
                         a_.key_size,
                         a_.value_size,
                         first % kBlockTokens,
                         end - first,
                         scratch + max_heads_ * a_.key_size,
                         result,
                         result + max_heads_,
                         result + 2 * max_heads_};
    find_blocks(unit, first, split, a_.cache.keys, a_.key_size, decoded, blocks[0]);
    if (values_are_keys()) {
      split.values = split.keys, split.value_stride = split.key_stride;
    } else {
      uint16_t* values = has_codes() ? decoded + (int64_t)kAttentionSplit * a_.key_size : nullptr;
      find_blocks(unit, first, split, a_.cache.values, a_.value_size, values, blocks[1]);
    }
    kernels_.attention_split(split);
  }

  // Of the split that begins with the key `first`; codes are decoded.
  void find_blocks(const Unit& unit, int32_t first, const AttentionSplit& split, const CachePart& part, int32_t size,
                   uint16_t* decoded, const char** blocks) const {
    const int32_t* table = sequences_.blocks(unit.sequence) + first / kBlockTokens;
    for (int32_t b = 0, begin = 0, end; begin < split.count; b++, begin = end) {
      const int32_t token = b ? 0 : split.skipped;
      end = std::min((b + 1) * kBlockTokens - split.skipped, split.count);
      blocks[b] = part.at(table[b], unit.group, token);
      if (!part.scales) continue;
      char* out = (char*)(decoded + (int64_t)begin * size);
      kernels_.decode_cache({(const uint8_t*)blocks[b], part.scales_at(table[b], unit.group, token), part.token_stride,
                             end - begin, size, out});
      blocks[b] = out;
    }
  }

  void merge_splits(const Unit& unit) {
    const Part& part = parts_[unit.part];
    char* out = a_.out + row(unit.sequence) * a_.out_row_stride;
    auto split_result = [&](int32_t s) {
      return results_.data() + (size_t)(part.first_unit + s) * (size_t)result_size_;
    };
    std::vector<float> sums((size_t)a_.value_size);
    for (int32_t h = 0; h < unit.heads; h++) {
      const float* sink = a_.sinks ? a_.sinks + unit.first_head + h : nullptr;
      float max_score = sink ? std::max(*sink, split_result(0)[h]) : split_result(0)[h];
      for (int32_t s = 1; s < part.splits; s++) max_score = std::max(max_score, split_result(s)[h]);
      float exp_sum = sink ? std::exp(*sink - max_score) : 0;
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int32_t s = 0; s < part.splits; s++) {
        const float rescale = std::exp(split_result(s)[h] - max_score);
        exp_sum += split_result(s)[max_heads_ + h] * rescale;
        add_scaled(split_result(s) + 2 * max_heads_ + h * a_.value_size, rescale, sums);
      }
      for (float& sum : sums) sum /= exp_sum;
      const int64_t head = (int64_t)(unit.first_head + h) * a_.value_size;
      narrow(a_.type, sums.data(), out + head * (int64_t)size_of(a_.type), a_.value_size);
    }
  }

  const KernelTable& kernels_;
  const Attention& a_;
  const StepSequences& sequences_;
  int32_t max_heads_ = 0, result_size_ = 0;  // heads of a unit at most; floats of its result
  std::vector<Unit> units_;
  std::vector<Part> parts_;
  std::vector<std::atomic<int32_t>> left_;
  std::vector<float> results_;
  std::atomic<size_t> next_{0};
};

}  // namespace

std::unique_ptr<Job> attention_job(const KernelTable& kernels, const Attention& attention, int threads) {
  return std::make_unique<AttentionJob>(kernels, attention, threads);
}

void attend(Pool& pool, const KernelTable& kernels, const Attention& attention) {
  AttentionJob job(kernels, attention, pool.threads());
  pool.run(job);
}

}  // namespace kt
