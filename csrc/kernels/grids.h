// Formats whose codes are indices into a grid: GGUF's IQ1, IQ2 and IQ3, and TQ1_0 with five trits a byte.
//
// A k tile of such a format is rows of bytes in the strip, as in the checkpoint, not planes. `open` looks the indices
// up and leaves a plane of 4-bit codes, which every ISA turns into numbers through the format's 16 levels (formats.h).
// Grids and look-ups do not depend on the ISA and are compiled once, for the baseline. Values are d * (2 s + 1) * level
// with factors of few bits: the product is exact in fp32 in any order.
#pragma once

#include "kernels/format.h"

namespace kt {

// A k tile that has been looked up.
struct OpenTile {
  alignas(64) uint32_t codes[2][2 * kTileN];  // a plane of 4 bits; bit 3 of a code turns the level's sign
  uint8_t odd[2][kTileN];                     // 2 s + 1 of each row: for the first 16 of K and for the others
  uint16_t d[kTileN];                         // f16
};

struct Grid {
  void (*open)(const char* header, int tile, const char* codes, OpenTile& out);
  alignas(64) float levels[16];
  // Four or eight codes an entry: those of even k from bit 0 up, those of odd k from bit 16 up.
  const uint32_t* entries;
  int32_t count;
};

// `codec` is one whose elements are `grid`.
const Grid& grid_of(Codec codec);

// Five trits as a byte holds them in a strip: a number to base 3, the first digit the lowest.
constexpr int kTritsOfByte = 5;

}  // namespace kt
