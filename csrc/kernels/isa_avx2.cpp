// AVX2 with FMA: 6 rows by 16 outputs, 12 accumulators of the 16 registers.
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
struct Avx2 : RowIsa<WidenToF32<8>, 8, 2, 6> {
  static double registers(double seconds) { return register_rate<8, 12>(seconds); }
};
}  // namespace

extern const KernelTable kernels_avx2;
const KernelTable kernels_avx2 = table_of<Avx2>("avx2");
}  // namespace kt
