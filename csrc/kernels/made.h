// Blocks that are no tiles yet, made into tiles beside the products that need them: encoded ones are decoded, those of
// a transposed matrix turned around. Which pairs of tiles are made when, and where they lie.
#pragma once

#include "kernels/turning.h"

namespace kt {
namespace {

constexpr int kMadeTiles = 4;  // pairs of tiles that are made at a time

// The blocks of one unit, made a few pairs of tiles ahead of where they are multiplied. Where a block is multiplied
// once, its tiles never leave L1 and those of the next block follow without a pause; where several passes read it, the
// first of them makes it.
template <class Isa>
class MadeAhead {
 public:
  template <class Unit>
  MadeAhead(const Unit& u, int passes)
      : once_(Isa::overlaps && passes == 1),
        k_tiles_(u.base.k_tiles),
        left_((int64_t)(u.block1 - u.block0) * u.base.k_tiles) {
    if constexpr (requires { u.turned; }) {
      if ((turned_ = u.turned)) {
        once_ &= !turned_->step;
        out_ = turned_->out;
        k_tile_ = turned_->k_tile;
      }
    }
    if constexpr (requires { u.coded; }) {
      if ((how_ = u.coded.how)) {
        at_ = u.base.b;
        block_bytes_ = (int64_t)u.block_bytes;
        k0_ = u.coded.k0;
        out_ = u.coded.decoded;
      }
    }
  }

  bool needed() const { return turned_ || how_; }

  // Begins the first pass over a block.
  void begin() {
    if (once_) return;
    made_ = turned_ && turned_->made ? k_tiles_ : 0;
    if (turned_ && block_++) out_ += turned_->step;
  }

  // The whole block, for an ISA that makes it before it multiplies.
  const char* all() {
    while (made_ < k_tiles_) made_ += make(k_tiles_, place(made_));
    return out_;
  }

  const char* tiles(int k) {
    if (!once_) {
      while (made_ <= k + kMadeTiles && made_ < k_tiles_) made_ += make(kMadeTiles, place(made_));
      return place(k);
    }
    // Here pairs go round: `made_` of them have not been multiplied yet, from `read_` on.
    while (made_ <= kMadeTiles && left_) {
      int slot = (read_ + made_) % kRingTiles, room = kRingTiles - slot;
      made_ += make(room < kMadeTiles ? room : kMadeTiles, place(slot));
    }
    made_--;
    read_++;
    return place((read_ - 1) % kRingTiles);
  }

 private:
  static constexpr int64_t kPair = 2 * Isa::tile_bytes;
  char* place(int slot) const { return out_ + slot * kPair; }

  // At most `most` pairs, as far as the block goes; how many.
  int make(int most, char* out) {
    int count = k_tiles_ - k_ < most ? k_tiles_ - k_ : most;
    turned_ ? turn(count, out) : decode_block<Isa>(*how_, at_, k0_ + k_, count, out);
    left_ -= count;
    if ((k_ += count) == k_tiles_) k_ = 0, at_ += block_bytes_, k_tile_++, tile_at_ += kPair;
    return count;
  }

  const char* stored(int k) const {
    const Stored* s = turned_->pieces;
    while (k >= s->count) k -= s++->count;
    return s->in + k * (int64_t)turned_->stride;
  }

  void turn(int count, char* out) {
    const Encoding* how = turned_->how;
    for (int k = k_; k < k_ + count; k++, out += kPair) {
      // What is turned a while later: another stored block's k tile, or the next k tile of one of the first.
      int far = k + kTurnAhead, next = far >= k_tiles_;
      if (next) far -= k_tiles_;
      bool fetch = far < k_tiles_ && (!next || left_ > k_tiles_);
      if (how) {
        if (fetch) fetch_encoded(*how, stored(far), k_tile_ + next);
        turn_encoded<Isa>(*how, stored(k), k_tile_, out);
      } else {
        if (fetch) fetch_pair<Isa>(stored(far) + tile_at_ + next * kPair, false);
        if (k + 1 < k_tiles_) fetch_pair<Isa>(stored(k + 1) + tile_at_, true);
        turn_pair<Isa>(stored(k) + tile_at_, out);
      }
    }
  }

  bool once_;  // every block is multiplied in one pass
  const Turned* turned_ = nullptr;
  const Encoding* how_ = nullptr;
  const char* at_ = nullptr;  // the encoded block that is decoded
  int64_t block_bytes_ = 0;
  int k0_ = 0, k_tiles_;
  int k_tile_ = 0, block_ = 0;
  int64_t tile_at_ = 0;  // of the stored blocks: the k tile that is turned
  int64_t left_;         // pairs of the unit that are still to be made
  char* out_ = nullptr;
  int k_ = 0;  // of the block, to come next
  int made_ = 0, read_ = 0;
};

}  // namespace
}  // namespace kt
