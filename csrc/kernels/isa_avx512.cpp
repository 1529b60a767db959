// AVX-512 without bf16 products: 12 rows by 32 outputs, 24 accumulators of the 32 registers.
#include "kernels/byte_products_x86.h"
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
struct Avx512 : RowIsa<WidenToF32<16>, 2, 12> {
  using CodeProduct = MaddProduct<16>;
  static double registers(double seconds) { return register_rate<F32<16>, 24>(seconds); }
};
constexpr KernelTable kBf16 = table_of<Avx512, RowIsa<WidenInt8<16>, 2, 12>>("avx512");
}  // namespace

extern const KernelTables kernels_avx512;
const KernelTables kernels_avx512 = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
