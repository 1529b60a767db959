// NEON with bf16 and int8 matrix products (Neoverse-N2, V1 and V2, Graviton 3 and 4, Grace, Apple M2).
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
constexpr KernelTable kBf16 = table_of<NeonBf16Weights, RowIsa<Int8Product<NeonDp4a>, 2, 12>>("neon_bf16");
}  // namespace

extern const KernelTables kernels_neon_bf16;
const KernelTables kernels_neon_bf16 = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
