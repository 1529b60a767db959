// The instruction takes eight bytes in one cycle but gives its result only after three, so three streams of a few
// kilobytes each are computed in turn and combined. Polynomials over GF(2) are held in reflected bit order: the highest
// bit is the coefficient of x^0.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define KT_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define KT_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace kt {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;

using Table = std::array<uint32_t, 256>;

constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    tables[0][i] = crc;
  }
  for (size_t t = 1; t < 8; t++)
    for (size_t i = 0; i < 256; i++) tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
  return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();

uint64_t load(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

// a b mod the polynomial.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? b >> 1 ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 bytes) mod the polynomial.
constexpr uint32_t power_of(size_t bytes) {
  uint32_t result = 1u << 31, square = 1u << 23;  // 1, x^8
  for (; bytes; bytes >>= 1, square = multiply(square, square))
    if (bytes & 1) result = multiply(result, square);
  return result;
}

#if defined(KT_CRC_TARGET)

constexpr size_t kStream = 4096;
constexpr uint32_t kShift1 = power_of(kStream), kShift2 = power_of(2 * kStream);

#if defined(__x86_64__)
KT_CRC_TARGET inline uint32_t step(uint32_t crc, uint64_t word) { return (uint32_t)_mm_crc32_u64(crc, word); }
KT_CRC_TARGET inline uint32_t step_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#else
KT_CRC_TARGET inline uint32_t step(uint32_t crc, uint64_t word) { return __builtin_aarch64_crc32cx(crc, word); }
KT_CRC_TARGET inline uint32_t step_byte(uint32_t crc, uint8_t byte) { return __builtin_aarch64_crc32cb(crc, byte); }
#endif

KT_CRC_TARGET uint32_t crc32c_by_instruction(const void* data, size_t bytes, uint32_t crc) {
  const uint8_t* at = (const uint8_t*)data;
  crc = ~crc;
  for (; bytes >= 3 * kStream; bytes -= 3 * kStream, at += 3 * kStream) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      crc = step(crc, load(at + i));
      second = step(second, load(at + kStream + i));
      third = step(third, load(at + 2 * kStream + i));
    }
    crc = multiply(kShift2, crc) ^ multiply(kShift1, second) ^ third;
  }
  for (; bytes >= 8; bytes -= 8, at += 8) crc = step(crc, load(at));
  for (; bytes; bytes--) crc = step_byte(crc, *at++);
  return ~crc;
}

#endif

bool detect_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__)
  return getauxval(AT_HWCAP) & (1 << 7);  // HWCAP_CRC32
#else
  return false;
#endif
}

}  // namespace

uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t crc) {
  const uint8_t* at = (const uint8_t*)data;
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    const uint64_t word = load(at) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; i++) crc ^= kTables[(size_t)(7 - i)][word >> 8 * i & 255];
  }
  for (; bytes; bytes--) crc = crc >> 8 ^ kTables[0][(crc ^ *at++) & 255];
  return ~crc;
}

bool has_crc32c_instruction() {
  static const bool has = detect_instruction();
  return has;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
#if defined(KT_CRC_TARGET)
  if (has_crc32c_instruction()) return crc32c_by_instruction(data, bytes, crc);
#endif
  return crc32c_by_tables(data, bytes, crc);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, size_t second_bytes) {
  return multiply(power_of(second_bytes), first) ^ second;
}

}  // namespace kt
