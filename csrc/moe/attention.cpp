#include "moe/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

namespace kt {

namespace {

// A unit is one GQA group of one sequence and one split of its keys. The thread that finishes the last split of a group
// merges them, in order, so the result does not depend on the number of threads.
class AttentionJob : public Job {
 public:
  AttentionJob(const KernelTable& kernels, const Attention& attention) : kernels_(kernels), a_(attention) {
    per_group_ = a_.heads / a_.groups;
    for (size_t p = 0; p < a_.sequences.size(); p++)
      for (int32_t g = 0; g < a_.groups; g++) {
        const int32_t splits = (a_.sequences[p].count + kAttentionSplit - 1) / kAttentionSplit;
        for (int32_t s = 0; s < splits; s++) units_.push_back({(int32_t)p, g, s, (int32_t)groups_.size()});
        groups_.push_back({(int32_t)units_.size() - splits, splits});
      }
    left_ = std::vector<std::atomic<int32_t>>(groups_.size());
    for (size_t g = 0; g < groups_.size(); g++) left_[g].store(groups_[g].splits, std::memory_order_relaxed);
    result_size_ = 2 * per_group_ + per_group_ * a_.value_size;
    results_.resize(units_.size() * (size_t)result_size_);
  }

  void work(const Worker&) override {
    std::vector<float> scratch((size_t)per_group_ * (size_t)(a_.key_size + kAttentionSplit));
    for (size_t at; !cancelled() && (at = next_.fetch_add(1)) < units_.size();) {
      const Unit& unit = units_[at];
      compute(unit, results_.data() + at * (size_t)result_size_, scratch.data());
      if (left_[(size_t)unit.group_index].fetch_sub(1, std::memory_order_acq_rel) == 1) merge_splits(unit);
    }
  }

 private:
  struct Unit {
    int32_t sequence, group, split, group_index;
  };
  struct Group {
    int32_t first, splits;
  };

  void compute(const Unit& unit, float* result, float* scratch) const {
    const KVSequence& sequence = a_.sequences[(size_t)unit.sequence];
    const int64_t elem = (int64_t)size_of(a_.type), first = (int64_t)unit.split * kAttentionSplit;
    const int32_t count = (int32_t)std::min<int64_t>(kAttentionSplit, sequence.count - first);
    char *keys = sequence.keys + unit.group * sequence.key_group_stride,
         *values = sequence.values + unit.group * sequence.value_group_stride;
    if (first + count == sequence.count) {
      const int64_t last = sequence.count - 1;
      std::memcpy(keys + last * sequence.key_stride, sequence.key + unit.group * sequence.key_head_stride,
                  (size_t)(a_.key_size * elem));
      std::memcpy(values + last * sequence.value_stride, sequence.value + unit.group * sequence.value_head_stride,
                  (size_t)(a_.value_size * elem));
    }
    for (int32_t h = 0; h < per_group_; h++) {
      const char* query = sequence.query + (unit.group * per_group_ + h) * sequence.query_head_stride;
      for (int32_t i = 0; i < a_.key_size; i++)
        scratch[h * a_.key_size + i] = element_of<float>(query, i, a_.type) * a_.scale;
    }
    kernels_.attention_split({scratch, keys + first * sequence.key_stride, values + first * sequence.value_stride,
                              sequence.key_stride, sequence.value_stride, a_.type, per_group_, a_.key_size,
                              a_.value_size, count, scratch + per_group_ * a_.key_size, result, result + per_group_,
                              result + 2 * per_group_});
  }

  void merge_splits(const Unit& unit) {
    const Group& group = groups_[(size_t)unit.group_index];
    const KVSequence& sequence = a_.sequences[(size_t)unit.sequence];
    auto split_result = [&](int32_t s) { return results_.data() + (size_t)(group.first + s) * (size_t)result_size_; };
    std::vector<float> rescale((size_t)group.splits);
    for (int32_t h = 0; h < per_group_; h++) {
      float max_score = split_result(0)[h], exp_sum = 0;
      for (int32_t s = 1; s < group.splits; s++) max_score = std::max(max_score, split_result(s)[h]);
      for (int32_t s = 0; s < group.splits; s++) {
        rescale[(size_t)s] = std::exp(split_result(s)[h] - max_score);
        exp_sum += split_result(s)[per_group_ + h] * rescale[(size_t)s];
      }
      const int64_t head = (int64_t)(unit.group * per_group_ + h) * a_.value_size;
      for (int32_t i = 0; i < a_.value_size; i++) {
        float sum = 0;
        for (int32_t s = 0; s < group.splits; s++)
          sum += split_result(s)[2 * per_group_ + h * a_.value_size + i] * rescale[(size_t)s];
        set_element(sequence.out, head + i, a_.type, (double)(sum / exp_sum));
      }
    }
  }

  const KernelTable& kernels_;
  const Attention& a_;
  int32_t per_group_ = 0, result_size_ = 0;  // heads of a group; floats of a unit's result
  std::vector<Unit> units_;
  std::vector<Group> groups_;
  std::vector<std::atomic<int32_t>> left_;
  std::vector<float> results_;
  std::atomic<size_t> next_{0};
};

}  // namespace

void attend(Pool& pool, const KernelTable& kernels, const Attention& attention) {
  AttentionJob job(kernels, attention);
  pool.run(job);
}

}  // namespace kt
