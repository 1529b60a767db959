// Transposes stored weight blocks for backward: a tile of pairs along K becomes one of pairs along N.
//
// Encoded blocks are transposed as codes (transpose_codes.h) into tiles of bf16; into tiles of the exact precisions
// they are dequantised first. A product over transposed blocks starts with the first of them in scratch; each further
// one is transposed while the one before it is multiplied, half a block at a time, because the matrix unit leaves the
// vector units idle and the cache free to prefetch.
#pragma once

#include "kernels/table.h"
#include "kernels/transpose_codes.h"

namespace kt {
namespace {

// One half of n of an f32 or f64 block, whose tiles are [32 k][16 n].
template <class Real>
inline void transpose_exact(const char* in, int half, char* out) {
  constexpr int tile = kTileK * kTileN;
  const Real* from = (const Real*)in + half * tile;
  Real* to = (Real*)out;
  for (int k = 0; k < kTileK; k++)
    for (int n = 0; n < kTileN; n++)
      to[k / kTileN * tile + (half * kTileN + n) * kTileN + k % kTileN] = from[k * kTileN + n];
}

// One half of a block of tiles.
template <class Isa>
inline void transpose_half(const char* in, int half, char* out) {
  if constexpr (Isa::tile_bytes != kTileBytes) {
    transpose_exact<typename Isa::Real>(in, half, out);
  } else {
    transpose_tile<Isa::width>(in + half * kTileBytes, half, out);
  }
}

// Neighbouring blocks are too far apart for the hardware prefetcher: each is prefetched into L2 eight blocks before it
// is transposed, and into L1 one block before.
constexpr int kTransposeAhead = 8;

// Transposes the blocks of a list of jobs, half by half.
template <class Isa>
class BlockTransposer {
 public:
  BlockTransposer(const Transpose* jobs, int count) : job_(jobs), end_(jobs + count), ahead_job_(job_) { skip_empty(); }

  // Halves in [at, end).
  static int halves(const Transpose* at, const Transpose* end) {
    int sum = 0;
    for (; at < end; at++) sum += 2 * at->count;
    return sum;
  }

  void all() { to(end_); }
  // Continues up to a later job of the list.
  void to(const Transpose* job) {
    while (job_ < job && job_ < end_) half();
  }

  // Transposes one half; does nothing at the end of the list.
  void half() {
    if (job_ >= end_) return;
    const Transpose& t = *job_;
    if (!half_)
      for (int i = 0; i < 2 && prefetched_ < kTransposeAhead; i++) prefetch();
    const char* in = t.in + (int64_t)block_ * (int64_t)t.in_stride;
    char* out = t.out + (int64_t)block_ * 2 * Isa::tile_bytes;
    if (!t.encoding) {
      for (int line = 0; line < Isa::tile_bytes && block_ + 1 < t.count; line += 64)
        __builtin_prefetch(in + t.in_stride + half_ * Isa::tile_bytes + line, 0, 3);
      transpose_half<Isa>(in, half_, out);
    } else if constexpr (Isa::tile_bytes == kTileBytes) {
      transpose_codes<kDecodeWidth<Isa>>(*t.encoding, in, t.k_tile, half_, out);
    } else if (half_) {
      alignas(64) char tiles[2 * Isa::tile_bytes];
      decode_block<Isa>(*t.encoding, in, t.k_tile, 1, tiles);
      for (int half = 0; half < 2; half++) transpose_half<Isa>(tiles, half, out);
    }
    if ((half_ ^= 1)) return;
    prefetched_--;
    if (++block_ == t.count) {
      job_++, block_ = 0;
      skip_empty();
    }
  }

 private:
  void skip_empty() {
    while (job_ < end_ && !job_->count) job_++;
  }

  // Prefetches the next block that has not been prefetched.
  void prefetch() {
    while (ahead_job_ < end_ && ahead_block_ >= ahead_job_->count) ahead_job_++, ahead_block_ = 0;
    if (ahead_job_ == end_) return;
    const Transpose& t = *ahead_job_;
    const char* block = t.in + (int64_t)ahead_block_++ * (int64_t)t.in_stride;
    prefetched_++;
    if (!t.encoding) {
      for (int line = 0; line < 2 * Isa::tile_bytes; line += 64) __builtin_prefetch(block + line, 0, 2);
      return;
    }
    for (int half = 0; half < 2; half++) {
      const Strip& s = t.encoding->strip[half];
      const char* strip = block + (half ? t.encoding->strip[0].bytes : 0);
      const char *header = strip + s.headers + t.k_tile / s.span_tiles * s.span_bytes,
                 *codes = strip + s.codes + t.k_tile * s.tile_bytes;
      for (int at = 0; at < s.span_bytes; at += 64) __builtin_prefetch(header + at, 0, 2);
      for (int at = 0; at < s.tile_bytes; at += 64) __builtin_prefetch(codes + at, 0, 2);
    }
  }

  const Transpose *job_, *end_;
  int block_ = 0, half_ = 0;  // next block and half of *job_
  const Transpose* ahead_job_;
  int ahead_block_ = 0, prefetched_ = 0;  // blocks that are prefetched and not transposed yet
};

// Transposes the next block of a product while one is multiplied: some halves at every k step.
template <class Isa>
class OverlappedTranspose {
 public:
  explicit OverlappedTranspose(const TransposedBlocks* t)
      : transposer_(t ? t->jobs : nullptr, t ? t->count : 0),
        next_(t ? t->jobs : nullptr),
        end_(t ? t->jobs + t->count : nullptr),
        jobs_per_block_(t ? t->jobs_per_block : 0) {}

  // Starts the passes over a block, `steps` k steps in all.
  void begin(int steps) {
    const Transpose* after = next_ + jobs_per_block_ < end_ ? next_ + jobs_per_block_ : end_;
    halves_per_block_ = BlockTransposer<Isa>::halves(next_, after);
    next_ = after;
    steps_ = steps;
    due_ = 0;
  }
  void step() {
    for (due_ += halves_per_block_; due_ >= steps_; due_ -= steps_) transposer_.half();
  }
  // Completes the next block.
  void finish() { transposer_.to(next_); }

 private:
  BlockTransposer<Isa> transposer_;
  const Transpose *next_, *end_;
  int jobs_per_block_, halves_per_block_ = 0, steps_ = 1, due_ = 0;
};

// For products whose blocks are not transposed.
struct NoTranspose {
  explicit NoTranspose(const TransposedBlocks*) {}
  void begin(int) {}
  void step() {}
  void finish() {}
};
template <class Isa, bool transposes>
struct OverlappedTransposeOf {
  using type = NoTranspose;
};
template <class Isa>
struct OverlappedTransposeOf<Isa, true> {
  using type = OverlappedTranspose<Isa>;
};

template <class Isa>
void run_transpose(const Transpose& t) {
  BlockTransposer<Isa>(&t, 1).all();
}

}  // namespace
}  // namespace kt
