// GEMV on packed codes for small batches: quantised weights are multiplied in registers, without dequantised tiles.
//
// With few rows the weights' bandwidth is the limit, and a core keeps up with memory only if a code costs few
// instructions. A word of a strip holds codes of one output at even or at odd k, so every part of the words (a nibble,
// a byte) is multiplied with the same eight bytes of a row in all pairs of lanes. The rows of x are therefore first
// reordered by part. Activations are int8 here (packed_gemv_int8.h); those in packed_gemv_int16.h share the loop over
// blocks. The template parameter `Codes` describes the codes. It has
//   width, words, parts   lanes of a vector; words of a lane in a k tile; parts of a word
//   Sum, Number           types of accumulators and of results
//   unpack, factor, add   one part of the words; eight bytes of a row; multiply-add
//   begin                 initial value of sums over k tiles
//   scaled, scale         whether spans have scales here, and those of W lanes
#pragma once

#include "kernels/product.h"

namespace kt {
namespace {

constexpr int kPackedGemvAhead = 8;  // k tiles whose codes are prefetched into L1
constexpr int kPartBytes = 8;        // bytes of a row that are multiplied with one part of the words

// Whether `Multiplier` is a packed GEMV; it reorders the rows and maps a format to its `Codes`.
template <class Multiplier>
constexpr bool kIsPackedGemv = requires { Multiplier::int8_rows; };

// Reordered rows for the codes of each half of a block.
struct PackedGemvPanel {
  const char* x[2];                      // [k_tiles][rows][bytes of all parts]
  const int32_t* prefix_sums = nullptr;  // int8: input of `begin`, [k_tiles + 1][rows][2]
};

// Broadcasts eight bytes, of even and odd k, to all pairs of lanes.
template <int W>
inline U32<W> in_pairs(const void* eight) {
  return (U32<W>)(typename Vec<W>::u64{} + load<uint64_t>(eight));
}

// Type of the scales of spans.
enum class Scale : uint8_t { f32, bf16, f16 };

// Scales of 16 rows for W lanes from `lane` on, each repeated for the two lanes of its output.
template <int W, Scale type>
inline F32<W> scales_of_lanes(const char* scales, int lane) {
#ifdef __AVX512BW__
  if constexpr (W == 16 && type == Scale::bf16) {
    Vec<16>::pairs twice;
    for (int i = 0; i < 32; i++) twice[i] = (uint16_t)(i / 4);
    __m512i low = _mm512_zextsi128_si512(_mm_loadu_si128((const __m128i*)(scales + lane)));
    return (F32<W>)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)twice, low);
  }
#endif
  I32<W> twice;
  for (int i = 0; i < W; i++) twice[i] = lane / 2 % W + i / 2;
  const int row = lane / 2 / W * W;
  const DType stored = type == Scale::bf16 ? DType::bf16 : type == Scale::f16 ? DType::f16 : DType::f32;
  return __builtin_shuffle(scales_at<W>(scales, row, stored), twice);
}

// Vectors that one sweep over a strip accumulates: what the registers hold for all rows.
template <int W, int rows>
constexpr int kPackedGemvVectors = W == 16 || rows <= 2 ? 2 : 1;

// k tiles [k0, k0 + k_tiles) of a strip; `next`: bytes from it to the strip of the next block, which is prefetched into
// L2, or 0.
struct CodeStrip {
  const Strip& s;
  const char* at;
  int64_t next;
  int k0, k_tiles;
};

template <int tile_bytes>
inline void prefetch_codes(const char* codes, int64_t next) {
#pragma GCC unroll 8
  for (int line = 0; line < tile_bytes; line += 64) {
    __builtin_prefetch(codes + kPackedGemvAhead * tile_bytes + line, 0, 3);
    __builtin_prefetch(codes + next + line, 0, 2);
  }
}

// Multiply-adds the codes of one k tile and the rows.
template <class Codes, int rows, int NV>
inline void add_tile(const Codes& kind, const char* codes, const char* x, typename Codes::Sum (&sums)[rows][NV]) {
  constexpr int W = Codes::width, parts = Codes::parts, row_bytes = Codes::words * parts * kPartBytes;
#pragma GCC unroll 4
  for (int word = 0; word < Codes::words; word++) {
    U32<W> words[NV];
    for (int v = 0; v < NV; v++) words[v] = load<U32<W>>(codes + (word * kLanesOfTile + v * W) * 4);
#pragma GCC unroll 8
    for (int part = 0; part < parts; part++) {
      decltype(kind.unpack(words[0], part)) unpacked[NV];
      for (int v = 0; v < NV; v++) unpacked[v] = kind.unpack(words[v], part);
      for (int r = 0; r < rows; r++) {
        auto factor = kind.factor(in_pairs<W>(x + r * row_bytes + (word * parts + part) * kPartBytes));
        for (int v = 0; v < NV; v++) sums[r][v] = kind.add(sums[r][v], unpacked[v], factor);
      }
    }
  }
}

// Codes times rows; sums of (output, parity of k) into lanes [rows][32].
template <class Codes, int rows>
__attribute__((noinline)) void multiply_lanes(const Codes& given, const CodeStrip& strip, const PackedGemvPanel& panel,
                                              int half, typename Codes::Number* lanes) {
  using Sum = typename Codes::Sum;
  constexpr int W = Codes::width, NV = kPackedGemvVectors<W, rows>, tile_bytes = Codes::words * kLanesOfTile * 4;
  constexpr int row_bytes = Codes::words * Codes::parts * kPartBytes;
  typedef typename Codes::Number Numbers __attribute__((vector_size(W * 4)));
  const Codes kind = given;
  const int span_tiles = strip.s.span_tiles, spans = strip.k0 / span_tiles;
  const int64_t next = strip.next, span_bytes = strip.s.span_bytes;
  for (int lane = 0; lane < kLanesOfTile; lane += NV * W) {
    const char* codes = strip.at + strip.s.codes + (int64_t)strip.k0 * tile_bytes + lane * 4;
    const char *scales = strip.at + strip.s.headers + spans * span_bytes, *x = panel.x[half];
    const int32_t* prefix_sums = panel.prefix_sums;
    Numbers numbers[rows][NV] = {};
    int span = (spans + 1) * span_tiles - strip.k0;
    for (int left = strip.k_tiles; left > 0; left -= span, span = span_tiles, scales += span_bytes) {
      if (span > left) span = left;
      Sum sums[rows][NV] = {};
      if constexpr (Codes::begins) {
        for (int r = 0; r < rows; r++)
          for (int v = 0; v < NV; v++)
            sums[r][v] = kind.begin(prefix_sums + 2 * r, prefix_sums + 2 * (span * rows + r));
        prefix_sums += 2 * span * rows;
      }
      for (int k = 0; k < span; k++, codes += tile_bytes, x += rows * row_bytes) {
        prefetch_codes<tile_bytes>(codes, next);
        add_tile<Codes, rows, NV>(kind, codes, x, sums);
      }
      if constexpr (Codes::scaled) __builtin_prefetch(scales + next, 0, 2);
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        F32<W> scale = {};
        if constexpr (Codes::scaled) scale = kind.scale(scales, lane + v * W);
        for (int r = 0; r < rows; r++) {
          if constexpr (Codes::scaled) {
            numbers[r][v] += __builtin_convertvector(sums[r][v], F32<W>) * scale;
          } else {
            numbers[r][v] += sums[r][v];
          }
        }
      }
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < NV; v++) store(lanes + r * kLanesOfTile + lane + v * W, numbers[r][v]);
  }
}

// Calls act<rows>() with the number of rows as a template argument.
template <int rows, class Act>
inline void with_rows(int live, const Act& act) {
  if (live == rows) {
    act.template operator()<rows>();
  } else if constexpr (rows > 1) {
    with_rows<rows - 1>(live, act);
  }
}

// Adds the lanes of even and of odd k, 16 outputs of each row, and stores to c or adds to it.
template <int W, class Lane, class Real>
inline void join_lanes(const Lane* lanes, int rows, bool accumulate, Real* c) {
  typedef Lane From __attribute__((vector_size(W * 4)));
  typedef Real To __attribute__((vector_size(W * 4)));
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < kTileN; n += W) {
      const Lane* from = lanes + r * kLanesOfTile + 2 * n;
      Real* to = c + r * kBlockN + n;
      U32<W> a = load<U32<W>>(from), b = load<U32<W>>(from + W);
      From sum = (From)deinterleave<W, 0>(a, b) + (From)deinterleave<W, 1>(a, b);
      To numbers = __builtin_convertvector(sum, To);
      store(to, accumulate ? load<To>(to) + numbers : numbers);
    }
}

// One block times the rows, into p.c. `next`: bytes from this block to the next one. For int8 also writes the channel
// scales, by which these sums are multiplied besides the scales of their rows.
template <class Multiplier>
__attribute__((noinline)) void multiply_codes(const EncodedBlocks& encoded,
                                              const ProductOf<typename Multiplier::Real>& p,
                                              const PackedGemvPanel& panel, int64_t next, float* channel) {
  const Encoding& e = *encoded.encoding;
  for (int half = 0; half < 2; half++) {
    const CodeStrip strip{e.strip[half], p.contraction.b + half * e.strip[0].bytes, next, encoded.k0,
                          p.contraction.k_tiles};
    Multiplier::with_codes(e.format[half], [&]<class Codes>(const Codes& kind) {
      alignas(64) typename Codes::Number lanes[Multiplier::max_rows * kLanesOfTile];
      with_rows<Multiplier::max_rows>(
          p.live, [&]<int rows>() { multiply_lanes<Codes, rows>(kind, strip, panel, half, lanes); });
      join_lanes<Codes::width>(lanes, p.live, p.accumulate, p.c + half * kTileN);
      if constexpr (Multiplier::int8_rows) {
        float* out = channel + half * kTileN;
        if constexpr (Codes::scaled) {
          for (int n = 0; n < kTileN; n++) out[n] = 1;
        } else {
          __builtin_memcpy(out, strip.at + strip.s.headers, kTileN * sizeof(float));
        }
      }
    });
  }
}

template <class Multiplier>
inline void multiply_packed(const EncodedBlocks& encoded, const ProductOf<typename Multiplier::Real>& p,
                            const PackedGemvPanel& panel, int64_t next, float* channel) {
  if constexpr (requires { Multiplier::multiply_block(encoded, p, panel, next); }) {
    Multiplier::multiply_block(encoded, p, panel, next);
  } else {
    multiply_codes<Multiplier>(encoded, p, panel, next, channel);
  }
}

// Multiplies every block of a unit with its rows, as for_each_product does for panels. `Isa` multiplies the LoRA terms.
template <class Isa, class Multiplier, class Unit, class PlaceSums, class Epilogue>
inline void for_each_packed_gemv(const Unit& u, const PlaceSums& place_sums, const Epilogue& epilogue) {
  const PackedGemvPanel panel = Multiplier::write_rows(u);
  const int rows_of_pass = kPassTiles * u.tiling.rows;
  if (u.lora_terms) Isa::enter(u.tiling.rows);
  for (int block = u.block0; block < u.block1; block++) {
    const int64_t at = (int64_t)(block - u.block0);
    const char* b = u.base.b + at * (int64_t)u.block_bytes;
    const int64_t next = block + 1 < u.block1 ? (int64_t)u.block_bytes : u.next ? u.next - b : 0;
    for (int row = 0; row < u.live; row += rows_of_pass) {
      const int live = u.live - row < rows_of_pass ? u.live - row : rows_of_pass;
      ProductOf<typename Multiplier::Real> p{u.base,
                                             block,
                                             row / u.tiling.rows,
                                             (live - 1) / u.tiling.rows + 1,
                                             u.tiling.rows,
                                             live,
                                             false,
                                             kNoPrefetch,
                                             nullptr,
                                             u.lora_term,
                                             u.lora_terms,
                                             u.block0};
      p.contraction.b = b;
      place_sums(p);
      multiply_packed<Multiplier>(u.encoded, p, panel, row ? 0 : next,
                                  Multiplier::int8_rows ? u.encoded.channel + at * kBlockN : nullptr);
      if constexpr (!Multiplier::int8_rows) {  // behind all of K, as where K comes in chunks
        p.accumulate = true;
        multiply_lora_terms<Isa>(p);
      }
      epilogue(p, 0, live);
    }
  }
  if (u.lora_terms) Isa::leave();
}

}  // namespace
}  // namespace kt
