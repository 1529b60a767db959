// W8A8 of few rows: codes of int8 and int4 are multiplied where they lie, and no block is opened into tiles.
//
// With few rows weights are what takes the time, and a core keeps up with memory only if a code costs it next to
// nothing. A word of a strip holds four k of one output, even or odd ones, so the same eight bytes of a row, in all
// pairs of lanes, are the other factor: of int8 eight neighbours as rows of bytes have them, of int4 eight of sixteen,
// once for the lower and once for the higher nibbles. Rows are written out in those orders first.
//
// Codes count from zero, so that a sum has their offset times the sum of x too much; it begins with less by that. Sums
// of int8 are whole and the same as those of tiles. A group of int4 has its own scale here, in f32, where tiles have to
// bring all groups of a channel to one: few rows are a little closer to the weights.
#pragma once

#include "kernels/product.h"
#include "kernels/quads.h"

namespace kt {
namespace {

constexpr int kDirectAhead = 8;  // k tiles whose codes come into L1 meanwhile

// Sums of such a product: integers where both halves of a block are int8, which have to have the bits of tiles.
template <class Quads, class Number>
struct Direct {
  using Real = Number;
  using Arithmetic = Quads;
};
template <class By>
constexpr bool kDirect = false;
template <class Quads, class Number>
constexpr bool kDirect<Direct<Quads, Number>> = true;

inline bool whole_sums(const Encoding& e) {
  return e.format[0].codec == Codec::int8 && e.format[1].codec == Codec::int8;
}

// Rows as the codes of each half of a block want them.
struct DirectPanel {
  const char* x[2];       // [k_tiles][rows][32]
  const int32_t* before;  // [k_tiles + 1][rows][even and odd k]: eight times the sum of all bytes before a k tile
};

// Sixteen bytes for the nibbles of a word: the lower ones of even and of odd k, the higher ones likewise.
typedef uint8_t Sixteen __attribute__((vector_size(16)));
inline Sixteen in_nibble_order(Sixteen bytes) {
  Sixteen from;
  for (int i = 0; i < 16; i++) {
    int k = i % 4 * 4 + i / 8 * 2 + i / 4 % 2;
    from[i] = (uint8_t)(k / 8 * 8 + k % 2 * 4 + k % 8 / 2);
  }
  return __builtin_shuffle(bytes, from);
}

// Eight times the sums of the even and of the odd k of 32 bytes, twice.
template <int W>
inline I32<4> eightfold_sums(const char* bytes) {
  constexpr int S = W < 8 ? 4 : 8;
  I32<S> sums = {};
  for (int i = 0; i < kTileK; i += 4 * S)
    sums = WidenedQuads<S>::add_small(sums, U32<S>{} + 0x08080808u, load<U32<S>>(bytes + i));
  I32<4> part[S / 4];
  __builtin_memcpy(part, &sums, sizeof sums);
  if constexpr (S == 8) part[0] += part[1];
  return part[0] + __builtin_shuffle(part[0], I32<4>{2, 3, 0, 1});
}

// One row into its places; those that nobody reads are null.
template <int W>
inline void write_row(const char* row, int64_t step, int k_tiles, int rows, char* bytes, char* nibbles,
                      int32_t* before) {
  I32<4> sum = {};
  for (int k = 0; k < k_tiles; k++, before += 2 * rows) {
    const char* from = row + k / 2 * step + k % 2 * kTileK;
    int64_t at = (int64_t)k * rows * kTileK;
    for (int i = 0; i < kTileK; i += 16) {
      Sixteen x = load<Sixteen>(from + i);
      if (bytes) store(bytes + at + i, x);
      if (nibbles) store(nibbles + at + i, in_nibble_order(x));
    }
    __builtin_memcpy(before, &sum, 8);
    sum += eightfold_sums<W>(from);
  }
  __builtin_memcpy(before, &sum, 8);
}

// All rows, into scratch that has room for decoded tiles.
template <int W>
__attribute__((noinline)) DirectPanel write_rows(const DirectRows& direct, int rows, const Encoding& e, char* scratch) {
  const bool whole[2] = {e.format[0].codec == Codec::int8, e.format[1].codec == Codec::int8};
  const int64_t size = (int64_t)e.k_tiles * rows * kTileK;
  char *bytes = whole[0] || whole[1] ? scratch : nullptr, *nibbles = whole[0] && whole[1] ? nullptr : scratch + size;
  int32_t* before = (int32_t*)(scratch + 2 * size);
  for (int r = 0; r < rows; r++)
    write_row<W>(direct.row[r], direct.step, e.k_tiles, rows, bytes ? bytes + r * kTileK : nullptr,
                 nibbles ? nibbles + r * kTileK : nullptr, before + 2 * r);
  return {{whole[0] ? bytes : nibbles, whole[1] ? bytes : nibbles}, before};
}

// Eight bytes, even and odd k, in all pairs of lanes.
template <int W>
inline U32<W> in_pairs(const void* eight) {
  return (U32<W>)(typename Vec<W>::u64{} + load<uint64_t>(eight));
}

// What sums over k tiles from `before` to `after` begin with, codes being `eights` times eight more than they should.
template <int W>
inline I32<W> offset_sums(const int32_t* before, const int32_t* after, int eights) {
  return ((I32<W>)in_pairs<W>(before) - (I32<W>)in_pairs<W>(after)) * eights;
}

// Vectors of lanes that one walk over a strip takes: what the registers hold with all rows.
template <int W, int rows>
constexpr int kDirectVectors = W == 16 || rows <= 2 ? 2 : 1;

// A strip, and how far from it that of the next block is, which comes into L2 meanwhile; 0: none does.
struct CodeStrip {
  const Strip& s;
  const char* at;
  int64_t next;
  int k_tiles;
};

template <int tile_bytes>
inline void fetch_codes(const char* codes, int64_t next) {
#pragma GCC unroll 8
  for (int line = 0; line < tile_bytes; line += 64) {
    __builtin_prefetch(codes + kDirectAhead * tile_bytes + line, 0, 3);
    __builtin_prefetch(codes + next + line, 0, 2);
  }
}

// Codes of int8 times rows, whole sums of (output, parity of k) into lanes [rows][32].
template <class Quads, int rows>
__attribute__((noinline)) void int8_lanes(const CodeStrip& strip, const char* rows_of_x, const int32_t* before,
                                          int32_t* lanes) {
  constexpr int W = Quads::width, NV = kDirectVectors<W, rows>, tile_bytes = kTileN * kTileK;
  const int k_tiles = strip.k_tiles;
  const int64_t next = strip.next;
  for (int lane = 0; lane < kLanesOfTile; lane += NV * W) {
    const char *codes = strip.at + strip.s.codes + lane * 4, *x = rows_of_x;
    I32<W> sums[rows][NV] = {};
    if constexpr (Quads::offset > 0)
      for (int r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++)
          sums[r][v] = offset_sums<W>(before + 2 * r, before + 2 * (k_tiles * rows + r), Quads::offset / 8);
    for (int k = 0; k < k_tiles; k++, codes += tile_bytes, x += rows * kTileK) {
      fetch_codes<tile_bytes>(codes, next);
#pragma GCC unroll 4
      for (int word = 0; word < 4; word++) {
        decltype(Quads::open(U32<W>{})) opened[NV];
        for (int v = 0; v < NV; v++) opened[v] = Quads::open(load<U32<W>>(codes + (word * kLanesOfTile + v * W) * 4));
        for (int r = 0; r < rows; r++) {
          auto factor = Quads::open_x(in_pairs<W>(x + r * kTileK + word * 8));
          for (int v = 0; v < NV; v++) sums[r][v] = Quads::add(sums[r][v], opened[v], factor);
        }
      }
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < NV; v++) store(lanes + r * kLanesOfTile + lane + v * W, sums[r][v]);
  }
}

// Scales of int4 for W lanes from `lane` on, each for the two of its output.
template <int W, DType type>
inline F32<W> scales_of_lanes(const char* scales, int lane) {
#ifdef __AVX512BW__
  if constexpr (W == 16 && type == DType::bf16) {
    Vec<16>::pairs twice;
    for (int i = 0; i < 32; i++) twice[i] = (uint16_t)(i / 4);
    __m512i few = _mm512_zextsi128_si512(_mm_loadu_si128((const __m128i*)(scales + lane)));
    return (F32<W>)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)twice, few);
  }
#endif
  I32<W> twice;
  for (int i = 0; i < W; i++) twice[i] = lane / 2 % W + i / 2;
  return __builtin_shuffle(scales_at<W>(scales, lane / 2 / W * W, type), twice);
}

// The same of int4, times the scales of their groups.
template <class Quads, int rows, DType type>
__attribute__((noinline)) void int4_lanes(const CodeStrip& strip, const char* rows_of_x, const int32_t* sums_before,
                                          float* lanes) {
  constexpr int W = Quads::width, NV = kDirectVectors<W, rows>, tile_bytes = kTileN * kTileK / 2;
  const int span_tiles = strip.s.span_tiles;
  const int64_t next = strip.next, span_bytes = strip.s.span_bytes;
  for (int lane = 0; lane < kLanesOfTile; lane += NV * W) {
    const char *codes = strip.at + strip.s.codes + lane * 4, *scales = strip.at + strip.s.headers, *x = rows_of_x;
    const int32_t* before = sums_before;
    F32<W> numbers[rows][NV] = {};
    for (int left = strip.k_tiles; left > 0; left -= span_tiles, scales += span_bytes) {
      const int span = left < span_tiles ? left : span_tiles;
      I32<W> sums[rows][NV];
      for (int r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++) sums[r][v] = offset_sums<W>(before + 2 * r, before + 2 * (span * rows + r), 1);
      before += 2 * span * rows;
      for (int k = 0; k < span; k++, codes += tile_bytes, x += rows * kTileK) {
        fetch_codes<tile_bytes>(codes, next);
#pragma GCC unroll 2
        for (int word = 0; word < 2; word++) {
          U32<W> low[NV], high[NV];
          for (int v = 0; v < NV; v++) {
            U32<W> both = load<U32<W>>(codes + (word * kLanesOfTile + v * W) * 4);
            low[v] = both & 0x0f0f0f0fu;
            high[v] = (both >> 4) & 0x0f0f0f0fu;
          }
          for (int r = 0; r < rows; r++) {
            const char* at = x + r * kTileK + word * 16;
            U32<W> lower = in_pairs<W>(at), higher = in_pairs<W>(at + 8);
            for (int v = 0; v < NV; v++) {
              sums[r][v] = Quads::add_small(sums[r][v], low[v], lower);
              sums[r][v] = Quads::add_small(sums[r][v], high[v], higher);
            }
          }
        }
      }
      __builtin_prefetch(scales + next, 0, 2);
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        F32<W> scale = scales_of_lanes<W, type>(scales, lane + v * W);
        for (int r = 0; r < rows; r++) numbers[r][v] += __builtin_convertvector(sums[r][v], F32<W>) * scale;
      }
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < NV; v++) store(lanes + r * kLanesOfTile + lane + v * W, numbers[r][v]);
  }
}

// act<rows>() for as many rows as there are.
template <int rows = kDirectRows, class Act>
inline void with_rows(int live, const Act& act) {
  if (live == rows) {
    act.template operator()<rows>();
  } else if constexpr (rows > 1) {
    with_rows<rows - 1>(live, act);
  }
}

// Lanes of even and of odd k together, 16 outputs of each row.
template <int W, class Lane, class Real>
inline void join_lanes(const Lane* lanes, int rows, Real* c) {
  typedef Lane From __attribute__((vector_size(W * 4)));
  typedef Real To __attribute__((vector_size(W * 4)));
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < kTileN; n += W) {
      const Lane* from = lanes + r * kLanesOfTile + 2 * n;
      U32<W> a = load<U32<W>>(from), b = load<U32<W>>(from + W);
      From sum = (From)every_other<W, 0>(a, b) + (From)every_other<W, 1>(a, b);
      store(c + r * kBlockN + n, __builtin_convertvector(sum, To));
    }
}

// One block times `live` rows, `next` bytes before the one to come, into c [live][32], and what these sums are to be
// multiplied with besides their rows' scales.
template <class By>
inline void multiply_codes(const Encoding& e, const char* block, const DirectPanel& panel, int live, int64_t next,
                           typename By::Real* c, float* channel) {
  using Quads = typename By::Arithmetic;
  using Real = typename By::Real;
  constexpr int W = Quads::width;
  for (int half = 0; half < 2; half++, c += kTileN, channel += kTileN) {
    const Format& f = e.format[half];
    const char* x = panel.x[half];
    const CodeStrip strip{e.strip[half], block + half * e.strip[0].bytes, next, e.k_tiles};
    if (f.codec == Codec::int8) {
      alignas(64) int32_t lanes[kDirectRows * kLanesOfTile];
      with_rows(live, [&]<int rows>() { int8_lanes<Quads, rows>(strip, x, panel.before, lanes); });
      join_lanes<W>(lanes, live, c);
      __builtin_memcpy(channel, strip.at + strip.s.headers, kTileN * sizeof(float));
    } else if constexpr ((Real)0.5 != 0) {
      alignas(64) float lanes[kDirectRows * kLanesOfTile];
      with_rows(live, [&]<int rows>() {
        auto make = f.scale == DType::bf16  ? &int4_lanes<Quads, rows, DType::bf16>
                    : f.scale == DType::f16 ? &int4_lanes<Quads, rows, DType::f16>
                                            : &int4_lanes<Quads, rows, DType::f32>;
        make(strip, x, panel.before, lanes);
      });
      join_lanes<W>(lanes, live, c);
      for (int n = 0; n < kTileN; n += W) store(channel + n, splat<F32<W>>(1.0f));
    }
  }
}

// Multiplies every block with the rows of a unit, as for_each_product does with panels. `Isa` multiplies the extras.
template <class Isa, class By, class Unit, class Where, class Finish>
inline void for_each_direct(const Unit& u, const Where& where, const Finish& finish) {
  static_assert(Isa::max_rows >= kDirectRows);
  const Encoding& e = *u.coded.how;
  const DirectPanel panel = write_rows<Isa::width>(u.direct, u.live, e, u.coded.decoded);
  if (u.extras) Isa::enter(u.tiling.rows);
  for (int block = u.block0; block < u.block1; block++) {
    const int64_t at = (int64_t)(block - u.block0);
    const char* codes = u.base.b + at * (int64_t)u.block_bytes;
    const int64_t next = block + 1 < u.block1 ? (int64_t)u.block_bytes : u.next ? u.next - codes : 0;
    ProductOf<typename By::Real> p{u.base, block,         0,       1,       u.tiling.rows, u.live,
                                   false,  kNothingAhead, nullptr, u.extra, u.extras,      u.block0};
    where(p);
    multiply_codes<By>(e, codes, panel, u.live, next, p.c, u.coded.channel + at * kBlockN);
    finish(p, 0, u.live);
  }
  if (u.extras) Isa::leave();
}

}  // namespace
}  // namespace kt
