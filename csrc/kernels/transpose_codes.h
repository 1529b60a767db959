// Transposes encoded blocks as bytes of codes, before they become numbers.
//
// A strip of bytes holds eight k of two neighbouring outputs in sixteen bytes. A row of a transposed tile is two
// outputs along k, so the selection of bytes that makes floats (code_bytes.h) takes them in that order and nothing else
// is shuffled: transposing costs what dequantising costs, and the bits are those of a tile that was dequantised first
// and then transposed. Formats of fewer bits are unpacked into such bytes first; tiles of bf16:12 are decoded first.
#pragma once

#include "kernels/formats.h"
#include "kernels/transpose_tiles.h"

namespace kt {
namespace {

constexpr int kPairBytes = 16;                        // eight k of two outputs
constexpr int kPieceBytes = kTileN / 2 * kPairBytes;  // eight k of a strip
constexpr int kPieces = kTileK / 8;

// Bytes of v shifted right by shift[b % 4], a negative one left; the caller masks what comes from the neighbours.
template <int W>
inline U8<W> shift_bytes(U8<W> v, int a, int b, int c, int d) {
#ifdef KT_NEON
  if constexpr (W == 4) {
    const int8_t by[4] = {(int8_t)-a, (int8_t)-b, (int8_t)-c, (int8_t)-d};
    int8x16_t shift;
    for (int i = 0; i < 16; i++) shift[i] = by[i % 4];
    return (U8<W>)vshlq_u8((uint8x16_t)v, shift);
  }
#endif
  U32<W> u = (U32<W>)v;
  auto part = [&](int shift, uint32_t mask) {
    return (shift < 0 ? u << (uint32_t)-shift : u >> (uint32_t)shift) & mask;
  };
  if (a == c && b == d) return (U8<W>)(part(a, 0x00ff00ffu) | part(b, 0xff00ff00u));
  return (U8<W>)(part(a, 0xffu) | part(b, 0xff00u) | part(c, 0xff0000u) | part(d, 0xff000000u));
}

// Unpacks the codes of a k tile into bytes, [4 pieces][16 outputs][parity of k][4], as in a strip of bytes.
template <int W, Codec C>
struct UnpackedCodes {
  using Words = CodeWords<W, C>;
  static constexpr int low = Words::low, high = Words::high;

  static void unpack(const char* codes, char* bytes) {
    for (int lane = 0; lane < kLanesOfTile; lane += W) {
#pragma GCC unroll 4
      for (int piece = 0; piece < kPieces; piece++) {
        U8<W> v;
        if constexpr (low == 4) {
          U32<W> word = load<U32<W>>(codes + (piece / 2 * kLanesOfTile + lane) * 4);
          v = repeat_bytes<W>(word, piece % 2 * 2, piece % 2 * 2 + 1);
          v = shift_bytes<W>(v, 0, 4, 0, 4) & (uint8_t)15;
        } else {
          static_assert(low == 2);
          v = repeat_bytes<W>(load<U32<W>>(codes + lane * 4), piece, piece);
          v = shift_bytes<W>(v, 0, 2, 4, 6) & (uint8_t)3;
        }
        store(bytes + piece * kPieceBytes + lane * 4, v | second_plane(codes, lane, piece));
      }
    }
  }

 private:
  static U8<W> second_plane(const char* codes, int lane, int piece) {
    const char* plane = codes + kTileN * kTileK * low / 8;
    if constexpr (high == 1) {
      U32<W> word = __builtin_convertvector(load<typename Vec<W>::u16>(plane + lane * 2), U32<W>);
      return test_bytes<W>(repeat_bytes<W>(word, piece / 2, piece / 2), 0x08040201u << (piece % 2 * 4), 1 << low);
    } else if constexpr (high == 2) {
      U8<W> bytes = repeat_bytes<W>(load<U32<W>>(plane + lane * 4), piece, piece);
      return shift_bytes<W>(bytes, -4, -2, 0, 2) & (uint8_t)0x30;
    } else {
      return U8<W>{};
    }
  }
};

// Selections of a vector's bytes: k from `k0` on of output 0 or 1 of a pair. Vectors of more than four lanes hold the
// sixteen bytes of a pair several times.
template <int output, int k0>
struct AlongK {
  static constexpr int byte = -1;
  static constexpr int of(int lane) { return output * 8 + lane % 2 * 4 + (lane + k0) % 8 / 2; }
};
// The same with both outputs side by side.
template <int k0>
struct BothAlongK {
  static constexpr int byte = -1;
  static constexpr int of(int lane) { return lane % 2 * 8 + lane / 2 % 2 * 4 + (lane / 2 + k0) % 8 / 2; }
};

// The bytes of a pair of outputs for one row of a tile, from piece `piece` on.
template <int W>
inline U8<W> load_pair(const char* bytes, int piece, int pair) {
  typedef uint8_t Quarter __attribute__((vector_size(16)));
  const char* at = bytes + piece * kPieceBytes + pair * kPairBytes;
  Quarter first = load<Quarter>(at);
  if constexpr (W == 4) {
    return first;
#ifdef __AVX512F__
  } else if constexpr (W == 16) {  // masked: without one, gcc's header reads an undefined vector and warns of it
    __m512i all = _mm512_maskz_broadcast_i32x4(0xffff, (__m128i)first);
    if constexpr (!kEvenAndOdd<W>) return (U8<W>)all;
    return (U8<W>)_mm512_mask_broadcast_i32x4(all, 0xff00, (__m128i)load<Quarter>(at + kPieceBytes));
#endif
#ifdef __AVX2__
  } else if constexpr (W == 8) {
    return (U8<W>)_mm256_broadcastsi128_si256((__m128i)first);
#endif
  } else {
    Quarter second = kEvenAndOdd<W> && W == 16 ? load<Quarter>(at + kPieceBytes) : first;
    U8<W> all;
    for (int q = 0; q < W / 4; q++) __builtin_memcpy((char*)&all + 16 * q, q < 2 ? &first : &second, 16);
    return all;
  }
}

// The scales of a pair of outputs in all lanes; alternating where lanes alternate between the outputs.
template <int W>
inline void splat_pair(const float* two, F32<W> (&s)[2]) {
  if constexpr (kEvenAndOdd<W>) {
    // As integers: the sum of a float and zero would be an instruction.
    for (int i = 0; i < 2; i++) s[i] = (F32<W>)(U32<W>{} + load<uint32_t>(two + i));
  } else {
    typename Vec<W>::u64 both = {};
    s[0] = s[1] = (F32<W>)(both + load<uint64_t>(two));
  }
}

// Rows `row0` ... of two transposed tiles, k 0-15 and 16-31, from a k tile in bytes.
template <int W, Codec C, bool usual>
inline void transpose_bytes(const RowScales& r, const char* bytes, int row0, char* __restrict out) {
  using D = Decoder<C>;
  using N = Numbers<W, C, usual>;
  using V = F32<W>;
  for (int pair = 0; pair < kTileN / 2; pair++) {
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; tile++) {
      const int half = D::halves == 2 ? tile : 0;
      V s[2], m[2] = {};
      splat_pair<W>(r.s[half] + 2 * pair, s);
      if constexpr (D::offset) splat_pair<W>(r.m[half] + 2 * pair, m);
      char* row = out + tile * kTileBytes + (row0 + pair) * 64;
      auto put = [&](int k, V a, V b) {
        put_pair<W, kExactInBf16<C>>(row + k * 4, scaled<D::offset>(a, s[0], m[0]), scaled<D::offset>(b, s[1], m[1]));
      };
      if constexpr (!kEvenAndOdd<W> && W == 16) {
        put(0, N::of(load_pair<W>(bytes, 2 * tile, pair)).template one<BothAlongK<0>>(),
            N::of(load_pair<W>(bytes, 2 * tile + 1, pair)).template one<BothAlongK<0>>());
      } else if constexpr (W == 4) {
#pragma GCC unroll 2
        for (int piece = 0; piece < 2; piece++) {
          V x[4];
          const N numbers = N::of(load_pair<W>(bytes, 2 * tile + piece, pair));
          if constexpr (kEvenAndOdd<W>) {
            numbers.template select<AlongK<0, 0>, AlongK<1, 0>, AlongK<0, 4>, AlongK<1, 4>>(x);
          } else {
            numbers.template select<BothAlongK<0>, BothAlongK<2>, BothAlongK<4>, BothAlongK<6>>(x);
          }
          put(8 * piece, x[0], x[1]);
          put(8 * piece + 4, x[2], x[3]);
        }
      } else {
#pragma GCC unroll 2
        for (int k = 0; k < kTileN; k += W) {
          const N numbers = N::of(load_pair<W>(bytes, 2 * tile + k / 8, pair));
          put(k, numbers.template one<AlongK<0, 0>>(), numbers.template one<AlongK<1, 0>>());
        }
      }
    }
  }
}

template <int W, Codec C>
__attribute__((noinline)) void transpose_rows_with_nan(const RowScales& r, const char* codes, int half, char* out) {
  alignas(64) char tile[kTileBytes];
  decode_rows<W, Bf16Pairs, C>(r, codes, tile);
  transpose_tile<W>(tile, half, out);
}

// One k tile of a strip into rows of two transposed tiles, the first or the second eight as `half` says. Never inlined,
// like decode_strip_as.
template <int W, Codec C>
__attribute__((noinline)) void transpose_strip_as(const Format& f, const Strip& s, const char* strip, int k_tile,
                                                  int half, char* out) {
  const int span = k_tile / s.span_tiles, in_span = k_tile - span * s.span_tiles, row0 = half * kTileN / 2;
  const Header header{strip + s.headers + (int64_t)span * s.span_bytes};
  const char* codes = strip + s.codes + (int64_t)k_tile * s.tile_bytes;
  RowScales scales;
  if constexpr (kFormats[(int)C].in_grid()) {
    OpenTile tile;
    const Grid& grid = grid_of(f.codec, W);
    grid.open(header.at, in_span, codes, tile);
    scales_of<W>(tile, grid.unit, scales);
    clear_payloads<W, C>(scales);
    transpose_bytes<W, C, false>(scales, (const char*)tile.codes, row0, out);
  } else {
    Decoder<C>::template scales<W>(f, header, in_span, strip, scales);
    clear_payloads<W, C>(scales);
    if constexpr (CodeWords<W, C>::low == 8) {
      const bool transposed = unless_nan<W, C>(
          scales, codes, [&](auto usual) { transpose_bytes<W, C, decltype(usual)::value>(scales, codes, row0, out); });
      if (__builtin_expect(!transposed, 0)) transpose_rows_with_nan<W, C>(scales, codes, half, out);
    } else {
      alignas(64) char bytes[kPieces * kPieceBytes];
      UnpackedCodes<W, C>::unpack(codes, bytes);
      transpose_bytes<W, C, false>(scales, bytes, row0, out);
    }
  }
}

// One half of a block, whose strips are encoded.
template <int W>
inline void transpose_codes(const Encoding& e, const char* block, int k_tile, int half, char* out) {
  const Format& f = e.format[half];
  const char* strip = block + (half ? e.strip[0].bytes : 0);
  if (f.codec == Codec::bf16_12) {
    const Strip& s = e.strip[half];
    alignas(64) char tile[kTileBytes];
    decode_bf16_12<W>(s, strip, k_tile, Patches(s, strip), tile);
    return transpose_tile<W>(tile, half, out);
  }
  switch (f.codec) {
#define KT_FORMAT(name, ...) \
  case Codec::name:          \
    return transpose_strip_as<W, decoded_as(Codec::name)>(f, e.strip[half], strip, k_tile, half, out);
#include "kernels/format_table.h"
  }
}

}  // namespace
}  // namespace kt
