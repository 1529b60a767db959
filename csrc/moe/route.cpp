// A counting sort over T * k entries: two walks over the ids, no comparison, no allocation once the vectors have grown.
#include "moe/route.h"

#include <algorithm>
#include <numeric>

#include "kernels/table.h"

namespace kt {
namespace {

int64_t expert_at(const Batch& b, int32_t token, int32_t slot) {
  int64_t at = token * b.ids_stride + slot;
  return b.ids_64 ? ((const int64_t*)b.ids)[at] : ((const int32_t*)b.ids)[at];
}

float weight_at(const Batch& b, int32_t token, int32_t slot) {
  int64_t at = token * b.weights_stride + slot;
  if (b.weights_dtype == DType::f32) return ((const float*)b.weights)[at];
  return to_float(((const uint16_t*)b.weights)[at], b.weights_dtype);
}

bool is_here(const Batch& b, int64_t expert, int32_t experts) {
  return expert >= 0 && expert < experts && !(b.skip && b.skip[expert]);
}

// Tokens in the order in which they enter their experts: by adapter, then as they come.
std::vector<int32_t> arrival_order(const Batch& b) {
  std::vector<int32_t> order((size_t)b.tokens);
  std::iota(order.begin(), order.end(), 0);
  if (b.adapter)
    std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return b.adapter[x] < b.adapter[y]; });
  return order;
}

}  // namespace

void route(const Batch& b, int32_t experts, Routing& r) {
  std::vector<int32_t> start((size_t)experts + 1), left((size_t)b.tokens);
  for (int32_t t = 0; t < b.tokens; t++)
    for (int32_t s = 0; s < b.top_k; s++)
      if (int64_t e = expert_at(b, t, s); is_here(b, e, experts)) start[(size_t)e + 1]++, left[(size_t)t]++;

  r.segments.clear();
  for (int32_t e = 0; e < experts; e++) {
    int32_t count = start[(size_t)e + 1];
    start[(size_t)e + 1] += start[(size_t)e];
    if (count) r.segments.push_back({e, start[(size_t)e], count});
  }
  size_t rows = (size_t)start.back();
  r.token.resize(rows);
  r.slot.resize(rows);
  r.weight.resize(rows);
  r.mark.resize(rows);
  for (int32_t t : arrival_order(b))
    for (int32_t s = 0; s < b.top_k; s++)
      if (int64_t e = expert_at(b, t, s); is_here(b, e, experts)) {
        size_t row = (size_t)start[(size_t)e]++;
        r.token[row] = t;
        r.slot[row] = s;
        r.weight[row] = weight_at(b, t, s);
      }

  r.idle.clear();
  for (int32_t t = 0; t < b.tokens; t++)
    if (!left[(size_t)t]) r.idle.push_back(t);
  std::vector<uint8_t> seen((size_t)b.tokens);
  for (size_t row = 0; row < rows; row++) {
    size_t t = (size_t)r.token[row];
    r.mark[row] = (uint8_t)((seen[t] ? 0 : kFirst) | (--left[t] == 0 ? kLast : 0));
    seen[t] = 1;
  }
}

}  // namespace kt
