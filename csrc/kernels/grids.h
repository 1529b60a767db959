// Formats whose codes are indices into a grid: GGUF's IQ1, IQ2 and IQ3, and TQ1_0 with five trits a byte.
//
// A k tile of such a format is rows of bytes in the strip, as in the checkpoint, not planes. `open` looks the indices
// up and leaves signed bytes in the order of a strip of int8, with the scales of the rows: from there on every ISA
// decodes, transposes or multiplies the tile as one of int8. Grids and look-ups do not depend on the ISA and are
// compiled once, for the baseline: eight weights are one word of 64 bits. Values are d * (2 s + 1) * level with factors
// of few bits, and levels are signed bytes times a power of two: the product is exact in fp32 in any order.
#pragma once

#include "kernels/format.h"

namespace kt {

// A k tile that has been looked up: the weight of output n at k is code * unit * odd * d, with the format's `unit`.
struct OpenTile {
  // [8 of k][output][parity of k][4]: k = 8 a + 2 c + b is codes[a][n][b][c].
  alignas(64) int8_t codes[kTileK / 8][kTileN][2][4];
  uint8_t odd[2][kTileN];  // 2 s + 1 of each row: for the first 16 of K and for the others
  uint16_t d[kTileN];      // f16
};

struct Grid {
  void (*open)(const char* header, int tile, const char* codes, OpenTile& out);
  float unit;  // a power of two
  // The same as tables of 4-bit codes, for decoders elsewhere. Levels: the weight of a code; bit 3 is the sign.
  alignas(64) float levels[16];
  // Four or eight codes an entry: those of even k from bit 0 up, those of odd k from bit 16 up.
  const uint32_t* entries;
  int32_t count;
};

// `codec` is one whose elements are `grid`; opened with vectors of at most `width` lanes of 32 bits, if the CPU has
// them.
const Grid& grid_of(Codec codec, int width);

// Whether the halves of a k tile have scales of their own.
constexpr bool grid_has_halves(Codec codec) {
  return codec == Codec::iq1_m || codec == Codec::iq2_xs || codec == Codec::iq2_s;
}

// Five trits as a byte holds them in a strip: a number to base 3, the first digit the lowest.
constexpr int kTritsOfByte = 5;

}  // namespace kt
