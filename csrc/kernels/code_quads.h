// Codes of a strip as bytes, for integer dot products: quads, which hold four codes of an output at even or at odd k in
// every lane of 32 bits.
//
// A lane has 16 codes of a k tile, so a k tile has four quads; which k a quad holds follows from the planes of the
// format, and `code_of` says so: k is twice that, plus the lane's parity. Formats with a scale for 16 of K need quads
// of one half of the k tile each (`HalfQuads`): quads 0 and 1 are those of the first half.
#pragma once

#include "kernels/int8_tiles.h"

namespace kt {
namespace {

constexpr int kQuads = 4;
constexpr int plane_bytes(int bits) { return kTileN * kTileK * bits / 8; }  // of a k tile

template <int W>
using Bytes = typename Halves<W>::bytes;

// Where bytes 0 to 3 of every lane come from: byte from(b) of `stride` bytes that belong to the lane.
template <int W, int stride, class From>
inline Bytes<W> spread(const char* source, const From& from) {
  Bytes<W> loaded = {}, index;
  __builtin_memcpy(&loaded, source, W * stride);
  for (int i = 0; i < 4 * W; i++) index[i] = (uint8_t)(i / 4 * stride + from(i % 4));
  return __builtin_shuffle(loaded, index);
}

template <int W, class At>
inline Bytes<W> bytes_by(const At& at) {
  Bytes<W> v;
  for (int i = 0; i < 4 * W; i++) v[i] = (uint8_t)at(i % 4);
  return v;
}

// A plane of 4 bits: two words a lane, the even codes of a word in its low nibbles.
template <int W>
struct NibbleQuads {
  static constexpr int bits = 4;
  static constexpr int code_of(int quad, int b) { return quad / 2 * 8 + 2 * b + quad % 2; }
  template <int quad>
  static Bytes<W> at(const char* tile, int lane) {
    auto words = load<Bytes<W>>(tile + (quad / 2 * kLanesOfTile + lane) * 4);
    return quad % 2 ? words >> 4 : words & 15;
  }
};

// The bits at 4 from a plane of one bit, whose 16 bits of a lane are in order of the codes.
template <int W>
struct FiveBitQuads {
  static constexpr int bits = 5;
  static constexpr int code_of(int quad, int b) { return NibbleQuads<W>::code_of(quad, b); }
  template <int quad>
  static Bytes<W> at(const char* tile, int lane) {
    const Bytes<W> high = spread<W, 2>(tile + plane_bytes(4) + lane * 2, [](int) { return quad / 2; });
    const Bytes<W> bit = bytes_by<W>([](int b) { return 1 << (2 * b + quad % 2); });
    return NibbleQuads<W>::template at<quad>(tile, lane) | ((Bytes<W>)((high & bit) != 0) & 16);
  }
};

// The bits at 4 and 5 from a plane of two bits.
template <int W>
struct SixBitQuads {
  static constexpr int bits = 6;
  static constexpr int code_of(int quad, int b) { return NibbleQuads<W>::code_of(quad, b); }
  template <int quad>
  static Bytes<W> at(const char* tile, int lane) {
    const char* plane = tile + plane_bytes(4) + lane * 4;
    const Bytes<W> pairs = spread<W, 4>(plane, [](int b) { return quad / 2 * 2 + b / 2; });
    const Bytes<W> odd = bytes_by<W>([](int b) { return b % 2 ? 0xff : 0; });
    const Bytes<W> nibbles = (odd & (pairs >> 4)) | (~odd & pairs);
    return NibbleQuads<W>::template at<quad>(tile, lane) | ((nibbles << (4 - quad % 2 * 2)) & 0x30);
  }
};

// A plane of 2 bits: one word a lane, codes 4 b + i at bits 2 i of byte b.
template <int W>
struct CrumbQuads {
  static constexpr int bits = 2;
  static constexpr int code_of(int quad, int b) { return 4 * b + quad; }
  template <int quad>
  static Bytes<W> at(const char* tile, int lane) {
    return (load<Bytes<W>>(tile + lane * 4) >> (2 * quad)) & 3;
  }
};

// The bit at 2 from a plane of one bit.
template <int W>
struct ThreeBitQuads {
  static constexpr int bits = 3;
  static constexpr int code_of(int quad, int b) { return CrumbQuads<W>::code_of(quad, b); }
  template <int quad>
  static Bytes<W> at(const char* tile, int lane) {
    const Bytes<W> high = spread<W, 2>(tile + plane_bytes(2) + lane * 2, [](int b) { return b / 2; });
    const Bytes<W> bit = bytes_by<W>([](int b) { return 1 << (b % 2 * 4 + quad); });
    return CrumbQuads<W>::template at<quad>(tile, lane) | ((Bytes<W>)((high & bit) != 0) & 4);
  }
};

// Quads whose bytes 0 and 1 are of the first half of the k tile and 2 and 3 of the second, in pairs of equal halves.
template <int W, class Mixed>
struct HalfQuads {
  static constexpr int bits = Mixed::bits;
  static constexpr int code_of(int quad, int b) { return Mixed::code_of(quad % 2 * 2 + b / 2, quad / 2 * 2 + b % 2); }
  template <int quad>
  static Bytes<W> at(const char* tile, int lane) {
    typedef typename Halves<W>::plain Pairs;
    const Pairs a = (Pairs)Mixed::template at<quad % 2 * 2>(tile, lane);
    const Pairs b = (Pairs)Mixed::template at<quad % 2 * 2 + 1>(tile, lane);
    Pairs from;
    for (int i = 0; i < 2 * W; i++) from[i] = (uint16_t)(i / 2 * 2 + quad / 2 + i % 2 * 2 * W);
    return (Bytes<W>)__builtin_shuffle(a, b, from);
  }
};

// Whole bytes: four words a lane.
template <int W>
struct ByteQuads {
  static constexpr int bits = 8;
  static constexpr int code_of(int quad, int b) { return 4 * quad + b; }
  template <int quad>
  static Bytes<W> at(const char* tile, int lane) {
    return load<Bytes<W>>(tile + (quad * kLanesOfTile + lane) * 4);
  }
};

}  // namespace
}  // namespace kt
