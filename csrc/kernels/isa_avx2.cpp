// AVX2 with FMA: 6 rows by 16 outputs, 12 accumulators of the 16 registers.
#include "kernels/byte_products_x86.h"
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
template <class Arith>
struct Avx2 : RowIsa<Arith, 2, 6> {
  static double registers(double seconds) { return register_rate<typename Arith::Vector, 12>(seconds); }
};
struct Avx2Bf16Weights : Avx2<WidenToF32<8>> {
  using CodeProduct = MaddProduct<8>;
};
constexpr KernelTable kBf16 = table_of<Avx2Bf16Weights, RowIsa<WidenInt8<8>, 2, 6>>("avx2");
constexpr KernelTable kF32 = table_of<Avx2<Exact<F32<8>>>>("avx2");
}  // namespace

extern const KernelTables kernels_avx2;
const KernelTables kernels_avx2 = {{&kBf16, &kF32, nullptr}};
}  // namespace kt
