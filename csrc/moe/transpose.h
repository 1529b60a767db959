// [rows, columns] -> [columns, rows], by all threads of a pool: gradients of LoRA's B on their way to PEFT, whose
// experts are the innermost dimension.
#pragma once

#include "threads.h"

namespace kt {

// Both dense, of elements of 2, 4 or 8 bytes.
void transpose(Pool& pool, const void* from, void* to, int64_t rows, int64_t columns, int64_t element);

}  // namespace kt
