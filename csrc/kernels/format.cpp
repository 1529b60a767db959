// From the bytes of a checkpoint to strips: the codes of 16 rows are sorted into planes, headers are copied field by
// field. Bits only; no number is computed.
#include <cstring>

#include "kernels/grids.h"

namespace kt {
namespace {

constexpr int kMaxSpan = 256;  // k that are packed at a time

// Codes of one row from a block of GGUF, `span` of them.
void unpack_nibbles(const uint8_t* qs, int half, uint8_t* out) {  // low nibbles first, then the high ones
  for (int i = 0; i < half; i++) {
    out[i] = qs[i] & 15;
    out[half + i] = qs[i] >> 4;
  }
}

void unpack_q5(const uint8_t* qh, const uint8_t* qs, uint8_t* out) {
  unpack_nibbles(qs, 16, out);
  for (int i = 0; i < 32; i++) out[i] = (uint8_t)(out[i] | ((qh[i / 8] >> (i % 8)) & 1) << 4);
}

void unpack_q2_k(const uint8_t* qs, uint8_t* out) {
  for (int i = 0; i < 256; i++) out[i] = (qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
}

void unpack_q3_k(const uint8_t* hmask, const uint8_t* qs, uint8_t* out) {
  unpack_q2_k(qs, out);
  for (int i = 0; i < 256; i++) out[i] = (uint8_t)(out[i] | ((hmask[i % 32] >> (i / 32)) & 1) << 2);
}

void unpack_q5_k(const uint8_t* qh, const uint8_t* qs, uint8_t* out) {
  for (int i = 0; i < 256; i += 64) unpack_nibbles(qs + i / 2, 32, out + i);
  for (int i = 0; qh && i < 256; i++) out[i] = (uint8_t)(out[i] | ((qh[i % 32] >> (i / 32)) & 1) << 4);
}

void unpack_q6_k(const uint8_t* ql, const uint8_t* qh, uint8_t* out) {
  for (int i = 0; i < 256; i++) {
    int half = i / 128, part = i % 128 / 32, l = i % 32;
    int low = (ql[half * 64 + part % 2 * 32 + l] >> (part / 2 * 4)) & 15;
    int high = (qh[half * 32 + l] >> (part * 2)) & 3;
    out[i] = (uint8_t)(low | high << 4);
  }
}

// For each k tile of a block `first` bytes of one array and `second` of another.
void join_tiles(const uint8_t* a, int first, const uint8_t* b, int second, uint8_t* out) {
  for (int tile = 0; tile < 8; tile++, out += first + second) {
    std::memcpy(out, a + tile * first, (size_t)first);
    std::memcpy(out + first, b + tile * second, (size_t)second);
  }
}

// The trits of a TQ1_0 block in order of k: a byte is a fraction of 256, and multiplying by 3 moves a digit out.
void unpack_trits(const uint8_t* b, uint8_t (&out)[256]) {
  auto digits = [&](const uint8_t* from, int bytes, int count, uint8_t* to) {
    for (int i = 0; i < bytes; i++) {
      uint8_t rest = from[i];
      for (int digit = 0; digit < count; digit++, rest = (uint8_t)(rest * 3))
        to[digit * bytes + i] = (uint8_t)(rest * 3 >> 8);
    }
  };
  digits(b, 32, 5, out);
  digits(b + 32, 16, 5, out + 160);
  digits(b + 48, 4, 4, out + 240);
}

// The trits of a block in the order of strips: of each k tile those of even and of odd k apart, two bytes of each in
// the tile, one in the header, and the last ones of two k tiles together in one more byte of the header.
void pack_trits(const uint8_t* b, uint8_t* codes, uint8_t* header) {
  uint8_t trits[256];
  unpack_trits(b, trits);
  auto byte = [](const uint8_t* first, int step, int count) {
    int number = 0;
    for (int i = count; i-- > 0;) number = number * 3 + first[i * step];
    return (uint8_t)number;
  };
  for (int tile = 0; tile < 8; tile++)
    for (int odd = 0; odd < 2; odd++) {
      const uint8_t* from = trits + tile * kTileK + odd;
      for (int i = 0; i < 2; i++) codes[4 * tile + 2 * odd + i] = byte(from + 2 * kTritsOfByte * i, 2, kTritsOfByte);
      header[2 * tile + odd] = byte(from + 4 * kTritsOfByte, 2, kTritsOfByte);
    }
  for (int pair = 0; pair < 4; pair++) {
    const uint8_t* from = trits + pair * 2 * kTileK;
    const uint8_t last[4] = {from[30], from[31], from[62], from[63]};
    header[16 + pair] = byte(last, 1, 4);
  }
  std::memcpy(header + 20, b + 52, 2);
}

void read_codes(Codec codec, const uint8_t* b, uint8_t* out) {
  switch (codec) {
    case Codec::q8_0:
      std::memcpy(out, b + 2, 32);
      return;
    case Codec::q4_0:
    case Codec::iq4_nl:
      unpack_nibbles(b + 2, 16, out);
      return;
    case Codec::q4_1:
      unpack_nibbles(b + 4, 16, out);
      return;
    case Codec::q5_0:
      unpack_q5(b + 2, b + 6, out);
      return;
    case Codec::q5_1:
      unpack_q5(b + 4, b + 8, out);
      return;
    case Codec::q2_k:
      unpack_q2_k(b + 16, out);
      return;
    case Codec::q3_k:
      unpack_q3_k(b, b + 32, out);
      return;
    case Codec::q4_k:
      unpack_q5_k(nullptr, b + 16, out);
      return;
    case Codec::q5_k:
      unpack_q5_k(b + 16, b + 48, out);
      return;
    case Codec::q6_k:
      unpack_q6_k(b, b + 128, out);
      return;
    case Codec::iq4_xs:
      for (int i = 0; i < 256; i += 32) unpack_nibbles(b + 8 + i / 2, 16, out + i);
      return;
    case Codec::tq2_0:
      unpack_q2_k(b, out);
      return;
    case Codec::iq1_s:
      std::memcpy(out, b + 2, 32);
      return;
    case Codec::iq1_m:
      std::memcpy(out, b, 32);
      return;
    case Codec::iq2_xxs:
    case Codec::iq2_xs:
      std::memcpy(out, b + 2, 64);
      return;
    case Codec::iq2_s:
      join_tiles(b + 2, 4, b + 34, 4, out);
      return;
    case Codec::iq3_xxs:
      join_tiles(b + 2, 8, b + 66, 4, out);
      return;
    case Codec::iq3_s:
      join_tiles(b + 2, 8, b + 74, 4, out);
      return;
    default:
      return;
  }
}

// Codes and header of one block of GGUF.
void read_block(const FormatRow& row, Codec codec, const uint8_t* block, uint8_t* codes, uint8_t* header) {
  if (codec == Codec::tq1_0) return pack_trits(block, codes, header);
  read_codes(codec, block, codes);
  for (int i = 0; i < row.fields(); i++) {
    const Field& field = row.header[i];
    const int bytes = size_of(field.type) * field.count;
    std::memcpy(header, block + field.at, (size_t)bytes);
    header += bytes;
  }
}

// Every number of a row's header into its array over the rows.
void store_header(const Format& f, const uint8_t* header, int n, char* out) {
  for (int i = 0; i < f.row().fields(); i++) {
    const Field& field = f.row().header[i];
    const int size = size_of(f.type_of(field));
    for (int number = 0; number < field.count; number++, header += size, out += size * f.rows())
      std::memcpy(out + n * size, header, (size_t)size);
  }
}

// The low `bits` of every other byte of eight, next to each other.
uint32_t pack_bits(uint64_t bytes, int bits) {
  uint64_t one = (1u << bits) - 1, two = (1ull << 2 * bits) - 1;
  uint64_t v = bytes & (one | one << 16 | one << 32 | one << 48);
  v |= v >> (16 - bits);
  v &= two | two << 32;
  return (uint32_t)(v | v >> (32 - 2 * bits));
}

// One plane of a k tile: `bits` of every code from bit `low` on.
char* store_plane(const uint8_t (*codes)[kMaxSpan], int k0, int bits, int low, char* out) {
  for (int lane = 0; lane < 2 * kTileN; lane++) {
    uint32_t words[4] = {};
    for (int quad = 0; quad < 4; quad++) {
      uint64_t bytes;
      std::memcpy(&bytes, codes[lane / 2] + k0 + 8 * quad, 8);
      uint32_t four = pack_bits(bytes >> (lane % 2 * 8 + low), bits) & (uint32_t)((1ull << 4 * bits) - 1);
      words[quad * bits / 8] |= four << (quad * 4 * bits % 32);
    }
    if (bits == 1) {
      uint16_t half = (uint16_t)words[0];
      std::memcpy(out + lane * 2, &half, 2);
    } else {
      for (int w = 0; w < bits / 2; w++) std::memcpy(out + (w * 2 * kTileN + lane) * 4, &words[w], 4);
    }
  }
  return out + kTileN * kTileK * bits / 8;
}

}  // namespace

void pack_strip(const Format& f, const Released& from, int32_t n0, int32_t n_valid, int32_t k, int32_t k_tiles,
                char* strip) {
  const Strip s = strip_of(f, k_tiles);
  const FormatRow& row = f.row();
  const int rows = n_valid - n0 < kTileN ? (n_valid > n0 ? n_valid - n0 : 0) : kTileN;
  std::memset(strip, 0, (size_t)s.codes);
  if (row.has_tensor_scale()) std::memcpy(strip, from.tensor, 4);
  const int chunk = row.block ? row.span : kTileK;
  uint8_t codes[kTileN][kMaxSpan];
  for (int32_t k0 = 0; k0 < k_tiles * kTileK; k0 += chunk) {
    const int live = k - k0 < chunk ? (k > k0 ? k - k0 : 0) : chunk;
    char* header = strip + s.headers + k0 / kTileK / s.span_tiles * s.span_bytes;
    const bool starts = k0 / kTileK % s.span_tiles == 0;
    if (rows < kTileN || live < chunk) std::memset(codes, 0, sizeof codes);
    for (int n = 0; n < rows; n++) {
      const uint8_t* at = from.codes + (n0 + n) * from.row_bytes;
      if (row.block) {
        const uint8_t* block = at + (int64_t)(k0 / chunk) * row.block;
        if (live < chunk) continue;
        uint8_t bytes[32];
        read_block(row, f.codec, block, codes[n], bytes);
        store_header(f, bytes, n, header);
        continue;
      }
      if (f.bits() == 8) {
        std::memcpy(codes[n], at + k0, (size_t)live);
      } else {
        for (int i = 0; i < live; i++) codes[n][i] = (at[(k0 + i) / 2] >> ((k0 + i) % 2 * 4)) & 15;
      }
      if (starts && n < f.rows()) {
        int64_t span = f.span() ? k0 / f.span() : 0;
        const char* scales = from.scales + (n0 + n) / from.scale_rows * from.scale_stride + span * f.header();
        store_header(f, (const uint8_t*)scales, n, header);
      }
    }
    for (int kt = 0; kt < chunk / kTileK && k0 / kTileK + kt < k_tiles; kt++) {
      char* out = strip + s.codes + (int64_t)(k0 / kTileK + kt) * s.tile_bytes;
      if (row.in_grid()) {
        const int bytes = s.tile_bytes / kTileN;
        for (int n = 0; n < kTileN; n++) std::memcpy(out + n * bytes, codes[n] + kt * bytes, (size_t)bytes);
        continue;
      }
      out = store_plane(codes, kt * kTileK, row.plane[0], 0, out);
      if (row.plane[1]) store_plane(codes, kt * kTileK, row.plane[1], row.plane[0], out);
    }
  }
}

}  // namespace kt
