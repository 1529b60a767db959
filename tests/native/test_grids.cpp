// Look-ups of grid formats with vectors of every width that this CPU has against those in plain C++: the same bytes.
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/grids_portable.h"

namespace kt {
namespace {

constexpr int kTiles = 8;  // of a span

// A random header and random codes of one k tile, opened both ways.
bool same_bytes(Codec codec, int width, int tile, std::mt19937& random) {
  Format format;
  format.codec = codec;
  const Strip strip = strip_of(format, kTiles);
  std::vector<char> header((size_t)strip.span_bytes), codes((size_t)strip.tile_bytes);
  std::uniform_int_distribution<int> any(0, 255);
  for (char& byte : header) byte = (char)any(random);
  for (char& byte : codes) byte = (char)any(random);
  OpenTile opened, expected;
  grid_of(codec, width).open(header.data(), tile, codes.data(), opened);
  portable_grid_of(codec).open(header.data(), tile, codes.data(), expected);
  return std::memcmp(opened.codes, expected.codes, sizeof opened.codes) == 0 &&
         std::memcmp(opened.odd, expected.odd, sizeof opened.odd) == 0 &&
         std::memcmp(opened.d, expected.d, sizeof opened.d) == 0;
}

}  // namespace

TEST(grids_opened_by_vectors_have_the_bytes_of_plain_code) {
  std::mt19937 random(7);
  for (int codec = 0; codec < kCodecs; codec++)
    for (int tile = 0; kFormats[codec].in_grid() && tile < kTiles; tile++)
      for (int width : {8, 16})
        for (int repeat = 0; repeat < 20; repeat++) CHECK(same_bytes((Codec)codec, width, tile, random));
}

}  // namespace kt
