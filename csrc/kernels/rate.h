// Peak rates of this CPU measured by bare loops (arithmetic from registers, the inner product over panels in L2, memory
// reads), and `table_of`, which assembles a variant's kernel table.
//
// The benches report every cell relative to these rates, measured in the same run with the same threads; the thread
// probe uses them too.
#pragma once

#include <time.h>

#include "kernels/decode_attention.h"
#include "kernels/down_backward.h"
#include "kernels/encode_blocks.h"
#include "kernels/gemv.h"
#include "kernels/lora_gemv.h"
#include "kernels/norm.h"
#include "kernels/rows_product.h"

namespace kt {
namespace {

inline double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Calls `body` until `seconds` have passed; returns units of work per second.
template <class Body>
inline double per_second(double seconds, Body&& body) {
  double start = seconds_now(), now, units = 0;
  do {
    units += body();
    now = seconds_now();
  } while (now - start < seconds);
  return units / (now - start);
}

// Random bytes, or bf16, f32 or f64 values below 1 with random signs and mantissas. Arithmetic throughput depends on
// the data: on zeros or constants a matrix unit draws less power and runs up to twice as fast as on weights.
inline void fill_with_noise(char* out, size_t bytes, int elem) {
  uint64_t x = 88172645463325252u;
  for (size_t at = 0; at + (size_t)elem <= bytes; at += (size_t)elem) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    uint32_t bits = ((uint32_t)x & 0x807fffffu) | (0x78u + (uint32_t)(x >> 60) % 7u) << 23;
    if (elem == 1) {
      out[at] = (char)(x >> 56);
    } else if (elem == 2) {
      uint16_t half = (uint16_t)(bits >> 16);
      __builtin_memcpy(out + at, &half, 2);
    } else if (elem == 4) {
      __builtin_memcpy(out + at, &bits, 4);
    } else {
      float single;
      __builtin_memcpy(&single, &bits, 4);
      double wide = single;
      __builtin_memcpy(out + at, &wide, 8);
    }
  }
}

// Two token tiles times blocks of K = 2048, everything packed and in cache, only the sums stored.
template <class Isa>
double panel_rate(double seconds, char* scratch, size_t bytes) {
  constexpr int k_tiles = 2048 / (kIntegerSums<Isa> ? kStepK : kTileK), each = kIntegerSums<Isa> ? 1 : Isa::elem;
  constexpr int64_t block = k_tiles * 2 * Isa::tile_bytes;
  int rows = Isa::max_rows;
  int64_t tile = (int64_t)rows * kTileK * Isa::elem * k_tiles, panel = round_up(kPassTiles * tile, 64);
  int64_t blocks = ((int64_t)bytes - panel) / block;
  if (blocks < 1) return 0;
  fill_with_noise(scratch, (size_t)panel, each);
  fill_with_noise(scratch + panel, bytes - (size_t)panel, kIntegerSums<Isa> ? 1 : Isa::tile_bytes / (kTileK * kTileN));
  alignas(64) typename Isa::Real c[kPassTiles * kMaxRows * kBlockN];
  NoOverlap no_overlap;
  Isa::enter(rows);
  double rate = per_second(seconds, [&] {
    for (int64_t i = 0; i < blocks; i++) {
      ProductOf<typename Isa::Real> p{{scratch, (size_t)tile, scratch + panel + i * block, k_tiles},
                                      0,
                                      0,
                                      kPassTiles,
                                      rows,
                                      kPassTiles * rows,
                                      false,
                                      kNoPrefetch,
                                      c,
                                      nullptr,
                                      0,
                                      0};
      Isa::multiply(p, no_overlap);
    }
    return 2.0 * kPassTiles * rows * kBlockN * 2048 * (double)blocks;
  });
  Isa::leave();
  return rate;
}

template <int W>
double read_rate(double seconds, const char* scratch, size_t bytes) {
  U32<W> sum[8] = {};
  double rate = per_second(seconds, [&] {
    size_t at = 0;
    for (; at + sizeof sum <= bytes; at += sizeof sum)
      for (int i = 0; i < 8; i++) sum[i] ^= load<U32<W>>(scratch + at + i * sizeof(U32<W>));
    return (double)at;
  });
  for (int i = 1; i < 8; i++) sum[0] ^= sum[i];
  // The sum must be used, or the compiler removes the loop.
  asm volatile("" : : "g"(sum[0][0]) : "memory");
  return rate;
}

// Multiply-adds on accumulators that stay in registers.
template <class V, int chains>
double register_rate(double seconds) {
  constexpr int W = kLanes<V>;
  // Values unknown to the compiler, which would drop a multiplication by one.
  alignas(64) Lane<V> noise[2 * W];
  fill_with_noise((char*)noise, sizeof noise, sizeof noise[0]);
  V acc[chains], x = load<V>(noise), y = load<V>(noise + W);
  for (int i = 0; i < chains; i++) acc[i] = splat<V>((Lane<V>)i);
  double rate = per_second(seconds, [&] {
    for (int n = 0; n < 4096; n++)
      for (int i = 0; i < chains; i++) acc[i] = acc[i] * x + y;
    return 4096.0 * chains * W * 2;
  });
  V all = acc[0];
  for (int i = 1; i < chains; i++) all += acc[i];
  asm volatile("" : : "g"(all[0]) : "memory");
  return rate;
}

template <class Isa, class Int8Isa>
double measure_rate(Rate what, double seconds, char* scratch, size_t bytes) {
  if (what == Rate::read) return read_rate<sizeof(typename Isa::Vector) / 4>(seconds, scratch, bytes);
  if (what == Rate::panels) return panel_rate<Isa>(seconds, scratch, bytes);
  if constexpr (kHasInt8<Int8Isa>)
    if (what == Rate::bytes) return panel_rate<Int8Isa>(seconds, scratch, bytes);
  return Isa::registers(seconds);
}

// What `write_rows` of a packed GEMV reads.
struct PackedGemvUnit {
  Contraction base;
  EncodedBlocks encoded;
  Tiling tiling;
  int32_t live;
  PackedGemvRows packed_gemv;
};

template <class Isa, class Gemv>
double packed_gemv_rate(const Encoding& encoding, int32_t rows, bool x_int8, double seconds, char* scratch,
                        size_t bytes) {
  const int32_t k_tiles = encoding.k_tiles;
  const Tiling tiling = Isa::tiling(rows);
  const int64_t tile = (int64_t)tiling.rows * kTileK * Isa::elem * k_tiles;
  char *panel = scratch, *block = panel + round_up(tile * tiling.tiles, 64),
       *decoded = block + round_up(encoding.block_bytes(), 64);
  const int64_t row_bytes = packed_gemv_row_bytes_of<Isa>() * rows;
  if (decoded + k_tiles * (row_bytes > 2 * kTileBytes ? row_bytes : 2 * kTileBytes) > scratch + bytes) return 0;
  fill_with_noise(panel, (size_t)(tile * tiling.tiles), Isa::elem);
  fill_with_noise(block, (size_t)encoding.block_bytes(), 1);
  for (int64_t i = 0; i < encoding.block_bytes(); i++) block[i] &= 0x77;  // no NaN of fp8
  for (int half = 0; half < 2; half++)  // a normal number in every type of scales: others are slow
    __builtin_memset(block + half * encoding.strip[0].bytes, 0x3f, (size_t)encoding.strip[half].codes);
  PackedGemvUnit unit{
      {panel, (size_t)tile, block, k_tiles}, {&encoding, 0, decoded, nullptr, x_int8}, tiling, rows, {}};
  for (int32_t r = 0; r < rows && r < kPackedGemvRows; r++) unit.packed_gemv.row[r] = panel + r * kTileK * Isa::elem;
  unit.packed_gemv.step = (int64_t)tiling.rows * kTileK * Isa::elem;
  const PackedGemvPanel written = Gemv::write_rows(unit);
  alignas(64) float c[kPassTiles * kMaxRows * kBlockN];
  ProductOf<float> p{unit.base, 0, 0, tiling.tiles, tiling.rows, rows, false, kNoPrefetch, c, nullptr, 0, 0};
  return per_second(seconds, [&] {
    for (int i = 0; i < 16; i++) multiply_packed<Gemv>(unit.encoded, p, written, 0, nullptr);
    return 16.0 * kBlockN * kTileK * k_tiles;
  });
}

template <class Isa>
double measure_codes(const Encoding& encoding, int32_t rows, bool x_int8, double seconds, char* scratch, size_t bytes) {
  const Format& format = encoding.format[0];
  if (rows < 1 || rows > kPassTiles * Isa::max_rows) return 0;
  if constexpr (kHasPackedGemvInt16<Isa>)
    if (rows <= PackedGemvInt16<Isa>::rows_of(format, x_int8))
      return packed_gemv_rate<Isa, PackedGemvInt16<Isa>>(encoding, rows, x_int8, seconds, scratch, bytes);
  return 0;
}

// bf16 tiles hold pairs along K, f32 and f64 tiles single values.
template <class Isa>
constexpr bool kPairs = Isa::tile_bytes == kTileBytes;

template <class Isa>
void pack_tiles(const Pack& p) {
  if constexpr (kPairs<Isa>) {
    pack_block<Isa::width>(p);
  } else {
    pack_exact<typename Isa::Vector>(p);
  }
}

template <class Isa>
void run_decode(const Decode& d) {
  decode_block<Isa>(*d.encoding, d.block, d.k0, d.count, d.out);
}

// Kernels other than the experts' exist once per variant, in the bf16 table.
template <class Isa, class Argument>
constexpr auto bf16_only(void (*kernel)(const Argument&)) {
  return kPairs<Isa> ? kernel : nullptr;
}

template <class Int8Isa, class Argument>
constexpr auto if_int8(void (*kernel)(const Argument&)) {
  return kHasInt8<Int8Isa> ? kernel : nullptr;
}

template <class Isa, class Int8Isa>
constexpr auto quantise_panel_of() -> void (*)(const QuantisePanel&) {
  if constexpr (kHasInt8<Int8Isa>) return &run_quantise_panel<Isa>;  // f64 has no W8A8
  return nullptr;
}

// `Int8Isa` is the int8 form of a variant, `GemvImpl` its GEMV for few rows (gemv.h).
template <class Isa, class Int8Isa = void, class GemvImpl = GemvWidened<Isa::width>>
constexpr KernelTable table_of(const char* name) {
  constexpr bool wide = sizeof(typename Isa::Real) == 8;
  return {name,
          kPairs<Isa> ? Precision::bf16
          : wide      ? Precision::f64
                      : Precision::f32,
          Isa::panel,
          wide ? DType::f64 : DType::f32,
          Isa::elem,
          sizeof(typename Isa::Real),
          Isa::tile_bytes,
          &Isa::tiling,
          &gather_panel<Isa>,
          &run_up<Isa, Int8Isa>,
          &run_down<Isa, Int8Isa>,
          &pack_tiles<Isa>,
          &run_decode<Isa>,
          &run_transpose<Isa>,
          &run_down_backward<Isa>,
          &Isa::lora_wgrad,
          &Isa::store_grad,
          &dropout_panel<Isa>,
          kPairs<Isa> ? GemvImpl::tokens : 0,
          bf16_only<Isa>(&GemvImpl::pack_rows),
          bf16_only<Isa>(&GemvImpl::multiply),
          bf16_only<Isa>(&run_attention_split<Isa::width>),
          bf16_only<Isa>(&run_decode_cache<Isa::width>),
          bf16_only<Isa>(&run_norm<Isa::width>),
          bf16_only<Isa>(&run_lora_gemv<Isa::width>),
          bf16_only<Isa>(&run_rows_product<kDecodeWidth<Isa>>),
          if_int8<Int8Isa>(&quantise_rows<kDecodeWidth<Isa>>),
          quantise_panel_of<Isa, Int8Isa>(),
          if_int8<Int8Isa>(&gather_int8_panel<Isa>),
          bf16_only<Isa>(&run_encode<(Isa::width > 4 ? Isa::width : 4)>),
          packed_gemv_rows_of<Isa>(),
          packed_gemv_row_bytes_of<Isa>(),
          packed_row_bytes_of<Isa>(),
          write_packed_rows_of<Isa>(),
          &measure_rate<Isa, Int8Isa>,
          &measure_codes<Isa>};
}

}  // namespace
}  // namespace kt
