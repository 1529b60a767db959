// Gradients of LoRA's factors contract over rows: c[r][n] += sum over m of p[m][r] * q[m][n].
//
// One of the two matrices is a few numbers wide, so the arithmetic is small beside the layer's own products, and here
// the vector units do it. The wide rows are first written out in the type of the sums, side by side: they come from far
// apart, and every few ranks read them again.
#pragma once

#include "kernels/gemm.h"

namespace kt {
namespace {

// 32 columns of one row, as far as they exist; what is missing is zero.
inline const char* block_of_row(const Outer& o, int m, int column, char (&edge)[kBlockN * 8]) {
  const char* from = o.q[m] + column / kBlockN * o.q_block;
  int left = o.columns - column;
  if (left >= kBlockN) return from;
  __builtin_memset(edge, 0, sizeof edge);
  __builtin_memcpy(edge, from, left * size_of(o.dtype));
  return edge;
}

// Columns [column, end) of row m.
template <class V>
inline void widen_row(const Outer& o, int m, int column, int end, Lane<V>* out) {
  alignas(64) char edge[kBlockN * 8];
  for (; column < end; column += kBlockN, out += kBlockN) {
    const char* from = block_of_row(o, m, column, edge);
    for (int i = 0; i < kBlockN; i += kLanes<V>) {
      V v = load_as<V>(from, i, o.dtype);
      if (o.drop.row) v = thinned<V>(v, o.drop, o.drop.row[m], o.column + column + i);
      store(out + i, v);
    }
  }
}

// `ranks` rows of c by NV vectors of columns, over `rows` rows of p and of the scratch.
template <class V, int NV, int ranks>
inline void outer_columns(const Outer& o, int row0, int rows, int rank, int column) {
  V acc[ranks][NV];
  using Real = Lane<V>;
  Real* c = (Real*)o.c + rank * o.c_stride + column;
  for (int r = 0; r < ranks; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = load<V>(c + r * o.c_stride + v * kLanes<V>);
  const Real *p = (const Real*)o.p + (int64_t)row0 * o.rank + rank, *q = (const Real*)o.scratch + column % kWideColumns;
  for (int m = 0; m < rows; m++, p += o.rank, q += kWideStride) {
    V x[NV];
    for (int v = 0; v < NV; v++) x[v] = load<V>(q + v * kLanes<V>);
    for (int r = 0; r < ranks; r++)
      for (int v = 0; v < NV; v++) acc[r][v] += p[r] * x[v];
  }
  for (int r = 0; r < ranks; r++)
    for (int v = 0; v < NV; v++) store(c + r * o.c_stride + v * kLanes<V>, acc[r][v]);
}

template <class V>
void run_outer(const Outer& o) {
  constexpr int W = kLanes<V>, NV = 2, ranks = W == 16 ? kRankStep : kRankStep / 2;
  for (int row0 = 0; row0 < o.rows; row0 += kWideRows)
    for (int column0 = 0; column0 < o.columns; column0 += kWideColumns) {
      int rows = o.rows - row0 < kWideRows ? o.rows - row0 : kWideRows;
      int end = o.columns - column0 < kWideColumns ? o.columns : column0 + kWideColumns;
      for (int m = 0; m < rows; m++) widen_row<V>(o, row0 + m, column0, end, (Lane<V>*)o.scratch + m * kWideStride);
      for (int column = column0; column < end; column += NV * W)
        for (int rank = 0; rank < o.rank; rank += ranks) outer_columns<V, NV, ranks>(o, row0, rows, rank, column);
    }
}

}  // namespace
}  // namespace kt
