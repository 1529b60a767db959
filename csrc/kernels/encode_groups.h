// int4 from bf16: W groups side by side, one in each lane, so that the largest number, the error of a scale and the
// codes of a group are found without adding up lanes.
//
// W groups of a row are opened as columns [span][W]. Bits are those of encode_clipped: the squares of a group are added
// in the order of its 16 sums.
#pragma once

#include "kernels/encode.h"

namespace kt {
namespace {

constexpr Integers kInt4{-8, 7, 8};
constexpr int kWord = 8;                 // codes of four bits
constexpr int kWords = kTileK / kWord;   // of a group's k tile
constexpr int32_t kOrigin = 0x4b400000;  // bits of kRounding

// 0 ... n - 1. Headers of ISA code include nothing of the library.
template <int... index>
struct Indices {};
template <int n, int... index>
struct IndicesUpTo : IndicesUpTo<n - 1, n - 1, index...> {};
template <int... index>
struct IndicesUpTo<0, index...> {
  using Type = Indices<index...>;
};

// Lanes of a with bit d of their index clear and of b with it clear, d to the right; or both with it set, a's d to the
// left.
template <int W, int d, bool upper, int... lane>
inline U32<W> exchanged(U32<W> a, U32<W> b, Indices<lane...>) {
  if constexpr (upper)
    return __builtin_shuffle(a, b, U32<W>{(lane & d ? (uint32_t)(W + lane) : (uint32_t)(lane + d))...});
  return __builtin_shuffle(a, b, U32<W>{(lane & d ? (uint32_t)(W + lane - d) : (uint32_t)lane)...});
}

// Transposes blocks of 2 d lanes of rows [rows][W], and those that they consist of.
template <int W, int rows, int d>
__attribute__((always_inline)) inline void transpose_lanes(U32<W> (&row)[rows]) {
  constexpr auto lanes = typename IndicesUpTo<W>::Type{};
  for (int r = 0; r < rows; r++) {
    if (r & d) continue;
    const U32<W> a = row[r], b = row[r + d];
    row[r] = exchanged<W, d, false>(a, b, lanes);
    row[r + d] = exchanged<W, d, true>(a, b, lanes);
  }
  if constexpr (d > 1) transpose_lanes<W, rows, d / 2>(row);
}

// W groups of `span` columns of bf16, as columns.
template <int W, int span>
inline void open_groups(const uint16_t* from, F32<W>* x) {
  constexpr int pairs = W;  // of columns at a time
  for (int k = 0; k < span; k += 2 * pairs) {
    U32<W> row[W];
    for (int g = 0; g < W; g++) row[g] = load<U32<W>>(from + (int64_t)g * span + k);
    transpose_lanes<W, W, W / 2>(row);
    for (int i = 0; i < pairs; i++) {
      x[k + 2 * i] = (F32<W>)(row[i] << 16);
      x[k + 2 * i + 1] = (F32<W>)(row[i] & 0xffff0000u);
    }
  }
}

// Of each group: the number farthest from zero, with its sign; of two, the positive one. Adds the squares, and keeps
// the largest magnitude's bits in `largest`.
template <int W, int span>
inline F32<W> peaks_of(const F32<W>* x, F32<W>& squares, I32<W>& largest) {
  I32<W> above = {}, below = {};
  for (int i = 0; i < span; i++) {
    const I32<W> v = (I32<W>)x[i], w = v ^ (int32_t)0x80000000u;
    above = above > v ? above : v;
    below = below > w ? below : w;
    squares += x[i] * x[i];
  }
  const I32<W> most = above > below ? above : below;
  largest = largest > most ? largest : most;
  return (F32<W>)(above >= below ? above : below ^ (int32_t)0x80000000u);
}

// The squared error of each group under its scale, in units of the scale; the order of additions is that of
// group_error.
template <int W, int span, class Element>
__attribute__((always_inline)) inline F32<W> column_errors(const Element element, const F32<W>* x, F32<W> factor) {
  const auto square = [&](int i) __attribute__((always_inline)) {
    const F32<W> t = apart(x[i] * factor);
    const F32<W> miss = element.template nearest<W>(t).value - t;
    return apart(miss * miss);
  };
  const auto sum = [&](int i) __attribute__((always_inline)) {
    F32<W> s = square(i) + square(i + kSums);
    for (int j = i + 2 * kSums; j < span; j += kSums) s += square(j);
    return s;
  };
  const auto four = [&](int i)
                        __attribute__((always_inline)) { return (sum(i) + sum(i + 8)) + (sum(i + 4) + sum(i + 12)); };
  return (four(0) + four(2)) + (four(1) + four(3));
}

// The code on which a clip lays the largest number, and whether numbers may then lie beyond the codes. A scale rounded
// to bf16 or f16 moves it by less than 1/64, unless it is one of the least of its type.
struct Reach {
  float codes;
  bool below, above;

  constexpr explicit Reach(const Clip& clip)
      : codes((float)(clip.on_largest ? kInt4.most - clip.beyond * kInt4.least
                                      : kInt4.least + clip.beyond * kInt4.least)),
        below(size() * (65.0f / 64) >= 0.5f - (float)kInt4.least),
        above(size() * (65.0f / 64) >= (float)kInt4.most + 0.5f) {}
  constexpr float size() const { return codes < 0 ? -codes : codes; }
  // Up to which the peak's code needs no more clamping than that.
  constexpr float limit() const {
    return below ? __builtin_inff() : above ? 0.5f - (float)kInt4.least : (float)kInt4.most + 0.5f;
  }
};

// The scale of each group with the least error of kClips, and its inverse.
template <int W>
struct GroupScales {
  F32<W> scale = {}, factor = {}, best = lanes_of<W>(__builtin_inff());

  __attribute__((always_inline)) void keep_better(F32<W> error, F32<W> s, F32<W> f) {
    error = error * apart(s * s);
    const Mask<F32<W>> better = error < best;
    best = select<F32<W>>(better, error, best);
    scale = select<F32<W>>(better, s, scale);
    factor = select<F32<W>>(better, f, factor);
  }
};

template <int W, int span, int... clip>
inline GroupScales<W> best_scales(const F32<W>* x, F32<W> peak, DType type, Indices<clip...>) {
  const F32<W> scale[] = {round_scale<W>(peak / lanes_of<W>(Reach(kClips[clip]).codes), type)...};
  const F32<W> factor[] = {inverse<W>(scale[clip])...};
  F32<W> beyond = {};  // a number above zero where a peak's code lies beyond the limit
  ((beyond = larger_magnitude<W>(
        beyond, select<F32<W>>(magnitude<W>(peak * factor[clip]) < lanes_of<W>(Reach(kClips[clip]).limit()), F32<W>{},
                               lanes_of<W>(1.0f)))),
   ...);
  GroupScales<W> kept;
  if (largest_lane<W>(beyond) > 0) {
    for (int c = 0; c < kTrials; c++)
      kept.keep_better(column_errors<W, span>(kInt4, x, factor[c]), scale[c], factor[c]);
    return kept;
  }
  (kept.keep_better(
       column_errors<W, span>(
           IntegersOf<Reach(kClips[clip]).below, Reach(kClips[clip]).above>{kInt4.least, kInt4.most, kInt4.zero}, x,
           factor[clip]),
       scale[clip], factor[clip]),
   ...);
  return kept;
}

// Codes of a k tile, of each group as `kWords` words; adds the squares of the error of the decoded numbers, rounded to
// bf16, to `moved`.
template <int W>
inline void encode_columns(const F32<W>* x, const GroupScales<W>& scales, U32<W> (&word)[kWords], F32<W>& moved) {
  for (int w = 0; w < kWords; w++) {
    U32<W> sum = {};
    uint32_t origins = 0;  // what codes have besides their four bits
    for (int i = 0; i < kWord; i++) {
      const F32<W> v = x[w * kWord + i];
      const Nearest<W> n = kInt4.nearest<W>(apart(v * scales.factor));
      sum += (U32<W>)n.code << (4 * i);
      origins += (uint32_t)kOrigin << (4 * i);
      const F32<W> miss = through_bf16<W>(apart(n.value * scales.scale)) - v;
      moved += miss * miss;
    }
    word[w] = sum - origins;
  }
}

// Words [kWords][W] to the W groups that they belong to, `step` bytes apart.
template <int W>
inline void store_words(U32<W> (&word)[kWords], int count, int64_t step, uint8_t* out) {
  static_assert(kWords == 4);
  transpose_lanes<W, kWords, 2>(word);  // in every four lanes
  for (int g = 0; g < count; g++) __builtin_memcpy(out + g * step, (const char*)&word[g % 4] + g / 4 * 16, 16);
}

template <int W>
inline void store_scales(F32<W> scale, int count, DType type, char* out) {
  alignas(64) uint16_t halves[W];
  if (type == DType::f32) {
    __builtin_memcpy(out, &scale, (size_t)count * 4);
    return;
  }
  if (type == DType::bf16) {
    const U32<W> bits = (U32<W>)scale >> 16;
    const auto narrow = __builtin_convertvector(bits, typename Vec<W>::u16);
    __builtin_memcpy(halves, &narrow, sizeof narrow);
  } else {
    to_f16<W>(halves, scale);
  }
  __builtin_memcpy(out, halves, (size_t)count * 2);
}

// Sums over a row, in each lane those of its groups.
template <int W>
struct LaneSums {
  F32<W> squares = {}, moved = {};
  I32<W> largest = {};  // bits of the largest magnitude

  void add_to(EncodeSums& sums) const {
    sums.norm += sum_of_lanes<W>(squares);
    sums.moved += sum_of_lanes<W>(moved);
    sums.finite &= largest_lane<W>((F32<W>)largest) < __builtin_inff();
  }
};

template <int W, int span>
inline void encode_some(const uint16_t* from, int count, DType type, uint8_t* codes, char* scales, LaneSums<W>& sums) {
  alignas(64) F32<W> x[span];
  open_groups<W, span>(from, x);
  const F32<W> peak = peaks_of<W, span>(x, sums.squares, sums.largest);
  const GroupScales<W> kept = best_scales<W, span>(x, peak, type, IndicesUpTo<kTrials>::Type{});
  store_scales<W>(kept.scale, count, type, scales);
  for (int k = 0; k < span; k += kTileK) {
    U32<W> word[kWords];
    encode_columns<W>(x + k, kept, word, sums.moved);
    store_words<W>(word, count, span / 2, codes + k / 2);
  }
}

template <int W, int span>
inline void encode_groups(const Encode& e, EncodeSums& sums) {
  // Half as many where no more are left: 24 groups are 16 and 8.
  constexpr int half = W > 8 ? W / 2 : W;
  const int groups = e.k / span, scale_bytes = (int)size_of(e.format->scale), whole = groups / W * W;
  for (int r = 0; r < e.rows; r++) {
    const uint16_t* const row = (const uint16_t*)e.source.data + r * e.source.n_stride;
    uint8_t* const codes = e.codes + r * e.row_bytes;
    char* const scales = e.scales + r * e.scale_stride;
    LaneSums<W> all;
    for (int g = 0; g < whole; g += W)
      encode_some<W, span>(row + g * span, W, e.format->scale, codes + g * span / 2, scales + g * scale_bytes, all);
    all.add_to(sums);
    LaneSums<half> rest;
    for (int g = whole; g < groups; g += half) {
      const int count = groups - g < half ? groups - g : half;
      alignas(64) uint16_t padded[half * span] = {};
      __builtin_memcpy(padded, row + g * span, (size_t)(count * span) * 2);
      encode_some<half, span>(padded, count, e.format->scale, codes + g * span / 2, scales + g * scale_bytes, rest);
    }
    rest.add_to(sums);
  }
}

// Whether rows are bf16 in whole groups of 32 or 128, and were encoded.
template <int W>
inline bool encode_columns_of(const Encode& e, EncodeSums& sums) {
  const Format& f = *e.format;
  if (e.source.dtype != DType::bf16 || f.bits() != 4 || f.row().zero_point != kInt4.zero) return false;
  if (f.span() == 0 || e.k % f.span() != 0) return false;
  if (f.span() == 32) return encode_groups<W, 32>(e, sums), true;
  if (f.span() == 128) return encode_groups<W, 128>(e, sums), true;
  return false;
}

}  // namespace
}  // namespace kt
