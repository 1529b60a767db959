#include "kt_rows.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <vector>

namespace kt {
namespace {

// Added to a float32 of less than 2^22 it leaves the nearest integer, half to even, in the low bits of the sum.
constexpr float kInteger = 12582912.0f;
constexpr uint32_t kInfinity = 0x7F800000;

inline float number(uint16_t bf16) { return std::bit_cast<float>((uint32_t)bf16 << 16); }
inline float number(float f32) { return f32; }

// The largest magnitude of a row as the bits of a float32: those of magnitudes have the order of the numbers.
uint32_t largest_bits(const uint16_t* row, int64_t n) {
  int16_t largest = 0;
  for (int64_t k = 0; k < n; k++) largest = std::max(largest, (int16_t)(row[k] & 0x7FFF));
  return (uint32_t)largest << 16;
}

uint32_t largest_bits(const float* row, int64_t n) {
  int32_t largest = 0;
  for (int64_t k = 0; k < n; k++) largest = std::max(largest, std::bit_cast<int32_t>(row[k]) & 0x7FFFFFFF);
  return (uint32_t)largest;
}

inline int32_t nearest(float x) { return std::bit_cast<int32_t>(x + kInteger) - std::bit_cast<int32_t>(kInteger); }

// A sixteenth of a code, half away from zero.
inline int8_t sixteenth(int32_t code) { return (int8_t)((code + 8 + (code >> 31)) >> 4); }

template <class T>
void round_row(const T* row, int64_t n, int bits, float scale, int8_t* codes) {
  // A product with a reciprocal and a quotient differ in the last bit, and now and then in a code.
  if (bits == 8) {
    const float reciprocal = 1 / scale;
    for (int64_t k = 0; k < n; k++) codes[k] = (int8_t)nearest(number(row[k]) * reciprocal);
  } else {
    for (int64_t k = 0; k < n; k++) codes[k] = sixteenth(nearest(number(row[k]) / scale));
  }
}

// Scales that are zero or subnormal numbers have few bits, so that quotients may be beyond the limits.
template <class T>
void round_small_row(const T* row, int64_t n, int bits, float scale, int8_t* codes) {
  const float divisor = scale == 0 ? 1 : scale, reciprocal = std::min(1 / divisor, FLT_MAX);
  const float limit = bits == 8 ? 127 : 112;
  for (int64_t k = 0; k < n; k++) {
    const float x = bits == 8 ? number(row[k]) * reciprocal : number(row[k]) / divisor;
    const int32_t code = nearest(std::clamp(x, -limit, limit));
    codes[k] = bits == 8 ? (int8_t)code : sixteenth(code);
  }
}

// Two codes of 4 bits in a byte, the even column in the low half, each with 8 added.
void pair_codes(const int8_t* codes, int64_t pairs, uint8_t* bytes) {
  for (int64_t j = 0; j < pairs; j++) bytes[j] = (uint8_t)((codes[2 * j] + 8) | ((codes[2 * j + 1] + 8) << 4));
}

template <class T>
bool quantise(const KtRows& source, int bits, bool paired, void* codes, float* scales) {
  std::vector<int8_t> unpaired(paired ? (size_t)source.columns : 0);
  for (int64_t row = 0; row < source.rows; row++) {
    const T* from = (const T*)source.data + row * source.stride;
    const uint32_t largest = largest_bits(from, source.columns);
    if (largest >= kInfinity) return false;
    const float size = std::bit_cast<float>(largest);
    const float scale = scales[row] = bits == 8 ? size * (float)(1.0 / 127) : size / 112;
    int8_t* to = paired ? unpaired.data() : (int8_t*)codes + row * source.columns;
    (scale >= FLT_MIN ? round_row<T> : round_small_row<T>)(from, source.columns, bits, scale, to);
    if (paired) pair_codes(to, source.columns / 2, (uint8_t*)codes + row * (source.columns / 2));
  }
  return true;
}

}  // namespace

bool quantise_kt_rows(const KtRows& source, int bits, bool paired, void* codes, float* scales) {
  return (source.bf16 ? quantise<uint16_t> : quantise<float>)(source, bits, paired, codes, scales);
}

}  // namespace kt
