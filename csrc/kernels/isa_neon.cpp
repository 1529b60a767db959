// NEON with dot products (Neoverse-N1, Graviton 2, Raspberry Pi 5): f32 products, int8 by SDOT.
#include "kernels/byte_products_neon.h"
#include "kernels/rate.h"
#include "kernels/rows_neon.h"

namespace kt {
namespace {
struct NeonBf16Weights : NeonRows<NeonWiden> {
  using CodeProduct = SdotProduct;
};
constexpr KernelTable kBf16 = table_of<NeonBf16Weights, NeonRows<NeonInt8<DType::f32>>>("neon");
constexpr KernelTable kF32 = table_of<NeonRows<NeonExact>>("neon");
}  // namespace

extern const KernelTables kernels_neon;
const KernelTables kernels_neon = {{&kBf16, &kF32, nullptr}};
}  // namespace kt
