// AVX-512 with VNNI and without bf16 products (Cascade Lake to Ice Lake): f32 products as in isa_avx512.cpp, int8 by
// VPDPBUSD.
#include "kernels/byte_products_x86.h"
#include "kernels/rate.h"
#include "kernels/rows.h"

namespace kt {
namespace {
struct Avx512 : RowIsa<WidenToF32<16>, 2, 12> {
  using CodeProduct = VnniProduct<16>;
  static double registers(double seconds) { return register_rate<F32<16>, 24>(seconds); }
};
constexpr KernelTable kBf16 = table_of<Avx512, RowIsa<Int8Product<VnniDp4a<16>>, 2, 12>>("avx512_vnni");
}  // namespace

extern const KernelTables kernels_avx512_vnni;
const KernelTables kernels_avx512_vnni = {{&kBf16, nullptr, nullptr}};
}  // namespace kt
