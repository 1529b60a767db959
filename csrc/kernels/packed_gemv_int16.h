// Packed GEMV with int16 activations, for CPUs without bf16 products: integer dot products of codes and x.
//
// A k tile of a row of x becomes int16 numbers times a power of two. That is exact for bf16 values down to 2^-7 of the
// tile's largest, and f32 values are off by at most 2^-16 of it: less than 1 % of what rounding the weights to bf16
// costs. Bytes are what CPUs multiply fastest, so where codes have few bits x is split into two signed bytes, 256 times
// the first plus the second, and each is multiplied with the codes; codes of 8 bits are widened and multiplied with the
// int16 numbers themselves. `Product` of the ISA says how (byte_products.h). A row's bits do not depend on the others.
//
// In W8A8 of these formats a k tile of x becomes int8 numbers times its largest magnitude / 127: half of the products.
#pragma once

#include "kernels/int16_rows.h"
#include "kernels/packed_gemv_fp8.h"
#include "kernels/segment_scales.h"

namespace kt {
namespace {

// Codes of one format: quads, the number of scales of a k tile, and the table that codes are looked up in, if any.
// `SumOf`: their accumulators for x of one or of two bytes.
template <class Product, class Quads, int scales_of_tile, int bits, bool looks_up, class SumOf>
struct Int16Codes {
  static constexpr int W = Product::width, halves = scales_of_tile;
  // Few enough constants that all lanes of a strip fit the registers.
  static constexpr bool plain = !looks_up && scales_of_tile == 1 && (bits == 2 || bits == 4 || bits == 8);
  static constexpr bool may_have_offset =
      !looks_up && (bits == 2 || bits == 4 || bits == 5 || (bits == 8 && halves == 1));
  using Sum = SumOf;
  U8<W> table = {};

  template <int quad>
  U8<W> at(const char* tile, int lane) const {
    if constexpr (looks_up) return Product::look_up(table, Quads::template at<quad>(tile, lane));
    return Quads::template at<quad>(tile, lane);
  }
};

// Vectors of lanes that one sweep over a strip accumulates: few, since x is loaded for free beside the products.
template <class Product, int rows, bool plain>
constexpr int kInt16Vectors = Product::joins                          ? (rows == 1 && plain ? 8 : 2)
                              : rows * 2 * 2 <= Product::accumulators ? 2
                                                                      : 1;

// Multiply-adds one half of a k tile, or all of it, into the sums of `rows` rows by NV vectors.
template <class Codes, class Tile, int rows, int NV, int quad, int end>
inline void add_quads(const Codes& kind, const char* tile, int lane, const Tile* x,
                      typename Codes::Sum (&sums)[rows][NV]) {
  if constexpr (quad < end) {
    constexpr int W = Codes::W;
    typename Codes::Sum::Factor factor[rows][2];
    for (int r = 0; r < rows; r++)
      for (int f = 0; f < 2; f++) factor[r][f] = Codes::Sum::factor(x[r].operand[quad][f]);
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      const auto codes = Codes::Sum::widen(kind.template at<quad>(tile, lane + v * W));
      for (int r = 0; r < rows; r++) sums[r][v].add(codes, factor[r][0], factor[r][1]);
    }
    add_quads<Codes, Tile, rows, NV, quad + 1, end>(kind, tile, lane, x, sums);
  }
}

// Lanes whose sums a vector of numbers holds.
template <class Product>
constexpr int kLanesOfNumbers = Product::joins ? 2 * Product::width : Product::width;

template <class Product>
inline F32<Product::width> scales_of_sums(const float* scales, int lane) {
  if constexpr (Product::joins) return load<F32<Product::width>>(scales + lane / 2);
  return scales_of_lanes_at<Product::width>(scales, lane);
}

// Adds the products of one half of a k tile, or of all of it where it has one scale, to the totals of a sweep. `s` and
// `m` are the half's scales and the numbers that are added.
template <class Product, class Codes, bool offset, int half, int rows, int NV, int NO>
inline void add_half(const Codes& kind, const char* tile, int lane, const Int16Tile<Product::copies>* x, const float* s,
                     const float* m, F32<Product::width> (&total)[rows][NO]) {
  constexpr int W = Product::width, quads = kQuads / Codes::halves;
  typename Codes::Sum sums[rows][NV];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < NV; v++) sums[r][v].begin(x[r].start[half][0], x[r].start[half][1]);
  add_quads<Codes, Int16Tile<Product::copies>, rows, NV, half * quads, (half + 1) * quads>(kind, tile, lane, x, sums);
#pragma GCC unroll 4
  for (int o = 0; o < NO; o++) {
    const F32<W> scale = scales_of_sums<Product>(s, lane + o * kLanesOfNumbers<Product>);
    F32<W> minimum = {};
    if constexpr (offset) minimum = scales_of_sums<Product>(m, lane + o * kLanesOfNumbers<Product>);
    for (int r = 0; r < rows; r++) {
      F32<W> sum;
      if constexpr (Product::joins) {
        sum = Codes::Sum::joined(sums[r][2 * o], sums[r][2 * o + 1]);
      } else {
        sum = sums[r][o].total(x[r].start[half][0], x[r].start[half][1]);
      }
      total[r][o] += sum * (scale * splat<F32<W>>(x[r].scale));
      if constexpr (offset) total[r][o] += minimum * splat<F32<W>>(x[r].sum[half] * (Product::joins ? 1.0f : 0.5f));
    }
  }
}

// Adds the products of `count` k tiles to numbers [rows][32]: of 16 outputs where the product joins lanes, else of
// lanes.
template <class Product, class Codes, bool offset, int rows>
__attribute__((noinline, flatten)) void multiply_segment(const Codes& given, const char* codes, int tile_bytes,
                                                         int count, const SegmentScales& scales,
                                                         const Int16Tile<Product::copies>* x, int64_t next,
                                                         float* numbers) {
  constexpr int W = Codes::W, NV = kInt16Vectors<Product, rows, Codes::plain>, NO = Product::joins ? NV / 2 : NV,
                halves = Codes::halves;
  const Codes kind = given;
  for (int lane = 0; lane < kLanesOfTile; lane += NV * W) {
    const int column = Product::joins ? lane / 2 : lane;
    F32<W> total[rows][NO];
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < NO; o++) total[r][o] = load<F32<W>>(numbers + r * kLanesOfTile + column + o * W);
    for (int k = 0; k < count; k++) {
      const char* tile = codes + (int64_t)k * tile_bytes;
      const float *s = scales.s + k * halves * kTileN, *m = scales.m + k * halves * kTileN;
      if (lane == 0) prefetch_tile(tile, tile_bytes, next);
      add_half<Product, Codes, offset, 0, rows, NV>(kind, tile, lane, x + k * rows, s, m, total);
      if constexpr (halves == 2)
        add_half<Product, Codes, offset, 1, rows, NV>(kind, tile, lane, x + k * rows, s + kTileN, m + kTileN, total);
    }
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < NO; o++) store(numbers + r * kLanesOfTile + column + o * W, total[r][o]);
  }
}

constexpr uint8_t kE2m1Doubled[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // plus 12
constexpr int8_t kIq4Bytes[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <class Isa>
struct PackedGemvInt16 {
  using Real = float;
  using Product = typename Isa::CodeProduct;
  using Tile = Int16Tile<Product::copies>;
  static constexpr bool int8_rows = false;
  // Dequantised tiles take less time for more rows.
  static constexpr int W = Product::width, max_rows = Isa::panel == DType::bf16 ? kInt16GroupRows : Product::max_rows;
  static constexpr int row_bytes = max_rows > kPackedGemvRows ? 2 * sizeof(Tile) : 0;
  static_assert(sizeof(Tile) >= kTileK * sizeof(float));
  static_assert(row_bytes || max_rows * 2 * sizeof(Tile) <= 2 * kTileBytes);

  static int32_t rows_of(const Format& f, bool x_int8) {
    const FormatRow& row = f.row();
    if (row.element == ElementKind::e4m3) return x_int8 ? 0 : kFp8Rows;
    if (f.is_tiles() || row.element == ElementKind::bf16_12) return 0;  // rounding would not be bf16's
    if (x_int8) return Isa::panel == DType::bf16 ? max_rows : kAnyRows;
    const bool unpacks_fast = !row.plane[1] && !has_halves(row) && !row.in_grid();
    return unpacks_fast || max_rows < Product::slow_rows ? max_rows : Product::slow_rows;
  }

  // Calls act with the Int16Codes of a format for x of `planes` bytes, and what the rows must know about it.
  template <int planes, class Act>
  static void with_codes(const Format& f, const Act& act) {
    const FormatRow& row = f.row();
    const bool halves = has_halves(row);
    if (row.element == ElementKind::e4m3) {
      QuadLayout layout{};
      layout.floats = true;
      return act(FloatCodes{}, layout);
    }
    if (row.in_grid() && grid_has_halves(f.codec))
      return with_quads<PlaneQuads<W, Codec::int8>, 2, 8, planes>(Product::byte_offset, act);
    if (row.element == ElementKind::int8 || row.in_grid())
      return with_quads<PlaneQuads<W, Codec::int8>, 1, 8, planes>(Product::byte_offset, act);
    if (row.element == ElementKind::iq4)
      return with_table<1, 8, planes>((const uint8_t (&)[16])kIq4Bytes, Product::byte_offset, 1, act);
    if (row.element == ElementKind::e2m1)
      return halves ? with_table<2, 5, planes>(kE2m1Doubled, 12, 0.5f, act)
                    : with_table<1, 5, planes>(kE2m1Doubled, 12, 0.5f, act);
    const int low = row.plane[0], high = row.plane[1], zero = row.zero_point;
    if (low == 2 && high == 1) return with_quads<HalfQuads<W, Codec::q3_k>, 2, 3, planes>(zero, act);
    if (low == 2 && halves) return with_quads<HalfQuads<W, Codec::q2_k>, 2, 2, planes>(zero, act);
    if (low == 2) return with_quads<PlaneQuads<W, Codec::tq2_0>, 1, 2, planes>(zero, act);
    if (high == 2) return with_quads<PlaneQuads<W, Codec::q6_k>, 2, 6, planes>(zero, act);
    if (high == 1) return with_quads<PlaneQuads<W, Codec::q5_k>, 1, 5, planes>(zero, act);
    with_quads<PlaneQuads<W, Codec::int4>, 1, 4, planes>(zero, act);
  }

  // Writes all rows into the scratch of dequantised tiles: groups of rows, in each [k_tiles][rows]. A pass over tiles
  // begins a new group, whatever the number of its rows.
  template <class Unit>
  static PackedGemvPanel write_rows(const Unit& u) {
    if constexpr (requires { u.packed_rows; })
      if (u.packed_rows) return {{u.packed_rows, u.packed_rows}};
    return write_panel(u.base, u.tiling.rows, u.live, *u.encoded.encoding, u.encoded.x_int8, (Tile*)u.encoded.decoded);
  }

  // Bytes of a k tile of a row where both halves of a block take the same rows.
  static int32_t packed_row_bytes(const Encoding& e) {
    return layout_of(e.format[0]) == layout_of(e.format[1]) ? (int32_t)sizeof(Tile) : 0;
  }
  static void write_packed_rows(const PackedRows& p) {
    write_panel(p.panel, p.tiling.rows, p.live, *p.encoding, p.x_int8, (Tile*)p.out);
  }

  // One block times the rows, into p.c. `next`: bytes from this block to the next one.
  __attribute__((noinline)) static void multiply_block(const EncodedBlocks& encoded, const ProductOf<float>& p,
                                                       const PackedGemvPanel& panel, int64_t next) {
    const Encoding& e = *encoded.encoding;
    const int k_tiles = p.contraction.k_tiles;
    for (int half = 0; half < 2; half++) {
      const Format& f = e.format[half];
      const StripPart part{f, e.strip[half], p.contraction.b + half * e.strip[0].bytes, encoded.k0};
      alignas(64) float numbers[kPassTiles * kMaxRows * kLanesOfTile];
      const bool joined = Product::joins && f.row().element != ElementKind::e4m3;
      int first = 0, end = 0;  // k tiles that are summed
      auto multiply = [&]<class Codes>(const Codes& kind, const QuadLayout&) {
        for (int k = first; k < end; k += kSegmentTiles) {
          Segment segment(part, k, end - k < kSegmentTiles ? end - k : kSegmentTiles, next);
          for (int row = 0; row < p.live; row += kInt16GroupRows) {
            const int rows = p.live - row < kInt16GroupRows ? p.live - row : kInt16GroupRows;
            const char* x =
                panel.x[half] + ((int64_t)(p.tile * p.rows + row) * k_tiles + (int64_t)k * rows) * sizeof(Tile);
            with_rows<kInt16GroupRows>(rows, [&]<int count>() {
              segment.template multiply<Codes, count>(kind, x, numbers + row * kLanesOfTile);
            });
            segment.next = 0;
          }
        }
      };
      for (; first < k_tiles; first = end) {
        end = k_tiles - first < encoded.sum_tiles ? k_tiles : first + encoded.sum_tiles;
        __builtin_memset(numbers, 0, (size_t)p.live * kLanesOfTile * sizeof(float));
        encoded.x_int8 ? with_codes<1>(f, multiply) : with_codes<2>(f, multiply);
        const bool accumulate = p.accumulate || first > 0;
        float* c = p.c + half * kTileN;
        joined ? store_outputs(numbers, p.live, accumulate, c) : join_lanes<W>(numbers, p.live, accumulate, c);
      }
    }
  }

 private:
  // Whether the halves of a k tile have scales of their own.
  static bool has_halves(const FormatRow& row) {
    return row.scales == ScaleKind::e4m3 || row.scales == ScaleKind::q2_k || row.scales == ScaleKind::q3_k ||
           row.scales == ScaleKind::q6_k;
  }

  // A strip, and the first k tile of it that is multiplied.
  struct StripPart {
    const Format& format;
    const Strip& strip;
    const char* at;
    int k0;
  };

  // Some k tiles of a strip with their scales; those of a grid are looked up here, once for all rows.
  struct Segment {
    const char* codes;
    int tile_bytes, count;
    int64_t next;  // to what is prefetched
    bool offset;
    Fp8Segment fp8;
    SegmentScales scales;
    OpenTile opened[kSegmentTiles];

    Segment(const StripPart& p, int k, int tiles, int64_t to_next)
        : codes(p.at + p.strip.codes + (int64_t)(p.k0 + k) * p.strip.tile_bytes),
          tile_bytes(p.strip.tile_bytes),
          count(tiles),
          next(to_next),
          offset(has_offset(p.format)) {
      prefetch_headers(p, p.k0 + k);
      if (p.format.row().in_grid()) {
        open_tiles(p, p.k0 + k);
      } else {
        read_scales<W>(p.format, p.strip, p.at, p.k0 + k, count, scales);
      }
      if (p.format.row().element == ElementKind::e4m3) fp8.template look_at<W>(codes, tile_bytes, count, scales.s);
    }

    // Headers lie in front of the codes, where no sweep over codes passes.
    void prefetch_headers(const StripPart& p, int k0) const {
      const Strip& s = p.strip;
      const char* headers = p.at + s.headers + next;
      const char* end = headers + ((k0 + count - 1) / s.span_tiles + 1) * (int64_t)s.span_bytes;
      for (const char* at = headers + k0 / s.span_tiles * (int64_t)s.span_bytes; at < end; at += 64)
        __builtin_prefetch(at, 0, 2);
    }

    void open_tiles(const StripPart& p, int k0) {
      const int scales_of_tile = grid_has_halves(p.format.codec) ? 2 * kTileN : kTileN;
      const Grid& grid = grid_of(p.format.codec, W);
      for (int k = 0; k < count; k++) {
        prefetch_tile(codes + (int64_t)k * tile_bytes, tile_bytes, next);
        const int span = (k0 + k) / p.strip.span_tiles;
        const char* header = p.at + p.strip.headers + (int64_t)span * p.strip.span_bytes;
        grid.open(header, k0 + k - span * p.strip.span_tiles, codes + (int64_t)k * tile_bytes, opened[k]);
        RowScales of_tile;
        scales_of<W>(opened[k], grid.unit, of_tile);
        __builtin_memcpy(scales.s + k * scales_of_tile, of_tile.s, (size_t)scales_of_tile * sizeof(float));
      }
      codes = (const char*)opened;
      tile_bytes = sizeof(OpenTile);
      next = 0;
    }

    template <class Codes, int rows>
    void multiply(const Codes& kind, const char* x, float* numbers) const {
      if constexpr (__is_same(Codes, FloatCodes)) {
        multiply_e4m3_segment<W, rows>(codes, tile_bytes, count, scales, fp8, (const float*)x,
                                       rows * sizeof(Tile) / sizeof(float), next, numbers);
      } else {
        auto* multiply = &multiply_segment<Product, Codes, false, rows>;
        if constexpr (Codes::may_have_offset)
          if (offset) multiply = &multiply_segment<Product, Codes, true, rows>;
        multiply(kind, codes, tile_bytes, count, scales, (const Tile*)x, next, numbers);
      }
    }
  };

  static void store_outputs(const float* numbers, int rows, bool accumulate, float* c) {
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < kTileN; n += W) {
        float* to = c + r * kBlockN + n;
        const F32<W> sum = load<F32<W>>(numbers + r * kLanesOfTile + n);
        store(to, accumulate ? load<F32<W>>(to) + sum : sum);
      }
  }

  // A k tile of a row as floats, in place of an Int16Tile; rows of a group are 32 floats apart.
  static void write_floats(const char* from, float* to) {
    for (int i = 0; i < kTileK; i += W) {
      if constexpr (Isa::panel == DType::bf16) {
        store(to + i, from_bf16<W>(from + 2 * i));
      } else {
        store(to + i, load<F32<W>>(from + 4 * i));
      }
    }
  }

  __attribute__((noinline)) static PackedGemvPanel write_panel(const Contraction& panel, int tile_rows, int rows,
                                                               const Encoding& e, bool x_int8, Tile* to) {
    const QuadLayout first = layout_of(e.format[0]), second = layout_of(e.format[1]);
    const OperandOrder<W> order[2] = {OperandOrder<W>(first), OperandOrder<W>(second)};
    const bool same = first == second;
    const int k_tiles = panel.k_tiles, rows_of_pass = kPassTiles * tile_rows;
    Tile* other = same ? to : to + (int64_t)rows * k_tiles;
    for (int row = 0; row < rows; row++) {
      const int pass = row - row % rows_of_pass, end = rows - pass < rows_of_pass ? rows : pass + rows_of_pass,
                group = row - (row - pass) % kInt16GroupRows,
                count = end - group < kInt16GroupRows ? end - group : kInt16GroupRows;
      const char* from = panel.a + row / tile_rows * (int64_t)panel.a_tile + row % tile_rows * (kTileK * Isa::elem);
      for (int k = 0; k < k_tiles; k++) {
        const char* tile = from + (int64_t)k * tile_rows * (kTileK * Isa::elem);
        alignas(64) int16_t x[kTileK];
        const auto values = TileValues<W>::template of<Isa::panel>(tile);
        const float scale = x_int8 ? to_int8<W>(values, x) : to_int16<W>(values, x);
        const int64_t begin = (int64_t)group * k_tiles + (int64_t)k * count, at = row - group;
        auto write = [&](const QuadLayout& layout, const OperandOrder<W>& operands, Tile* tiles) {
          if (layout.floats) return write_floats(tile, (float*)(tiles + begin) + at * kTileK);
          write_tile<Product>(x, scale, layout, operands, tiles[begin + at]);
        };
        write(first, order[0], to);
        if (!same) write(second, order[1], other);
      }
    }
    return {{(const char*)to, (const char*)other}};
  }

  static bool has_offset(const Format& f) {
    const ScaleKind kind = f.row().scales;
    return kind == ScaleKind::scale_and_min || kind == ScaleKind::scale_and_zero || kind == ScaleKind::q2_k ||
           kind == ScaleKind::q4_k;
  }

  static QuadLayout layout_of(const Format& f) {
    QuadLayout layout;
    with_codes<2>(f, [&](const auto&, const QuadLayout& of_format) { layout = of_format; });
    return layout;
  }

  template <int bits, int planes>
  using SumsOf = typename Product::template Sums<bits, planes>;

  template <class Quads, int halves, int bits, int planes, class Act>
  static void with_quads(int zero, const Act& act) {
    using Codes = Int16Codes<Product, Quads, halves, bits, false, SumsOf<bits, planes>>;
    act(Codes{}, layout_for<Quads, typename Codes::Sum>(halves, zero, 1));
  }

  template <int halves, int bits, int planes, class Act>
  static void with_table(const uint8_t (&table)[16], int zero, float unit, const Act& act) {
    using Quads = PlaneQuads<W, Codec::int4>;
    using Codes = Int16Codes<Product, Quads, halves, bits, true, SumsOf<bits, planes>>;
    Codes codes;
    for (int i = 0; i < 4 * W; i++) codes.table[i] = table[i % 16];
    act(codes, layout_for<Quads, typename Codes::Sum>(halves, zero, unit));
  }

  template <class Quads, class Sum>
  static QuadLayout layout_for(int halves, int zero, float unit) {
    QuadLayout layout{{}, halves, zero, unit, Sum::pairs};
    for (int quad = 0; quad < kQuads; quad++)
      for (int b = 0; b < 4; b++) layout.code[quad][b] = (uint8_t)Quads::code_of(quad, b);
    return layout;
  }
};

template <class Isa>
constexpr bool kHasPackedGemvInt16 = requires { typename Isa::CodeProduct; };

}  // namespace
}  // namespace kt
