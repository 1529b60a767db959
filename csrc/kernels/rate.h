// Bare loops that say what this CPU can do: arithmetic from registers, the inner product over panels in L2, and reads.
//
// The benches set every cell against these, measured in the same run with the same threads; the thread probe uses them.
#pragma once

#include <time.h>

#include "kernels/back.h"

namespace kt {
namespace {

inline double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Calls `body` until `seconds` have passed; units of work per second.
template <class Body>
inline double per_second(double seconds, Body&& body) {
  double start = seconds_now(), now, units = 0;
  do {
    units += body();
    now = seconds_now();
  } while (now - start < seconds);
  return units / (now - start);
}

// bf16 or f32 numbers below 1 with random signs and mantissas. What the arithmetic can do depends on its data: on
// zeros or constants a matrix unit draws less power and runs up to twice as fast as it ever will on weights.
inline void fill_with_noise(char* out, size_t bytes, int elem) {
  uint64_t x = 88172645463325252u;
  for (size_t at = 0; at + (size_t)elem <= bytes; at += (size_t)elem) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    uint32_t bits = ((uint32_t)x & 0x807fffffu) | (0x78u + (uint32_t)(x >> 60) % 7u) << 23;
    if (elem == 2) {
      uint16_t half = (uint16_t)(bits >> 16);
      __builtin_memcpy(out + at, &half, 2);
    } else {
      __builtin_memcpy(out + at, &bits, 4);
    }
  }
}

// Two token tiles against blocks of K = 2048, everything packed and resident, nothing stored but the sums.
template <class Isa>
double panel_rate(double seconds, char* scratch, size_t bytes) {
  constexpr int k_tiles = 2048 / kTileK;
  constexpr int64_t block = k_tiles * 2 * kTileBytes;
  int rows = Isa::max_rows;
  int64_t tile = (int64_t)rows * kTileK * Isa::elem * k_tiles, panel = round_up(kPassTiles * tile, 64);
  int64_t blocks = ((int64_t)bytes - panel) / block;
  if (blocks < 1) return 0;
  fill_with_noise(scratch, (size_t)panel, Isa::elem);
  fill_with_noise(scratch + panel, bytes - (size_t)panel, 2);
  alignas(64) float c[kPassTiles * kMaxRows * kBlockN];
  Nothing nothing;
  Isa::enter(rows);
  double rate = per_second(seconds, [&] {
    for (int64_t i = 0; i < blocks; i++) {
      Product p{{scratch, (size_t)tile, scratch + panel + i * block, k_tiles},
                0,
                0,
                kPassTiles,
                rows,
                kPassTiles * rows,
                false,
                kNothingAhead,
                c,
                nullptr,
                0,
                0};
      Isa::multiply(p, nothing);
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
  // The sum must be seen, or the loop is dropped.
  asm volatile("" : : "g"(sum[0][0]) : "memory");
  return rate;
}

// Multiply-adds on MR x NV accumulators that never leave their registers.
template <int W, int chains>
double register_rate(double seconds) {
  // Numbers that the compiler cannot see, or it would leave the multiplication by one out.
  alignas(64) float noise[2 * W];
  fill_with_noise((char*)noise, sizeof noise, 4);
  F32<W> acc[chains], x = load<F32<W>>(noise), y = load<F32<W>>(noise + W);
  for (int i = 0; i < chains; i++) acc[i] = splat<W>((float)i);
  double rate = per_second(seconds, [&] {
    for (int n = 0; n < 4096; n++)
      for (int i = 0; i < chains; i++) acc[i] = acc[i] * x + y;
    return 4096.0 * chains * W * 2;
  });
  F32<W> all = acc[0];
  for (int i = 1; i < chains; i++) all += acc[i];
  asm volatile("" : : "g"(all[0]) : "memory");
  return rate;
}

template <class Isa>
double measure_rate(Rate what, double seconds, char* scratch, size_t bytes) {
  if (what == Rate::read) return read_rate<Isa::width>(seconds, scratch, bytes);
  if (what == Rate::panels) return panel_rate<Isa>(seconds, scratch, bytes);
  return Isa::registers(seconds);
}

template <class Isa>
constexpr KernelTable table_of(const char* name) {
  return {name,
          Isa::elem,
          &Isa::tiling,
          &gather_panel<Isa::width, Isa::elem>,
          &run_up<Isa>,
          &run_down<Isa>,
          &pack_block<Isa::width>,
          &turn_blocks<Isa::width>,
          &run_back<Isa>,
          &Isa::outer,
          &thin_panel<Isa>,
          &measure_rate<Isa>};
}

}  // namespace
}  // namespace kt
