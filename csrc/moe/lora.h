// LoRA of one layer: for every expert and each of its matrices y += scale * B (A x), the factors packed like weights.
//
// Gate and up share a product with x: their A are stacked into one matrix of rank R (stored once where both have the
// same A), and their B are side by side in the blocks of gate/up, zero at the other's ranks. The rank is one more range
// of K, so it is rounded up to a tile; the scale is folded into B before rounding. Forward and backward read the same
// bytes.
#pragma once

#include <mutex>

#include "moe/buffer_pool.h"
#include "moe/weights.h"

namespace kt {

struct LoraRanks {
  int32_t gate, up, down;  // 0: no LoRA on that matrix
  bool shared;             // gate and up have one A
};

// Factors in the caller's layout, for all experts: a [E, r, in], b [E, out, r].
struct SourceFactor {
  SourceMatrix a, b;
  double scale;
};

struct SourceLora {
  SourceFactor gate, up, down;  // shared: up.a is absent
};

class Adapter {
 public:
  // The pool and the arena must outlive it.
  Adapter(const LayerShape& layer, const LoraRanks& ranks, const KernelTable& kernels, Pool& pool, Arena& arena);

  void pack(const SourceLora& source);  // throws std::runtime_error while a call reads the factors
  void enter() const;                   // throws std::runtime_error while they are packed or incomplete
  void leave() const { readers_.leave(); }

  const LoraRanks& ranks() const { return ranks_; }
  // The rank of gate and up together, and up's first rank in it.
  int32_t gate_up_rank() const { return ranks_.shared ? ranks_.gate : ranks_.gate + ranks_.up; }
  int32_t up_at() const { return ranks_.shared ? 0 : ranks_.gate; }
  // Stored matrices: [R, H], [gate/up blocks, R], [r, I], [H, r].
  const BlockStore& gate_up_a() const { return gate_up_a_; }
  const BlockStore& gate_up_b() const { return gate_up_b_; }
  const BlockStore& down_a() const { return down_a_; }
  const BlockStore& down_b() const { return down_b_; }
  // Whether the ranks fill at most half a block of A, or of B transposed.
  bool gate_up_half() const { return gate_up_rank() <= kTileN; }
  bool down_half() const { return ranks_.down <= kTileN; }
  int32_t gate_up_tiles() const { return gate_up_b_.k_tiles(); }  // 0: neither gate nor up
  int32_t down_tiles() const { return down_b_.k_tiles(); }
  size_t bytes() const { return gate_up_a_.bytes() + gate_up_b_.bytes() + down_a_.bytes() + down_b_.bytes(); }

 private:
  template <class Real>
  friend class FactorJob;
  std::mutex packing_;
  Readers readers_;
  bool complete_ = true;  // false after an interrupted pack()
  LayerShape layer_;
  LoraRanks ranks_;
  const KernelTable& kernels_;
  Pool& pool_;
  Arena& arena_;
  BlockStore gate_up_a_, gate_up_b_, down_a_, down_b_;
};

using Adapters = std::vector<const Adapter*>;

}  // namespace kt
