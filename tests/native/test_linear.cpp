// GEMV, norm and LoRA of few rows on every variant against double, with the same bits for a row whatever others are in
// the batch; argmax; transpose.
#include "check.h"
#include "moe/argmax.h"
#include "moe/linear.h"
#include "moe/transpose.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

// Two matrices in one job, for every number of tokens that a variant takes.
void check_products(Pool& pool, const KernelTable& kernels, DType type, int64_t columns, bool own_x) {
  constexpr int64_t kOutputs[] = {67, 16};
  std::mt19937 random(5);
  std::vector<Numbers> weights;
  for (int64_t outputs : kOutputs) weights.emplace_back((size_t)(outputs * columns), 1.0, DType::bf16, random);
  Numbers x((size_t)(kernels.gemv_max_tokens * columns), 1.0, type, random);
  Numbers other((size_t)(kernels.gemv_max_tokens * columns), 1.0, type, random);
  const Numbers* inputs[] = {&x, own_x ? &other : &x};
  std::vector<char> first[2];
  for (int32_t tokens = 1; tokens <= kernels.gemv_max_tokens; tokens++) {
    std::vector<char> out[2];
    std::vector<Matrix> matrices;
    for (size_t m = 0; m < 2; m++) {
      out[m].resize((size_t)(tokens * kOutputs[m]) * size_of(type));
      matrices.push_back(
          {inputs[m]->bytes.data(), weights[m].bytes.data(), columns * 2, kOutputs[m], out[m].data(), kOutputs[m]});
    }
    multiply(pool, kernels, {columns, columns, type, tokens, matrices.data(), 2});
    for (size_t m = 0; m < 2; m++) {
      for (int32_t t = 0; t < tokens; t++)
        for (int64_t n = 0; n < kOutputs[m]; n++) {
          double sum = 0;
          for (int64_t k = 0; k < columns; k++)
            sum += inputs[m]->values[(size_t)(t * columns + k)] * weights[m].values[(size_t)(n * columns + k)];
          double actual = element_of<double>(out[m].data(), t * kOutputs[m] + n, type);
          CHECK(std::abs(sum - actual) < (type == DType::f32 ? 5e-4 : std::max(1.0, std::abs(sum)) / 128));
        }
      // A token's bits are those that it had as the last of fewer.
      CHECK(std::equal(first[m].begin(), first[m].end(), out[m].begin()));
      first[m] = out[m];
    }
  }
}

}  // namespace

TEST(linear_every_variant) {
  PoolOptions options;
  options.threads = 3;
  Pool pool(options);
  for (const KernelTable* kernels : all_kernels()) {
    CHECK((kernels->precision == Precision::bf16) == (kernels->gemv_rows != nullptr));
    if (!kernels->gemv_rows) continue;
    for (DType type : {DType::f32, DType::bf16})
      for (int64_t columns : {32, 96, 4160})
        for (bool own_x : {false, true}) check_products(pool, *kernels, type, columns, own_x);
  }
}

TEST(norm_every_variant) {
  std::mt19937 random(6);
  for (const KernelTable* kernels : all_kernels()) {
    CHECK((kernels->precision == Precision::bf16) == (kernels->norm != nullptr));
    if (!kernels->norm) continue;
    for (DType type : {DType::f32, DType::bf16})
      for (int64_t size : {1, 16, 67, 128}) {
        constexpr int64_t rows = 3;
        Numbers x((size_t)(rows * size), 1.0, type, random), weight((size_t)size, 1.0, type, random);
        std::vector<char> out(x.bytes.size());
        kernels->norm({x.bytes.data(), weight.bytes.data(), out.data(), type, rows, size, 1e-6f});
        for (int64_t r = 0; r < rows; r++) {
          double squares = 0;
          for (int64_t i = 0; i < size; i++) squares += std::pow(x.values[(size_t)(r * size + i)], 2);
          for (int64_t i = 0; i < size; i++) {
            double want = x.values[(size_t)(r * size + i)] / std::sqrt(squares / (double)size + 1e-6);
            want *= weight.values[(size_t)i];
            double actual = element_of<double>(out.data(), r * size + i, type);
            CHECK(std::abs(actual - want) <= (type == DType::f32 ? 2e-6 : 1e-2) * std::max(1.0, std::abs(want)));
          }
        }
      }
  }
}

TEST(lora_gemv_every_variant) {
  std::mt19937 random(7);
  constexpr int64_t rows = 2, rank = 3;
  for (const KernelTable* kernels : all_kernels()) {
    CHECK((kernels->precision == Precision::bf16) == (kernels->lora_gemv != nullptr));
    if (!kernels->lora_gemv) continue;
    for (DType type : {DType::f32, DType::bf16})
      for (int64_t k : {5, 64})
        for (int64_t columns : {1, 16, 37}) {
          Numbers x((size_t)(rows * k), 1.0, type, random), out((size_t)(rows * columns), 1.0, type, random);
          Numbers a((size_t)(rank * k), 1.0, DType::f32, random), b((size_t)(rank * columns), 1.0, DType::f32, random);
          std::vector<float> scratch(rank);
          kernels->lora_gemv({x.bytes.data(), out.bytes.data(), k, columns, type, (const float*)a.bytes.data(),
                              (const float*)b.bytes.data(), rows, k, rank, columns, 0.5f, scratch.data()});
          for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++) {
              double want = out.values[(size_t)(row * columns + column)];
              for (int64_t r = 0; r < rank; r++) {
                double sum = 0;
                for (int64_t i = 0; i < k; i++) sum += x.values[(size_t)(row * k + i)] * a.values[(size_t)(r * k + i)];
                want += 0.5 * sum * b.values[(size_t)(r * columns + column)];
              }
              double actual = element_of<double>(out.bytes.data(), row * columns + column, type);
              CHECK(std::abs(actual - want) <= (type == DType::f32 ? 1e-5 : 1e-2) * std::max(1.0, std::abs(want)));
            }
        }
  }
}

TEST(argmax_of_each_row) {
  PoolOptions options;
  options.threads = 3;
  Pool pool(options);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  for (DType type : {DType::bf16, DType::f32}) {
    constexpr int64_t columns = 40000;  // more than two parts
    const std::vector<std::pair<std::vector<std::pair<int64_t, double>>, int64_t>> rows = {
        {{{7, 2.0}, {20000, 3.0}, {39999, 3.0}}, 20000},
        {{{0, -0.0}, {1, 0.0}}, 0},
        {{{3, inf}, {5, inf}}, 3},
        {{{3, inf}, {20001, -nan}, {39000, nan}}, 20001},
        {{}, 0},
    };
    std::vector<char> x(rows.size() * columns * size_of(type));
    for (size_t r = 0; r < rows.size(); r++) {
      for (int64_t c = 0; c < columns; c++)
        set_element(x.data(), (int64_t)r * columns + c, type, rows[r].first.empty() ? -inf : -1.0 - (double)(c % 5));
      for (auto [c, value] : rows[r].first) set_element(x.data(), (int64_t)r * columns + c, type, value);
    }
    std::vector<int64_t> actual(rows.size());
    argmax(pool, x.data(), type, (int64_t)rows.size(), columns, columns, actual.data());
    for (size_t r = 0; r < rows.size(); r++) CHECK(actual[r] == rows[r].second);
  }
}

TEST(transpose_any_size) {
  PoolOptions options;
  options.threads = 3;
  Pool pool(options);
  for (int64_t rows : {1, 16, 37})
    for (int64_t columns : {1, 64, 131}) {
      std::vector<uint32_t> from((size_t)(rows * columns)), to(from.size());
      for (size_t i = 0; i < from.size(); i++) from[i] = (uint32_t)i;
      transpose(pool, from.data(), to.data(), rows, columns, 4);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) CHECK(to[(size_t)(c * rows + r)] == from[(size_t)(r * columns + c)]);
    }
}
