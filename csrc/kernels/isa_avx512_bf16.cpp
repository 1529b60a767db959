// AVX-512 with VDPBF16PS: activations stay bf16, and one instruction multiplies a pair of k for 16 outputs.
#include <immintrin.h>

#include "kernels/byte_products_x86.h"
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {

struct Bf16PairProduct {
  using Vector = F32<16>;
  static constexpr int elem = 2, step_k = 2, step_bytes = 4, tile_bytes = kTileBytes;
  static constexpr DType panel = DType::bf16;
  static U32<16> unpack(const char* w) { return load<U32<16>>(w); }
  static F32<16> step(F32<16> acc, const char* x, const U32<16>& w) {
    U32<16> pair = U32<16>{} + load<uint32_t>(x);
    return (F32<16>)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)pair);
  }
};

struct Avx512Bf16 : RowIsa<Bf16PairProduct, 2, 12> {
  using CodeProduct = VnniProduct<16>;
  static double registers(double seconds) {
    constexpr int chains = 24;
    F32<16> acc[chains] = {};
    alignas(64) char noise[2 * sizeof(U32<16>)];
    fill_with_noise(noise, sizeof noise, 2);
    U32<16> x = load<U32<16>>(noise), y = load<U32<16>>(noise + sizeof(U32<16>));
    double rate = per_second(seconds, [&] {
      for (int n = 0; n < 4096; n++)
        for (int i = 0; i < chains; i++) acc[i] = (F32<16>)_mm512_dpbf16_ps((__m512)acc[i], (__m512bh)x, (__m512bh)y);
      return 4096.0 * chains * 64;
    });
    for (int i = 1; i < chains; i++) acc[0] += acc[i];
    asm volatile("" : : "g"(acc[0][0]) : "memory");
    return rate;
  }
};

// Few rows: both operands are pairs along k in their stored order.
struct Bf16PairRows {
  static constexpr int width = 16;
  static U32<16> unpack(const char* w) { return load<U32<16>>(w); }
  static U32<16> at(const char* x, int32_t k, int32_t token, int64_t pair) {
    return load<U32<16>>(x + (int64_t)token * k * 2 + pair * 4);
  }
  static F32<16> step(F32<16> sum, const U32<16>& w, const U32<16>& x) {
    return (F32<16>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
};

using Int8Isa = RowIsa<Int8Product<VnniDp4a<16>, DType::bf16>, 2, 12>;
constexpr KernelTable kBf16 = table_of<Avx512Bf16, Int8Isa, GemvPairs<Bf16PairRows>>("avx512_bf16");

}  // namespace

extern const KernelTables kernels_avx512_bf16;
const KernelTables kernels_avx512_bf16 = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
