// Backward through an expert with the weights as they lie: no transposed copy of a matrix exists anywhere.
//
// A product with a transposed matrix is the forward product on transposed blocks, and those are made in scratch when
// they are needed, 2 KB at a time, and used for all tokens of the expert: pairs along K become pairs along N, with two
// 16-bit shuffles a row and a transpose of dwords. What remains is the way back through the activation.
#pragma once

#include "kernels/gemm.h"
#include "kernels/turned_bytes.h"

namespace kt {
namespace {

// Four k of eight n: from two rows of pairs along k to four rows of pairs along n.
inline void turn_square(const char* in, char* out) {
  using Four = U32<4>;
  Four turned[4];
  for (int row = 0; row < 2; row++) {
    Four a = load<Four>(in + row * 64), b = load<Four>(in + row * 64 + 16);
    Four even = __builtin_shuffle(a, b, Four{0, 2, 4, 6}), odd = __builtin_shuffle(a, b, Four{1, 3, 5, 7});
    turned[2 * row] = (even & 0xffffu) | (odd << 16);
    turned[2 * row + 1] = (even >> 16) | (odd & 0xffff0000u);
  }
  Four a = __builtin_shuffle(turned[0], turned[1], Four{0, 4, 1, 5});
  Four b = __builtin_shuffle(turned[2], turned[3], Four{0, 4, 1, 5});
  Four c = __builtin_shuffle(turned[0], turned[1], Four{2, 6, 3, 7});
  Four d = __builtin_shuffle(turned[2], turned[3], Four{2, 6, 3, 7});
  store(out, __builtin_shuffle(a, b, Four{0, 1, 4, 5}));
  store(out + 64, __builtin_shuffle(a, b, Four{2, 3, 6, 7}));
  store(out + 128, __builtin_shuffle(c, d, Four{0, 1, 4, 5}));
  store(out + 192, __builtin_shuffle(c, d, Four{2, 3, 6, 7}));
}

// in: two tiles [16 pairs of k][16 n], n 0-15 and 16-31; out: two tiles [16 pairs of n][16 k], k 0-15 and 16-31.
inline void turn_tiles(const char* in, char* out) {
  for (int half = 0; half < 2; half++)
    for (int n = 0; n < kTileN; n += 8)
      for (int k = 0; k < kTileK; k += 4) {
        const char* from = in + half * kTileBytes + (k / 2) * 64 + n * 4;
        turn_square(from, out + (k / kTileN) * kTileBytes + (half * 8 + n / 2) * 64 + (k % kTileN) * 4);
      }
}

// The same with whole rows in registers. Sixteen bytes of each of four rows make a register, so that the transpose of
// 16 x 16 dwords has two stages left, inside those quarters; which rows come together is chosen such that the last
// stage, which pairs neighbours along n, leaves k in order.
#ifdef __AVX512F__
template <int W>
inline U32<W> quarters(const char* a, const char* b, const char* c, const char* d) {
  // Inserting from memory needs no shuffle unit; the compiler's own way of joining vectors would.
  __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)a));
  all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i*)b), 1);
  all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i*)c), 2);
  return (U32<W>)_mm512_inserti32x4(all, _mm_loadu_si128((const __m128i*)d), 3);
}
#else
template <int W>
inline U32<W> quarters(const char* a, const char* b, const char* c, const char* d) {
  char all[64];
  __builtin_memcpy(all, a, 16);
  __builtin_memcpy(all + 16, b, 16);
  __builtin_memcpy(all + 32, c, 16);
  __builtin_memcpy(all + 48, d, 16);
  return load<U32<W>>(all);
}
#endif

// Elements of a and b in turns, from the lower or the upper half of every quarter.
template <int W, class V, bool upper>
inline U32<W> in_turns(U32<W> a, U32<W> b) {
  V order;
  constexpr int count = sizeof(V) / sizeof(order[0]), per = count / 4;
  for (int i = 0; i < count; i++)
    order[i] = (decltype(order[0] + 0))(i / per * per + i % per / 2 + (upper ? per / 2 : 0) + (i % 2) * count);
  return (U32<W>)__builtin_shuffle((V)a, (V)b, order);
}

template <int W>
inline void turn_tiles_wide(const char* in, char* out) {
  using Words = typename Vec<W>::pairs;
  using Doubles = typename Vec<W>::u64;
  for (int half = 0; half < 2; half++, in += kTileBytes)
    for (int n = 0; n < kTileN; n += 4) {
      U32<W> x[4];  // quarter q: of pairs 2q, 2q + 1, 8 + 2q, 9 + 2q
      for (int i = 0; i < 4; i++) {
        const char* at = in + ((i & 1) + (i >> 1) * 8) * 64 + n * 4;
        x[i] = quarters<W>(at, at + 2 * 64, at + 4 * 64, at + 6 * 64);
      }
      U32<W> a = in_turns<W, U32<W>, false>(x[0], x[1]), b = in_turns<W, U32<W>, true>(x[0], x[1]);
      U32<W> c = in_turns<W, U32<W>, false>(x[2], x[3]), d = in_turns<W, U32<W>, true>(x[2], x[3]);
      U32<W> n0 = in_turns<W, Doubles, false>(a, c), n1 = in_turns<W, Doubles, true>(a, c);
      U32<W> n2 = in_turns<W, Doubles, false>(b, d), n3 = in_turns<W, Doubles, true>(b, d);
      char* to = out + (half * 8 + n / 2) * 64;
      store(to, in_turns<W, Words, false>(n0, n1));
      store(to + kTileBytes, in_turns<W, Words, true>(n0, n1));
      store(to + 64, in_turns<W, Words, false>(n2, n3));
      store(to + kTileBytes + 64, in_turns<W, Words, true>(n2, n3));
    }
}

// Neighbouring blocks lie far apart, where no hardware follows: each is brought into L2 while the eighth before it is
// turned, and into L1 while the one before is.
constexpr int kTurnAhead = 8;

template <int W>
inline void turn_blocks(const Transpose& t) {
  for (int i = 0; i < t.count; i++) {
    const char* in = t.in + (int64_t)i * (int64_t)t.in_stride;
    for (int line = 0; i + kTurnAhead < t.count && line < 2 * kTileBytes; line += 64)
      __builtin_prefetch(in + kTurnAhead * (int64_t)t.in_stride + line, 0, 2);
    for (int line = 0; i + 1 < t.count && line < 2 * kTileBytes; line += 64)
      __builtin_prefetch(in + t.in_stride + line, 0, 3);
    char* out = t.out + (int64_t)i * 2 * kTileBytes;
    if constexpr (W == 16) {
      turn_tiles_wide<W>(in, out);
    } else {
      turn_tiles(in, out);
    }
  }
}

// The tiles of the exact kinds, [32 k][16 n]: each half of n becomes rows of both tiles.
template <class Real>
inline void turn_plain(const Transpose& t) {
  constexpr int tile = kTileK * kTileN;
  for (int i = 0; i < t.count; i++) {
    const Real* in = (const Real*)(t.in + (int64_t)i * (int64_t)t.in_stride);
    Real* out = (Real*)t.out + (int64_t)i * 2 * tile;
    for (int half = 0; half < 2; half++)
      for (int k = 0; k < kTileK; k++)
        for (int n = 0; n < kTileN; n++)
          out[k / kTileN * tile + (half * kTileN + n) * kTileN + k % kTileN] = in[half * tile + k * kTileN + n];
  }
}

// Encoded blocks are decoded on the way, one k tile of one block at a time; those that are bytes are turned first.
template <class Isa, class Turn>
inline void turn_encoded(const Transpose& t, const Turn& turn) {
  alignas(64) char tiles[2 * Isa::tile_bytes];
  const Encoding& e = *t.how;
  constexpr bool pairs = Isa::tile_bytes == kTileBytes;
  const bool bytes = pairs && turns_as_bytes(e.format[0].codec) && turns_as_bytes(e.format[1].codec);
  for (int i = 0; i < t.count; i++) {
    const char* block = t.in + (int64_t)i * (int64_t)t.in_stride;
    for (int half = 0; half < 2 && i + kTurnAhead < t.count; half++) {
      const Strip& s = e.strip[half];
      const char* strip = block + kTurnAhead * (int64_t)t.in_stride + (half ? e.strip[0].bytes : 0);
      const char *header = strip + s.headers + t.k_tile / s.span_tiles * s.span_bytes,
                 *codes = strip + s.codes + t.k_tile * s.tile_bytes;
      for (int at = 0; at < s.span_bytes; at += 64) __builtin_prefetch(header + at, 0, 2);
      for (int at = 0; at < s.tile_bytes; at += 64) __builtin_prefetch(codes + at, 0, 2);
    }
    char* out = t.out + (int64_t)i * 2 * Isa::tile_bytes;
    if constexpr (pairs)
      if (bytes) {
        turn_bytes<kDecodeWidth<Isa>>(e, block, t.k_tile, out);
        continue;
      }
    decode_block<Isa>(e, block, t.k_tile, 1, tiles);
    turn({tiles, 0, 1, out, nullptr, 0});
  }
}

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

// The sum of a vector's lanes: one half joins the other, as long as there are two.
template <class V, int half = kLanes<V> / 2>
inline Lane<V> sum_of_lanes(V v) {
  if constexpr (half == 0) {
    return v[0];
  } else {
    Mask<V> from;
    for (int i = 0; i < kLanes<V>; i++) from[i] = (i + half) % kLanes<V>;
    return sum_of_lanes<V, half / 2>(v + __builtin_shuffle(v, from));
  }
}

// One row of a product meets its gate and up. The 32 columns are one block of these, or two, whose gradients lie
// `next_block` bytes apart, where a block holds 16 of gate beside 16 of up. One copy of this code, as in hidden_row.
template <class Isa, Activation A, bool gated>
__attribute__((noinline)) void back_row(const typename Isa::Real* c, double weight, const Gate& gate, const char* keep,
                                        char* grad, int64_t next_block, char* hidden, char* part) {
  using V = typename Isa::Vector;
  V sum = splat<V>(0.0), scale = splat<V>(weight);
  constexpr int halves = gated ? 2 : 1, width = kBlockN / halves;
#pragma GCC unroll 2
  for (int half = 0; half < halves; half++, keep += kBlockN * Isa::elem, grad += next_block)
    for (int i = 0; i < width; i += Isa::width) {
      V d = load<V>(c + half * width + i), g = get_element<Isa>(keep, i), h, dg;
      if constexpr (gated) {
        V u = get_element<Isa>(keep, kTileN + i), du;
        h = back_gated<V, A>(g, u, d * scale, gate, dg, du);
        put_element<Isa>(grad, kTileN + i, du);
      } else {
        h = activate<V, A>(g, gate.alpha);
        dg = d * scale * slope<V, A>(g, gate.alpha);
      }
      sum += d * h;
      put_element<Isa>(grad, i, dg);
      if (hidden) put_element<Isa>(hidden, half * width + i, h);
    }
  *(typename Isa::Real*)part = sum_of_lanes<V>(sum);
}

template <class Isa, Activation A>
void run_back_as(const Back& b) {
  using Real = typename Isa::Real;
  int64_t block_sums = (int64_t)b.tiling.tiles * b.tiling.rows * kBlockN;
  int turn = 0;
  ProductOf<Real> now = {};
  auto where = [&](ProductOf<Real>& p) {
    now = p;
    p.accumulate = !b.first;
    p.c = b.first && b.last ? (Real*)b.scratch + (turn ^= 1) * kPassTiles * kMaxRows * kBlockN
                            : (Real*)b.sums + (p.block - b.block0) * block_sums + (int64_t)p.tile * p.rows * kBlockN;
  };
  auto finish = [&](const ProductOf<Real>& p, int first, int end) {
    const Gate gate = b.gate;
    const int halves = gate.gated ? 2 : 1, rows = p.rows, last = now.live - 1;
    const int64_t row_bytes = kTileK * Isa::elem, block = row_bytes * rows, row0 = (int64_t)p.tile * rows;
    const int64_t grad_tile = block * b.grad_k_tiles, hidden_tile = block * b.hidden_k_tiles;
    const int64_t keep_stride = b.keep_stride, part_stride = b.part_stride * (int64_t)sizeof(Real);
    const int64_t of_block = halves * row_bytes;  // bytes of a row in the blocks of gate/up
    const char *keep = b.keep + row0 * keep_stride + p.block * of_block,
               *soon = b.keep + (int64_t)now.tile * rows * keep_stride + now.block * of_block;
    char *grad = b.grad + p.tile * grad_tile + p.block * halves * block,
         *part = b.part + row0 * part_stride + p.block * (int64_t)sizeof(Real),
         *hidden = b.hidden ? b.hidden + p.tile * hidden_tile + p.block * block : nullptr;
    const double* weight = b.weight + row0;
    const auto finish_row = gate.gated ? &back_row<Isa, A, true> : &back_row<Isa, A, false>;
    for (int r = first; r < end; r++) {
      // What was kept lies rows apart, where no hardware follows: that of the product under way comes meanwhile.
      const char* ahead = soon + (r < last ? r : last) * keep_stride;
      for (int64_t line = 0; line < of_block; line += 64) __builtin_prefetch(ahead + line, 0, 3);
      const int second = r >= rows;
      const int64_t at = (r - second * rows) * row_bytes;
      finish_row(p.c + r * kBlockN, weight[r], gate, keep + r * keep_stride, grad + second * grad_tile + at, block,
                 hidden ? hidden + second * hidden_tile + at : nullptr, part + r * part_stride);
    }
  };
  for_each_product<Isa>(b, b.last, nullptr, true, b.drop, where, finish);
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
