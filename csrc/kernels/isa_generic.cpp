// Any CPU: vectors of four floats, which the compiler maps to SSE2 or NEON. The oracle's nearest relative among the
// variants, and what runs where nothing better may.
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
struct Generic : RowIsa<WidenToF32<4>, 4, 2, 4> {
  static double registers(double seconds) { return register_rate<4, 8>(seconds); }
};
}  // namespace

extern const KernelTable kernels_generic;
const KernelTable kernels_generic = table_of<Generic>("generic");
}  // namespace kt
