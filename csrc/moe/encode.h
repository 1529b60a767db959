// Encodes one matrix of one expert on the calling thread: callers have a matrix for every thread.
#pragma once

#include "kernels/table.h"

namespace kt {

// Where codes and scales go, laid out as in `Released`.
struct EncodedMatrix {
  uint8_t* codes;
  int64_t row_bytes;
  char* scales;  // null for blocks of GGUF
  int64_t scale_stride;
  float* tensor;  // scale of the whole matrix, where the format has one
};

// `source` [rows, k] has k_stride 1. Throws Interrupted. Where `finite` is false the result is to be thrown away.
EncodeSums encode_matrix(const KernelTable& kernels, const Format& format, const Source& source, int32_t rows,
                         int32_t k, const EncodedMatrix& to);

}  // namespace kt
