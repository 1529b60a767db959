// Weight formats as data: how the 16 outputs of half a block lie in memory when they are not bf16 tiles.
//
// Half a block is a strip: a header area, then codes, k tile by k tile. Headers are the released bytes, one set for
// every span of K, but each field lies as an array over the 16 rows, so that all rows are scaled at once. Codes are the
// released bits, sorted into planes: a lane of a plane is one output at even or at odd k, which holds its 16 codes of
// the k tile. Sixteen shifts of the same words then give sixteen rows of a weight tile, in order and for any vector
// width. A few formats have places in tables for codes; their k tiles stay rows of bytes (grids.h). A strip is as long
// as what was released; a value is decoded in fp32 and rounded once, to the tile. A new format is a row in the table
// below and a struct in codecs.h, or a function in grids.cpp.
#pragma once

#include "types.h"

namespace kt {

enum class Codec : uint8_t {
  tiles,  // bf16, or what the precision says: no strip
  int8,
  int4,
  fp8,
  mxfp8,
  mxfp4,
  nvfp4,
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  tq2_0,
  tq1_0,
  iq1_s,
  iq1_m,
  iq2_xxs,
  iq2_xs,
  iq2_s,
  iq3_xxs,
  iq3_s,
};
constexpr int kCodecs = 28;

struct CodecRow {
  const char* name;
  int8_t plane[2];       // bits of the planes that make a code, the low ones first
  int16_t span;          // k that share a header; 0: the format says
  int8_t header;         // bytes of a row's header; 0: the format says
  int16_t block;         // bytes of `span` values of a row as GGUF has them; 0: codes and scales come apart
  bool in_rows = false;  // no planes: rows of as many bits, which grids.h opens
};

constexpr CodecRow kCodecRows[kCodecs] = {
    {"bf16", {0, 0}, 0, 0, 0},              // one row a codec, in the order of the enum
    {"int8", {8, 0}, 0, 4, 0},              // f32
    {"int4", {4, 0}, 0, 0, 0},              // bf16, f16 or f32
    {"fp8", {8, 0}, 0, 4, 0},               // f32
    {"mxfp8", {8, 0}, 32, 1, 0},            // e8m0
    {"mxfp4", {4, 0}, 32, 1, 0},            // e8m0
    {"nvfp4", {4, 0}, 32, 2, 0},            // e4m3 for each half; and f32 in front, for all
    {"q8_0", {8, 0}, 32, 2, 34},            // f16 d
    {"q4_0", {4, 0}, 32, 2, 18},            // f16 d
    {"q4_1", {4, 0}, 32, 4, 20},            // f16 d, m
    {"q5_0", {4, 1}, 32, 2, 22},            // f16 d
    {"q5_1", {4, 1}, 32, 4, 24},            // f16 d, m
    {"q2_k", {2, 0}, 256, 20, 84},          // 16 scales and minima of 4 bits, f16 d, dmin
    {"q3_k", {2, 1}, 256, 14, 110},         // 16 scales of 6 bits, f16 d
    {"q4_k", {4, 0}, 256, 16, 144},         // f16 d, dmin, 8 scales and minima of 6 bits
    {"q5_k", {4, 1}, 256, 16, 176},         // likewise
    {"q6_k", {4, 2}, 256, 18, 210},         // 16 scales of 8 bits, f16 d
    {"iq4_nl", {4, 0}, 32, 2, 18},          // f16 d
    {"iq4_xs", {4, 0}, 256, 8, 136},        // f16 d, 8 scales of 6 bits
    {"tq2_0", {2, 0}, 256, 2, 66},          // f16 d
    {"tq1_0", {1, 0}, 256, 22, 54, true},   // 20 bytes of trits that a k tile has no room for, f16 d
    {"iq1_s", {1, 0}, 256, 18, 50, true},   // f16 d, 8 times high bits, a scale of 3 bits and a sign
    {"iq1_m", {1, 0}, 256, 24, 56, true},   // 16 bytes of high bits and signs, 16 scales of 3 bits and f16 d
    {"iq2_xxs", {2, 0}, 256, 2, 66, true},  // f16 d
    {"iq2_xs", {2, 0}, 256, 10, 74, true},  // f16 d, 16 scales of 4 bits
    {"iq2_s", {2, 0}, 256, 18, 82, true},   // f16 d, 8 bytes of high bits, 16 scales of 4 bits
    {"iq3_xxs", {3, 0}, 256, 2, 98, true},  // f16 d
    {"iq3_s", {3, 0}, 256, 14, 110, true},  // f16 d, 8 bytes of high bits, 8 scales of 4 bits
};

struct Format {
  Codec codec = Codec::tiles;
  bool shared = false;       // fp8: one header for all 16 rows
  DType scale = DType::f32;  // of int4's scales
  int32_t group = 0;         // int4, fp8: k that share a scale, a multiple of 32; 0: all of K

  constexpr const CodecRow& row() const { return kCodecRows[(int)codec]; }
  constexpr bool is_tiles() const { return codec == Codec::tiles; }
  constexpr int span() const { return row().span ? row().span : group; }
  constexpr int bits() const { return row().plane[0] + row().plane[1]; }
  constexpr int header() const { return codec == Codec::int4 ? (int)size_of(scale) : row().header; }
  constexpr int rows() const { return shared ? 1 : kTileN; }  // that have a header of their own
  constexpr bool operator==(const Format&) const = default;
};

// Where things are in a strip over `k_tiles` tiles.
struct Strip {
  int64_t headers;  // first span's header
  int64_t codes;    // first k tile's codes
  int64_t bytes;
  int32_t span_tiles;  // k tiles that share a header
  int32_t span_bytes, tile_bytes;
};

constexpr Strip strip_of(const Format& f, int32_t k_tiles) {
  Strip s{};
  s.span_tiles = f.span() ? f.span() / kTileK : (k_tiles ? k_tiles : 1);
  s.span_bytes = f.rows() * f.header();
  s.tile_bytes = kTileN * kTileK * f.bits() / 8;
  s.headers = f.codec == Codec::nvfp4 ? 4 : 0;
  s.codes = round_up(s.headers + ceil_div(k_tiles, s.span_tiles) * s.span_bytes, 64);
  s.bytes = s.codes + (int64_t)k_tiles * s.tile_bytes;
  return s;
}

// The two strips of a block.
struct Encoding {
  Format format[2];
  Strip strip[2];
  int32_t k_tiles;

  Encoding() = default;
  Encoding(const Format& first, const Format& second, int32_t tiles)
      : format{first, second}, strip{strip_of(first, tiles), strip_of(second, tiles)}, k_tiles(tiles) {}
  // An odd number of lines: backward walks across blocks, and they must not fall into the same sets of a cache.
  constexpr int64_t block_bytes() const {
    int64_t lines = ceil_div(strip[0].bytes + strip[1].bytes, 64);
    return (lines | 1) * 64;
  }
};

// One matrix of one expert as it was released. Codes: row n at codes + n * row_bytes, bytes or nibbles (low first) in
// order of k, or GGUF's blocks. Scales: element (row, span) in the order [rows][spans], `scale_rows` rows to a scale.
struct Released {
  const uint8_t* codes;
  int64_t row_bytes;
  const char* scales;    // null for GGUF's
  int64_t scale_stride;  // bytes from one row of scales to the next
  int32_t scale_rows;    // 128 for fp8 in blocks, else 1
  const float* tensor;   // nvfp4's
};

// Fills a strip with rows [n0, n0 + 16) of a matrix of n_valid rows and K columns; rows and columns past them are zero.
void pack_strip(const Format& format, const Released& from, int32_t n0, int32_t n_valid, int32_t k, int32_t k_tiles,
                char* strip);

}  // namespace kt
