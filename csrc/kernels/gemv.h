// A few token rows times a matrix as it lies in a checkpoint, rows of bf16: what decoding asks of every linear layer
// that is not an expert. Memory is what it waits for, so nothing is packed and each weight is read once.
//
// Rows of weights are read kNarrowRows at a time, a group. While one group is multiplied the next one is fetched into
// L2, in kFetched streams of neighbouring lines: that is the order in which memory is fastest, whatever the order in
// which the group is then taken from L2. Here vectors multiply; tiles do in gemv_amx.h. A token's sums are added up
// in the same order, whoever is beside it.
#pragma once

#include "kernels/elementwise.h"

namespace kt {
namespace {

constexpr int kFetched = 4;        // streams, each of kNarrowRows / kFetched rows
constexpr int kSlab = 8192;        // bytes of each row that are fetched ahead, at most
constexpr int kFewTokens = 8;      // that vectors multiply at a time
constexpr int kNarrowTokens = 32;  // in any variant, at most

// What is fetched while something else is multiplied: `bytes` of each of kNarrowRows rows, a line of each stream at a
// time. Rows past the end of a matrix do no harm.
struct Fetch {
  const char* at;  // null: nothing
  int64_t stride, bytes;
  int64_t offset = 0, left = bytes;

  void lines(int count) {
    if (!at) return;
    for (int n = 0; n < count; n++) {
      for (int i = 0; i < kFetched; i++) __builtin_prefetch(at + i * (kNarrowRows / kFetched) * stride + offset, 0, 2);
      offset += 64;
      left -= 64;
      if (left <= 0) {
        offset += stride - bytes;
        left = bytes;
      }
    }
  }
  void all() { lines((int)(bytes / 64) * (kNarrowRows / kFetched)); }
};

// The sum of all lanes, by halves.
template <class V>
inline float sum_of(V v) {
  constexpr int W = kLanes<V>;
  for (int half = W / 2; half; half /= 2) {
    Mask<V> turned;
    for (int i = 0; i < W; i++) turned[i] = (i + half) % W;
    v = v + __builtin_shuffle(v, turned);
  }
  return v[0];
}

// Sums [tokens][kNarrowRows] of `count` rows from `row` on, rounded into the output.
template <int W>
inline void store_sums(const Narrow& n, const float* sums, int32_t row, int32_t count) {
  for (int32_t t = 0; t < n.tokens; t++, sums += kNarrowRows) {
    int64_t at = t * n.out_stride + row;
    if (count == kNarrowRows) {
      for (int i = 0; i < kNarrowRows; i += W) store_as<F32<W>>(n.out, at + i, n.type, load<F32<W>>(sums + i));
    } else {
      for (int i = 0; i < count; i++) set_element(n.out, at + i, n.type, sums[i]);
    }
  }
}

// Weights widened to f32 by a shift and a mask; of a row of activations first those of even k, then those of odd k.
template <int W>
struct WidenedRows {
  static constexpr int width = W;
  struct Both {
    F32<W> even, odd;
  };
  static Both apart(U32<W> pairs) { return {(F32<W>)(pairs << 16), (F32<W>)(pairs & 0xffff0000u)}; }
  static Both open(const char* w) { return apart(load<U32<W>>(w)); }
  static Both at(const char* x, int32_t k, int32_t token, int64_t pair) {
    const float* row = (const float*)x + (int64_t)token * k + pair;
    return {load<F32<W>>(row), load<F32<W>>(row + k / 2)};
  }
  static F32<W> step(F32<W> sum, const Both& w, const Both& x) {
    sum = sum + w.even * x.even;
    return sum + w.odd * x.odd;
  }
  static void spread(const Spread& s) {
    Mask<F32<W>> even, odd;
    for (int i = 0; i < W; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
    for (int32_t t = 0; t < s.tokens; t++) {
      const char* from = (const char*)s.x + t * s.stride * (int64_t)size_of(s.type);
      float* to = (float*)s.out + (int64_t)t * s.k;
      for (int64_t pair = 0; pair < s.k / 2; pair += W) {
        Both both;
        if (s.type == DType::bf16) {
          both = open(from + pair * 4);
        } else {
          F32<W> low = load<F32<W>>(from + pair * 8), high = load<F32<W>>(from + (pair + W / 2) * 8);
          both = {__builtin_shuffle(low, high, even), __builtin_shuffle(low, high, odd)};
        }
        store(to + pair, both.even);
        store(to + s.k / 2 + pair, both.odd);
      }
    }
  }
};

// R rows by T tokens, from `row` and `token` on, into sums [T][kNarrowRows]; meanwhile R rows' share is fetched.
template <class Arith, int R, int T>
inline void narrow_rows(const Narrow& n, int32_t row, int32_t token, float* sums, Fetch& fetch) {
  constexpr int W = Arith::width, line = 16, every = line * (kNarrowRows / kFetched) / R;
  F32<W> acc[R][T] = {};
  const char* w[R];
  for (int r = 0; r < R; r++) w[r] = n.weights + (row + r) * n.weight_stride;
  for (int64_t pair = 0; pair < n.k / 2; pair += W) {
    if (pair % every == 0) fetch.lines(1);
    decltype(Arith::open(w[0])) opened[R];
    for (int r = 0; r < R; r++) opened[r] = Arith::open(w[r] + pair * 4);
    for (int t = 0; t < T; t++) {
      auto x = Arith::at(n.x, n.k, token + t, pair);
      for (int r = 0; r < R; r++) acc[r][t] = Arith::step(acc[r][t], opened[r], x);
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) sums[t * kNarrowRows + r] = sum_of(acc[r][t]);
}

// The instance for exactly `tokens`, 1 ... T.
template <class Arith, int R, int T>
inline void narrow_tokens(int32_t tokens, const Narrow& n, int32_t row, int32_t token, float* sums, Fetch& fetch) {
  if (tokens == T) {
    narrow_rows<Arith, R, T>(n, row, token, sums, fetch);
  } else if constexpr (T > 1) {
    narrow_tokens<Arith, R, T - 1>(tokens, n, row, token, sums, fetch);
  }
}

// More tokens than fit at a time find the weights in L1.
template <class Arith, int R, int T>
inline void narrow_all_tokens(const Narrow& n, int32_t row, float* sums, Fetch& fetch) {
  Fetch nothing{};
  for (int32_t token = 0; token < n.tokens; token += T) {
    int32_t now = n.tokens - token < T ? n.tokens - token : T;
    narrow_tokens<Arith, R, T>(now, n, row, token, sums + token * kNarrowRows, token ? nothing : fetch);
  }
}

template <class Arith>
void narrow_vectors(const Narrow& n) {
  alignas(64) float sums[kNarrowTokens * kNarrowRows];
  // Longer rows are streams that the CPU follows by itself.
  int64_t bytes = (int64_t)n.k * 2, ahead = bytes <= kSlab ? bytes : 0;
  if (n.cold && ahead) Fetch{n.weights, n.weight_stride, ahead}.all();
  for (int32_t row = 0; row < n.rows; row += kNarrowRows) {
    int32_t count = n.rows - row < kNarrowRows ? n.rows - row : kNarrowRows, r = 0;
    const char* next = row + kNarrowRows < n.rows ? n.weights + (row + kNarrowRows) * n.weight_stride : n.next;
    Fetch fetch{ahead ? next : nullptr, n.weight_stride, ahead};
    if (n.tokens > 4) {
      for (; r + 2 <= count; r += 2) narrow_all_tokens<Arith, 2, kFewTokens>(n, row + r, sums + r, fetch);
    } else {
      for (; r + 4 <= count; r += 4) narrow_all_tokens<Arith, 4, 4>(n, row + r, sums + r, fetch);
    }
    for (; r < count; r++) narrow_all_tokens<Arith, 1, kFewTokens>(n, row + r, sums + r, fetch);
    store_sums<Arith::width>(n, sums, row, count);
  }
}

// How a variant multiplies few rows: `tokens` at most.
template <int W>
struct FewWidened {
  static constexpr int32_t tokens = 8;
  static void spread(const Spread& s) { WidenedRows<W>::spread(s); }
  static void multiply(const Narrow& n) { narrow_vectors<WidenedRows<W>>(n); }
};

}  // namespace
}  // namespace kt
