// Arguments of the kernels of table.h that decoding needs besides experts: linear layers for a few rows, attention over
// the KV cache, RMS norm, and LoRA on linear layers. Tensors are f32 or bf16 with row strides; nothing is packed, and
// results have the type of the input.
#pragma once

#include "types.h"

namespace kt {

// x W^T for a few rows of x and a matrix W of bf16 rows; K is a multiple of kGemvK. `pack_rows` first brings the rows
// of x into the order in which a variant multiplies them: bf16 rows may be multiplied in bf16, f32 rows stay f32.
constexpr int32_t kGemvK = 32, kGemvGroup = 16;  // kGemvGroup: matrix rows that are read together
struct PackRows {
  const void* x;   // [tokens][K]
  DType type;      // bf16 or f32
  int64_t stride;  // elements
  int32_t k, tokens;
  char* out;  // packed_rows_bytes(tokens, k) bytes, aligned to 64
};
constexpr int64_t packed_rows_bytes(int64_t tokens, int64_t k) { return tokens * k * 4; }

struct Gemv {
  const char* weights;
  int64_t weight_stride;  // bytes from row to row
  int32_t rows;           // of the matrix
  int32_t k, tokens;
  const char* x;  // as packed by pack_rows
  DType type;     // of x before packing, and of out
  char* out;      // [tokens][out_stride] elements, `rows` of them
  int64_t out_stride;
  bool cold;         // the first rows have not been prefetched
  const char* next;  // matrix rows that this thread reads next, or null
};

// Tokens of a block of the paged KV cache.
constexpr int32_t kBlockTokens = 64;

// Attention of one query per head of a GQA group over a split of at most kAttentionSplit keys and values (as in
// FlashDecoding), which lie in blocks of kBlockTokens. Head sizes are multiples of kHeadSizeStep.
constexpr int32_t kAttentionSplit = 512, kHeadSizeStep = 16;
static_assert(kAttentionSplit % kBlockTokens == 0);
struct AttentionSplit {
  const float* query;                       // [heads][key_size], scaled
  const char *const *keys, *const *values;  // of each block: its first token of the split
  int64_t key_stride, value_stride;         // bytes from token to token
  DType type;                               // bf16 or f32, of both
  int32_t heads, key_size, value_size;
  int32_t skipped;             // tokens of the first block before those of the split
  int32_t count;               // of keys, 1 to kAttentionSplit
  float* scores;               // [heads][kAttentionSplit], scratch
  float *max_score, *exp_sum;  // [heads]: the largest score; the sum of e^(score - max_score)
  float* out;                  // [heads][value_size]: the sum of e^(score - max_score) v
};

// Rows of a KV cache in codes of e4m3, each with a scale of e8m0, as bf16. That is exact: a code has four significant
// bits, and scales are powers of two.
struct CacheRows {
  const uint8_t *codes, *scales;
  int64_t stride;      // of codes, from row to row; scales are adjacent
  int32_t rows, size;  // size: a multiple of kHeadSizeStep
  char* out;           // [rows][size]
};

// RMS norm: rows divided by their root mean square, rounded, times a weight; x, weight and out have one type, bf16 or
// f32.
struct Norm {
  const char *x, *weight;
  char* out;
  DType type;
  int64_t rows, size;
  float epsilon;
};

// out [rows][columns] += scale * (x [rows][k] A^T) B with A [rank][k] and B [rank][columns] in f32; x and out have one
// type, bf16 or f32.
struct LoraGemv {
  const char* x;
  char* out;
  int64_t x_stride, out_stride;  // elements from row to row
  DType type;
  const float *a, *b;
  int64_t rows, k, rank, columns;
  float scale;
  float* xa;  // x A^T of one row, [rank], scratch
};

}  // namespace kt
