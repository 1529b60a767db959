#include "moe/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

namespace kt {

namespace {

// A unit is one group of heads of one sequence and one stretch of its keys. Whoever ends the last stretch of a group
// joins them, in order, so the numbers do not depend on threads.
class AttentionJob : public Job {
 public:
  AttentionJob(const KernelTable& kernels, const Attention& attention) : kernels_(kernels), a_(attention) {
    per_group_ = a_.heads / a_.groups;
    for (size_t p = 0; p < a_.pasts.size(); p++)
      for (int32_t g = 0; g < a_.groups; g++) {
        const int32_t stretches = (a_.pasts[p].count + kStretch - 1) / kStretch;
        for (int32_t s = 0; s < stretches; s++) units_.push_back({(int32_t)p, g, s, (int32_t)groups_.size()});
        groups_.push_back({(int32_t)units_.size() - stretches, stretches});
      }
    left_ = std::vector<std::atomic<int32_t>>(groups_.size());
    for (size_t g = 0; g < groups_.size(); g++) left_[g].store(groups_[g].stretches, std::memory_order_relaxed);
    result_ = 2 * per_group_ + per_group_ * a_.value_size;
    results_.resize(units_.size() * (size_t)result_);
  }

  void work(const Worker&) override {
    std::vector<float> scratch((size_t)per_group_ * (size_t)(a_.key_size + kStretch));
    for (size_t at; (at = next_.fetch_add(1)) < units_.size();) {
      const Unit& unit = units_[at];
      compute(unit, results_.data() + at * (size_t)result_, scratch.data());
      if (left_[(size_t)unit.of].fetch_sub(1, std::memory_order_acq_rel) == 1) join(unit);
    }
  }

 private:
  struct Unit {
    int32_t past, group, stretch, of;
  };
  struct Group {
    int32_t first, stretches;
  };

  void compute(const Unit& unit, float* result, float* scratch) const {
    const Past& past = a_.pasts[(size_t)unit.past];
    const int64_t elem = (int64_t)size_of(a_.type), first = (int64_t)unit.stretch * kStretch;
    const int32_t count = (int32_t)std::min<int64_t>(kStretch, past.count - first);
    char *keys = past.keys + unit.group * past.key_group, *values = past.values + unit.group * past.value_group;
    if (first + count == past.count) {
      const int64_t last = past.count - 1;
      std::memcpy(keys + last * a_.key_size * elem, past.key + unit.group * past.key_head,
                  (size_t)(a_.key_size * elem));
      std::memcpy(values + last * a_.value_size * elem, past.value + unit.group * past.value_head,
                  (size_t)(a_.value_size * elem));
    }
    for (int32_t h = 0; h < per_group_; h++) {
      const char* query = past.query + (unit.group * per_group_ + h) * past.query_head;
      for (int32_t i = 0; i < a_.key_size; i++)
        scratch[h * a_.key_size + i] = element_of<float>(query, i, a_.type) * a_.scale;
    }
    kernels_.attend({scratch, keys + first * a_.key_size * elem, values + first * a_.value_size * elem,
                     a_.key_size * elem, a_.value_size * elem, a_.type, per_group_, a_.key_size, a_.value_size, count,
                     scratch + per_group_ * a_.key_size, result, result + per_group_, result + 2 * per_group_});
  }

  void join(const Unit& unit) {
    const Group& group = groups_[(size_t)unit.of];
    const Past& past = a_.pasts[(size_t)unit.past];
    auto of = [&](int32_t s) { return results_.data() + (size_t)(group.first + s) * (size_t)result_; };
    std::vector<float> share((size_t)group.stretches);
    for (int32_t h = 0; h < per_group_; h++) {
      float most = of(0)[h], total = 0;
      for (int32_t s = 1; s < group.stretches; s++) most = std::max(most, of(s)[h]);
      for (int32_t s = 0; s < group.stretches; s++) {
        share[(size_t)s] = std::exp(of(s)[h] - most);
        total += of(s)[per_group_ + h] * share[(size_t)s];
      }
      const int64_t head = (int64_t)(unit.group * per_group_ + h) * a_.value_size;
      for (int32_t i = 0; i < a_.value_size; i++) {
        float sum = 0;
        for (int32_t s = 0; s < group.stretches; s++)
          sum += of(s)[2 * per_group_ + h * a_.value_size + i] * share[(size_t)s];
        set_element(past.out, head + i, a_.type, (double)(sum / total));
      }
    }
  }

  const KernelTable& kernels_;
  const Attention& a_;
  int32_t per_group_ = 0, result_ = 0;  // heads; numbers of a unit's result
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
