// Argmax of each row of logits [rows, columns], for greedy decoding.
#pragma once

#include "threads.h"
#include "types.h"

namespace kt {

// The first index where several are the largest; a NaN is larger than any number. `type` is bf16 or f32, `stride` in
// elements.
void argmax(Pool& pool, const void* x, DType type, int64_t rows, int64_t columns, int64_t stride, int64_t* index);

}  // namespace kt
