// The packed experts of one layer: for every expert the blocks of gate/up and the blocks of down, and their biases.
//
// A gated block is 16 outputs of gate beside the same 16 of up, so that the activation finds both in one product; an
// ungated one is 32 outputs of up. Down blocks are 32 outputs. On several NUMA nodes each node holds a range of the
// *outputs* of every matrix (of I for gate/up, of H for down): no sum ever crosses nodes, only activations do.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/table.h"
#include "memory.h"
#include "threads.h"

namespace kt {

struct LayerShape {
  int32_t experts, hidden, intermediate;
  bool gated;
};

// Either one packs or any number of calls read.
class Readers {
 public:
  void enter(const char* what) const;  // throws std::runtime_error while they are packed
  void leave() const { count_.fetch_sub(1, std::memory_order_release); }
  void close(const char* what);  // throws std::runtime_error while a call reads
  void open() { count_.store(0, std::memory_order_release); }

 private:
  mutable std::atomic<int32_t> count_{0};  // -1: being packed
};

// Blocks of one matrix kind: how many, how long, and which node holds which.
class BlockStore {
 public:
  BlockStore() = default;
  BlockStore(int32_t experts, int32_t blocks, int32_t k_tiles, int32_t tile_bytes, int32_t step, const Pool& pool);
  BlockStore(int32_t experts, int32_t blocks, int32_t k_tiles, int32_t tile_bytes);  // all in one place

  const char* at(int32_t expert, int32_t block) const;
  const char* at(int32_t expert, int32_t block, int32_t k_tile) const { return at(expert, block) + k_bytes(k_tile); }
  char* at(int32_t expert, int32_t block) { return const_cast<char*>(std::as_const(*this).at(expert, block)); }
  int32_t blocks() const { return blocks_; }
  int32_t k_tiles() const { return k_tiles_; }
  size_t block_bytes() const { return block_bytes_; }
  size_t k_bytes(int32_t k_tiles) const { return (size_t)k_tiles * 2 * (size_t)tile_bytes_; }  // that many of a block
  size_t bytes() const;
  int32_t begin(int group) const { return first_[group]; }  // blocks [begin, end) live with this group
  int32_t end(int group) const { return first_[group + 1]; }
  int group_of(int32_t block) const;
  int parts() const { return (int)part_.size(); }

 private:
  int32_t blocks_ = 0, k_tiles_ = 0, tile_bytes_ = 0;
  size_t block_bytes_ = 0;
  std::vector<int32_t> first_;  // [groups + 1]
  std::vector<Buffer> part_;    // [groups], each [experts][blocks of the group][block_bytes]
};

// Experts [first, first + count) as the caller has them; expert e of the call at data + e * expert_stride elements.
struct SourceMatrix {
  Source source;  // of the call's expert 0; data null: absent
  int64_t expert_stride;
};

struct SourceLayer {
  int32_t first, count;
  SourceMatrix gate, up, down;
  SourceMatrix gate_bias, up_bias, down_bias;  // vectors: n_stride is the stride
};

// Calls act with a zero of the type of a table's sums: for the few places that handle numbers themselves.
template <class Act>
auto with_sums_of(const KernelTable& kernels, Act&& act) {
  return kernels.sums == DType::f64 ? act(double{}) : act(float{});
}

class Weights {
 public:
  Weights(const LayerShape& shape, const KernelTable& kernels, Pool& pool);

  // In parallel on the pool; experts may arrive in any order and number of calls, from several threads. Throws
  // std::runtime_error while a call reads the weights.
  void pack(const SourceLayer& source);
  int32_t first_missing() const;  // -1: every expert has arrived

  // A call reads the weights from enter() to leave(). Throws std::runtime_error while they are packed or incomplete.
  void enter() const;
  void leave() const { readers_.leave(); }

  const LayerShape& shape() const { return shape_; }
  const BlockStore& up() const { return up_; }
  const BlockStore& down() const { return down_; }
  // In the type of the kernels' sums.
  const char* up_bias(int32_t expert) const;    // [up blocks * 32] as the blocks lie, or null
  const char* down_bias(int32_t expert) const;  // [down blocks * 32], or null
  int32_t hidden_k_tiles() const { return down_.k_tiles(); }
  size_t bytes() const { return up_.bytes() + down_.bytes() + up_bias_.size() + down_bias_.size(); }

 private:
  template <class Real>
  void pack_biases(const SourceLayer& source);

  std::mutex packing_;
  Readers readers_;
  LayerShape shape_;
  const KernelTable& kernels_;
  Pool& pool_;
  BlockStore up_, down_;
  std::vector<char> up_bias_, down_bias_;
  std::vector<uint8_t> present_;
};

}  // namespace kt
