// Routing: rows per expert, their order, and which of a token's rows is its first and its last.
#include "check.h"
#include "kernels/table.h"
#include "moe/route.h"

using namespace kt;

namespace {

Routing routed(const std::vector<int64_t>& ids, int32_t top_k, int32_t experts, const int32_t* adapter = nullptr,
               const uint8_t* skip = nullptr) {
  std::vector<float> weights(ids.size());
  for (size_t n = 0; n < ids.size(); n++) weights[n] = (float)n;
  Batch b;
  b.tokens = (int32_t)ids.size() / top_k, b.top_k = top_k;
  b.ids = ids.data(), b.ids_64 = true, b.ids_stride = top_k;
  b.weights = weights.data(), b.weights_stride = top_k;
  b.adapter = adapter, b.skip = skip;
  Routing r;
  route(b, experts, r);
  return r;
}

std::string words(const std::vector<int32_t>& numbers) {
  std::ostringstream text;
  for (size_t n = 0; n < numbers.size(); n++) text << (n ? " " : "") << numbers[n];
  return text.str();
}

}  // namespace

TEST(route_sorts_by_expert_then_token) {
  Routing r = routed({2, 0, 0, 1, 2, 0}, 2, 3);
  CHECK_EQ(r.segments.size(), 3u);
  CHECK_EQ(words({r.segments[0].begin, r.segments[1].begin, r.segments[2].begin}), "0 3 4");
  CHECK_EQ(words(r.token), "0 1 2 1 0 2");
  CHECK((r.weight == std::vector<double>{1, 2, 5, 3, 0, 4}));
  CHECK((r.mark == std::vector<uint8_t>{kFirst, kFirst, kFirst, kLast, kLast, kLast}));
  CHECK(r.idle.empty());
}

TEST(route_skips_foreign_and_skipped_experts) {
  const uint8_t skip[] = {0, 1, 0};
  Routing r = routed({-1, 3, 1, 1, 2, -5, int64_t{1} << 40, 0}, 2, 3, nullptr, skip);
  CHECK_EQ(words(r.token), "3 2");
  CHECK_EQ(words(r.idle), "0 1");
  for (uint8_t mark : r.mark) CHECK_EQ((int)mark, kFirst | kLast);
}

TEST(route_same_expert_twice_and_nothing_at_all) {
  Routing r = routed({1, 1, 1}, 3, 2);
  CHECK_EQ(words(r.token), "0 0 0");
  CHECK((r.mark == std::vector<uint8_t>{kFirst, 0, kLast}));
  r = routed({}, 1, 2);
  CHECK(r.segments.empty() && r.token.empty() && r.idle.empty());
}

TEST(route_sorts_by_adapter_inside_an_expert) {
  const int32_t adapter[] = {1, -1, 0, -1, 1};
  Routing r = routed({0, 0, 0, 0, 0}, 1, 1, adapter);
  CHECK_EQ(words(r.token), "1 3 2 0 4");
}

TEST(route_reads_strides_and_half_weights) {
  const int32_t ids[] = {0, 9, 1, 9};
  const uint16_t weights[] = {0x3f80, 0, 0x4000, 0};
  Batch b;
  b.tokens = 2, b.top_k = 1;
  b.ids = ids, b.ids_stride = 2;
  b.weights = weights, b.weights_dtype = DType::bf16, b.weights_stride = 2;
  Routing r;
  route(b, 2, r);
  CHECK((r.weight == std::vector<double>{1, 2}));
  const uint16_t halves[] = {0x3c00, 0, 0x0001, 0};  // 1 and the smallest subnormal
  b.weights = halves, b.weights_dtype = DType::f16;
  route(b, 2, r);
  CHECK((r.weight == std::vector<double>{1, 0x1p-24f}));
}
