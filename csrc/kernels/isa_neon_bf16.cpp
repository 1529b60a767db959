// NEON with bf16 and int8 matrix products (Neoverse-N2, V1 and V2, Graviton 3 and 4, Grace, Apple M2): activations stay
// bf16.
#include "kernels/rate.h"
#include "kernels/rows_neon_mmla.h"

namespace kt {
namespace {

struct NeonBf16 : NeonRows<NeonMatrix<NeonBf16Dot>> {
  static double registers(double seconds) {
    alignas(64) char noise[32];
    fill_with_noise(noise, sizeof noise, 2);
    const uint32x4_t x = load<uint32x4_t>(noise), y = load<uint32x4_t>(noise + 16);
    return neon_register_rate(seconds, 32, [&](F32<4> acc) { return NeonBf16Dot::mmla(acc, x, y); });
  }
};

// Few rows: both operands are pairs along k in their stored order.
struct NeonPairRows {
  static constexpr int width = 4;
  static uint32x4_t unpack(const char* w) { return load<uint32x4_t>(w); }
  static uint32x4_t at(const char* x, int32_t k, int32_t token, int64_t pair) {
    return load<uint32x4_t>(x + (int64_t)token * k * 2 + pair * 4);
  }
  static F32<4> step(F32<4> sum, uint32x4_t w, uint32x4_t x) {
    return (F32<4>)vbfdotq_f32((float32x4_t)sum, NeonBf16Dot::bits(w), NeonBf16Dot::bits(x));
  }
};

constexpr KernelTable kBf16 =
    table_of<NeonBf16, NeonRows<NeonMatrix<NeonInt8Dot>>, GemvPairs<NeonPairRows>>("neon_bf16");

}  // namespace

extern const KernelTables kernels_neon_bf16;
const KernelTables kernels_neon_bf16 = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
