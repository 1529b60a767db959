// What a model has besides experts when it decodes, as it crosses the door of table.h: a few rows through a linear
// layer, attention over keys and values as they lie, norms, and LoRA on linear layers. Numbers are f32 or bf16 in rows
// of their own strides; nothing here is packed, and results are of the type that came in.
#pragma once

#include "types.h"

namespace kt {

// A few rows times a matrix of bf16 rows; K a multiple of kNarrowK. First the rows are laid out as a variant multiplies
// them (`pack_rows`), which depends on their type: bf16 rows may meet the weights in bf16, f32 rows stay f32.
constexpr int32_t kGemvK = 32, kGemvGroup = 16;  // rows of the matrix that are read together
struct PackRows {
  const void* x;   // [tokens][K]
  DType type;      // bf16 or f32
  int64_t stride;  // elements
  int32_t k, tokens;
  char* out;  // spread_bytes(tokens, k), aligned to 64
};
constexpr int64_t packed_rows_bytes(int64_t tokens, int64_t k) { return tokens * k * 4; }

struct Gemv {
  const char* weights;
  int64_t weight_stride;  // bytes from row to row
  int32_t rows;           // of the matrix
  int32_t k, tokens;
  const char* x;  // as spread
  DType type;     // of x before, and of out
  char* out;      // [tokens][out_stride] elements, `rows` of them
  int64_t out_stride;
  bool cold;         // nobody has fetched the first rows
  const char* next;  // rows that this thread will read after these, or null
};

// One query of each head of a group against a stretch of keys and values. Sizes are multiples of kHeadSizeStep.
constexpr int32_t kAttentionSplit = 512, kHeadSizeStep = 16;
struct AttentionSplit {
  const float* query;  // [heads][key_size], scaled
  const char *keys, *values;
  int64_t key_stride, value_stride;  // bytes from token to token
  DType type;                        // bf16 or f32, of both
  int32_t heads, key_size, value_size;
  int32_t count;               // of keys, 1 to kAttentionSplit
  float* scores;               // [heads][kAttentionSplit], scratch
  float *max_score, *exp_sum;  // [heads]: the largest score; the sum of e^(score - most)
  float* out;                  // [heads][value_size]: the sum of e^(score - most) v
};

// Rows divided by their root mean square, rounded, times a weight: x, weight and out of one type, bf16 or f32.
struct Norm {
  const char *x, *weight;
  char* out;
  DType type;
  int64_t rows, size;
  float epsilon;
};

// out [rows][columns] += scale * (x [rows][k] A^T) B with A [rank][k] and B [rank][columns] in f32; x and out of one
// type, bf16 or f32.
struct LoraGemv {
  const char* x;
  char* out;
  int64_t x_stride, out_stride;  // elements from row to row
  DType type;
  const float *a, *b;
  int64_t rows, k, rank, columns;
  float scale;
  float* xa;  // [rank], scratch
};

}  // namespace kt
