// Any CPU: vectors of four floats or two doubles, which the compiler maps to SSE2 or NEON. The fallback, and the
// reference variant of the tests.
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
template <class Arith>
struct Generic : RowIsa<Arith, 2, 4> {
  static double registers(double seconds) { return register_rate<typename Arith::Vector, 8>(seconds); }
};
#ifdef __SSE2__
using Int8Isa = RowIsa<WidenInt8<4>, 2, 4>;
#else
using Int8Isa = RowIsa<WidenInt8PerLane<4>, 2, 4>;
#endif
struct GenericBf16Weights : Generic<WidenToF32<4>> {
  using CodeProduct = WordProduct<4>;
};
constexpr KernelTable kBf16 = table_of<GenericBf16Weights, Int8Isa>("generic");
constexpr KernelTable kF32 = table_of<Generic<Exact<F32<4>>>>("generic");
constexpr KernelTable kF64 = table_of<Generic<Exact<F64<2>>>>("generic");
}  // namespace

extern const KernelTables kernels_generic;
const KernelTables kernels_generic = {{&kBf16, &kF32, &kF64}};
}  // namespace kt
