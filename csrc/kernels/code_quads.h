// Codes of a strip as bytes for integer dot products: quads, which hold four codes of an output at even or at odd k in
// every lane of 32 bits, as CodeWords splits them.
//
// A lane has 16 codes of a k tile, so a k tile has four quads. `code_of` says which of the 16 a byte is; its k is twice
// that, plus the lane's parity.
#pragma once

#include "kernels/code_bytes.h"
#include "kernels/int8_tiles.h"

namespace kt {
namespace {

constexpr int kQuads = 4;

// The quads of a format's planes.
template <int W, Codec C>
struct PlaneQuads {
  using Words = CodeWords<W, C>;
  static constexpr int code_of(int quad, int b) { return Words::row_of(quad / Words::parts, quad % Words::parts, b); }

  template <int quad>
  static U8<W> at(const char* tile, int lane) {
    constexpr int word = quad / Words::parts;
    const U32<W> plane = load<U32<W>>(tile + (word * kLanesOfTile + lane) * 4);
    return Words::split(plane, high_plane(tile, lane), word, quad % Words::parts);
  }

 private:
  static U32<W> high_plane(const char* tile, int lane) {
    const char* plane = tile + kTileN * kTileK * Words::low / 8;
    if constexpr (Words::high == 1)
      return __builtin_convertvector(load<typename Vec<W>::u16>(plane + lane * 2), U32<W>);
    if constexpr (Words::high == 2) return load<U32<W>>(plane + lane * 4);
    return U32<W>{};
  }
};

// Quads of planes of 2 bits, whose bytes 0 and 1 are of the first half of the k tile, in pairs: quads 0 and 1 are of
// the first half, 2 and 3 of the second.
template <int W, Codec C>
struct HalfQuads {
  using Mixed = PlaneQuads<W, C>;
  static constexpr int code_of(int quad, int b) { return Mixed::code_of(quad % 2 * 2 + b / 2, quad / 2 * 2 + b % 2); }

  template <int quad>
  static U8<W> at(const char* tile, int lane) {
    const U32<W> a = (U32<W>)Mixed::template at<quad % 2 * 2>(tile, lane);
    const U32<W> b = (U32<W>)Mixed::template at<quad % 2 * 2 + 1>(tile, lane);
    if constexpr (kNeon<W>) {  // which interleaves halves of words in one instruction
      U16<W> from;
      for (int i = 0; i < 2 * W; i++) from[i] = (uint16_t)(i / 2 * 2 + quad / 2 + i % 2 * 2 * W);
      return (U8<W>)__builtin_shuffle((U16<W>)a, (U16<W>)b, from);
    }
    return quad < 2 ? (U8<W>)((a & 0xffffu) | b << 16) : (U8<W>)(a >> 16 | (b & 0xffff0000u));
  }
};

}  // namespace
}  // namespace kt
