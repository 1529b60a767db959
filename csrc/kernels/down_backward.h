// Backward through an expert without a stored transposed copy of any matrix.
//
// A product with a transposed matrix is the forward product on transposed blocks, which are made in scratch on demand,
// 2 KB at a time, and used for all tokens of the expert: pairs along K become pairs along N by two 16-bit shuffles a
// row and a transpose of dwords (transpose_blocks.h). This file adds the epilogue: the activation's derivative.
#pragma once

#include "kernels/gemm.h"

namespace kt {
namespace {

// Derivative of the activation at g.
template <class V, Activation A>
inline V activation_derivative(V g, double alpha) {
  V one = splat<V>(1.0);
  if constexpr (A == Activation::silu) {
    V s = sigmoid<V>(g);
    return s * (one + g * (one - s));
  }
  if constexpr (A == Activation::swiglu_oai) {
    V s = sigmoid<V>(g * splat<V>(alpha));
    return s * (one + splat<V>(alpha) * g * (one - s));
  }
  if constexpr (A == Activation::gelu) {
    V density = splat<V>(0.39894228040143268) * vexp<V>(splat<V>(-0.5) * g * g);
    return gelu_phi<V>(g) + g * density;
  }
  if constexpr (A == Activation::gelu_tanh) {
    V square = g * g;
    V s = sigmoid<V>(splat<V>(1.5957691216057307) * g * (one + splat<V>(0.044715) * square));
    return s + g * s * (one - s) * splat<V>(1.5957691216057307) * (one + splat<V>(3 * Lane<V>(0.044715)) * square);
  }
  return splat<V>(2.0) * vmax<V>(g, splat<V>(0.0));
}

// Gradients dg and du from dh; returns h, for the routing weight's gradient.
template <class V, Activation A>
inline V gated_backward(V g, V u, V dh, const Gate& gate, V& dg, V& du) {
  V zero = splat<V>(0.0), g_passes = splat<V>(1.0), u_passes = g_passes;
  if (gate.limit > 0) {
    V l = splat<V>(gate.limit);
    g_passes = select<V>(g > l, zero, g_passes);
    u_passes = select<V>(u > l, zero, select<V>(u < -l, zero, u_passes));
    g = vmin<V>(g, l);
    u = vmin<V>(vmax<V>(u, -l), l);
  }
  if constexpr (A == Activation::swiglu_oai) u = u + splat<V>(1.0);
  V a = activate<V, A>(g, gate.alpha);
  dg = dh * u * activation_derivative<V, A>(g, gate.alpha) * g_passes;
  du = dh * a * u_passes;
  return a * u;
}

// Activation backward for one row of a product. Its 32 columns are one gate/up block or, where a block holds 16 of gate
// beside 16 of up, two, whose gradients are `next_block` bytes apart. Never inlined, for the reason given at
// hidden_row.
template <class Isa, Activation A, bool gated>
__attribute__((noinline)) void activation_backward_row(const typename Isa::Real* c, double weight, const Gate& gate,
                                                       const char* keep, char* grad, int64_t next_block, char* hidden,
                                                       char* weight_grad) {
  using V = typename Isa::Vector;
  V sum = splat<V>(0.0), scale = splat<V>(weight);
  constexpr int halves = gated ? 2 : 1, width = kBlockN / halves;
#pragma GCC unroll 2
  for (int half = 0; half < halves; half++, keep += kBlockN * Isa::elem, grad += next_block)
    for (int i = 0; i < width; i += Isa::width) {
      V d = load<V>(c + half * width + i), g = get_element<Isa>(keep, i), h, dg;
      if constexpr (gated) {
        V u = get_element<Isa>(keep, kTileN + i), du;
        h = gated_backward<V, A>(g, u, d * scale, gate, dg, du);
        put_element<Isa>(grad, kTileN + i, du);
      } else {
        h = activate<V, A>(g, gate.alpha);
        dg = d * scale * activation_derivative<V, A>(g, gate.alpha);
      }
      sum += d * h;
      put_element<Isa>(grad, i, dg);
      if (hidden) put_element<Isa>(hidden, half * width + i, h);
    }
  *(typename Isa::Real*)weight_grad = sum_of_lanes<V>(sum);
}

template <class Isa, Activation A>
void run_down_backward_as(const DownBackward& b) {
  using Real = typename Isa::Real;
  int64_t block_sums = (int64_t)b.tiling.tiles * b.tiling.rows * kBlockN;
  int buffer = 0;
  ProductOf<Real> current = {};
  auto place_sums = [&](ProductOf<Real>& p) {
    current = p;
    p.accumulate = !b.first;
    p.c = b.first && b.last ? (Real*)b.scratch + (buffer ^= 1) * kPassTiles * kMaxRows * kBlockN
                            : (Real*)b.sums + (p.block - b.block0) * block_sums + (int64_t)p.tile * p.rows * kBlockN;
  };
  auto epilogue = [&](const ProductOf<Real>& p, int first, int end) {
    const Gate gate = b.gate;
    const int halves = gate.gated ? 2 : 1, rows = p.rows, last = current.live - 1;
    const int64_t row_bytes = kTileK * Isa::elem, block = row_bytes * rows, row0 = (int64_t)p.tile * rows;
    const int64_t grad_tile = block * b.grad_k_tiles, hidden_tile = block * b.hidden_k_tiles;
    const int64_t keep_stride = b.keep_stride, weight_grad_stride = b.weight_grad_stride * (int64_t)sizeof(Real);
    const int64_t row_bytes_of_block = halves * row_bytes;  // bytes of a row in the blocks of gate/up
    const char *keep = b.keep + row0 * keep_stride + p.block * row_bytes_of_block,
               *next_keep = b.keep + (int64_t)current.tile * rows * keep_stride + current.block * row_bytes_of_block;
    char *grad = b.grad + p.tile * grad_tile + p.block * halves * block,
         *weight_grad = b.weight_grad + row0 * weight_grad_stride + p.block * (int64_t)sizeof(Real),
         *hidden = b.hidden ? b.hidden + p.tile * hidden_tile + p.block * block : nullptr;
    const double* weight = b.weight + row0;
    const auto finish_row =
        gate.gated ? &activation_backward_row<Isa, A, true> : &activation_backward_row<Isa, A, false>;
    for (int r = first; r < end; r++) {
      // Kept rows are too far apart for the hardware prefetcher: those of the current product are prefetched.
      const char* ahead = next_keep + (r < last ? r : last) * keep_stride;
      for (int64_t line = 0; line < row_bytes_of_block; line += 64) __builtin_prefetch(ahead + line, 0, 3);
      const int second = r >= rows;
      const int64_t at = (r - second * rows) * row_bytes;
      finish_row(p.c + r * kBlockN, weight[r], gate, keep + r * keep_stride, grad + second * grad_tile + at, block,
                 hidden ? hidden + second * hidden_tile + at : nullptr, weight_grad + r * weight_grad_stride);
    }
  };
  for_each_product<Isa, true>(b, b.last, nullptr, &b.transposed, b.dropout, place_sums, epilogue);
}

template <class Isa>
void run_down_backward(const DownBackward& b) {
  switch (b.gate.kind) {
    case Activation::silu:
      return run_down_backward_as<Isa, Activation::silu>(b);
    case Activation::gelu:
      return run_down_backward_as<Isa, Activation::gelu>(b);
    case Activation::gelu_tanh:
      return run_down_backward_as<Isa, Activation::gelu_tanh>(b);
    case Activation::relu2:
      return run_down_backward_as<Isa, Activation::relu2>(b);
    case Activation::swiglu_oai:
      return run_down_backward_as<Isa, Activation::swiglu_oai>(b);
    case Activation::none:
      return;  // not an activation of experts
  }
}

}  // namespace
}  // namespace kt
