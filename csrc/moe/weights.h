// The packed experts of one layer: for every expert the blocks of gate/up and the blocks of down, and their biases.
//
// A gated block is 16 outputs of gate beside the same 16 of up, so that the activation finds both in one product; an
// ungated one is 32 outputs of up. Down blocks are 32 outputs. On several NUMA nodes each node holds a range of the
// *outputs* of every matrix (of I for gate/up, of H for down): no sum ever crosses nodes, only activations do.
//
// There is one copy of the experts on any number of nodes. Experts that are packed here have one part per node,
// [experts] [blocks of the node], each allocated on its node in huge pages. Adopted ones, in a mapped file for example,
// stay in the layout of one node, [experts][blocks], where a part is a range of each expert's blocks: their pages are
// placed when they are first read.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/table.h"
#include "mapped_file.h"
#include "memory.h"
#include "threads.h"

namespace kt {

struct LayerShape {
  int32_t experts, hidden, intermediate;
  bool gated;
};

// Storage format of each matrix; `gate` is ignored for experts without a gate.
struct LayerFormats {
  Format gate, up, down;
};

// Readers-writer exclusion that throws instead of blocking: either one thread packs or any number of calls read.
class Readers {
 public:
  void enter(const char* what) const;  // throws std::runtime_error while they are packed
  void leave() const { count_.fetch_sub(1, std::memory_order_release); }
  void lock(const char* what);  // throws std::runtime_error while a call reads
  void unlock() { count_.store(0, std::memory_order_release); }

 private:
  mutable std::atomic<int32_t> count_{0};  // -1: being packed
};

// Blocks of one kind of matrix: count, size, and which NUMA node holds which.
class BlockStore {
 public:
  BlockStore() = default;
  // `half`: the formats of a block's halves; both are tiles, or neither.
  BlockStore(int32_t experts, int32_t blocks, int32_t k_tiles, int32_t tile_bytes, int32_t step, const Pool& pool,
             const Format (&half)[2]);
  BlockStore(int32_t experts, int32_t blocks, int32_t k_tiles, int32_t tile_bytes);  // in one buffer

  const char* at(int32_t expert, int32_t block) const;
  // Where a product that starts at that k tile reads: for encoded blocks always the first byte.
  const char* at(int32_t expert, int32_t block, int32_t k_tile) const { return at(expert, block) + offset(k_tile); }
  size_t offset(int32_t k_tile) const { return encoding() ? 0 : k_bytes(k_tile); }
  char* at(int32_t expert, int32_t block) { return const_cast<char*>(std::as_const(*this).at(expert, block)); }
  int32_t blocks() const { return blocks_; }
  int32_t k_tiles() const { return k_tiles_; }
  size_t block_bytes() const { return block_bytes_; }
  size_t k_bytes(int32_t k_tiles) const { return (size_t)k_tiles * 2 * (size_t)tile_bytes_; }  // as tiles
  const Encoding* encoding() const { return encoding_ ? &*encoding_ : nullptr; }               // null: tiles
  size_t bytes() const { return bytes_; }
  // Uses existing blocks in the order [experts][blocks], in place.
  void adopt(const char* from, std::shared_ptr<const void> owner);
  // What keeps the memory of all parts alive, whichever blocks are used later.
  std::shared_ptr<const void> owner() const { return owner_; }
  void copy_to(char* to, int32_t experts) const;  // in the same order
  // Their address where they are contiguous in that order, else null.
  const char* whole() const { return whole_ ? base_[0] : nullptr; }
  const char* part(int group) const { return base_[(size_t)group]; }  // of the first expert
  size_t part_bytes(int group) const { return (size_t)(end(group) - begin(group)) * block_bytes_; }  // of an expert
  int32_t begin(int group) const { return first_[group]; }  // blocks [begin, end) are on this group's node
  int32_t end(int group) const { return first_[group + 1]; }
  int group_of(int32_t block) const;
  int parts() const { return (int)base_.size(); }

 private:
  int32_t blocks_ = 0, k_tiles_ = 0, tile_bytes_ = 0;
  size_t block_bytes_ = 0, bytes_ = 0;
  std::optional<Encoding> encoding_;
  std::vector<int32_t> first_;     // [groups + 1]
  std::vector<const char*> base_;  // [groups] where the part of the first expert begins
  std::vector<size_t> stride_;     // [groups] bytes from an expert's part to the next expert's
  bool whole_ = true;
  std::shared_ptr<const void> owner_;  // of the parts' memory
};

// The first `count` outputs of one half of a block of tiles, as rows [count][columns]; none where it is not positive.
void copy_half_rows(const char* tiles, int half, int32_t count, int64_t columns, int32_t tile_bytes, char* out);

// Experts [first, first + count) in the caller's layout; expert e of the call at data + e * expert_stride elements.
struct SourceMatrix {
  Source source;  // of the call's expert 0; data null: absent
  int64_t expert_stride;
  // Instead of `source`, for a matrix in an encoded format; strides in bytes.
  Released released = {};
  int64_t codes_stride = 0, scales_stride = 0, zeros_stride = 0;
};

struct SourceLayer {
  int32_t first, count;
  SourceMatrix gate, up, down;
  SourceMatrix gate_bias, up_bias, down_bias;  // vectors: n_stride is the stride
};

// A layer in packed memory, [experts][blocks][block_bytes], and its biases in the layout of up_bias and down_bias, for
// all experts, or null.
struct AdoptedLayer {
  const char *up, *down, *up_bias, *down_bias;
  std::shared_ptr<const void> owner;  // of up and down
  std::vector<uint32_t> checksums;    // [experts], or empty: not verified
  std::string source;                 // for errors: file and layer
};

// Calls act with a zero of the type of a table's sums, for code outside the kernels that computes with them.
template <class Act>
auto with_sums_of(const KernelTable& kernels, Act&& act) {
  return kernels.sums == DType::f64 ? act(double{}) : act(float{});
}

class Weights {
 public:
  Weights(const LayerShape& shape, const LayerFormats& formats, const KernelTable& kernels, Pool& pool);

  // Packs in parallel on the pool; experts may be packed in any order and number of calls, from several threads. Throws
  // std::runtime_error while a call reads the weights.
  void pack(const SourceLayer& source);
  int32_t first_missing() const;  // -1: every expert is packed

  // Instead of packing: uses the packed gate_up and down of another store of the same shape. They may be read-only, so
  // nothing can be packed afterwards.
  void adopt(const AdoptedLayer& layer);
  bool adopted() const { return adopted_; }

  // Experts of an adopted layer are verified by the first call that reads them: their pages are read in by threads that
  // prefer the node of their part, and compared with the checksums, if there are any. Safe to call from several threads
  // between enter() and leave(); throws DamagedFile naming the layer and the expert.
  bool verified(int32_t expert) const {
    return verified_.empty() || verified_[(size_t)expert].load(std::memory_order_acquire);
  }
  void verify(const std::vector<int32_t>& experts) const;
  // The same where the pool's threads are in steps already (steps.h): the job of a step, then finish(), which throws.
  class Verification {
   public:
    Verification(const Weights& weights, const std::vector<int32_t>& experts);
    ~Verification();
    Job* job() const;  // null: all are verified
    void finish();

   private:
    struct State;
    std::unique_ptr<State> state_;
  };
  void place_pages() const;                 // of all experts, without comparing them; once
  uint32_t checksum(int32_t expert) const;  // CRC-32C of gate_up, down and their biases, as they lie in memory()
  void check_source() const;                // throws DamagedFile if pages of an adopted file were lost
  // Dequantises one matrix of an expert: [N][K] in bf16, or in the precision's type.
  enum class Matrix : uint8_t { gate, up, down };
  void decode(Matrix matrix, int32_t expert, char* out) const;
  int64_t rows_of(Matrix m) const { return m == Matrix::down ? shape_.hidden : shape_.intermediate; }
  int64_t columns_of(Matrix m) const { return m == Matrix::down ? shape_.intermediate : shape_.hidden; }

  // A call reads the weights from enter() to leave(). Throws std::runtime_error while they are packed or incomplete.
  void enter() const;
  void leave() const { readers_.leave(); }

  const LayerShape& shape() const { return shape_; }
  const LayerFormats& formats() const { return formats_; }
  const BlockStore& up() const { return up_; }
  const BlockStore& down() const { return down_; }
  // In the type of the kernels' sums.
  const char* up_bias(int32_t expert) const;    // [up blocks * 32] in block order, or null
  const char* down_bias(int32_t expert) const;  // [down blocks * 32], or null
  std::shared_ptr<const std::vector<char>> up_biases() const { return up_bias_; }  // of all experts
  std::shared_ptr<const std::vector<char>> down_biases() const { return down_bias_; }
  int32_t hidden_k_tiles() const { return down_.k_tiles(); }
  size_t bytes() const { return up_.bytes() + down_.bytes() + up_bias_->size() + down_bias_->size(); }

 private:
  template <class Real>
  void pack_biases(const SourceLayer& source);
  uint32_t bias_checksum(int32_t expert, uint32_t checksum) const;
  void compare_checksum(int32_t expert, uint32_t checksum) const;
  bool has_parts() const { return adopted_ && up_.parts() > 1; }  // of one memory, to be placed

  std::mutex packing_;
  Readers readers_;
  LayerShape shape_;
  LayerFormats formats_;
  const KernelTable& kernels_;
  Pool& pool_;
  BlockStore up_, down_;
  // Replaced, not resized: views of them stay valid.
  std::shared_ptr<std::vector<char>> up_bias_ = std::make_shared<std::vector<char>>();
  std::shared_ptr<std::vector<char>> down_bias_ = std::make_shared<std::vector<char>>();
  std::vector<uint8_t> present_;
  std::vector<uint8_t> populated_;  // [experts] whose memory was written before
  bool adopted_ = false;
  std::string source_;                               // the adopted layer in words
  const Mapping* mappings_[2] = {};                  // files that hold adopted memory, or null
  std::vector<uint32_t> checksums_;                  // [experts], or empty: not known
  mutable std::vector<std::atomic<bool>> verified_;  // [experts], or empty: nothing to verify
  mutable std::atomic<bool> placed_{false};          // pages of all experts
};

// A reader of the weights, in a scope.
class Reading {
 public:
  explicit Reading(const Weights& weights) : weights_(weights) { weights_.enter(); }
  ~Reading() { weights_.leave(); }
  Reading(const Reading&) = delete;

 private:
  const Weights& weights_;
};

}  // namespace kt
