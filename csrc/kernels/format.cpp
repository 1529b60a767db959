// From released bytes to strips: codes of 16 rows are taken out of whatever order they came in and put into planes,
// headers are copied field by field. Bits only; no number is computed.
#include "kernels/format.h"

#include <cstring>

namespace kt {
namespace {

constexpr int kMostSpan = 256;  // k that are taken at a time

// Codes of one row as GGUF has them, `span` of them from its block; each function is the released layout read
// backwards.
void nibbles_of(const uint8_t* qs, int half, uint8_t* out) {  // low nibbles first, then the high ones
  for (int i = 0; i < half; i++) {
    out[i] = qs[i] & 15;
    out[half + i] = qs[i] >> 4;
  }
}

void codes_of_q5(const uint8_t* qh, const uint8_t* qs, uint8_t* out) {
  nibbles_of(qs, 16, out);
  for (int i = 0; i < 32; i++) out[i] = (uint8_t)(out[i] | ((qh[i / 8] >> (i % 8)) & 1) << 4);
}

void codes_of_q2_k(const uint8_t* qs, uint8_t* out) {
  for (int i = 0; i < 256; i++) out[i] = (qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
}

void codes_of_q3_k(const uint8_t* hmask, const uint8_t* qs, uint8_t* out) {
  codes_of_q2_k(qs, out);
  for (int i = 0; i < 256; i++) out[i] = (uint8_t)(out[i] | ((hmask[i % 32] >> (i / 32)) & 1) << 2);
}

void codes_of_q5_k(const uint8_t* qh, const uint8_t* qs, uint8_t* out) {
  for (int i = 0; i < 256; i += 64) nibbles_of(qs + i / 2, 32, out + i);
  for (int i = 0; qh && i < 256; i++) out[i] = (uint8_t)(out[i] | ((qh[i % 32] >> (i / 32)) & 1) << 4);
}

void codes_of_q6_k(const uint8_t* ql, const uint8_t* qh, uint8_t* out) {
  for (int i = 0; i < 256; i++) {
    int half = i / 128, part = i % 128 / 32, l = i % 32;
    int low = (ql[half * 64 + part % 2 * 32 + l] >> (part / 2 * 4)) & 15;
    int high = (qh[half * 32 + l] >> (part * 2)) & 3;
    out[i] = (uint8_t)(low | high << 4);
  }
}

// `block`: one of GGUF's, `out`: its codes. Returns where the header begins; some come after the codes.
struct Piece {
  int at, bytes;
};

// The header's bytes in a block of GGUF's: one or two pieces, in order.
void header_pieces(Codec codec, Piece (&pieces)[2]) {
  pieces[1] = {0, 0};
  switch (codec) {
    case Codec::q2_k:  // scales, codes, d and dmin
      pieces[0] = {0, 16};
      pieces[1] = {80, 4};
      return;
    case Codec::q3_k:  // high bits, codes, scales, d
      pieces[0] = {96, 14};
      return;
    case Codec::q6_k:  // low bits, high bits, scales, d
      pieces[0] = {192, 18};
      return;
    default:
      pieces[0] = {0, kCodecRows[(int)codec].header};
  }
}

void codes_of_block(Codec codec, const uint8_t* b, uint8_t* out) {
  switch (codec) {
    case Codec::q8_0:
      std::memcpy(out, b + 2, 32);
      return;
    case Codec::q4_0:
    case Codec::iq4_nl:
      nibbles_of(b + 2, 16, out);
      return;
    case Codec::q4_1:
      nibbles_of(b + 4, 16, out);
      return;
    case Codec::q5_0:
      codes_of_q5(b + 2, b + 6, out);
      return;
    case Codec::q5_1:
      codes_of_q5(b + 4, b + 8, out);
      return;
    case Codec::q2_k:
      codes_of_q2_k(b + 16, out);
      return;
    case Codec::q3_k:
      codes_of_q3_k(b, b + 32, out);
      return;
    case Codec::q4_k:
      codes_of_q5_k(nullptr, b + 16, out);
      return;
    case Codec::q5_k:
      codes_of_q5_k(b + 16, b + 48, out);
      return;
    case Codec::q6_k:
      codes_of_q6_k(b, b + 128, out);
      return;
    case Codec::iq4_xs:
      for (int i = 0; i < 256; i += 32) nibbles_of(b + 8 + i / 2, 16, out + i);
      return;
    default:
      return;
  }
}

// Sizes of a header's fields in order, each to be an array over the rows: runs of single bytes, and words of 2 or 4.
int field_size(const Format& f, int at) {
  switch (f.codec) {
    case Codec::int4:
    case Codec::int8:
    case Codec::fp8:
      return f.header();
    case Codec::mxfp8:
    case Codec::mxfp4:
    case Codec::nvfp4:
      return 1;
    case Codec::q2_k:
      return at < 16 ? 1 : 2;
    case Codec::q3_k:
      return at < 12 ? 1 : 2;
    case Codec::q6_k:
      return at < 16 ? 1 : 2;
    case Codec::q4_k:
    case Codec::q5_k:
    case Codec::iq4_xs:
      return at < 4 ? 2 : 1;
    default:
      return 2;
  }
}

void put_header(const Format& f, const uint8_t* row, int n, char* out) {
  for (int at = 0, size; at < f.header(); at += size) {
    size = field_size(f, at);
    std::memcpy(out + at * f.rows() + n * size, row + at, (size_t)size);
  }
}

// The low `bits` of every other byte of eight, next to each other.
uint32_t squeezed(uint64_t bytes, int bits) {
  uint64_t one = (1u << bits) - 1, two = (1ull << 2 * bits) - 1;
  uint64_t v = bytes & (one | one << 16 | one << 32 | one << 48);
  v |= v >> (16 - bits);
  v &= two | two << 32;
  return (uint32_t)(v | v >> (32 - 2 * bits));
}

// One plane of a k tile: `bits` of every code from bit `low` on.
char* put_plane(const uint8_t (*codes)[kMostSpan], int k0, int bits, int low, char* out) {
  for (int lane = 0; lane < 2 * kTileN; lane++) {
    uint32_t words[4] = {};
    for (int quad = 0; quad < 4; quad++) {
      uint64_t bytes;
      std::memcpy(&bytes, codes[lane / 2] + k0 + 8 * quad, 8);
      uint32_t four = squeezed(bytes >> (lane % 2 * 8 + low), bits) & (uint32_t)((1ull << 4 * bits) - 1);
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
  const CodecRow& row = f.row();
  const int rows = n_valid - n0 < kTileN ? (n_valid > n0 ? n_valid - n0 : 0) : kTileN;
  std::memset(strip, 0, (size_t)s.codes);
  if (f.codec == Codec::nvfp4) std::memcpy(strip, from.tensor, 4);
  const int chunk = row.block ? row.span : kTileK;
  uint8_t codes[kTileN][kMostSpan];
  for (int32_t k0 = 0; k0 < k_tiles * kTileK; k0 += chunk) {
    const int live = k - k0 < chunk ? (k > k0 ? k - k0 : 0) : chunk;
    char* header = strip + s.headers + k0 / kTileK / s.span_tiles * s.span_bytes;
    const bool starts = k0 / kTileK % s.span_tiles == 0;
    if (rows < kTileN || live < chunk) std::memset(codes, 0, sizeof codes);
    for (int n = 0; n < rows; n++) {
      const uint8_t* at = from.codes + (n0 + n) * from.row_bytes;
      if (row.block) {
        const uint8_t* block = at + (int64_t)(k0 / chunk) * row.block;
        if (live == chunk) codes_of_block(f.codec, block, codes[n]);
        uint8_t bytes[32];
        Piece piece[2];
        header_pieces(f.codec, piece);
        std::memcpy(bytes, block + piece[0].at, (size_t)piece[0].bytes);
        std::memcpy(bytes + piece[0].bytes, block + piece[1].at, (size_t)piece[1].bytes);
        if (live == chunk) put_header(f, bytes, n, header);
        continue;
      }
      if (f.bits() == 8) {
        std::memcpy(codes[n], at + k0, (size_t)live);
      } else {
        for (int i = 0; i < live; i++) codes[n][i] = (at[(k0 + i) / 2] >> ((k0 + i) % 2 * 4)) & 15;
      }
      if (starts && n < f.rows()) {
        int64_t span = f.span() ? k0 / f.span() : 0;
        put_header(f, (const uint8_t*)from.scales + (n0 + n) / from.scale_rows * from.scale_stride + span * f.header(),
                   n, header);
      }
    }
    for (int kt = 0; kt < chunk / kTileK && k0 / kTileK + kt < k_tiles; kt++) {
      char* out = strip + s.codes + (int64_t)(k0 / kTileK + kt) * s.tile_bytes;
      out = put_plane(codes, kt * kTileK, row.plane[0], 0, out);
      if (row.plane[1]) put_plane(codes, kt * kTileK, row.plane[1], row.plane[0], out);
    }
  }
}

}  // namespace kt
