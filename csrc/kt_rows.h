// The rows of kt-kernel's AMXINT8 and AMXINT4: integer codes with one float32 scale for each row, by the rule of its
// converter (src/ktransformers/checkpoint/kt_codes.py has the definition).
#pragma once

#include <cstdint>

namespace kt {

struct KtRows {
  const void* data;  // [rows, columns], columns side by side
  bool bf16;         // or float32
  int64_t stride;    // elements from one row to the next
  int64_t rows, columns;
};

// Writes `codes` int8 [rows, columns], or `paired` bytes [rows, columns / 2] of two codes of 4 bits (each plus 8, the
// even column in the low half), and `scales` [rows]. False if a number is not finite; what was written is no use then.
bool quantise_kt_rows(const KtRows& source, int bits, bool paired, void* codes, float* scales);

}  // namespace kt
