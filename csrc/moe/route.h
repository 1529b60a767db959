// Maps expert ids per token to rows per expert.
//
// Rows are sorted by expert, then by adapter, then by token: an expert's rows are contiguous, and so are an adapter's
// inside them. A row is marked as the first or the last contribution to its token in that order, which is the order of
// summation, so a token's result does not depend on the other tokens of the batch, except for whether its experts have
// few enough rows for packed GEMV (Task::uses_packed_gemv).
#pragma once

#include <cstdint>
#include <vector>

#include "types.h"

namespace kt {

// Inputs and output of a call. Ids outside [0, E) and experts with skip[e] != 0 are not computed by this call.
struct Batch {
  int32_t tokens = 0, top_k = 0;
  const void* hidden = nullptr;  // [T, H]
  DType hidden_dtype = DType::bf16;
  int64_t hidden_stride = 0;  // elements from row to row, as all strides here
  const void* ids = nullptr;  // [T, k] int32 or int64
  bool ids_64 = false;
  int64_t ids_stride = 0;
  const void* weights = nullptr;  // [T, k]
  DType weights_dtype = DType::f32;
  int64_t weights_stride = 0;
  const int32_t* adapter = nullptr;  // [T], -1 for none; null: `every_adapter` for all
  int32_t every_adapter = -1;
  double dropout = 0;  // probability of dropping an element of LoRA's inputs
  uint64_t dropout_seed = 0;
  bool w8a8 = false;              // forward: int8 activations; needs an empty Experts::w8a8_unsupported
  bool needs_grad = false;        // forward: a backward pass follows and must see the same (rounded) weights
  const uint8_t* skip = nullptr;  // [E]
  void* out = nullptr;            // [T, H]
  DType out_dtype = DType::bf16;
  int64_t out_stride = 0;
};

// The rows of one expert.
struct Segment {
  int32_t expert, begin, count;
};

// Rows of a segment that use one adapter; rows without an adapter are in no run.
struct Run {
  int32_t segment, adapter;
  int32_t first, count;  // counted from the segment's first row
};

struct Routing {
  std::vector<Segment> segments;  // experts that have rows, ascending
  std::vector<Run> runs;          // by segment, then by adapter
  std::vector<int32_t> run0;      // [segments + 1] first run of each
  std::vector<int32_t> token;     // [rows]
  std::vector<int32_t> slot;      // [rows] which of the token's k
  std::vector<double> weight;     // [rows]
  std::vector<uint8_t> mark;      // [rows] kFirst | kLast of kernels/table.h
  std::vector<int32_t> idle;      // tokens without any row: their output is zero
  std::vector<uint32_t> dropout_seeds_x,
      dropout_seeds_h;  // [rows] seeds of the dropout of gate/up's and down's LoRA; or empty

 private:
  friend void route(const Batch& batch, int32_t experts, Routing& routing);
  std::vector<int32_t> expert_, start_, left_, order_;  // buffers of the sort, reused between calls
  std::vector<uint8_t> seen_;
};

void route(const Batch& batch, int32_t experts, Routing& routing);

}  // namespace kt
