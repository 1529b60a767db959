#include "moe/attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

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

// A unit is a part of the heads of one GQA group of one sequence and one split of its keys. A group is divided only if
// there would be too few units for the threads, as with latents, which all heads share: each part reads the keys again.
// The thread that finishes the last split of a part merges them, in order, so the result does not depend on the number
// of threads, nor on the parts, since a head's does not depend on the others.
class AttentionJob : public Job {
 public:
  AttentionJob(const KernelTable& kernels, const Attention& attention, int threads) : kernels_(kernels), a_(attention) {
    const int32_t per_group = a_.heads / a_.groups;
    int64_t units = 0;
    for (const KVSequence& sequence : a_.sequences) units += a_.groups * splits_of(sequence);
    const int64_t parts = std::clamp<int64_t>(ceil_div(kUnitsOfThread * threads, std::max<int64_t>(units, 1)), 1,
                                              ceil_div(per_group, kHeadsTogether));
    max_heads_ = (int32_t)std::min<int64_t>(round_up(ceil_div(per_group, parts), kHeadsTogether), per_group);
    for (size_t p = 0; p < a_.sequences.size(); p++)
      for (int32_t head = 0; head < a_.heads;) {
        const int32_t group = head / per_group, splits = splits_of(a_.sequences[p]);
        const int32_t count = std::min(max_heads_, (group + 1) * per_group - head);
        for (int32_t s = 0; s < splits; s++) units_.push_back({(int32_t)p, group, head, count, s, parts_.size()});
        parts_.push_back({(int32_t)units_.size() - splits, splits});
        head += count;
      }
    left_ = std::vector<std::atomic<int32_t>>(parts_.size());
    for (size_t p = 0; p < parts_.size(); p++) left_[p].store(parts_[p].splits, std::memory_order_relaxed);
    result_size_ = 2 * max_heads_ + max_heads_ * a_.value_size;
    results_.resize(units_.size() * (size_t)result_size_);
    for (const KVSequence& sequence : a_.sequences) store_new(sequence);
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

  static int32_t splits_of(const KVSequence& sequence) {
    return (sequence.count + kAttentionSplit - 1) / kAttentionSplit;
  }

  bool has_codes() const {
    return std::any_of(a_.sequences.begin(), a_.sequences.end(), [](const KVSequence& s) { return s.key_scales; });
  }

  void store_new(const KVSequence& sequence) const {
    const int64_t elem = (int64_t)size_of(a_.type), last = sequence.count - 1;
    for (int32_t g = 0; g < a_.groups; g++) {
      if (sequence.key_scales) {
        encode_row(sequence.key + g * sequence.key_head_stride, a_.type, a_.key_size,
                   (uint8_t*)sequence.keys + g * sequence.key_group_stride + last * sequence.key_stride,
                   sequence.key_scales + g * sequence.key_scale_group_stride + last);
        if (sequence.values != sequence.keys)  // values that begin the keys have their codes and scale
          encode_row(sequence.value + g * sequence.value_head_stride, a_.type, a_.value_size,
                     (uint8_t*)sequence.values + g * sequence.value_group_stride + last * sequence.value_stride,
                     sequence.value_scales + g * sequence.value_scale_group_stride + last);
        continue;
      }
      std::memcpy(sequence.keys + g * sequence.key_group_stride + last * sequence.key_stride,
                  sequence.key + g * sequence.key_head_stride, (size_t)(a_.key_size * elem));
      std::memcpy(sequence.values + g * sequence.value_group_stride + last * sequence.value_stride,
                  sequence.value + g * sequence.value_head_stride, (size_t)(a_.value_size * elem));
    }
  }

  // `decoded`: for the keys and values of a split that are codes.
  void compute(const Unit& unit, float* result, float* scratch, uint16_t* decoded) const {
    const KVSequence& sequence = a_.sequences[(size_t)unit.sequence];
    const int64_t first = (int64_t)unit.split * kAttentionSplit;
    const int32_t count = (int32_t)std::min<int64_t>(kAttentionSplit, sequence.count - first);
    const char *keys = sequence.keys + unit.group * sequence.key_group_stride,
               *values = sequence.values + unit.group * sequence.value_group_stride;
    for (int32_t h = 0; h < unit.heads; h++) {
      const char* query = sequence.query + (unit.first_head + h) * sequence.query_head_stride;
      for (int32_t i = 0; i < a_.key_size; i++)
        scratch[h * a_.key_size + i] = element_of<float>(query, i, a_.type) * a_.scale;
    }
    AttentionSplit split{scratch,
                         keys + first * sequence.key_stride,
                         values + first * sequence.value_stride,
                         sequence.key_stride,
                         sequence.value_stride,
                         a_.type,
                         unit.heads,
                         a_.key_size,
                         a_.value_size,
                         count,
                         scratch + max_heads_ * a_.key_size,
                         result,
                         result + max_heads_,
                         result + 2 * max_heads_};
    if (sequence.key_scales) decode_split(unit, first, split, decoded);
    kernels_.attention_split(split);
  }

  void decode_split(const Unit& unit, int64_t first, AttentionSplit& split, uint16_t* decoded) const {
    const KVSequence& sequence = a_.sequences[(size_t)unit.sequence];
    const bool shared = sequence.values == sequence.keys;
    auto decode = [&](const char* codes, const uint8_t* scales, int64_t stride, int32_t size, uint16_t* out) {
      kernels_.decode_cache({(const uint8_t*)codes, scales + first, stride, split.count, size, (char*)out});
    };
    decode(split.keys, sequence.key_scales + unit.group * sequence.key_scale_group_stride, split.key_stride,
           a_.key_size, decoded);
    split.type = DType::bf16;
    split.keys = split.values = (const char*)decoded;
    split.key_stride = split.value_stride = 2 * a_.key_size;
    if (shared) return;
    uint16_t* values = decoded + (int64_t)kAttentionSplit * a_.key_size;
    decode(sequence.values + unit.group * sequence.value_group_stride + first * sequence.value_stride,
           sequence.value_scales + unit.group * sequence.value_scale_group_stride, sequence.value_stride, a_.value_size,
           values);
    split.values = (const char*)values;
    split.value_stride = 2 * a_.value_size;
  }

  void merge_splits(const Unit& unit) {
    const Part& part = parts_[unit.part];
    const KVSequence& sequence = a_.sequences[(size_t)unit.sequence];
    auto split_result = [&](int32_t s) {
      return results_.data() + (size_t)(part.first_unit + s) * (size_t)result_size_;
    };
    std::vector<float> rescale((size_t)part.splits);
    for (int32_t h = 0; h < unit.heads; h++) {
      const float* sink = a_.sinks ? a_.sinks + unit.first_head + h : nullptr;
      float max_score = sink ? std::max(*sink, split_result(0)[h]) : split_result(0)[h];
      for (int32_t s = 1; s < part.splits; s++) max_score = std::max(max_score, split_result(s)[h]);
      float exp_sum = sink ? std::exp(*sink - max_score) : 0;
      for (int32_t s = 0; s < part.splits; s++) {
        rescale[(size_t)s] = std::exp(split_result(s)[h] - max_score);
        exp_sum += split_result(s)[max_heads_ + h] * rescale[(size_t)s];
      }
      const int64_t head = (int64_t)(unit.first_head + h) * a_.value_size;
      for (int32_t i = 0; i < a_.value_size; i++) {
        float sum = 0;
        for (int32_t s = 0; s < part.splits; s++)
          sum += split_result(s)[2 * max_heads_ + h * a_.value_size + i] * rescale[(size_t)s];
        set_element(sequence.out, head + i, a_.type, (double)(sum / exp_sum));
      }
    }
  }

  const KernelTable& kernels_;
  const Attention& a_;
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
