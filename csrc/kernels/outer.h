// Gradients of LoRA's factors contract over rows: c[r][n] += sum over m of p[m][r] * q[m][n], n a block of 32 columns.
//
// One of the two matrices is a few numbers wide, so the arithmetic is small beside the layer's own products, and the
// vector units take it in f32 from rows as they lie: a matrix unit would want the rows in pairs, and bringing them
// there costs as much as the multiplication.
#pragma once

#include "kernels/gemm.h"

namespace kt {
namespace {

// `ranks` rows of c by NV vectors of columns, over all rows of p and q.
template <int W, int NV, int ranks, DType type>
inline void outer_columns(const Outer& o, const char* const* q, int64_t q_at, int rank, int column) {
  F32<W> acc[ranks][NV];
  float* c = o.c + rank * o.c_stride + column;
  for (int r = 0; r < ranks; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = load<F32<W>>(c + r * o.c_stride + v * W);
  const float* p = o.p + rank;
  for (int m = 0; m < o.rows; m++, p += o.rank) {
    F32<W> x[NV];
    for (int v = 0; v < NV; v++) x[v] = load_as_f32<W>(q[m] + q_at, column + v * W, type);
    for (int r = 0; r < ranks; r++)
      for (int v = 0; v < NV; v++) acc[r][v] += p[r] * x[v];
  }
  for (int r = 0; r < ranks; r++)
    for (int v = 0; v < NV; v++) store(c + r * o.c_stride + v * W, acc[r][v]);
}

template <class Isa, DType type>
inline void outer_block_of(const Outer& o, const char* const* q, int64_t q_at) {
  constexpr int W = Isa::width, NV = 2, ranks = W == 16 ? kRankStep : kRankStep / 2;
  for (int rank = 0; rank < o.rank; rank += ranks)
    for (int column = 0; column < kBlockN; column += NV * W)
      outer_columns<W, NV, ranks, type>(o, q, q_at, rank, column);
}

template <class Isa>
inline void outer_block(const Outer& o, const char* const* q, int64_t q_at) {
  if (o.dtype == DType::bf16) return outer_block_of<Isa, DType::bf16>(o, q, q_at);
  if (o.dtype == DType::f16) return outer_block_of<Isa, DType::f16>(o, q, q_at);
  outer_block_of<Isa, DType::f32>(o, q, q_at);
}

template <class Isa>
void run_outer(const Outer& o) {
  if (o.width >= kBlockN) return outer_block<Isa>(o, o.q, o.q_at);
  // The last columns of a tensor: a row at a time, in a block of its own, zero past the end.
  alignas(64) char edge[kBlockN * 4] = {};
  const char* row = edge;
  Outer one = o;
  one.rows = 1;
  for (int m = 0; m < o.rows; m++) {
    __builtin_memcpy(edge, o.q[m] + o.q_at, o.width * size_of(o.dtype));
    one.p = o.p + (int64_t)m * o.rank;
    outer_block<Isa>(one, &row, 0);
  }
}

}  // namespace
}  // namespace kt
