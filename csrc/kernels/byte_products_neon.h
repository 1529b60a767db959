// Products of code bytes by SDOT: four signed bytes of every lane.
#pragma once

#include <arm_neon.h>

#include "kernels/byte_products.h"

namespace kt {
namespace {

// Converting integers to floats takes as long as four other instructions here. Sums are below 2^22, so they start from
// the bits of 1.5 * 2^23 instead: they are then the bits of that float plus themselves.
constexpr int32_t kFloatBits = 0x4b400000;

template <int planes>
struct SdotSums {
  static constexpr bool pairs = false;
  using Factor = U8<4>;
  I32<4> high, low;  // of the two bytes of x; int8: the second alone

  static Factor factor(const char* x) { return load<U8<4>>(x); }
  static U8<4> widen(const U8<4>& codes) { return codes; }
  void begin(const char* start_high, const char* start_low) {
    if constexpr (planes == 2) high = loaded(start_high);
    low = loaded(start_low);
  }
  void add(const U8<4>& codes, const Factor& x_high, const Factor& x_low) {
    if constexpr (planes == 2) high = (I32<4>)vdotq_s32((int32x4_t)high, (int8x16_t)codes, (int8x16_t)x_high);
    low = (I32<4>)vdotq_s32((int32x4_t)low, (int8x16_t)codes, (int8x16_t)x_low);
  }
  // Sums of the two lanes of every output.
  static F32<4> joined(const SdotSums& a, const SdotSums& b) {
    const F32<4> lows = (F32<4>)vpaddq_s32((int32x4_t)a.low, (int32x4_t)b.low) - splat<F32<4>>(kRounding);
    if constexpr (planes == 1) return lows;
    const F32<4> highs = (F32<4>)vpaddq_s32((int32x4_t)a.high, (int32x4_t)b.high) - splat<F32<4>>(kRounding);
    return lows + highs * splat<F32<4>>(256.0f);
  }

 private:
  // A load for every use: a copy of a register would take the place of a product.
  static I32<4> loaded(const char* from) {
#if defined(__aarch64__)
    I32<4> v;
    asm("ldr %q0, %1" : "=w"(v) : "m"(*(const I32<4>*)from));
    return v;
#else
    return load<I32<4>>(from);
#endif
  }
};

struct SdotProduct {
  static constexpr int width = 4, copies = 2, byte_offset = 0, start = kFloatBits, accumulators = 16;
  static constexpr int max_rows = kAnyRows, slow_rows = 16;
  static constexpr bool joins = true;
  template <int bits, int planes>
  using Sums = SdotSums<planes>;

  static U8<4> look_up(const U8<4>& table, const U8<4>& codes) { return shuffle_bytes<4>(table, codes); }
};

}  // namespace
}  // namespace kt
