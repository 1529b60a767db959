// Weight tiles turned around, 2 KB at a time: pairs along K become pairs along N, with two 16-bit shuffles a row and a
// transpose of dwords. A pair of tiles of a stored block becomes a pair of tiles of the transposed matrix.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "kernels/formats.h"
#include "kernels/table.h"

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

// The tiles of the exact kinds, [32 k][16 n]: each half of n becomes rows of both tiles.
template <class Real>
inline void turn_plain(const Real* in, Real* out) {
  constexpr int tile = kTileK * kTileN;
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < kTileK; k++)
      for (int n = 0; n < kTileN; n++)
        out[k / kTileN * tile + (half * kTileN + n) * kTileN + k % kTileN] = in[half * tile + k * kTileN + n];
}

template <class Isa>
inline void turn_pair(const char* in, char* out) {
  if constexpr (Isa::tile_bytes != kTileBytes) {
    turn_plain((const typename Isa::Real*)in, (typename Isa::Real*)out);
  } else if constexpr (Isa::width == 16) {
    turn_tiles_wide<Isa::width>(in, out);
  } else {
    turn_tiles(in, out);
  }
}

// Stored blocks lie far apart, where no hardware follows: the k tile of each is brought into L2 while that of the
// eighth before it is turned, and tiles into L1 while the one before is.
constexpr int kTurnAhead = 8;

template <class Isa>
inline void fetch_pair(const char* pair, bool near) {
  for (int line = 0; line < 2 * Isa::tile_bytes; line += 64)
    near ? __builtin_prefetch(pair + line, 0, 3) : __builtin_prefetch(pair + line, 0, 2);
}

inline void fetch_encoded(const Encoding& e, const char* block, int k_tile) {
  for (int half = 0; half < 2; half++, block += e.strip[0].bytes) {
    const Strip& s = e.strip[half];
    const char *header = block + s.headers + k_tile / s.span_tiles * s.span_bytes,
               *codes = block + s.codes + k_tile * s.tile_bytes;
    for (int at = 0; at < s.span_bytes; at += 64) __builtin_prefetch(header + at, 0, 2);
    for (int at = 0; at < s.tile_bytes; at += 64) __builtin_prefetch(codes + at, 0, 2);
  }
}

// Encoded blocks are decoded on the way.
template <class Isa>
__attribute__((noinline)) void turn_encoded(const Encoding& e, const char* block, int k_tile, char* out) {
  alignas(64) char tiles[2 * Isa::tile_bytes];
  decode_block<Isa>(e, block, k_tile, 1, tiles);
  turn_pair<Isa>(tiles, out);
}

template <class Isa>
void turn_blocks(const Transpose& t) {
  for (int i = 0; i < t.count; i++) {
    const char* in = t.in + (int64_t)i * (int64_t)t.in_stride;
    const char* far = i + kTurnAhead < t.count ? in + kTurnAhead * (int64_t)t.in_stride : nullptr;
    char* out = t.out + (int64_t)i * 2 * Isa::tile_bytes;
    if (t.how) {
      if (far) fetch_encoded(*t.how, far, t.k_tile);
      turn_encoded<Isa>(*t.how, in, t.k_tile, out);
    } else {
      if (far) fetch_pair<Isa>(far, false);
      if (i + 1 < t.count) fetch_pair<Isa>(in + t.in_stride, true);
      turn_pair<Isa>(in, out);
    }
  }
}

}  // namespace
}  // namespace kt
