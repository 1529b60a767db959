// x W^T for a few rows of x (decoding) and a matrix W of bf16 rows in the checkpoint's layout, for linear layers that
// are not experts. It is bound by memory bandwidth, so weights are not packed and each is read once.
//
// Matrix rows are read in groups of kGemvGroup. While one group is multiplied the next one is prefetched into L2 in
// kPrefetchStreams streams of consecutive lines, the order in which memory is fastest, whatever order the
// multiplication then reads L2 in. This file uses vectors, gemv_amx.h tiles. A token's sums are added in the same order
// whatever other tokens are in the batch.
#pragma once

#include "kernels/elementwise.h"

namespace kt {
namespace {

constexpr int kPrefetchStreams = 4;  // each of kGemvGroup / kPrefetchStreams rows
constexpr int kSlab = 8192;          // bytes of each row that are prefetched, at most
constexpr int kVectorTokens = 8;     // multiplied at a time
constexpr int kGemvMaxTokens = 32;   // in any variant, at most

// Prefetches `bytes` of each of kGemvGroup rows while something else is multiplied, one line of each stream at a time.
// Prefetching past the end of a matrix is harmless.
struct GroupPrefetch {
  const char* at;  // null: nothing to prefetch
  int64_t stride, bytes;
  int64_t offset = 0, left = bytes;

  void lines(int count) {
    if (!at) return;
    for (int n = 0; n < count; n++) {
      for (int i = 0; i < kPrefetchStreams; i++)
        __builtin_prefetch(at + i * (kGemvGroup / kPrefetchStreams) * stride + offset, 0, 2);
      offset += 64;
      left -= 64;
      if (left <= 0) {
        offset += stride - bytes;
        left = bytes;
      }
    }
  }
  void all() { lines((int)(bytes / 64) * (kGemvGroup / kPrefetchStreams)); }
};

// Rounds sums [tokens][kGemvGroup] of `count` rows from `row` on into the output.
template <int W>
inline void store_sums(const Gemv& n, const float* sums, int32_t row, int32_t count) {
  for (int32_t t = 0; t < n.tokens; t++, sums += kGemvGroup) {
    int64_t at = t * n.out_stride + row;
    if (count == kGemvGroup) {
      for (int i = 0; i < kGemvGroup; i += W) store_as<F32<W>>(n.out, at + i, n.type, load<F32<W>>(sums + i));
    } else {
      for (int i = 0; i < count; i++) set_element(n.out, at + i, n.type, sums[i]);
    }
  }
}

// Weights are widened to f32 by a shift and a mask; a packed row of x holds its even k first, then its odd k.
template <int W>
struct WidenedRows {
  static constexpr int width = W;
  struct EvenOdd {
    F32<W> even, odd;
  };
  static EvenOdd split(U32<W> pairs) { return {(F32<W>)(pairs << 16), (F32<W>)(pairs & 0xffff0000u)}; }
  static EvenOdd unpack(const char* w) { return split(load<U32<W>>(w)); }
  static EvenOdd at(const char* x, int32_t k, int32_t token, int64_t pair) {
    const float* row = (const float*)x + (int64_t)token * k + pair;
    return {load<F32<W>>(row), load<F32<W>>(row + k / 2)};
  }
  static F32<W> step(F32<W> sum, const EvenOdd& w, const EvenOdd& x) {
    sum = sum + w.even * x.even;
    return sum + w.odd * x.odd;
  }
  static void pack_rows(const PackRows& s) {
    Mask<F32<W>> even, odd;
    for (int i = 0; i < W; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
    for (int32_t t = 0; t < s.tokens; t++) {
      const char* from = (const char*)s.x + t * s.stride * (int64_t)size_of(s.type);
      float* to = (float*)s.out + (int64_t)t * s.k;
      for (int64_t pair = 0; pair < s.k / 2; pair += W) {
        EvenOdd pair_values;
        if (s.type == DType::bf16) {
          pair_values = unpack(from + pair * 4);
        } else {
          F32<W> low = load<F32<W>>(from + pair * 8), high = load<F32<W>>(from + (pair + W / 2) * 8);
          pair_values = {__builtin_shuffle(low, high, even), __builtin_shuffle(low, high, odd)};
        }
        store(to + pair, pair_values.even);
        store(to + s.k / 2 + pair, pair_values.odd);
      }
    }
  }
};

// R matrix rows by T tokens, from `row` and `token` on, into sums [T][kGemvGroup]; prefetches the next group's share of
// R rows.
template <class Arith, int R, int T>
inline void gemv_block(const Gemv& n, int32_t row, int32_t token, float* sums, GroupPrefetch& fetch) {
  constexpr int W = Arith::width, line = 16, every = line * (kGemvGroup / kPrefetchStreams) / R;
  F32<W> acc[R][T] = {};
  const char* w[R];
  for (int r = 0; r < R; r++) w[r] = n.weights + (row + r) * n.weight_stride;
  for (int64_t pair = 0; pair < n.k / 2; pair += W) {
    if (pair % every == 0) fetch.lines(1);
    decltype(Arith::unpack(w[0])) unpacked[R];
    for (int r = 0; r < R; r++) unpacked[r] = Arith::unpack(w[r] + pair * 4);
    for (int t = 0; t < T; t++) {
      auto x = Arith::at(n.x, n.k, token + t, pair);
      for (int r = 0; r < R; r++) acc[r][t] = Arith::step(acc[r][t], unpacked[r], x);
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) sums[t * kGemvGroup + r] = sum_of_lanes<F32<W>>(acc[r][t]);
}

// Dispatches to the instance for exactly `tokens`, 1 ... T.
template <class Arith, int R, int T>
inline void gemv_exact_tokens(int32_t tokens, const Gemv& n, int32_t row, int32_t token, float* sums,
                              GroupPrefetch& fetch) {
  if (tokens == T) {
    gemv_block<Arith, R, T>(n, row, token, sums, fetch);
  } else if constexpr (T > 1) {
    gemv_exact_tokens<Arith, R, T - 1>(tokens, n, row, token, sums, fetch);
  }
}

// Tokens beyond the first T read the weights from L1.
template <class Arith, int R, int T>
inline void gemv_all_tokens(const Gemv& n, int32_t row, float* sums, GroupPrefetch& fetch) {
  GroupPrefetch no_prefetch{};
  for (int32_t token = 0; token < n.tokens; token += T) {
    int32_t now = n.tokens - token < T ? n.tokens - token : T;
    gemv_exact_tokens<Arith, R, T>(now, n, row, token, sums + token * kGemvGroup, token ? no_prefetch : fetch);
  }
}

template <class Arith>
void gemv_vectors(const Gemv& n) {
  alignas(64) float sums[kGemvMaxTokens * kGemvGroup];
  // Longer rows are sequential streams that the hardware prefetcher follows.
  int64_t bytes = (int64_t)n.k * 2, ahead = bytes <= kSlab ? bytes : 0;
  if (n.cold && ahead) GroupPrefetch{n.weights, n.weight_stride, ahead}.all();
  for (int32_t row = 0; row < n.rows; row += kGemvGroup) {
    int32_t count = n.rows - row < kGemvGroup ? n.rows - row : kGemvGroup, r = 0;
    const char* next = row + kGemvGroup < n.rows ? n.weights + (row + kGemvGroup) * n.weight_stride : n.next;
    GroupPrefetch fetch{ahead ? next : nullptr, n.weight_stride, ahead};
    if (n.tokens > 4) {
      for (; r + 2 <= count; r += 2) gemv_all_tokens<Arith, 2, kVectorTokens>(n, row + r, sums + r, fetch);
    } else {
      for (; r + 4 <= count; r += 4) gemv_all_tokens<Arith, 4, 4>(n, row + r, sums + r, fetch);
    }
    for (; r < count; r++) gemv_all_tokens<Arith, 1, kVectorTokens>(n, row + r, sums + r, fetch);
    store_sums<Arith::width>(n, sums, row, count);
  }
}

// The vector implementation for `tokens` rows of x at most.
template <int W>
struct GemvWidened {
  static constexpr int32_t tokens = 8;
  static void pack_rows(const PackRows& s) { WidenedRows<W>::pack_rows(s); }
  static void multiply(const Gemv& n) { gemv_vectors<WidenedRows<W>>(n); }
};

// The same where the CPU multiplies bf16: rows of bf16 are pairs along k in their stored order on both sides.
template <class PairRows>
struct GemvPairs {
  static constexpr int32_t tokens = 16;
  using F32Rows = WidenedRows<PairRows::width>;
  static void pack_rows(const PackRows& s) {
    if (s.type == DType::f32) return F32Rows::pack_rows(s);
    for (int32_t t = 0; t < s.tokens; t++)
      __builtin_memcpy(s.out + (int64_t)t * s.k * 2, (const char*)s.x + t * s.stride * 2, (size_t)s.k * 2);
  }
  static void multiply(const Gemv& n) { n.type == DType::f32 ? gemv_vectors<F32Rows>(n) : gemv_vectors<PairRows>(n); }
};

}  // namespace
}  // namespace kt
