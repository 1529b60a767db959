// A matrix of a linear layer in the bits of its format: out = x W^T for any number of rows, and rows of W again.
//
// The blocks are those of down in experts (weights.h), and so are the kernels: few rows are multiplied with the codes
// as they lie, many with dequantised tiles.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "moe/task.h"

namespace kt {

struct LinearRows {
  const void* x;  // [tokens, K]
  void* out;      // [tokens, N], the same dtype
  DType dtype;
  int64_t x_stride, out_stride;  // elements
  int32_t tokens;
};

// Products of heads: rows [first, first + count) of every `step` rows of W belong to one head after the other, and each
// head has rows of x of its own. `along_rows`: sums run over these rows, x is [heads, tokens, count] and out [heads,
// tokens, K]; else over K, x is [heads, tokens, K] and out [heads, tokens, count].
struct HeadProducts {
  LinearRows rows;           // of head 0
  int64_t x_head, out_head;  // elements from head to head
  int32_t heads, first, count, step;
  bool along_rows;
};
constexpr int32_t kMaxHeadRows = 1024;  // tokens: along rows, every thread widens those of a head to float32

class CodedLinear {
 public:
  CodedLinear(int32_t rows, int32_t columns, const Format& format, const KernelTable& kernels,
              std::shared_ptr<Engine> engine);

  // On the pool. Throws std::runtime_error while another call reads the weights, and so do the others while they are
  // packed.
  void pack(const Released& source);
  bool packed() const { return packed_; }  // since the last pack(), which may have been interrupted
  void multiply(const LinearRows& rows) const;
  // In one job. A row of x has the same result whatever other rows there are.
  void multiply_heads(const HeadProducts& products) const;
  // Products of several weights with a few rows each in one job, at least one product; for any pool, of whose threads
  // each takes scratch of its own. Rows that several products share are written once.
  struct Product {
    const CodedLinear* linear;
    LinearRows rows;
  };
  static std::unique_ptr<Job> product_job(const std::vector<Product>& products);
  // Rows of W by number, in bf16, or as the codes have them in f32: [count, K].
  void decode(const int64_t* rows, int64_t count, DType dtype, char* out) const;
  // Instead of packing: the blocks of another, in its order; they may be read-only.
  void adopt(const char* blocks, std::shared_ptr<const void> owner);
  uint32_t checksum() const;                              // CRC-32C of the blocks
  void check_source() const { check_mapping(mapping_); }  // throws DamagedFile if pages of an adopted file were lost
  const BlockStore& store() const { return store_; }
  // Rows of x are rounded to int8, each 32 columns with a scale of their own (packed_gemv_int16.h).
  bool supports_w8a8() const;
  bool w8a8() const { return w8a8_.load(std::memory_order_relaxed); }  // read once by a call
  void set_w8a8(bool on) { w8a8_.store(on, std::memory_order_relaxed); }

  int32_t rows() const { return rows_; }
  int32_t columns() const { return columns_; }
  size_t bytes() const { return store_.bytes(); }
  const char* isa() const { return kernels_.name; }

 private:
  struct Panel;
  class PackJob;
  class GatherJob;
  class ProductJob;
  class DecodeJob;
  class HeadsJob;
  class JointJob;
  class Read;
  struct Range;
  template <class Act>
  static void for_each_pass(const LinearRows& rows, int32_t step, const Act& act);
  void multiply_pass(const LinearRows& rows, bool x_int8) const;
  void multiply_range(const Panel& panel, const Range& range, const char* next, char* slice) const;
  int32_t pass_rows(DType dtype, bool x_int8) const;  // the most rows of a pass

  int32_t rows_, columns_;
  const KernelTable& kernels_;
  std::shared_ptr<Engine> engine_;
  BlockStore store_;
  Readers readers_;
  bool packed_ = false, adopted_ = false;
  std::atomic<bool> w8a8_{false};
  const Mapping* mapping_ = nullptr;  // of the file that holds the blocks, or null
};

}  // namespace kt
