// AVX2 with AVX-VNNI (Alder Lake and later without AVX-512): f32 products as in isa_avx2.cpp, int8 by VPDPBUSD.
#include "kernels/byte_products_x86.h"
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
struct AvxVnni : RowIsa<WidenToF32<8>, 2, 6> {
  using CodeProduct = VnniProduct<8>;
  static double registers(double seconds) { return register_rate<F32<8>, 12>(seconds); }
};
constexpr KernelTable kBf16 = table_of<AvxVnni, RowIsa<Int8Product<VnniDp4a<8>>, 2, 6>>("avx_vnni");
}  // namespace

extern const KernelTables kernels_avx_vnni;
const KernelTables kernels_avx_vnni = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
