// A matrix of a linear layer in the bits of its format: out = x W^T for any number of rows, and W in bf16 again.
//
// The blocks are those of down in experts (weights.h), and so are the kernels: few rows are multiplied with the codes
// as they lie, many with dequantised tiles.
#pragma once

#include <memory>

#include "moe/task.h"

namespace kt {

struct LinearRows {
  const void* x;  // [tokens, K]
  void* out;      // [tokens, N], the same dtype
  DType dtype;
  int64_t x_stride, out_stride;  // elements
  int32_t tokens;
};

class CodedLinear {
 public:
  CodedLinear(int32_t rows, int32_t columns, const Format& format, const KernelTable& kernels,
              std::shared_ptr<Engine> engine);

  // On the pool. Throws std::runtime_error while another call reads the weights, and so do the others while they are
  // packed.
  void pack(const Released& source);
  bool packed() const { return packed_; }  // since the last pack(), which may have been interrupted
  void multiply(const LinearRows& rows) const;
  void decode(int32_t first, int32_t count, char* out) const;  // rows of W in bf16, `first` a multiple of 32

  int32_t rows() const { return rows_; }
  int32_t columns() const { return columns_; }
  size_t bytes() const { return store_.bytes(); }
  const char* isa() const { return kernels_.name; }

 private:
  struct Panel;
  class PackJob;
  class GatherJob;
  class ProductJob;
  class Read;
  void multiply_pass(const LinearRows& rows) const;

  int32_t rows_, columns_;
  const KernelTable& kernels_;
  std::shared_ptr<Engine> engine_;
  BlockStore store_;
  Readers readers_;
  bool packed_ = false;
};

}  // namespace kt
