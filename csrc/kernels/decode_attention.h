// Attention of one new token over its paged KV cache, for decoding. The heads of a GQA group share keys, so a group is
// computed together and each key is read once.
//
// Each split of the keys yields the largest score, the sum of exponentials and the weighted sum of values;
// moe/attention.cpp merges the splits in order (FlashDecoding), so that several threads share a long context. All in
// f32.
#pragma once

#include "kernels/codecs.h"
#include "kernels/elementwise.h"

namespace kt {
namespace {

template <int W>
inline F32<W> value_at(const char* row, int64_t i, DType type) {
  return type == DType::bf16 ? from_bf16<W>(row + i * 2) : load<F32<W>>(row + i * 4);
}

// Half by half: a lane-by-lane sum would take longer than the products of a key.
template <int W>
inline float sum_of(F32<W> v) {
  if constexpr (W == 2) {
    return v[0] + v[1];
  } else {
    F32<W / 2> halves[2];
    __builtin_memcpy(halves, &v, sizeof v);
    return sum_of<W / 2>(halves[0] + halves[1]);
  }
}

// As an index among the keys of the split.
inline int32_t end_of_block(const AttentionSplit& a, int32_t block) {
  const int32_t end = (block + 1) * kBlockTokens - a.skipped;
  return end < a.count ? end : a.count;
}

// Scores of G heads for all keys of the split.
template <int W, int G>
inline void score_heads(const AttentionSplit& a, int32_t head) {
  for (int32_t block = 0, j = 0; j < a.count; block++) {
    const char* key = a.keys[block];
    for (const int32_t end = end_of_block(a, block); j < end; j++, key += a.key_stride) {
      F32<W> sums[G] = {};
      for (int32_t i = 0; i < a.key_size; i += W) {
        F32<W> k = value_at<W>(key, i, a.type);
        for (int g = 0; g < G; g++) sums[g] = sums[g] + k * load<F32<W>>(a.query + (head + g) * a.key_size + i);
      }
      for (int g = 0; g < G; g++) a.scores[(head + g) * kAttentionSplit + j] = sum_of<W>(sums[g]);
    }
  }
}

// C vectors of the weighted sum of values of G heads.
template <int W, int G, int C>
inline void add_values(const AttentionSplit& a, int32_t head, int32_t column) {
  F32<W> sums[G][C] = {};
  for (int32_t block = 0, j = 0; j < a.count; block++) {
    const char* value = a.values[block];
    for (const int32_t end = end_of_block(a, block); j < end; j++, value += a.value_stride) {
      F32<W> v[C];
      for (int c = 0; c < C; c++) v[c] = value_at<W>(value, column + c * W, a.type);
      for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++)
          sums[g][c] = sums[g][c] + v[c] * splat<F32<W>>(a.scores[(head + g) * kAttentionSplit + j]);
    }
  }
  for (int g = 0; g < G; g++)
    for (int c = 0; c < C; c++) store(a.out + (head + g) * a.value_size + column + c * W, sums[g][c]);
}

template <int W, int G>
inline void attention_heads(const AttentionSplit& a, int32_t head) {
  score_heads<W, G>(a, head);
  for (int g = 0; g < G; g++) {
    float *scores = a.scores + (head + g) * kAttentionSplit, max_score = scores[0], exp_sum = 0;
    for (int32_t j = 1; j < a.count; j++) max_score = scores[j] > max_score ? scores[j] : max_score;
    for (int32_t j = a.count; j % W; j++) scores[j] = max_score;
    F32<W> sums = {};
    for (int32_t j = 0; j < a.count; j += W) {
      F32<W> e = vexp<F32<W>>(load<F32<W>>(scores + j) - splat<F32<W>>(max_score));
      store(scores + j, e);
      if (j + W <= a.count) sums = sums + e;
    }
    for (int32_t j = a.count / W * W; j < a.count; j++) exp_sum += scores[j];
    a.max_score[head + g] = max_score;
    a.exp_sum[head + g] = exp_sum + sum_of<W>(sums);
  }
  int32_t column = 0;
  for (; column + 2 * W <= a.value_size; column += 2 * W) add_values<W, G, 2>(a, head, column);
  for (; column < a.value_size; column += W) add_values<W, G, 1>(a, head, column);
}

// A head's result does not depend on which heads are computed together with it.
template <int W>
void run_attention_split(const AttentionSplit& a) {
  constexpr int max_heads = 4;
  int32_t head = 0;
  for (; head + max_heads <= a.heads; head += max_heads) attention_heads<W, max_heads>(a, head);
  for (; head < a.heads; head++) attention_heads<W, 1>(a, head);
}

template <int W>
void run_decode_cache(const CacheRows& c) {
  for (int64_t row = 0; row < c.rows; row++) {
    const F32<W> scale = e8m0<W>(splat<U32<W>>((uint32_t)c.scales[row]));
    const uint8_t* codes = c.codes + row * c.stride;
    char* out = c.out + row * c.size * 2;
    for (int32_t i = 0; i < c.size; i += W)
      to_bf16<W>(out + i * 2, finite_e4m3<W, false>(bytes_of<W>(codes, i) << 24) * scale);
  }
}

}  // namespace
}  // namespace kt
