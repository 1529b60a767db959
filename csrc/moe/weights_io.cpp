// Import and export of packed experts: blocks packed by another process are used in place, read in by the node that
// computes with them and checked by their checksums, and any matrix can be dequantised to rows.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "crc32c.h"
#include "interrupt.h"
#include "moe/weights.h"

namespace kt {

void BlockStore::adopt(const char* from, std::shared_ptr<const void> owner) {
  for (int g = 0; g < parts(); g++) {
    base_[(size_t)g] = from + (size_t)begin(g) * block_bytes_;
    stride_[(size_t)g] = (size_t)blocks_ * block_bytes_;
  }
  whole_ = true;
  owner_ = std::move(owner);
}

void BlockStore::copy_to(char* to, int32_t experts) const {
  InterruptPoll interrupted;
  for (int32_t e = 0; e < experts; e++) {
    if (interrupted()) throw Interrupted();
    for (int g = 0; g < parts(); g++)
      if (part_bytes(g))
        std::memcpy(to + ((size_t)e * (size_t)blocks_ + (size_t)begin(g)) * block_bytes_, at(e, begin(g)),
                    part_bytes(g));
  }
}

void Weights::adopt(const AdoptedLayer& layer) {
  std::lock_guard lock(packing_);
  readers_.lock("experts");
  struct Unlock {
    Readers& readers;
    ~Unlock() { readers.unlock(); }
  } unlock{readers_};
  // Incomplete until the end, also where it throws.
  std::fill(present_.begin(), present_.end(), (uint8_t)0);
  up_.adopt(layer.up, layer.owner);
  down_.adopt(layer.down, layer.owner);
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
  adopted_ = true;
  placed_.store(false, std::memory_order_release);
  verified_ = std::vector<std::atomic<bool>>(checksums_.empty() && !has_parts() ? 0 : (size_t)shape_.experts);
  check_source();
  std::fill(present_.begin(), present_.end(), (uint8_t)1);
}

void Weights::check_source() const {
  for (const Mapping* mapping : mappings_) check_mapping(mapping);
}

namespace {

constexpr size_t kPieceBytes = 512 << 10;  // that a thread takes at a time

// Bytes of one expert in one part.
struct Piece {
  const char* data;
  size_t bytes;
  int group;
  uint32_t checksum;
};

// The bytes of an expert in order, in pieces; blocks are contiguous within a part.
void add_pieces(const BlockStore& store, int32_t expert, std::vector<Piece>& pieces) {
  for (int g = 0; g < store.parts(); g++) {
    if (store.begin(g) == store.end(g)) continue;
    const char* at = store.at(expert, store.begin(g));
    size_t left = store.part_bytes(g);
    for (size_t bytes; left; at += bytes, left -= bytes) {
      bytes = std::min(left, kPieceBytes);
      pieces.push_back({at, bytes, g, 0});
    }
  }
}

enum class PieceWork : uint8_t { populate, checksum };

// Reads pieces, each thread those of its own group first. With `place` a page that is not in memory yet is allocated on
// the node of its part, whichever thread reads it in, and one that an earlier process left on another node is moved.
class PieceJob final : public Job {
 public:
  PieceJob(std::vector<Piece>& pieces, const Pool& pool, PieceWork work, bool place)
      : pieces_(pieces),
        pool_(pool),
        work_(work),
        place_(place),
        of_group_((size_t)pool.groups()),
        next_((size_t)pool.groups()) {
    for (size_t i = 0; i < pieces.size(); i++) of_group_[(size_t)pieces[i].group].push_back(i);
  }

  void work(const Worker& worker) override {
    const size_t groups = of_group_.size();
    for (size_t i = 0; i < groups; i++) {
      const size_t g = ((size_t)worker.group + i) % groups;
      const int node = place_ ? pool_.node_of((int)g) : -1;
      const PreferNode prefer(of_group_[g].empty() ? -1 : node);
      for (size_t n; !cancelled() && (n = next_[g].fetch_add(1)) < of_group_[g].size();)
        read(pieces_[of_group_[g][n]], node);
    }
  }

 private:
  void read(Piece& piece, int node) const {
    if (work_ == PieceWork::checksum) {
      piece.checksum = crc32c(piece.data, piece.bytes);
    } else {
      populate_read(piece.data, piece.bytes);
    }
    move_to_node(piece.data, piece.bytes, node);
  }

  std::vector<Piece>& pieces_;
  const Pool& pool_;
  const PieceWork work_;
  const bool place_;
  std::vector<std::vector<size_t>> of_group_;  // indices of pieces
  std::vector<std::atomic<size_t>> next_;      // [groups]
};

uint32_t combine(const Piece* first, const Piece* last) {
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
  std::vector<Piece> pieces;
  add_pieces(up_, expert, pieces);
  add_pieces(down_, expert, pieces);
  PieceJob job(pieces, pool_, PieceWork::checksum, has_parts());
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

struct Weights::Verification::State {
  const Weights& weights;
  std::vector<Piece> pieces;
  std::vector<std::pair<int32_t, size_t>> pending;  // expert, end of its pieces
  std::unique_ptr<PieceJob> job;
};

Weights::Verification::Verification(const Weights& w, const std::vector<int32_t>& experts)
    : state_(new State{w, {}, {}, nullptr}) {
  auto& [weights, pieces, pending, job] = *state_;
  for (int32_t expert : experts) {
    if (w.verified(expert)) continue;
    add_pieces(w.up_, expert, pieces);
    add_pieces(w.down_, expert, pieces);
    pending.emplace_back(expert, pieces.size());
  }
  if (pending.empty()) return;
  const PieceWork work = w.checksums_.empty() ? PieceWork::populate : PieceWork::checksum;
  job = std::make_unique<PieceJob>(pieces, w.pool_, work, w.has_parts());
}

Weights::Verification::~Verification() = default;

Job* Weights::Verification::job() const { return state_->job.get(); }

void Weights::Verification::finish() {
  const Weights& weights = state_->weights;
  if (state_->job) weights.check_source();
  const Piece* first = state_->pieces.data();
  for (auto [expert, end] : state_->pending) {
    if (weights.checksums_.empty()) {
      weights.verified_[(size_t)expert].store(true, std::memory_order_release);
      continue;
    }
    weights.compare_checksum(expert, weights.bias_checksum(expert, combine(first, state_->pieces.data() + end)));
    first = state_->pieces.data() + end;
  }
}

void Weights::verify(const std::vector<int32_t>& experts) const {
  Verification verification(*this, experts);
  if (!verification.job()) return;
  pool_.run(*verification.job());
  verification.finish();
}

void Weights::place_pages() const {
  if (!has_parts() || placed_.load(std::memory_order_acquire)) return;
  std::vector<Piece> pieces;
  for (int32_t expert = 0; expert < shape_.experts; expert++) {
    add_pieces(up_, expert, pieces);
    add_pieces(down_, expert, pieces);
  }
  PieceJob job(pieces, pool_, PieceWork::populate, true);
  pool_.run(job);
  check_source();
  placed_.store(true, std::memory_order_release);
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
