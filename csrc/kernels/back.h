// Backward through an expert with the weights as they lie: no transposed copy of a matrix exists anywhere.
//
// A product with a transposed matrix is the forward product on transposed blocks (turning.h), and those are made beside
// the products that need them. What is left to do here is the way back through the activation.
#pragma once

#include "kernels/gemm.h"

namespace kt {
namespace {

// The activation and its slope at g.
template <class V, Activation A>
inline V slope(V g, double alpha) {
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

// dh meets gate and up: their gradients, and h for the routing weight's.
template <class V, Activation A>
inline V back_gated(V g, V u, V dh, const Gate& gate, V& dg, V& du) {
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
  dg = dh * u * slope<V, A>(g, gate.alpha) * g_passes;
  du = dh * a * u_passes;
  return a * u;
}

template <class Isa, Activation A>
void run_back_as(const Back& b) {
  using Real = typename Isa::Real;
  using V = typename Isa::Vector;
  int64_t block_sums = (int64_t)b.tiling.tiles * b.tiling.rows * kBlockN;
  int64_t row_bytes = kTileK * Isa::elem, tile_bytes = row_bytes * b.tiling.rows * b.grad_k_tiles;
  int turn = 0, halves = b.gate.gated ? 2 : 1;
  auto where = [&](ProductOf<Real>& p) {
    p.accumulate = !b.first;
    p.c = b.first && b.last ? (Real*)b.scratch + (turn ^= 1) * kPassTiles * kMaxRows * kBlockN
                            : (Real*)b.sums + (p.block - b.block0) * block_sums + (int64_t)p.tile * p.rows * kBlockN;
  };
  auto finish = [&](const ProductOf<Real>& p, int r, const Real* c) {
    int64_t row = (int64_t)p.tile * p.rows + r;
    int second = r >= p.rows;
    V sum = splat<V>(0.0), scale = splat<V>(b.weight[row]);
    char* hidden = nullptr;
    if (b.hidden)
      hidden = b.hidden + ((p.tile + second) * (int64_t)b.hidden_k_tiles + p.block) * row_bytes * p.rows +
               (r - second * p.rows) * row_bytes;
    // The 32 columns are one block of gate/up, or two where a block holds 16 of gate beside 16 of up.
    for (int half = 0; half < halves; half++) {
      int block = p.block * halves + half;
      const char* keep = b.keep + row * b.keep_stride + (int64_t)block * kBlockN * Isa::elem;
      char* out =
          b.grad + (p.tile + second) * tile_bytes + block * row_bytes * p.rows + (r - second * p.rows) * row_bytes;
      for (int i = 0; i < kBlockN / halves; i += Isa::width) {
        V d = load<V>(c + half * kTileN + i), g = get_element<Isa>(keep, i), dg, du;
        V h;
        if (b.gate.gated) {
          V u = get_element<Isa>(keep, kTileN + i);
          h = back_gated<V, A>(g, u, d * scale, b.gate, dg, du);
          put_element<Isa>(out, kTileN + i, du);
        } else {
          h = activate<V, A>(g, b.gate.alpha);
          dg = d * scale * slope<V, A>(g, b.gate.alpha);
        }
        sum += d * h;
        put_element<Isa>(out, i, dg);
        if (hidden) put_element<Isa>(hidden, half * kTileN + i, h);
      }
    }
    Real total = 0;
    for (int i = 0; i < Isa::width; i++) total += sum[i];
    ((Real*)b.part)[row * b.part_stride + p.block] = total;
  };
  for_each_product<Isa>(b, b.last, nullptr, b.drop, where, finish);
}

template <class Isa>
void run_back(const Back& b) {
  switch (b.gate.kind) {
    case Activation::silu:
      return run_back_as<Isa, Activation::silu>(b);
    case Activation::gelu:
      return run_back_as<Isa, Activation::gelu>(b);
    case Activation::gelu_tanh:
      return run_back_as<Isa, Activation::gelu_tanh>(b);
    case Activation::relu2:
      return run_back_as<Isa, Activation::relu2>(b);
    case Activation::swiglu_oai:
      return run_back_as<Isa, Activation::swiglu_oai>(b);
    case Activation::none:
      return;  // no expert has it
  }
}

}  // namespace
}  // namespace kt
