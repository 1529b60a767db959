// Dequantising of encoded blocks, overlapped with the products that read them: which pairs of tiles are decoded when,
// and into which slot.
#pragma once

#include "kernels/quantise.h"
#include "kernels/rounded_tiles.h"
#include "kernels/table.h"

namespace kt {
namespace {

constexpr int kDecodedTiles = 4;  // pairs of tiles that are decoded at a time

// Setup before a block's first tiles: in W8A8, the scales of its channels.
template <class Isa>
inline void begin_decode(const Encoding& e, const char* block, float* channel) {
  if constexpr (kIntegerSums<Isa>) channel_scales<Isa::width>(e, block, channel);
}

// Whether tiles of bf16 are widened to f32 to be multiplied, and may as well be f32.
template <class Isa>
constexpr bool kMultipliesF32 = requires { typename Isa::F32Tiles; } && kRoundsByFma<Isa::width>;

// Unpacks k tiles, or int8 steps, of a block from `k0` on.
template <class Isa>
inline void unpack_block(const Encoding& e, const char* block, const float* channel, int k0, int count, char* out) {
  if constexpr (kIntegerSums<Isa>) {
    block_to_int8_tiles<Isa::width>(e, block, channel, k0, count, out);
  } else if constexpr (kMultipliesF32<Isa>) {
    decode_product_block<Isa::width, RoundedBf16Tile>(e, block, k0, count, out);
  } else {
    decode_block<Isa>(e, block, k0, count, out);
  }
}

// Decodes the blocks of one unit a few pairs of tiles ahead of the multiplication. Where a block is multiplied in a
// single pass, its tiles stay in L1 in a ring, and the next block follows without a pause; with several passes, the
// first one decodes.
template <class Isa>
class DecodeAhead {
 public:
  template <class Unit>
  DecodeAhead(const Unit& u, int passes)
      : single_pass_(passes == 1),
        block_(u.base.b),
        block_bytes_((int64_t)u.block_bytes),
        k_tiles_(u.base.k_tiles),
        left_((int64_t)(u.block1 - u.block0) * u.base.k_tiles) {
    if constexpr (requires { u.encoded; }) {
      encoding_ = u.encoded.encoding, k0_ = u.encoded.k0, out_ = u.encoded.decoded;
      channel_ = u.encoded.channel;
    }
  }

  // Starts the first pass over a block.
  void begin() {
    if (!single_pass_) decoded_ = 0;
  }

  const char* tiles(int k) {
    if (!single_pass_) {
      while (decoded_ <= k + kDecodedTiles && decoded_ < k_tiles_) decoded_ += decode(decoded_, k_tiles_);
      return slot_at(k);
    }
    // The ring: `decoded_` pairs are not multiplied yet, starting at `consumed_`.
    while (decoded_ <= kDecodedTiles && left_) decoded_ += decode((consumed_ + decoded_) % kRingTiles, kRingTiles);
    decoded_--;
    consumed_++;
    return slot_at((consumed_ - 1) % kRingTiles);
  }

 private:
  char* slot_at(int slot) const { return out_ + (int64_t)slot * 2 * Isa::tile_bytes; }

  // Decodes a few pairs into the slots from `slot` on; returns how many.
  int decode(int slot, int slots) {
    int count = k_tiles_ - k_ < slots - slot ? k_tiles_ - k_ : slots - slot;
    if (count > kDecodedTiles) count = kDecodedTiles;
    if (k_ == 0) begin_decode<Isa>(*encoding_, block_, channel_);
    unpack_block<Isa>(*encoding_, block_, channel_, k0_ + k_, count, slot_at(slot));
    left_ -= count;
    if ((k_ += count) == k_tiles_) {
      k_ = 0, block_ += block_bytes_;
      if constexpr (kIntegerSums<Isa>) channel_ += kBlockN;
    }
    return count;
  }

  bool single_pass_;  // every block is multiplied in one pass
  const Encoding* encoding_ = nullptr;
  const char* block_;  // being decoded
  int64_t block_bytes_;
  int k0_ = 0, k_tiles_;
  int64_t left_;  // pairs of the unit still to be decoded
  char* out_ = nullptr;
  float* channel_ = nullptr;  // of that block
  int k_ = 0;                 // next k tile of that block
  int decoded_ = 0, consumed_ = 0;
};

}  // namespace
}  // namespace kt
