// Encodes some rows at a time, so that a user's interrupt is noticed in between.
#include "moe/encode.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "interrupt.h"

namespace kt {
namespace {

constexpr int32_t kRowsAtOnce = kBlockScale;  // those that share a scale of fp8:128x128 stay together
constexpr uintptr_t kCacheLine = 64;
constexpr float kLargestCode = 448.0f * 6.0f;  // e4m3 times e2m1
constexpr float kLeastTensorScale = 0x1p-100f;

}  // namespace

EncodeSums encode_matrix(const KernelTable& kernels, const Format& format, const Source& source, int32_t rows,
                         int32_t k, const EncodedMatrix& to) {
  std::vector<char> space((size_t)encode_scratch(format, k) + kCacheLine);
  char* const scratch = space.data() + (-(uintptr_t)space.data() & (kCacheLine - 1));  // vectors lie in one line each
  InterruptPoll interrupted;
  EncodeSums all{0, 0, 0, true};
  auto pass = [&](bool writes) {
    for (int32_t r = 0; r < rows; r += kRowsAtOnce) {
      if (interrupted()) throw Interrupted();
      EncodeSums sums;
      Encode e{};
      e.format = &format;
      e.source = source;
      e.rows = std::min(rows - r, kRowsAtOnce);
      e.k = k;
      e.tensor = to.tensor ? *to.tensor : 1.0f;
      e.source.data = (const char*)source.data + r * source.n_stride * (int64_t)size_of(source.dtype);
      e.codes = writes ? to.codes + r * to.row_bytes : nullptr;
      e.row_bytes = to.row_bytes;
      e.scales = to.scales ? to.scales + r / (format.shared ? kBlockScale : 1) * to.scale_stride : nullptr;
      e.scale_stride = to.scale_stride;
      e.scratch = scratch;
      e.sums = &sums;
      kernels.encode(e);
      all.moved += sums.moved;
      all.norm += writes ? sums.norm : 0;
      all.largest = std::max(all.largest, sums.largest);
      all.finite &= sums.finite;
    }
  };
  if (format.row().has_tensor_scale()) {
    pass(false);
    *to.tensor = std::max(all.largest / kLargestCode, kLeastTensorScale);
  }
  pass(true);
  return all;
}

}  // namespace kt
