// Weight formats as data: how the 16 outputs of half a block lie in memory when they are not bf16 tiles.
//
// Half a block is a strip: a header area, then codes, k tile by k tile. Headers are the bytes of the checkpoint, one
// set for every span of K, but each field lies as an array over the 16 rows, so that all rows are scaled at once. Codes
// are the bits of the checkpoint, sorted into planes: a lane of a plane is one output at even or at odd k, which holds
// its 16 codes of the k tile. Sixteen shifts of the same words then give sixteen rows of a weight tile, in order and
// for any vector width. Formats whose codes are indices into a grid keep their k tiles as rows of bytes (grids.h), and
// bf16:12, which is packed from plain bf16, its own order of bytes and a list of patches behind the headers
// (bf16_12.h). A strip of any other format has as many bytes as the checkpoint; a value is decoded in fp32 and rounded
// once, to the tile.
//
// A new format is a row of format_table.h if codecs.h can read its elements and scales, else a row and a kind there.
#pragma once

#include "types.h"

namespace kt {

enum class Codec : uint8_t {
#define KT_FORMAT(name, ...) name,
#include "kernels/format_table.h"
};

// How a code becomes a number.
enum class ElementKind : uint8_t {
  bf16,  // no codes: tiles of bf16, or of what the precision says
  int8,  // two's complement
  uint,  // code - zero_point
  e4m3,
  e2m1,
  iq4,      // one of the 16 levels of GGUF's IQ4 types
  grid,     // an index into a table of several codes (grids.h)
  bf16_12,  // the low byte of a bf16, and an index into the span's 16 high bytes (bf16_12.h)
};
constexpr const char* kElementKinds[] = {"bf16", "int8", "uint", "e4m3", "e2m1", "iq4", "grid", "bf16_12"};

// What the fields of a header mean.
enum class ScaleKind : uint8_t {
  none,
  floats,          // one scale
  e8m0,            // one power of two
  e4m3,            // two scales, of 16 k each, times one f32 of the whole matrix in front of the strip
  scale_and_min,   // one scale, and one number that is added
  scale_and_zero,  // one scale, and the code of zero, which is subtracted from codes
  q2_k,            // 16 scales and minima of 4 bits, f16 for all scales and for all minima
  q3_k,            // 16 scales of 6 bits, one f16 for all
  q4_k,            // f16 for all scales and for all minima, 8 scales and minima of 6 bits
  q6_k,            // 16 scales of 8 bits, one f16 for all
  iq4_xs,          // one f16 for all, 8 scales of 6 bits
  grid,            // of the format alone (grids.cpp)
  high_bytes,      // no scales: the high bytes of bf16 numbers, 16 for all rows of a strip
};
constexpr const char* kScaleKinds[] = {"none", "floats", "e8m0", "e4m3",   "scale_and_min", "scale_and_zero", "q2_k",
                                       "q3_k", "q4_k",   "q6_k", "iq4_xs", "grid",          "high_bytes"};

enum class FieldType : uint8_t { none, f32, f16, bf16, u8, i8, u16, by_name };  // by_name: bf16, f16 or f32 (Suffix)
constexpr const char* kFieldTypes[] = {"none", "f32", "f16", "bf16", "u8", "i8", "u16"};

constexpr int size_of(FieldType t) {
  return t == FieldType::f32 ? 4 : t == FieldType::u8 || t == FieldType::i8 ? 1 : 2;
}

// A field of a header: `count` numbers of a row, which begin at byte `at` of a GGUF block.
struct Field {
  FieldType type;
  int8_t count = 1;
  int16_t at = 0;
};

// What follows the name of a format after a colon.
enum class Suffix : uint8_t {
  none,
  group,  // k that share a scale, and the type of scales: int4:GROUP[:f16|f32]
  block,  // 128x128, 1x128 or row: k and rows that share a scale
};
constexpr int kBlockScale = 128;  // k, and rows where they share it

constexpr int kMaxFields = 3;

struct FormatRow {
  const char* name;
  ElementKind element;
  int8_t zero_point = 0;
  int8_t plane[2] = {};  // bits of the planes that make a code, the low ones first; grid: bits of a k tile's rows
  ScaleKind scales = ScaleKind::none;
  int16_t span = 0;  // k that share a header; 0: the suffix says, or all of K
  Field header[kMaxFields] = {};
  Suffix suffix = Suffix::none;
  int8_t gguf_type = -1;          // number of the type in GGUF files; -1: it is none of theirs
  int16_t block = 0;              // bytes of `span` values of a row in GGUF; 0: codes and scales are separate tensors
  bool written = false;           // `kt quant` writes it
  const char* spelled = nullptr;  // its name where that is no identifier

  constexpr int fields() const {
    int n = 0;
    while (n < kMaxFields && header[n].type != FieldType::none) n++;
    return n;
  }
  constexpr bool in_grid() const { return element == ElementKind::grid; }
  constexpr bool has_tensor_scale() const { return scales == ScaleKind::e4m3; }
  constexpr bool has_zeros() const { return scales == ScaleKind::scale_and_zero; }
  constexpr bool has_patches() const { return element == ElementKind::bf16_12; }
};

// Patches of a strip: values whose high byte is none of their span's 16. `uint16_t first[k_tiles + 1]` has the number
// of the first patch of every k tile, then come the patches in order of k tiles, each `k tile << 17 | position in the
// tile
// << 8 | high byte`. There is one for every k tile and some more, ten times as many as trained weights need; those that
// are not needed are kNoPatch.
constexpr int kMorePatches = 16;
constexpr uint32_t kNoPatch = 0xffffffffu;
constexpr int patches_of(int32_t k_tiles) { return k_tiles + kMorePatches; }
constexpr int64_t patch_index_bytes(int32_t k_tiles) { return round_up(2 * (k_tiles + 1), 4); }

namespace format_table {
constexpr FormatRow spell(FormatRow row) {
  if (row.spelled) row.name = row.spelled;
  return row;
}
using E = ElementKind;
using S = ScaleKind;
using enum FieldType;
constexpr FormatRow kFormats[] = {
#define KT_FORMAT(codec, ...) spell({.name = #codec, __VA_ARGS__}),
#include "kernels/format_table.h"
};
}  // namespace format_table
using format_table::kFormats;
constexpr int kCodecs = sizeof kFormats / sizeof kFormats[0];

struct Format {
  Codec codec = Codec::bf16;
  bool shared = false;       // one header for all 16 rows: Suffix::block
  DType scale = DType::f32;  // type of the scales: Suffix::group
  int32_t group = 0;         // k that share a scale, a multiple of 32; 0: all of K: Suffix::group and Suffix::block

  constexpr const FormatRow& row() const { return kFormats[(int)codec]; }
  constexpr bool is_tiles() const { return codec == Codec::bf16; }
  constexpr int span() const { return row().span ? row().span : group; }
  constexpr int bits() const { return row().plane[0] + row().plane[1]; }
  constexpr FieldType type_of(const Field& field) const {
    if (field.type != FieldType::by_name) return field.type;
    return scale == DType::bf16 ? FieldType::bf16 : scale == DType::f16 ? FieldType::f16 : FieldType::f32;
  }
  constexpr int field_bytes(const Field& field) const { return size_of(type_of(field)) * field.count; }
  constexpr int header() const {  // bytes of a row's header
    int bytes = 0;
    for (int i = 0; i < row().fields(); i++) bytes += field_bytes(row().header[i]);
    return bytes;
  }
  constexpr int rows() const { return shared ? 1 : kTileN; }  // that have a header of their own
  constexpr bool operator==(const Format&) const = default;
};

// Offsets within a strip over `k_tiles` tiles.
struct Strip {
  int64_t headers;  // first span's header
  int64_t patches;  // first patch of every k tile, where the format has them
  int64_t codes;    // first k tile's codes
  int64_t bytes;
  int32_t k_tiles;
  int32_t span_tiles;  // k tiles that share a header
  int32_t span_bytes, tile_bytes;
};

constexpr Strip strip_of(const Format& f, int32_t k_tiles) {
  Strip s{};
  s.k_tiles = k_tiles;
  s.span_tiles = f.span() ? f.span() / kTileK : (k_tiles ? k_tiles : 1);
  s.span_bytes = f.rows() * f.header();
  s.tile_bytes = kTileN * kTileK * f.bits() / 8;
  s.headers = f.row().has_tensor_scale() ? 4 : 0;
  s.patches = s.headers + ceil_div(k_tiles, s.span_tiles) * s.span_bytes;
  const int64_t patches = f.row().has_patches() ? patch_index_bytes(k_tiles) + 4 * patches_of(k_tiles) : 0;
  s.codes = round_up(s.patches + patches, 64);
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
  // An odd number of cache lines: backward strides across blocks, which must not fall into the same cache sets.
  constexpr int64_t block_bytes() const {
    int64_t lines = ceil_div(strip[0].bytes + strip[1].bytes, 64);
    return (lines | 1) * 64;
  }
};

// One matrix of one expert in the bytes of a checkpoint. Codes: row n at codes + n * row_bytes, bytes or nibbles (low
// first) in order of k, blocks of GGUF, or bf16 (bf16:12). Scales: [rows / scale_rows][spans].
struct Released {
  const uint8_t* codes;
  int64_t row_bytes;
  const char* scales;    // null for blocks of GGUF and for bf16
  int64_t scale_stride;  // bytes from one row of scales to the next
  int32_t scale_rows;    // rows that share a scale
  const float* tensor;   // scale of the whole matrix, where the format has one
  const uint8_t* zeros;  // [rows][spans], a byte each, where the format has them
  int64_t zero_stride;   // bytes from one row of zeros to the next
};

// Fills a strip with rows [n0, n0 + 16) of a matrix of n_valid rows and K columns; rows and columns past them are zero.
// False: the strip has more values to patch than patches, and is not packed.
constexpr const char* kUnpatched =
    ": given more values beside the 16 commonest high bytes of their groups than bf16:12 has patches for, expected "
    "bf16 "
    "numbers of few magnitudes; store this matrix as bf16";
[[nodiscard]] bool pack_strip(const Format& format, const Released& from, int32_t n0, int32_t n_valid, int32_t k,
                              int32_t k_tiles, char* strip);

}  // namespace kt
