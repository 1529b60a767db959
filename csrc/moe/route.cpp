// A counting sort over T * k entries: two sweeps, no comparison, no allocation once the vectors have grown.
#include "moe/route.h"

#include <algorithm>
#include <numeric>

#include "kernels/table.h"

namespace kt {
namespace {

// The expert of every entry, -1 if it is not local, and counts per expert and per token. The caller's ids are read only
// once: a concurrent write to them may give wrong sums, but no access out of bounds.
template <class Id>
void read_ids(const Batch& b, int32_t experts, int32_t* expert, int32_t* count, int32_t* left) {
  for (int32_t t = 0; t < b.tokens; t++) {
    const Id* ids = (const Id*)b.ids + t * b.ids_stride;
    for (int32_t s = 0; s < b.top_k; s++) {
      Id e = ids[s];
      bool local = e >= 0 && e < experts && !(b.skip && b.skip[e]);
      *expert++ = local ? (int32_t)e : -1;
      if (local) count[e]++, left[t]++;
    }
  }
}

// Tokens in the order in which they enter their experts: by adapter, then by index.
void order_by_adapter(const Batch& b, std::vector<int32_t>& order) {
  order.resize((size_t)b.tokens);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return b.adapter[x] < b.adapter[y]; });
}

// The runs of every segment, whose rows are sorted by adapter.
void make_runs(const Batch& b, Routing& r) {
  r.runs.clear();
  r.run0.assign(1, 0);
  for (size_t s = 0; s < r.segments.size(); s++) {
    const Segment& segment = r.segments[s];
    if (!b.adapter && b.every_adapter >= 0) r.runs.push_back({(int32_t)s, b.every_adapter, 0, segment.count});
    for (int32_t i = 0; b.adapter && i < segment.count; i++) {
      int32_t adapter = b.adapter[r.token[(size_t)(segment.begin + i)]];
      if (adapter < 0) continue;
      bool same = (int32_t)r.runs.size() > r.run0.back() && r.runs.back().adapter == adapter;
      if (!same) r.runs.push_back({(int32_t)s, adapter, i, 0});
      r.runs.back().count++;
    }
    r.run0.push_back((int32_t)r.runs.size());
  }
}

// A token's seeds depend on the token and its slot alone, not on the other tokens of the batch.
uint32_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (uint32_t)((x ^ (x >> 31)) >> 32);
}

void make_dropout_seeds(const Batch& b, Routing& r) {
  size_t rows = b.dropout > 0 && !r.runs.empty() ? r.token.size() : 0;
  r.dropout_seeds_x.resize(rows);
  r.dropout_seeds_h.resize(rows);
  for (size_t row = 0; row < rows; row++) {
    uint64_t place = (uint64_t)r.token[row] * (uint64_t)b.top_k + (uint64_t)r.slot[row];
    r.dropout_seeds_x[row] = mix(b.dropout_seed + 0x9e3779b97f4a7c15u * (2 * place + 1));
    r.dropout_seeds_h[row] = mix(b.dropout_seed + 0x9e3779b97f4a7c15u * (2 * place + 2));
  }
}

}  // namespace

void route(const Batch& b, int32_t experts, Routing& r) {
  size_t entries = (size_t)b.tokens * (size_t)b.top_k;
  r.start_.assign((size_t)experts + 1, 0);
  r.left_.assign((size_t)b.tokens, 0);
  r.expert_.resize(entries);
  auto read = b.ids_64 ? read_ids<int64_t> : read_ids<int32_t>;
  read(b, experts, r.expert_.data(), r.start_.data() + 1, r.left_.data());

  r.segments.clear();
  for (int32_t e = 0; e < experts; e++) {
    int32_t count = r.start_[(size_t)e + 1];
    r.start_[(size_t)e + 1] += r.start_[(size_t)e];
    if (count) r.segments.push_back({e, r.start_[(size_t)e], count});
  }
  size_t rows = (size_t)r.start_.back();
  r.token.resize(rows);
  r.slot.resize(rows);
  r.weight.resize(rows);
  r.mark.resize(rows);
  if (b.adapter) order_by_adapter(b, r.order_);
  for (int32_t n = 0; n < b.tokens; n++) {
    int32_t t = b.adapter ? r.order_[(size_t)n] : n;
    for (int32_t s = 0; s < b.top_k; s++)
      if (int32_t e = r.expert_[(size_t)t * (size_t)b.top_k + (size_t)s]; e >= 0) {
        size_t row = (size_t)r.start_[(size_t)e]++;
        r.token[row] = t;
        r.slot[row] = s;
        r.weight[row] = element_of<double>(b.weights, t * b.weights_stride + s, b.weights_dtype);
      }
  }

  make_runs(b, r);
  make_dropout_seeds(b, r);
  r.idle.clear();
  for (int32_t t = 0; t < b.tokens; t++)
    if (!r.left_[(size_t)t]) r.idle.push_back(t);
  r.seen_.assign((size_t)b.tokens, 0);
  for (size_t row = 0; row < rows; row++) {
    size_t t = (size_t)r.token[row];
    r.mark[row] = (uint8_t)((r.seen_[t] ? 0 : kFirst) | (--r.left_[t] == 0 ? kLast : 0));
    r.seen_[t] = 1;
  }
}

}  // namespace kt
