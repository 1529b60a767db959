// Import and export of packed experts: blocks packed by another process are used in place, and any matrix can be
// dequantised to rows.
#include <algorithm>
#include <cstring>

#include "moe/weights.h"

namespace kt {

void BlockStore::adopt(const char* from, int32_t experts) {
  if (parts() == 1) {
    part_.clear();
    base_[0] = from;
    return;
  }
  for (int32_t e = 0; e < experts; e++)
    for (int g = 0; g < parts(); g++) {
      size_t count = (size_t)(end(g) - begin(g));
      const char* blocks = from + ((size_t)e * (size_t)blocks_ + (size_t)begin(g)) * block_bytes_;
      std::memcpy(part_[(size_t)g].data() + (size_t)e * count * block_bytes_, blocks, count * block_bytes_);
    }
}

void BlockStore::copy_to(char* to, int32_t experts) const {
  for (int32_t e = 0; e < experts; e++)
    for (int g = 0; g < parts(); g++) {
      size_t count = (size_t)(end(g) - begin(g));
      std::memcpy(to + ((size_t)e * (size_t)blocks_ + (size_t)begin(g)) * block_bytes_,
                  base_[(size_t)g] + (size_t)e * count * block_bytes_, count * block_bytes_);
    }
}

void Weights::adopt(const char* up, const char* down) {
  std::lock_guard lock(packing_);
  readers_.lock("experts");
  up_.adopt(up, shape_.experts);
  down_.adopt(down, shape_.experts);
  std::fill(present_.begin(), present_.end(), (uint8_t)1);
  readers_.unlock();
}

void Weights::adopt_biases(const char* up, const char* down) {
  auto take = [&](const char* from, const BlockStore& store, std::vector<char>& to) {
    if (from)
      to.assign(from, from + (size_t)shape_.experts * (size_t)store.blocks() * kBlockN * (size_t)kernels_.sum_bytes);
  };
  take(up, up_, up_bias_);
  take(down, down_, down_bias_);
}

void Weights::decode(Matrix matrix, int32_t expert, char* out) const {
  const BlockStore& store = matrix == Matrix::down ? down_ : up_;
  const int64_t rows = rows_of(matrix), columns = columns_of(matrix);
  const bool halves = matrix != Matrix::down && shape_.gated;  // one half of every block belongs to this matrix
  const int32_t tile_bytes = kernels_.tile_bytes, size = tile_bytes / (kTileK * kTileN);
  std::vector<char> tiles(store.k_bytes(store.k_tiles()));
  for (int32_t block = 0; block < store.blocks(); block++) {
    const char* from = store.at(expert, block);
    if (const Encoding* encoding = store.encoding()) {
      kernels_.decode({encoding, from, 0, store.k_tiles(), tiles.data()});
      from = tiles.data();
    }
    for (int half = 0; half < 2; half++) {
      if (halves && half != (matrix == Matrix::up)) continue;
      int64_t n0 = halves ? (int64_t)block * kTileN : (int64_t)block * kBlockN + half * kTileN;
      for (int64_t n = n0; n < std::min(n0 + kTileN, rows); n++)
        for (int64_t k = 0; k < columns; k++) {
          int64_t in = k % kTileK, lane = n - n0;
          int64_t at = size == 2 ? (in / 2 * kTileN + lane) * 2 + in % 2 : in * kTileN + lane;
          std::memcpy(out + (n * columns + k) * size, from + (k / kTileK * 2 + half) * tile_bytes + at * size,
                      (size_t)size);
        }
    }
  }
}

}  // namespace kt
