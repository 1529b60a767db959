// The wgrad contraction of LoRA's factors and the store of its sums, kernel by kernel against double: every variant,
// rows of tensors and of panels, dtypes, and layouts of the caller's tensor.
#include "check.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

struct Case {
  int32_t rows, rank, columns;
  DType dtype;       // of q
  int32_t in_panel;  // rows of a tile where q is a panel; 0: rows of a tensor
  bool weighted;
};

// A rank panel p and rows q in the layouts that the kernel takes, and their values.
struct Operands {
  std::vector<std::vector<char>> p, q;
  std::vector<const char*> p_at, q_at;
  std::vector<double> p_values, q_values;  // [rows][rank], [rows][columns]
  std::vector<double> weight;
  int64_t p_block, q_block;

  Operands(const Case& c, const KernelTable& kernels, std::mt19937& random) {
    std::normal_distribution<double> normal(0, 1);
    auto element = [&](char* to, int64_t at, DType type, std::vector<double>& values) {
      set_element(to, at, type, normal(random));
      values.push_back(element_of<double>(to, at, type));
    };
    // Ranks are in blocks of 32, padded with zeros; blocks are not adjacent.
    p_block = 3 * kTileK * kernels.elem;
    for (int32_t m = 0; m < c.rows; m++) {
      p.emplace_back((size_t)(ceil_div(c.rank, kTileK) * p_block), 0);
      for (int32_t r = 0; r < c.rank; r++)
        element(p.back().data() + r / kTileK * p_block, r % kTileK, kernels.panel, p_values);
      weight.push_back(normal(random));
    }
    int64_t block = kBlockN * (int64_t)size_of(c.dtype);
    q_block = c.in_panel ? c.in_panel * block : block;
    for (int32_t m = 0; m < c.rows; m++) {
      q.emplace_back((size_t)(c.in_panel ? ceil_div(c.columns, kBlockN) * q_block : c.columns * block / kBlockN), 0);
      for (int32_t n = 0; n < c.columns; n++)
        element(q.back().data() + n / kBlockN * q_block, n % kBlockN, c.dtype, q_values);
    }
    for (int32_t m = 0; m < c.rows; m++) p_at.push_back(p[(size_t)m].data()), q_at.push_back(q[(size_t)m].data());
  }
};

// Layout of element (r, n) of the sums in the tensor.
struct Place {
  bool ranks_inside;  // [n][r], else [r][n]
  int64_t spacing;    // elements between neighbours: 1, or more in a strided tensor
  DType dtype;
  int32_t from, each;
};

void check_store_grad(const KernelTable& kernels, const std::vector<char>& sums, int64_t c_stride, const Case& c,
                      const std::vector<double>& expected, double limit, const Place& place) {
  const double scale = 0.75;
  // The ranks to store may begin and end anywhere.
  int32_t first = c.rank > 8 ? 5 : 0, ranks = c.rank - first - (c.rank > 16 ? 2 : 0);
  int32_t blocks = (int32_t)ceil_div(c.columns, kBlockN);
  int32_t count = place.each == kBlockN ? c.columns : std::min(c.columns / 2, blocks * place.each);
  int64_t r_stride = place.ranks_inside ? place.spacing : count * place.spacing + 3;
  int64_t n_stride = place.ranks_inside ? ranks * place.spacing + 1 : place.spacing;
  std::vector<char> to((size_t)((ranks * r_stride + count * n_stride + 64) * 8), 0x11), untouched = to;
  StoreGrad d{sums.data() + first * c_stride * kernels.sum_bytes,
              c_stride,
              ranks,
              place.from,
              place.each,
              count,
              scale,
              to.data(),
              place.dtype,
              r_stride,
              n_stride};
  kernels.store_grad(d);
  double rounding = place.dtype == DType::bf16 ? 8e-3 : place.dtype == DType::f16 ? 1e-3 : 1e-6, worst = 0;
  size_t size = size_of(place.dtype);
  for (int32_t r = 0; r < ranks; r++)
    for (int32_t n = 0; n < count; n++) {
      int32_t column = n / place.each * kBlockN + place.from + n % place.each;
      int64_t at = r * r_stride + n * n_stride;
      double actual = element_of<double>(to.data(), at, place.dtype);
      double want = column < c.columns ? scale * expected[(size_t)((first + r) * c.columns + column)] : actual;
      worst = std::max(worst, std::abs(actual - want) / (limit + rounding * std::abs(want)));
      std::memcpy(to.data() + (size_t)at * size, untouched.data(), size);
    }
  CHECK(worst < 1);
  CHECK(to == untouched);  // nothing else was written
}

void check_wgrad(const KernelTable& kernels, const Case& c) {
  std::mt19937 random(3);
  Operands operands(c, kernels, random);
  // Wider than the columns, and filled with NaN that must not be read.
  int64_t c_stride = round_up(c.columns, kBlockN) + 16;
  std::vector<char> sums((size_t)(round_up(c.rank, kTileN) * c_stride * kernels.sum_bytes), (char)0xff);
  std::vector<char> scratch((size_t)wgrad_scratch(c.rank, kernels.sum_bytes) + 64, (char)0xff);
  LoraWgrad o{};
  o.p = operands.p_at.data(), o.p_block = operands.p_block;
  o.weight = c.weighted ? operands.weight.data() : nullptr;
  o.rows = c.rows, o.rank = c.rank;
  o.q = operands.q_at.data(), o.q_block = operands.q_block;
  o.dtype = c.dtype, o.columns = c.columns;
  o.first = true;
  o.c = sums.data(), o.c_stride = c_stride;
  o.scratch = scratch.data() + (64 - (uintptr_t)scratch.data() % 64) % 64;
  kernels.lora_wgrad(o);
  o.first = false;
  kernels.lora_wgrad(o);  // accumulates the same again

  std::vector<double> expected((size_t)(c.rank * c.columns));
  for (int32_t m = 0; m < c.rows; m++)
    for (int32_t r = 0; r < c.rank; r++) {
      double p = 2 * operands.p_values[(size_t)(m * c.rank + r)] * (c.weighted ? operands.weight[(size_t)m] : 1);
      for (int32_t n = 0; n < c.columns; n++)
        expected[(size_t)(r * c.columns + n)] += p * operands.q_values[(size_t)(m * c.columns + n)];
    }
  // Tiles round the weighted operand and anything that is not bf16 to bf16: 2^-9 of every product at most, and products
  // of three normal numbers have long tails.
  double unit = kernels.panel == DType::bf16 ? 4e-2 : kernels.sums == DType::f64 ? 1e-12 : 1e-5;
  double limit = unit * std::sqrt((double)c.rows);
  check_store_grad(kernels, sums, c_stride, c, expected, limit, {false, 1, DType::f32, 0, kBlockN});
  check_store_grad(kernels, sums, c_stride, c, expected, limit, {true, 1, DType::f32, 0, kBlockN});
  check_store_grad(kernels, sums, c_stride, c, expected, limit, {false, 1, DType::bf16, 0, kBlockN});
  check_store_grad(kernels, sums, c_stride, c, expected, limit, {true, 1, DType::bf16, 0, kTileN});
  check_store_grad(kernels, sums, c_stride, c, expected, limit, {true, 1, DType::f16, kTileN, kTileN});
  check_store_grad(kernels, sums, c_stride, c, expected, limit, {true, 3, DType::f64, 0, kBlockN});
}

const std::vector<Case> kCases = {
    {1, 8, 32, DType::bf16, 0, false},    {2, 16, 33, DType::bf16, 0, true},     {33, 24, 96, DType::bf16, 7, true},
    {128, 8, 1100, DType::bf16, 0, true}, {65, 16, 416, DType::bf16, 16, false}, {31, 40, 64, DType::f32, 0, false},
    {47, 8, 200, DType::f16, 0, true},    {70, 16, 1088, DType::f32, 0, true},
};

}  // namespace

TEST(lora_wgrad_every_variant) {
  for (const KernelTable* kernels : all_kernels())
    for (Case c : kCases) {
      // A panel has the variant's type.
      if (c.in_panel) c.dtype = kernels->panel;
      check_wgrad(*kernels, c);
    }
}
