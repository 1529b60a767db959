// AVX-512 without bf16 products: 12 rows by 32 outputs, 24 accumulators of the 32 registers.
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
struct Avx512 : RowIsa<WidenToF32<16>, 16, 2, 12> {
  static double registers(double seconds) { return register_rate<16, 24>(seconds); }
};
}  // namespace

extern const KernelTable kernels_avx512;
const KernelTable kernels_avx512 = table_of<Avx512>("avx512");
}  // namespace kt
