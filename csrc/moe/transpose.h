// Transposes [rows, columns] to [columns, rows] with all threads of a pool: gradients of LoRA's B for PEFT, whose
// layout has the experts innermost.
#pragma once

#include "threads.h"

namespace kt {

// Both contiguous, of elements of 2, 4 or 8 bytes.
void transpose(Pool& pool, const void* from, void* to, int64_t rows, int64_t columns, int64_t element);

}  // namespace kt
