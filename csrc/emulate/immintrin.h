// Software versions of the few intrinsics that the VNNI, AVX-512 BF16 and AMX kernels use, for machines that lack them.
//
// The kernels are otherwise written in the compiler's portable vectors, so with this file in place of the compiler's
// <immintrin.h> every variant runs on the machine that built it: slowly, but with the same loops, layouts and edge
// cases. For test builds only (KT_EMULATE); an emulated variant is never chosen unless it is requested by name.
// Operands are bf16, denormals count as zero, and products are added to the f32 sum one by one; the hardware first adds
// a tile's products among themselves and flushes tiny results, so the last bits differ.
//
// On a machine with AVX2 an emulated variant has those of its flags that the machine runs (cmake/isa_objects.cmake),
// and needs them on any other: with AVX-512 a vector is one register and not four of SSE, which compiles four times as
// fast. Then the compiler's header is read as well, and only the intrinsics below are replaced.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __AVX2__
#include_next <immintrin.h>
// The compiler declares every intrinsic, whatever the flags are.
#define _mm512_dpbf16_ps emulated_mm512_dpbf16_ps
#define _mm512_dpbusd_epi32 emulated_mm512_dpbusd_epi32
#define _mm256_dpbusd_avx_epi32 emulated_mm256_dpbusd_avx_epi32
#define _mm512_maddubs_epi16 emulated_mm512_maddubs_epi16
#define _mm256_maddubs_epi16 emulated_mm256_maddubs_epi16
#define _mm512_madd_epi16 emulated_mm512_madd_epi16
#define _mm256_madd_epi16 emulated_mm256_madd_epi16
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_release emulated_tile_release
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#define _tile_dpbssd emulated_tile_dpbssd
#else
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef float __m512 __attribute__((vector_size(64)));
typedef uint16_t __m512bh __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
#endif

namespace {

struct EmulatedTile {
  uint8_t bytes[16][64];
};

struct EmulatedTiles {
  EmulatedTile tile[8];
  uint8_t rows[8];
  uint16_t colsb[8];
  bool on;
};

thread_local EmulatedTiles emulated_tiles;

inline float emulated_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline float emulated_pair(float sum, const uint8_t* a, const uint8_t* b) {
  uint16_t x[2], y[2];
  __builtin_memcpy(x, a, 4);
  __builtin_memcpy(y, b, 4);
  sum = __builtin_fmaf(emulated_bf16(x[1]), emulated_bf16(y[1]), sum);
  return __builtin_fmaf(emulated_bf16(x[0]), emulated_bf16(y[0]), sum);
}

inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  for (int i = 0; i < 16; i++) sum[i] = emulated_pair(sum[i], (const uint8_t*)&a + 4 * i, (const uint8_t*)&b + 4 * i);
  return sum;
}

// Never inlined: loops that inline it take minutes to compile.
template <class V>
__attribute__((noinline)) V emulated_dpbusd(V sum, V a, V b) {
  for (size_t i = 0; i < sizeof(V) / 4; i++) {
    uint32_t lane;
    __builtin_memcpy(&lane, (const char*)&sum + 4 * i, 4);
    for (int j = 0; j < 4; j++) {
      int product = ((const uint8_t*)&a)[4 * i + j] * ((const int8_t*)&b)[4 * i + j];
      lane += (uint32_t)product;
    }
    __builtin_memcpy((char*)&sum + 4 * i, &lane, 4);
  }
  return sum;
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) { return emulated_dpbusd(sum, a, b); }
inline __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) { return emulated_dpbusd(sum, a, b); }

// Products of unsigned and signed bytes, neighbours added and saturated to 16 bits; neighbours of 16 bits added.
template <int bytes>
struct EmulatedVectors {
  typedef int16_t Halves __attribute__((vector_size(bytes)));
  typedef int32_t Words __attribute__((vector_size(bytes)));
};
template <class V>
__attribute__((noinline)) V emulated_maddubs(V a, V b) {
  typedef typename EmulatedVectors<sizeof(V)>::Halves Halves;
  const Halves x = (Halves)a, y = (Halves)b;
  const Halves even = (x & 255) * (y << 8 >> 8), odd = ((x >> 8) & 255) * (y >> 8), sum = even + odd;
  const Halves overflows = ((even ^ sum) & (odd ^ sum)) >> 15, limit = (even >> 15) ^ 32767;
  return (V)((overflows & limit) | (~overflows & sum));
}
template <class V>
__attribute__((noinline)) V emulated_madd(V a, V b) {
  typedef typename EmulatedVectors<sizeof(V)>::Words Words;
  const Words x = (Words)a, y = (Words)b;
  return (V)((x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16));
}
inline __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) { return emulated_maddubs(a, b); }
inline __m256i _mm256_maddubs_epi16(__m256i a, __m256i b) { return emulated_maddubs(a, b); }
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) { return emulated_madd(a, b); }
inline __m256i _mm256_madd_epi16(__m256i a, __m256i b) { return emulated_madd(a, b); }

// Using tiles before configuring them faults on real hardware; here it traps.
inline EmulatedTile& emulated_tile(int i) {
  if (!emulated_tiles.on) __builtin_trap();
  return emulated_tiles.tile[i];
}

inline void _tile_loadconfig(const void* config) {
  const uint8_t* c = (const uint8_t*)config;
  __builtin_memset(&emulated_tiles, 0, sizeof emulated_tiles);
  emulated_tiles.on = c[0] == 1;
  for (int i = 0; i < 8; i++) {
    __builtin_memcpy(&emulated_tiles.colsb[i], c + 16 + 2 * i, 2);
    emulated_tiles.rows[i] = c[48 + i];
    if (emulated_tiles.rows[i] > 16 || emulated_tiles.colsb[i] > 64) __builtin_trap();
  }
}

inline void _tile_release() { emulated_tiles.on = false; }

inline void _tile_zero(int t) { __builtin_memset(&emulated_tile(t), 0, sizeof(EmulatedTile)); }

inline void _tile_loadd(int t, const void* base, size_t stride) {
  EmulatedTile& tile = emulated_tile(t);
  __builtin_memset(&tile, 0, sizeof tile);
  for (int r = 0; r < emulated_tiles.rows[t]; r++)
    __builtin_memcpy(tile.bytes[r], (const char*)base + r * stride, emulated_tiles.colsb[t]);
}

inline void _tile_stored(int t, void* base, size_t stride) {
  for (int r = 0; r < emulated_tiles.rows[t]; r++)
    __builtin_memcpy((char*)base + r * stride, emulated_tile(t).bytes[r], emulated_tiles.colsb[t]);
}

// Updates every word of c with `add` over the words of a and b.
template <class Sum, class Add>
inline void emulated_product(int c, int a, int b, const Add& add) {
  // Mismatched shapes fault on real hardware.
  const EmulatedTiles& t = emulated_tiles;
  if (t.rows[a] != t.rows[c] || t.colsb[b] != t.colsb[c] || t.colsb[a] != 4 * t.rows[b]) __builtin_trap();
  EmulatedTile &tc = emulated_tile(c), &ta = emulated_tile(a), &tb = emulated_tile(b);
  for (int m = 0; m < emulated_tiles.rows[c]; m++) {
    for (int k = 0; k < emulated_tiles.colsb[a] / 4; k++) {
      for (int n = 0; n < emulated_tiles.colsb[c] / 4; n++) {
        Sum sum;
        __builtin_memcpy(&sum, &tc.bytes[m][4 * n], 4);
        sum = add(sum, &ta.bytes[m][4 * k], &tb.bytes[k][4 * n]);
        __builtin_memcpy(&tc.bytes[m][4 * n], &sum, 4);
      }
    }
  }
}

inline void _tile_dpbf16ps(int c, int a, int b) { emulated_product<float>(c, a, b, emulated_pair); }

inline void _tile_dpbssd(int c, int a, int b) {
  emulated_product<uint32_t>(c, a, b, [](uint32_t sum, const uint8_t* x, const uint8_t* y) {
    for (int i = 0; i < 4; i++) sum += (uint32_t)((int8_t)x[i] * (int8_t)y[i]);
    return sum;
  });
}

}  // namespace
