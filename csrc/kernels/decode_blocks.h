// Encoded blocks beside the products that need them: which pairs of tiles are decoded when, and where they lie.
#pragma once

#include "kernels/formats.h"
#include "kernels/quantise.h"
#include "kernels/table.h"

namespace kt {
namespace {

constexpr int kDecodedTiles = 4;  // pairs of tiles that are decoded at a time

// What comes before a block's first tiles: of bytes, the scales of its channels.
template <class Isa>
inline void begin_block(const Encoding& e, const char* block, float* channel) {
  if constexpr (kInBytes<Isa>) channel_scales<Isa::width>(e, block, channel);
}

// k tiles, or steps of bytes, of a block from `k0` on.
template <class Isa>
inline void open_block(const Encoding& e, const char* block, const float* channel, int k0, int count, char* out) {
  if constexpr (kInBytes<Isa>) {
    order_block<Isa::width>(e, block, channel, k0, count, out);
  } else {
    decode_block<Isa>(e, block, k0, count, out);
  }
}

// The blocks of one unit, decoded a few pairs of tiles ahead of where they are multiplied. Where a block is multiplied
// once, its tiles never leave L1 and those of the next block follow without a pause; where several passes read it, the
// first of them decodes.
template <class Isa>
class DecodingAhead {
 public:
  template <class Unit>
  DecodingAhead(const Unit& u, int passes)
      : once_(passes == 1),
        at_(u.base.b),
        block_bytes_((int64_t)u.block_bytes),
        k_tiles_(u.base.k_tiles),
        left_((int64_t)(u.block1 - u.block0) * u.base.k_tiles) {
    if constexpr (requires { u.encoded; }) {
      encoding_ = u.encoded.encoding, k0_ = u.encoded.k0, out_ = u.encoded.decoded;
      channel_ = u.encoded.channel;
    }
  }

  // Begins the first pass over a block.
  void begin() {
    if (!once_) made_ = 0;
  }

  const char* tiles(int k) {
    if (!once_) {
      while (made_ <= k + kDecodedTiles && made_ < k_tiles_) made_ += decode(made_, k_tiles_);
      return place(k);
    }
    // Here pairs go round: `made_` of them have not been multiplied yet, from `read_` on.
    while (made_ <= kDecodedTiles && left_) made_ += decode((read_ + made_) % kRingTiles, kRingTiles);
    made_--;
    read_++;
    return place((read_ - 1) % kRingTiles);
  }

 private:
  char* place(int slot) const { return out_ + (int64_t)slot * 2 * Isa::tile_bytes; }

  // A few pairs into the places from `slot` on; how many.
  int decode(int slot, int slots) {
    int count = k_tiles_ - k_ < slots - slot ? k_tiles_ - k_ : slots - slot;
    if (count > kDecodedTiles) count = kDecodedTiles;
    if (k_ == 0) begin_block<Isa>(*encoding_, at_, channel_);
    open_block<Isa>(*encoding_, at_, channel_, k0_ + k_, count, place(slot));
    left_ -= count;
    if ((k_ += count) == k_tiles_) {
      k_ = 0, at_ += block_bytes_;
      if constexpr (kInBytes<Isa>) channel_ += kBlockN;
    }
    return count;
  }

  bool once_;  // every block is multiplied in one pass
  const Encoding* encoding_ = nullptr;
  const char* at_;  // the block that is decoded
  int64_t block_bytes_;
  int k0_ = 0, k_tiles_;
  int64_t left_;  // pairs of the unit that are still to be decoded
  char* out_ = nullptr;
  float* channel_ = nullptr;  // of that block
  int k_ = 0;                 // of the block, to come next
  int made_ = 0, read_ = 0;
};

}  // namespace
}  // namespace kt
