// NEON with dot products (Neoverse-N1, Graviton 2, Raspberry Pi 5): f32 products, int8 by SDOT; 12 rows by 8 outputs,
// 24 accumulators of the 32 registers.
#include "kernels/byte_products_neon.h"
#include "kernels/dp4a_neon.h"
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
template <class Arith>
struct Neon : RowIsa<Arith, 2, 12> {
  static double registers(double seconds) { return register_rate<typename Arith::Vector, 24>(seconds); }
};
struct NeonBf16Weights : Neon<WidenToF32<4>> {
  using CodeProduct = SdotProduct;
};
constexpr KernelTable kBf16 = table_of<NeonBf16Weights, RowIsa<Int8Product<NeonDp4a>, 2, 12>>("neon");
constexpr KernelTable kF32 = table_of<Neon<Exact<F32<4>>>>("neon");
}  // namespace

extern const KernelTables kernels_neon;
const KernelTables kernels_neon = {{&kBf16, &kF32, nullptr}};
}  // namespace kt
