// From floats to a format: scales from the numbers of each group, codes rounded to nearest, and the error that this
// adds.
//
// One row at a time lies in scratch as floats. Unsigned codes with float scales (int4) try a few scales for each group
// and keep the one with the least squared error: the largest number on the largest or on the smallest code, and both a
// little smaller, which clips the tail and serves the rest. Powers of two (e8m0) try the one that just holds the
// largest number and the one below it. A scale is rounded to its stored type before anything is divided by it. Squares
// are added in 16 sums, whatever the width of vectors, and no product is fused with an addition, so that every CPU
// writes the same bytes. encode_blocks.h has the blocks of GGUF.
#pragma once

#include "kernels/formats.h"
#include "kernels/int8_tiles.h"

namespace kt {
namespace {

constexpr int kSums = 16;
constexpr float kMaxFloat = 0x1.fffffep127f, kE4m3Max = 448.0f, kE2m1Max = 6.0f;

// The same float in all lanes. `splat` adds zero, which changes -0 and is therefore not left out.
template <int W>
inline F32<W> lanes_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return (F32<W>)(U32<W>{} + bits);
}

// Sixteen sums to four. The order of additions is that of 16 lanes for every W: first those 8 apart, then those 4
// apart.
template <int W>
inline F32<4> four_of(const F32<W> (&sums)[kSums / W]) {
  if constexpr (W == 4) {
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  } else {
    F32<8> eight[2];
    __builtin_memcpy(eight, sums, sizeof eight);
    eight[0] = eight[0] + eight[1];
    F32<4> four[2];
    __builtin_memcpy(four, eight, sizeof four);
    return four[0] + four[1];
  }
}

inline float one_of(F32<4> four) { return (four[0] + four[2]) + (four[1] + four[3]); }

// The same for four groups at once.
inline F32<4> one_of_each(const F32<4> (&four)[4]) {
  const F32<4> first =
      __builtin_shuffle(four[0], four[1], I32<4>{0, 1, 4, 5}) + __builtin_shuffle(four[0], four[1], I32<4>{2, 3, 6, 7});
  const F32<4> second =
      __builtin_shuffle(four[2], four[3], I32<4>{0, 1, 4, 5}) + __builtin_shuffle(four[2], four[3], I32<4>{2, 3, 6, 7});
  return __builtin_shuffle(first, second, I32<4>{0, 2, 4, 6}) + __builtin_shuffle(first, second, I32<4>{1, 3, 5, 7});
}

// The largest lane of floats none of which is negative or NaN: their bits have the same order.
template <int W>
inline float largest_lane(F32<W> v) {
  if constexpr (W > 4) {
    I32<W / 2> half[2];
    __builtin_memcpy(half, &v, sizeof half);
    return largest_lane<W / 2>((F32<W / 2>)(half[0] > half[1] ? half[0] : half[1]));
  } else {
    I32<4> x = (I32<4>)v, y = __builtin_shuffle(x, I32<4>{2, 3, 0, 1});
    x = x > y ? x : y;
    y = __builtin_shuffle(x, I32<4>{1, 0, 3, 2});
    return ((F32<4>)(x > y ? x : y))[0];
  }
}

template <int W>
inline float sum_of_lanes(F32<W> v) {
  float sum = 0;
  for (int i = 0; i < W; i++) sum += v[i];
  return sum;
}

template <int W>
inline F32<W> magnitude(F32<W> v) {
  return (F32<W>)((U32<W>)v & 0x7fffffffu);
}

// Maximum of floats none of which is negative or NaN: their bits have the same order, and integers are compared by one
// instruction.
template <int W>
inline F32<W> larger_magnitude(F32<W> a, F32<W> b) {
  const I32<W> x = (I32<W>)a, y = (I32<W>)b;
  return (F32<W>)(x > y ? x : y);
}

template <int W>
inline F32<W> smaller_magnitude(F32<W> a, F32<W> b) {
  const I32<W> x = (I32<W>)a, y = (I32<W>)b;
  return (F32<W>)(x < y ? x : y);
}

// Rounded to bf16, as floats; finite numbers only.
template <int W>
inline F32<W> through_bf16(F32<W> x) {
  const U32<W> u = (U32<W>)x;
  return (F32<W>)((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}

// A code and its number before the scale.
template <int W>
struct Nearest {
  I32<W> code;  // in the low byte
  F32<W> value;
};

// Integers [least, most], stored plus `zero`. Adding kRounding leaves the integer in the low bits, where it is clamped;
// `low` and `high` say whether numbers may lie below and above.
template <bool low = true, bool high = true>
struct IntegersOf {
  int32_t least, most, zero;

  template <int W>
  __attribute__((always_inline)) Nearest<W> nearest(F32<W> t) const {
    constexpr int32_t origin = 0x4b400000;  // kRounding
    const I32<W> first = I32<W>{} + (origin + least), last = I32<W>{} + (origin + most);
    I32<W> y = (I32<W>)(t + lanes_of<W>(kRounding));
    if constexpr (low) y = y < first ? first : y;
    if constexpr (high) y = y > last ? last : y;
    return {y + zero, (F32<W>)y - lanes_of<W>(kRounding)};
  }
};
using Integers = IntegersOf<>;

// Floats of a few bits: sign, exponent from `least_exponent` on, and `mantissa` bits. A number of exponent e is a
// multiple of 2^(e - mantissa), and so are those below the least exponent: adding 1.5 * 2^23 of that unit rounds.
template <int bits, int mantissa, int least_exponent>
struct SmallFloats {
  float limit;

  template <int W>
  __attribute__((always_inline)) Nearest<W> nearest(F32<W> t) const {
    const F32<W> a = smaller_magnitude<W>(magnitude<W>(t), lanes_of<W>(limit));
    constexpr uint32_t least = (uint32_t)(127 + least_exponent) << 23;
    const I32<W> normal = (I32<W>)larger_magnitude<W>(a, (F32<W>)(U32<W>{} + least));
    const U32<W> exponent = (U32<W>)normal & 0x7f800000u;
    const U32<W> unit = exponent + ((uint32_t)(23 - mantissa) << 23 | 0x400000u);
    const F32<W> moved = a + (F32<W>)unit;
    const U32<W> steps = (U32<W>)moved - unit;  // of 2^(e - mantissa)
    const U32<W> code = steps + ((exponent - least) >> (23 - mantissa));
    const U32<W> negative = (U32<W>)t & 0x80000000u;
    const U32<W> value = (U32<W>)(moved - (F32<W>)unit) | negative;
    return {(I32<W>)(code | negative >> (32 - bits)), (F32<W>)value};
  }
};
using E4m3 = SmallFloats<8, 3, -6>;

// The same for 0, 0.5, 1, 1.5, 2, 3, 4 and 6: between 0, 2, 4 and 6 the code is a straight line of the size, each
// flatter than the one before, so it is the least of three lines, and the number the largest of theirs inverted.
struct E2m1 {
  float limit;

  template <int W>
  __attribute__((always_inline)) Nearest<W> nearest(F32<W> t) const {
    using V = F32<W>;
    const V size = magnitude<W>(t);
    const V line = smaller_magnitude<W>(
        size + size, smaller_magnitude<W>(size + lanes_of<W>(2.0f), size * lanes_of<W>(0.5f) + lanes_of<W>(4.0f)));
    const V moved = smaller_magnitude<W>(line, lanes_of<W>(7.0f)) + lanes_of<W>(kRounding);
    const V code = moved - lanes_of<W>(kRounding);
    const V value = larger_magnitude<W>(code * lanes_of<W>(0.5f),
                                        larger_magnitude<W>(code - lanes_of<W>(2.0f), code + code - lanes_of<W>(8.0f)));
    const U32<W> negative = (U32<W>)t & 0x80000000u;
    return {(I32<W>)(((U32<W>)moved & 7u) | negative >> 28), (V)((U32<W>)value | negative)};
  }
};

// Scratch of a row: its numbers, its codes, and arrays over its groups.
constexpr int kGroupArrays = 7;
constexpr int64_t padded_columns(int64_t k, int span) { return round_up(k, span ? span : kSums); }

struct RowScratch {
  float* x;       // [columns], zero past K
  int32_t* code;  // [columns], a code in the low byte
  float* group[kGroupArrays];
  int32_t columns, span, groups;

  RowScratch(char* scratch, int32_t k, int32_t group_span) {
    columns = (int32_t)padded_columns(k, group_span);
    span = group_span ? group_span : columns;
    groups = columns / span;
    x = (float*)scratch;
    code = (int32_t*)(x + columns);
    for (int i = 0; i < kGroupArrays; i++) group[i] = (float*)(code + columns) + i * round_up(groups, kSums);
  }
};

template <int W>
struct TwoVectors {
  F32<W> first, second;
};

// 2 W numbers of bf16. Four at a time are opened as pairs: gcc has no instruction for half a vector.
template <int W>
inline TwoVectors<W> two_of_bf16(const uint16_t* p) {
  if constexpr (W == 4) {
    const U32<4> pairs = load<U32<4>>(p), even = pairs << 16, odd = pairs & 0xffff0000u;
    return {(F32<4>)__builtin_shuffle(even, odd, U32<4>{0, 4, 1, 5}),
            (F32<4>)__builtin_shuffle(even, odd, U32<4>{2, 6, 3, 7})};
  } else {
    return {from_bf16<W>(p), from_bf16<W>(p + W)};
  }
}

// Loads row r; returns the sum of its squares.
template <int W>
inline float load_row(const Encode& e, int64_t r, const RowScratch& row) {
  const int64_t at = r * e.source.n_stride;
  const int whole = e.k / (2 * W) * (2 * W);
  float* const x = row.x;
  F32<W> squares[2] = {};
  if (e.source.dtype == DType::bf16) {
    const uint16_t* from = (const uint16_t*)e.source.data + at;
    for (int k = 0; k < whole; k += 2 * W) {
      const TwoVectors<W> v = two_of_bf16<W>(from + k);
      store(x + k, v.first), store(x + k + W, v.second);
      squares[0] += v.first * v.first, squares[1] += v.second * v.second;
    }
  } else {
    for (int k = 0; k < whole; k += W) {
      const F32<W> v = load_as<F32<W>>(e.source.data, at + k, e.source.dtype);
      store(x + k, v);
      squares[0] += v * v;
    }
  }
  float sum = sum_of_lanes<W>(squares[0] + squares[1]);
  for (int k = whole; k < row.columns; k++) {
    x[k] = k < e.k ? element_of<float>(e.source.data, at + k, e.source.dtype) : 0.0f;
    sum += x[k] * x[k];
  }
  return sum;
}

// Whether all numbers of a row are finite, which a finite sum of squares says already.
inline bool finite_row(const float* x, int count, float squares) {
  if (squares <= kMaxFloat) return true;
  uint32_t largest = 0;
  for (int k = 0; k < count; k++) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + k, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest < 0x7f800000u;
}

// The largest magnitude of each group, or of what the array holds already.
template <int W>
inline void add_largest(const RowScratch& row, float* largest) {
  const float* x = row.x;
  const int span = row.span, groups = row.groups;
  for (int g = 0; g < groups; g++, x += span) {
    F32<W> v = {};
    for (int i = 0; i < span; i += W) v = larger_magnitude<W>(v, magnitude<W>(load<F32<W>>(x + i)));
    const float found = largest_lane<W>(v);
    largest[g] = found > largest[g] ? found : largest[g];
  }
}

// 1/s, and 0 where s is 0: a group of zeros stays one. Below the least normal number the largest float: 0 * inf is no
// number.
template <int W>
inline F32<W> inverse(F32<W> s) {
  const F32<W> tiny = lanes_of<W>(0x1p-126f), size = magnitude<W>(s);
  const F32<W> exact = lanes_of<W>(1.0f) / s;
  const F32<W> most = (F32<W>)((U32<W>)lanes_of<W>(kMaxFloat) | ((U32<W>)s & 0x80000000u));
  const F32<W> kept = select<F32<W>>(size < tiny, most, exact);
  return select<F32<W>>(size == lanes_of<W>(0.0f), lanes_of<W>(0.0f), kept);
}

// Calls act(g) for every W-th group; arrays over groups have space for whole vectors.
template <int W, class Act>
inline void for_groups(int groups, Act&& act) {
  for (int g = 0; g < groups; g += W) act(g);
}

template <int W>
inline F32<W> round_scale(F32<W> s, DType type) {
  if (type == DType::f32) return s;
  if (type == DType::bf16) return (F32<W>)(bf16_bits<W>(s) << 16);
  alignas(64) uint16_t halves[W];
  to_f16<W>(halves, s);
  return from_f16<W>(halves);
}

// The squared error of a group under one scale, in units of the scale, as four sums.
template <int W, class Element>
__attribute__((always_inline)) inline F32<4> group_error(const Element element, const float* x, int span,
                                                         float inverse) {
  const F32<W> factor = lanes_of<W>(inverse);
  F32<W> sums[kSums / W] = {};
  for (int i = 0; i < span; i += kSums)
    for (int j = 0; j < kSums / W; j++) {
      const F32<W> t = apart(load<F32<W>>(x + i + j * W) * factor);
      const F32<W> miss = element.template nearest<W>(t).value - t;
      sums[j] += apart(miss * miss);
    }
  return four_of<W>(sums);
}

template <int W, class Element>
__attribute__((always_inline)) inline void group_errors(const Element element, const float* x, int span, int groups,
                                                        const float* inverses, float* errors) {
  int g = 0;
  for (; g + 4 <= groups; g += 4, x += 4 * span) {
    F32<4> four[4];
    for (int i = 0; i < 4; i++) four[i] = group_error<W>(element, x + i * span, span, inverses[g + i]);
    store(errors + g, one_of_each(four));
  }
  for (; g < groups; g++, x += span) errors[g] = one_of(group_error<W>(element, x, span, inverses[g]));
}

template <int W, class Element>
inline void find_errors(const Element element, const RowScratch& row, const float* inverses, float* errors) {
  if (row.span == kTileK) {  // the most common group, unrolled
    group_errors<W>(element, row.x, kTileK, row.groups, inverses, errors);
  } else {
    group_errors<W>(element, row.x, row.span, row.groups, inverses, errors);
  }
}

// Codes of a row from the scales of its groups and their inverses; returns the sum of squares of the error that the
// numbers have when they are decoded and rounded to bf16. What loops read lies in locals: stores may alias all else.
template <int W, class Element>
__attribute__((always_inline)) inline float encode_row(const Element element, const RowScratch& row, const float* scale,
                                                       const float* inverses) {
  const float* x = row.x;
  int32_t* code = row.code;
  const int span = row.span, groups = row.groups;
  F32<W> moved = {};
  for (int g = 0; g < groups; g++, x += span, code += span) {
    const F32<W> factor = lanes_of<W>(inverses[g]), unit = lanes_of<W>(scale[g]);
    for (int i = 0; i < span; i += W) {
      const F32<W> v = load<F32<W>>(x + i);
      const Nearest<W> n = element.template nearest<W>(apart(v * factor));
      store(code + i, n.code);
      const F32<W> miss = through_bf16<W>(apart(n.value * unit)) - v;
      moved += miss * miss;
    }
  }
  return sum_of_lanes<W>(moved);
}

// Codes of a row as a checkpoint holds them: bytes, or two in a byte, the even column in the low half.
inline void store_codes(const int32_t* code, int k, int bits, uint8_t* out) {
  if (bits == 8) {
    for (int i = 0; i < k; i++) out[i] = (uint8_t)code[i];
  } else {
    for (int i = 0; i < k / 2; i++) out[i] = (uint8_t)((code[2 * i] & 15) | code[2 * i + 1] << 4);
  }
}

// Where the largest number of a group is laid: on the smallest or the largest code, or beyond it by a share of the
// range below zero, which clips it.
struct Clip {
  bool on_largest;
  double beyond;
};
constexpr Clip kClips[] = {{false, 0.0}, {true, 0.0}, {false, 0.075}, {true, 0.075}, {false, 0.175}};
constexpr int kTrials = sizeof kClips / sizeof kClips[0];

// The number of each group that is farthest from zero, with its sign; of two, the positive one.
template <int W>
inline void find_peaks(const RowScratch& row, float* peak) {
  const float* x = row.x;
  const int span = row.span, groups = row.groups;
  for (int g = 0; g < groups; g++, x += span) {
    // Magnitudes of positive and of negative numbers: bits of others are negative integers or below.
    I32<W> above = {}, below = {};
    for (int i = 0; i < span; i += W) {
      const I32<W> v = load<I32<W>>(x + i), w = v ^ (int32_t)0x80000000u;
      above = above > v ? above : v;
      below = below > w ? below : w;
    }
    const float high = largest_lane<W>((F32<W>)above), low = largest_lane<W>((F32<W>)below);
    peak[g] = high >= low ? high : -low;
  }
}

template <int W>
inline float encode_clipped(const Encode& e, const RowScratch& row, const Integers element, float* kept,
                            float* inverses) {
  const DType type = e.format->scale;
  float *peak = row.group[2], *best = row.group[3], *scale = row.group[4], *trial = row.group[5];
  float* errors = row.group[6];
  const int groups = row.groups;
  find_peaks<W>(row, peak);
  for (int g = groups; g < round_up(groups, kSums); g++) peak[g] = 0;
  for_groups<W>(groups, [&](int g) {
    store(best + g, lanes_of<W>(__builtin_inff()));
    store(kept + g, F32<W>{});
  });
  for (const Clip& clip : kClips) {
    const double least = element.least, most = element.most;
    const float codes = (float)(clip.on_largest ? most - clip.beyond * least : least + clip.beyond * least);
    F32<W> reach = {};
    for_groups<W>(groups, [&](int g) {
      const F32<W> p = load<F32<W>>(peak + g), s = round_scale<W>(p / lanes_of<W>(codes), type), factor = inverse<W>(s);
      store(scale + g, s);
      store(trial + g, factor);
      reach = larger_magnitude<W>(reach, magnitude<W>(p * factor));
    });
    // The peak's own code is the farthest: most scales need no clamping on one side or both.
    const float farthest = largest_lane<W>(reach);
    const auto find = [&](auto codes_of) { find_errors<W>(codes_of, row, trial, errors); };
    if (farthest < (float)element.most + 0.5f) {
      find(IntegersOf<false, false>{element.least, element.most, element.zero});
    } else if (farthest < 0.5f - (float)element.least) {
      find(IntegersOf<false, true>{element.least, element.most, element.zero});
    } else {
      find(element);
    }
    for_groups<W>(groups, [&](int g) {
      const F32<W> s = load<F32<W>>(scale + g), error = load<F32<W>>(errors + g) * apart(s * s);
      const F32<W> least_error = load<F32<W>>(best + g), kept_scale = load<F32<W>>(kept + g);
      const Mask<F32<W>> better = error < least_error;
      store(best + g, select<F32<W>>(better, error, least_error));
      store(kept + g, select<F32<W>>(better, s, kept_scale));
    });
  }
  for_groups<W>(row.groups, [&](int g) { store(inverses + g, inverse<W>(load<F32<W>>(kept + g))); });
  return encode_row<W>(element, row, kept, inverses);
}

// 2^exponent for exponents -127 ... 127.
inline float power_of_two(int exponent) {
  const uint32_t bits = exponent < -126 ? 0x400000u : (uint32_t)(exponent + 127) << 23;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// The exponent of the least power of two that is not below x, which is at least 2^-126.
inline int ceil_log2(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return (int)(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
}

template <int W, class Element>
inline float encode_e8m0(const RowScratch& row, const Element element, float limit, uint8_t* scales) {
  float *largest = row.group[0], *scale = row.group[1], *inverses = row.group[2];
  float *errors[2] = {row.group[3], row.group[4]}, *halved = row.group[5];
  for_groups<W>(row.groups, [&](int g) { store(largest + g, F32<W>{}); });
  add_largest<W>(row, largest);
  // The exponent of each group, and the one below it.
  auto exponent_of = [&](int g, int below) {
    const float top = largest[g] / limit;
    const int exponent = ceil_log2(top < 0x1p-126f ? 0x1p-126f : top) - below;
    return exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
  };
  for (int g = 0; g < row.groups; g++) {
    inverses[g] = power_of_two(-exponent_of(g, 0));
    halved[g] = power_of_two(-exponent_of(g, 1));
  }
  find_errors<W>(element, row, inverses, errors[0]);
  find_errors<W>(element, row, halved, errors[1]);
  for (int g = 0; g < row.groups; g++) {
    const float unit[2] = {power_of_two(exponent_of(g, 0)), power_of_two(exponent_of(g, 1))};
    const int below = errors[1][g] * unit[1] * unit[1] < errors[0][g] * unit[0] * unit[0];
    const int kept = exponent_of(g, below);
    scales[g] = (uint8_t)(kept + 127);
    scale[g] = unit[below];
    inverses[g] = power_of_two(-kept);
  }
  return encode_row<W>(element, row, scale, inverses);
}

// Scales of e4m3, times that of the whole matrix.
template <int W>
inline float encode_e4m3(const Encode& e, const RowScratch& row, const E2m1 element, uint8_t* scales) {
  float *largest = row.group[0], *scale = row.group[1], *inverses = row.group[2];
  for_groups<W>(row.groups, [&](int g) { store(largest + g, F32<W>{}); });
  add_largest<W>(row, largest);
  const float unit = (float)((double)element.limit * (double)e.tensor);
  for_groups<W>(row.groups, [&](int g) {
    const Nearest<W> stored = E4m3{kE4m3Max}.nearest<W>(load<F32<W>>(largest + g) / lanes_of<W>(unit));
    for (int i = 0; i < W && g + i < row.groups; i++) scales[g + i] = (uint8_t)stored.code[i];
    const F32<W> s = stored.value * lanes_of<W>(e.tensor);
    store(scale + g, s);
    store(inverses + g, inverse<W>(s));
  });
  return encode_row<W>(element, row, scale, inverses);
}

// One float for the largest number of a group, which some rows may share.
template <int W, class Element>
inline void encode_floats(const Encode& e, const RowScratch& row, const Element element, float limit,
                          EncodeSums& sums) {
  const int shared = e.format->shared ? kBlockScale : 1;
  float *largest = row.group[0], *scale = row.group[1], *inverses = row.group[2];
  for (int r0 = 0; r0 < e.rows; r0 += shared) {
    const int end = r0 + shared < e.rows ? r0 + shared : e.rows;
    for_groups<W>(row.groups, [&](int g) { store(largest + g, F32<W>{}); });
    for (int r = r0; r < end; r++) {
      const float squares = load_row<W>(e, r, row);
      if (!finite_row(row.x, e.k, squares)) sums.finite = false;
      sums.norm += squares;
      add_largest<W>(row, largest);
    }
    for_groups<W>(row.groups, [&](int g) {
      const F32<W> s = load<F32<W>>(largest + g) / lanes_of<W>(limit);
      store(scale + g, s);
      store(inverses + g, inverse<W>(s));
    });
    __builtin_memcpy(e.scales + r0 / shared * e.scale_stride, scale, (size_t)row.groups * 4);
    for (int r = r0; r < end; r++) {
      if (shared > 1) load_row<W>(e, r, row);
      sums.moved += encode_row<W>(element, row, scale, inverses);
      store_codes(row.code, e.k, e.format->bits(), e.codes + r * e.row_bytes);
    }
  }
}

}  // namespace
}  // namespace kt
