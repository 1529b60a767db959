// Import and export of packed experts: blocks packed by another process are used in place and checked by their
// checksums, and any matrix can be dequantised to rows.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "crc32c.h"
#include "interrupt.h"
#include "moe/weights.h"

namespace kt {

namespace {

// Copies what each part of the blocks has of every expert; a unit is one expert's.
class CopyJob final : public Job {
 public:
  CopyJob(const BlockStore& store, const char* from, char* const* parts, int32_t experts)
      : store_(store), from_(from), parts_(parts), experts_(experts), next_((size_t)store.parts()) {}

  void work(const Worker& worker) override {
    const int groups = store_.parts();
    for (int i = 0; i < groups; i++) {
      const int g = (worker.group + i) % groups;
      const size_t first = (size_t)store_.begin(g), bytes = ((size_t)store_.end(g) - first) * store_.block_bytes();
      for (int32_t e; !cancelled() && (e = next_[(size_t)g]++) < experts_;)
        std::memcpy(parts_[g] + (size_t)e * bytes,
                    from_ + ((size_t)e * (size_t)store_.blocks() + first) * store_.block_bytes(), bytes);
    }
  }

 private:
  const BlockStore& store_;
  const char* from_;
  char* const* parts_;
  const int32_t experts_;
  std::vector<std::atomic<int32_t>> next_;
};

}  // namespace

void BlockStore::adopt(const char* from, int32_t experts, std::shared_ptr<const void> owner, Pool& pool) {
  if (parts() == 1) {
    base_[0] = from;
    owner_ = std::move(owner);
    return;
  }
  std::vector<char*> to;
  for (const char* part : base_) to.push_back(const_cast<char*>(part));
  CopyJob job(*this, from, to.data(), experts);
  pool.run(job);
}

void BlockStore::copy_to(char* to, int32_t experts) const {
  InterruptPoll interrupted;
  for (int32_t e = 0; e < experts; e++) {
    if (interrupted()) throw Interrupted();
    for (int g = 0; g < parts(); g++) {
      size_t count = (size_t)(end(g) - begin(g));
      std::memcpy(to + ((size_t)e * (size_t)blocks_ + (size_t)begin(g)) * block_bytes_,
                  base_[(size_t)g] + (size_t)e * count * block_bytes_, count * block_bytes_);
    }
  }
}

void Weights::adopt(const AdoptedLayer& layer) {
  std::lock_guard lock(packing_);
  readers_.lock("experts");
  struct Unlock {
    Readers& readers;
    ~Unlock() { readers.unlock(); }
  } unlock{readers_};
  // Incomplete until the end, also where the copying is interrupted.
  std::fill(present_.begin(), present_.end(), (uint8_t)0);
  up_.adopt(layer.up, shape_.experts, layer.owner, pool_);
  down_.adopt(layer.down, shape_.experts, layer.owner, pool_);
  auto take = [&](const char* from, const BlockStore& store) {
    if (!from) return std::make_shared<std::vector<char>>();
    size_t bytes = (size_t)shape_.experts * (size_t)store.blocks() * kBlockN * (size_t)kernels_.sum_bytes;
    return std::make_shared<std::vector<char>>(from, from + bytes);
  };
  up_bias_ = take(layer.up_bias, up_);
  down_bias_ = take(layer.down_bias, down_);
  mappings_[0] = mapping_at(layer.up);
  mappings_[1] = mapping_at(layer.down);
  source_ = layer.source.empty() ? "another store" : layer.source;
  checksums_ = layer.checksums;
  verified_ = std::vector<std::atomic<bool>>(checksums_.size());
  adopted_ = true;
  check_source();
  std::fill(present_.begin(), present_.end(), (uint8_t)1);
}

void Weights::check_source() const {
  for (const Mapping* mapping : mappings_) check_mapping(mapping);
}

namespace {

constexpr size_t kChecksumPiece = 512 << 10;  // bytes that a thread takes at a time

struct ChecksumPiece {
  const char* data;
  size_t bytes;
  uint32_t checksum;
};

// The bytes of an expert in order, in pieces; blocks are contiguous within a part.
void add_pieces(const BlockStore& store, int32_t expert, std::vector<ChecksumPiece>& pieces) {
  for (int g = 0; g < store.parts(); g++) {
    if (store.begin(g) == store.end(g)) continue;
    const char* at = store.at(expert, store.begin(g));
    size_t left = (size_t)(store.end(g) - store.begin(g)) * store.block_bytes();
    for (size_t bytes; left; at += bytes, left -= bytes) {
      bytes = std::min(left, kChecksumPiece);
      pieces.push_back({at, bytes, 0});
    }
  }
}

class ChecksumJob final : public Job {
 public:
  explicit ChecksumJob(std::vector<ChecksumPiece>& pieces) : pieces_(pieces) {}

  void work(const Worker&) override {
    for (size_t i; !cancelled() && (i = next_.fetch_add(1)) < pieces_.size();)
      pieces_[i].checksum = crc32c(pieces_[i].data, pieces_[i].bytes);
  }

 private:
  std::vector<ChecksumPiece>& pieces_;
  std::atomic<size_t> next_{0};
};

uint32_t combine(const ChecksumPiece* first, const ChecksumPiece* last) {
  uint32_t checksum = 0;
  for (; first != last; first++) checksum = crc32c_combine(checksum, first->checksum, first->bytes);
  return checksum;
}

}  // namespace

uint32_t Weights::bias_checksum(int32_t expert, uint32_t checksum) const {
  size_t sum_bytes = (size_t)kernels_.sum_bytes * kBlockN;
  if (const char* bias = up_bias(expert)) checksum = crc32c(bias, (size_t)up_.blocks() * sum_bytes, checksum);
  if (const char* bias = down_bias(expert)) checksum = crc32c(bias, (size_t)down_.blocks() * sum_bytes, checksum);
  return checksum;
}

uint32_t Weights::checksum(int32_t expert) const {
  std::vector<ChecksumPiece> pieces;
  add_pieces(up_, expert, pieces);
  add_pieces(down_, expert, pieces);
  ChecksumJob job(pieces);
  pool_.run(job);
  return bias_checksum(expert, combine(pieces.data(), pieces.data() + pieces.size()));
}

void Weights::compare_checksum(int32_t expert, uint32_t checksum) const {
  if (checksum == checksums_[(size_t)expert]) return verified_[(size_t)expert].store(true, std::memory_order_release);
  auto hex = [](uint32_t value) {
    char text[9];
    std::snprintf(text, sizeof text, "%08x", value);
    return std::string(text);
  };
  throw DamagedFile(source_ + ", expert " + std::to_string(expert) + ": given contents with checksum " + hex(checksum) +
                    ", expected " + hex(checksums_[(size_t)expert]) +
                    "; the file was changed or has decayed: copy it again, or run kt quant again (--no-verify, or "
                    "KT_VERIFY=0, computes with it as it is)");
}

void Weights::verify(const std::vector<int32_t>& experts) const {
  std::vector<ChecksumPiece> pieces;
  std::vector<std::pair<int32_t, size_t>> pending;  // expert, end of its pieces
  for (int32_t expert : experts) {
    if (verified(expert)) continue;
    add_pieces(up_, expert, pieces);
    add_pieces(down_, expert, pieces);
    pending.emplace_back(expert, pieces.size());
  }
  if (pending.empty()) return;
  ChecksumJob job(pieces);
  pool_.run(job);
  check_source();
  const ChecksumPiece* first = pieces.data();
  for (auto [expert, end] : pending) {
    compare_checksum(expert, bias_checksum(expert, combine(first, pieces.data() + end)));
    first = pieces.data() + end;
  }
}

void copy_half_rows(const char* tiles, int half, int32_t count, int64_t columns, int32_t tile_bytes, char* out) {
  const int32_t size = tile_bytes / (kTileK * kTileN);
  for (int64_t lane = 0; lane < count; lane++)
    for (int64_t k = 0; k < columns; k++) {
      const int64_t in = k % kTileK, at = size == 2 ? (in / 2 * kTileN + lane) * 2 + in % 2 : in * kTileN + lane;
      std::memcpy(out + (lane * columns + k) * size, tiles + (k / kTileK * 2 + half) * tile_bytes + at * size,
                  (size_t)size);
    }
}

void Weights::decode(Matrix matrix, int32_t expert, char* out) const {
  const BlockStore& store = matrix == Matrix::down ? down_ : up_;
  const int64_t rows = rows_of(matrix), columns = columns_of(matrix);
  const bool halves = matrix != Matrix::down && shape_.gated;  // one half of every block belongs to this matrix
  const int64_t row_bytes = columns * (kernels_.tile_bytes / (kTileK * kTileN));
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
      copy_half_rows(from, half, (int32_t)std::min<int64_t>(kTileN, rows - n0), columns, kernels_.tile_bytes,
                     out + n0 * row_bytes);
    }
  }
}

}  // namespace kt
