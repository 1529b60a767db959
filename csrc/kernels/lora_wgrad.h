// Weight gradients of LoRA's factors, a contraction over rows: c[r][n] += sum over m of p[m][r] * q[m][n].
//
// p is only a rank wide, so the arithmetic is small compared with the layer's own products, and this file does it with
// vectors (isa_amx.cpp with tiles). Both operands are first converted to the type of the sums in contiguous scratch:
// rows of q are scattered, and every few ranks read them again. Sums are stored 4 ranks x 32 columns at a time,
// transposed in registers where the tensor has the ranks innermost.
#pragma once

#include "kernels/gemm.h"

namespace kt {
namespace {

// 32 columns of one row of q; columns past the end are zero.
inline const char* block_of_row(const LoraWgrad& o, int m, int column, char (&edge)[kBlockN * 8]) {
  const char* from = o.q[m] + column / kBlockN * o.q_block;
  int left = o.columns - column;
  if (left >= kBlockN) return from;
  __builtin_memset(edge, 0, sizeof edge);
  __builtin_memcpy(edge, from, left * size_of(o.dtype));
  return edge;
}

// Converts columns [column, end) of row m.
template <class V>
inline void widen_row(const LoraWgrad& o, int m, int column, int end, Lane<V>* out) {
  alignas(64) char edge[kBlockN * 8];
  for (; column < end; column += kBlockN, out += kBlockN) {
    const char* from = block_of_row(o, m, column, edge);
    for (int i = 0; i < kBlockN; i += kLanes<V>) {
      V v = load_as<V>(from, i, o.dtype);
      if (o.dropout.seeds) v = apply_dropout<V>(v, o.dropout, o.dropout.seeds[m], o.column + column + i);
      store(out + i, v);
    }
  }
}

// Ranks [rank, rank + W) of row m, times the row's weight.
template <class V, DType panel>
inline V ranks_of_row(const LoraWgrad& o, int m, int rank) {
  V v = load_as<V>(o.p[m] + rank / kTileK * o.p_block, rank % kTileK, panel);
  return o.weight ? v * splat<V>(o.weight[m]) : v;
}

// The operands in scratch: p [rows][p_stride], q [kWideRows][kWideStride].
template <class Real>
struct WgradOperands {
  const Real *p, *q;
  int64_t p_stride;
};

// Accumulates `ranks` rows of c by NV vectors of columns, over `rows` rows of both operands.
template <class V, int NV, int ranks>
inline void wgrad_columns(const LoraWgrad& o, const WgradOperands<Lane<V>>& s, bool first, int rows, int rank,
                          int column) {
  V acc[ranks][NV];
  using Real = Lane<V>;
  Real* c = (Real*)o.c + rank * o.c_stride + column;
  for (int r = 0; r < ranks; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = first ? V{} : load<V>(c + r * o.c_stride + v * kLanes<V>);
  const Real *p = s.p + rank, *q = s.q + column % kWideColumns;
  for (int m = 0; m < rows; m++, p += s.p_stride, q += kWideStride) {
    V x[NV];
    for (int v = 0; v < NV; v++) x[v] = load<V>(q + v * kLanes<V>);
    for (int r = 0; r < ranks; r++)
      for (int v = 0; v < NV; v++) acc[r][v] += p[r] * x[v];
  }
  for (int r = 0; r < ranks; r++)
    for (int v = 0; v < NV; v++) store(c + r * o.c_stride + v * kLanes<V>, acc[r][v]);
}

// `ranks` by NV vectors of sums are in registers.
template <class V, DType panel, int ranks = kLanes<V> == 16 ? kRankStep : kRankStep / 2>
void run_lora_wgrad(const LoraWgrad& o) {
  using Real = Lane<V>;
  constexpr int W = kLanes<V>, NV = 2;
  int64_t p_stride = round_up(o.rank, kTileN);
  Real *p = (Real*)o.scratch, *q = p + kWgradRows * p_stride;
  for (int m = 0; m < o.rows; m++)
    for (int rank = 0; rank < o.rank; rank += W) store(p + m * p_stride + rank, ranks_of_row<V, panel>(o, m, rank));
  for (int row0 = 0; row0 < o.rows; row0 += kWideRows)
    for (int column0 = 0; column0 < o.columns; column0 += kWideColumns) {
      int rows = o.rows - row0 < kWideRows ? o.rows - row0 : kWideRows;
      int end = o.columns - column0 < kWideColumns ? o.columns : column0 + kWideColumns;
      for (int m = 0; m < rows; m++) widen_row<V>(o, row0 + m, column0, end, q + m * kWideStride);
      WgradOperands<Real> operands{p + row0 * p_stride, q, p_stride};
      for (int column = column0; column < end; column += NV * W)
        for (int rank = 0; rank < o.rank; rank += ranks)
          wgrad_columns<V, NV, ranks>(o, operands, o.first && !row0, rows, rank, column);
    }
}

constexpr int kStoreRanks = 4;  // stored at a time

// Stores `columns` values contiguously.
template <class V>
inline void store_contiguous(const StoreGrad& d, int64_t at, const Lane<V>* from, int columns) {
  int i = 0;
  for (; i + kLanes<V> <= columns; i += kLanes<V>) store_as<V>(d.data, at + i, d.dtype, load<V>(from + i));
  for (; i < columns; i++) set_element(d.data, at + i, d.dtype, from[i]);
}

// Stores four ranks of `columns` columns with the ranks innermost.
inline void store_transposed(const StoreGrad& d, int64_t at, const float* from, int columns) {
  using Four = F32<4>;
  using Order = I32<4>;
  int i = 0;
  for (; i + 4 <= columns; i += 4) {
    const float* p = from + i;
    Four r0 = load<Four>(p), r1 = load<Four>(p + kBlockN);
    Four r2 = load<Four>(p + 2 * kBlockN), r3 = load<Four>(p + 3 * kBlockN);
    Four a = __builtin_shuffle(r0, r1, Order{0, 4, 1, 5}), b = __builtin_shuffle(r2, r3, Order{0, 4, 1, 5});
    Four c = __builtin_shuffle(r0, r1, Order{2, 6, 3, 7}), e = __builtin_shuffle(r2, r3, Order{2, 6, 3, 7});
    int64_t to = at + i * d.n_stride;
    store_as<Four>(d.data, to, d.dtype, __builtin_shuffle(a, b, Order{0, 1, 4, 5}));
    store_as<Four>(d.data, to + d.n_stride, d.dtype, __builtin_shuffle(a, b, Order{2, 3, 6, 7}));
    store_as<Four>(d.data, to + 2 * d.n_stride, d.dtype, __builtin_shuffle(c, e, Order{0, 1, 4, 5}));
    store_as<Four>(d.data, to + 3 * d.n_stride, d.dtype, __builtin_shuffle(c, e, Order{2, 3, 6, 7}));
  }
  for (; i < columns; i++)
    for (int r = 0; r < kStoreRanks; r++) set_element(d.data, at + i * d.n_stride + r, d.dtype, from[r * kBlockN + i]);
}

// `order` restores the column order of 32 sums of a row.
template <class V, class Order>
void store_grad_sums(const StoreGrad& d, const Order& order) {
  using Real = Lane<V>;
  constexpr int NV = kBlockN / kLanes<V>;
  alignas(64) Real rows[kStoreRanks][kBlockN];
  for (int n = 0; n < d.count; n += d.each)
    for (int rank = 0; rank < d.ranks; rank += kStoreRanks) {
      int ranks = d.ranks - rank < kStoreRanks ? d.ranks - rank : kStoreRanks;
      int columns = d.count - n < d.each ? d.count - n : d.each;
      const Real* c = (const Real*)d.c + rank * d.c_stride + n / d.each * kBlockN;
      for (int r = 0; r < ranks; r++) {
        V v[NV];
        for (int i = 0; i < NV; i++) v[i] = load<V>(c + r * d.c_stride + i * kLanes<V>);
        order(v);
        for (int i = 0; i < NV; i++) store(rows[r] + i * kLanes<V>, v[i] * splat<V>(d.scale));
      }
      int64_t at = rank * d.r_stride + n * d.n_stride;
      if (d.n_stride == 1) {
        for (int r = 0; r < ranks; r++) store_contiguous<V>(d, at + r * d.r_stride, rows[r] + d.from, columns);
        continue;
      }
      if constexpr (!kDouble<V>)
        if (d.r_stride == 1 && ranks == kStoreRanks) {
          store_transposed(d, at, rows[0] + d.from, columns);
          continue;
        }
      for (int r = 0; r < ranks; r++)
        for (int i = 0; i < columns; i++)
          set_element(d.data, at + r * d.r_stride + i * d.n_stride, d.dtype, rows[r][d.from + i]);
    }
}

}  // namespace
}  // namespace kt
