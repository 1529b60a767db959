// Transposes tiles of bf16: pairs along K become pairs along N.
#pragma once

#include "kernels/elementwise.h"

namespace kt {
namespace {

// Four k by eight n: two rows of pairs along k become four rows of pairs along n.
inline void transpose_square(const char* in, char* out) {
  using Four = U32<4>;
  Four transposed[4];
  for (int row = 0; row < 2; row++) {
    Four a = load<Four>(in + row * 64), b = load<Four>(in + row * 64 + 16);
    Four even = __builtin_shuffle(a, b, Four{0, 2, 4, 6}), odd = __builtin_shuffle(a, b, Four{1, 3, 5, 7});
    transposed[2 * row] = (even & 0xffffu) | (odd << 16);
    transposed[2 * row + 1] = (even >> 16) | (odd & 0xffff0000u);
  }
  Four a = __builtin_shuffle(transposed[0], transposed[1], Four{0, 4, 1, 5});
  Four b = __builtin_shuffle(transposed[2], transposed[3], Four{0, 4, 1, 5});
  Four c = __builtin_shuffle(transposed[0], transposed[1], Four{2, 6, 3, 7});
  Four d = __builtin_shuffle(transposed[2], transposed[3], Four{2, 6, 3, 7});
  store(out, __builtin_shuffle(a, b, Four{0, 1, 4, 5}));
  store(out + 64, __builtin_shuffle(a, b, Four{2, 3, 6, 7}));
  store(out + 128, __builtin_shuffle(c, d, Four{0, 1, 4, 5}));
  store(out + 192, __builtin_shuffle(c, d, Four{2, 3, 6, 7}));
}

// One half of n: in is a tile [16 pairs of k][16 n], out two tiles [16 pairs of n][16 k], k 0-15 and 16-31, of which
// half of the rows are written.
inline void transpose_tile_by_squares(const char* in, int half, char* out) {
  for (int n = 0; n < kTileN; n += 8)
    for (int k = 0; k < kTileK; k += 4)
      transpose_square(in + (k / 2) * 64 + n * 4,
                       out + (k / kTileN) * kTileBytes + (half * 8 + n / 2) * 64 + (k % kTileN) * 4);
}

// The same with whole rows in registers. Sixteen bytes of each of four rows make a register, so that the transpose of
// 16 x 16 dwords has two stages left, inside those quarters; the four rows are chosen such that the last stage, which
// pairs neighbours along n, leaves k in order.
#ifdef __AVX512F__
template <int W>
inline U32<W> load_quarters(const char* a, const char* b, const char* c, const char* d) {
  // Inserting from memory needs no shuffle unit, which the compiler's code for joining vectors would use.
  __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)a));
  all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i*)b), 1);
  all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i*)c), 2);
  return (U32<W>)_mm512_inserti32x4(all, _mm_loadu_si128((const __m128i*)d), 3);
}
#else
template <int W>
inline U32<W> load_quarters(const char* a, const char* b, const char* c, const char* d) {
  char all[64];
  __builtin_memcpy(all, a, 16);
  __builtin_memcpy(all + 16, b, 16);
  __builtin_memcpy(all + 32, c, 16);
  __builtin_memcpy(all + 48, d, 16);
  return load<U32<W>>(all);
}
#endif

// Interleaves a and b, from the lower or the upper half of every quarter.
template <int W, class V, bool upper>
inline U32<W> interleave(U32<W> a, U32<W> b) {
  V order;
  constexpr int count = sizeof(V) / sizeof(order[0]), per = count / 4;
  for (int i = 0; i < count; i++)
    order[i] = (decltype(order[0] + 0))(i / per * per + i % per / 2 + (upper ? per / 2 : 0) + (i % 2) * count);
  return (U32<W>)__builtin_shuffle((V)a, (V)b, order);
}

template <int W>
inline void transpose_tile_wide(const char* in, int half, char* out) {
  using Words = typename Vec<W>::pairs;
  using Doubles = typename Vec<W>::u64;
  for (int n = 0; n < kTileN; n += 4) {
    U32<W> x[4];  // quarter q: of pairs 2q, 2q + 1, 8 + 2q, 9 + 2q
    for (int i = 0; i < 4; i++) {
      const char* at = in + ((i & 1) + (i >> 1) * 8) * 64 + n * 4;
      x[i] = load_quarters<W>(at, at + 2 * 64, at + 4 * 64, at + 6 * 64);
    }
    U32<W> a = interleave<W, U32<W>, false>(x[0], x[1]), b = interleave<W, U32<W>, true>(x[0], x[1]);
    U32<W> c = interleave<W, U32<W>, false>(x[2], x[3]), d = interleave<W, U32<W>, true>(x[2], x[3]);
    U32<W> n0 = interleave<W, Doubles, false>(a, c), n1 = interleave<W, Doubles, true>(a, c);
    U32<W> n2 = interleave<W, Doubles, false>(b, d), n3 = interleave<W, Doubles, true>(b, d);
    char* to = out + (half * 8 + n / 2) * 64;
    store(to, interleave<W, Words, false>(n0, n1));
    store(to + kTileBytes, interleave<W, Words, true>(n0, n1));
    store(to + 64, interleave<W, Words, false>(n2, n3));
    store(to + kTileBytes + 64, interleave<W, Words, true>(n2, n3));
  }
}

template <int W>
inline void transpose_tile(const char* in, int half, char* out) {
  if constexpr (W == 16) {
    transpose_tile_wide<W>(in, half, out);
  } else {
    transpose_tile_by_squares(in, half, out);
  }
}

}  // namespace
}  // namespace kt
