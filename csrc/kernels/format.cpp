// From the bytes of a checkpoint to strips: the codes of 16 rows are sorted into planes, headers are copied field by
// field. Bits only; no number is computed.
//
// Codes of 8 neighbours along k are one 64-bit word, and the words of 16 rows lie side by side: a vector of the
// compiler's holds two rows, and separating even from odd k, which every CPU does by one or two instructions, puts
// their lanes into the order of a strip. Formats with two codes in a byte are sorted without being opened.
#include <cstring>

#include "kernels/grids.h"

namespace kt {
namespace {

constexpr int kMaxSpan = 256;                  // k that are packed at a time
constexpr int kPackAhead = 256;                // bytes of a source row to prefetch
constexpr int kQuads = kTileK / 8;             // words of a k tile with a code in each byte
constexpr int kTritHeader = 22;                // bytes of a row's header in TQ1_0
using Codes = uint64_t[kMaxSpan / 8][kTileN];  // [k / 8][row]: 8 codes, one in each byte

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

Bytes load(const void* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

uint64_t load_word(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Bits of every byte from bit `low` on; `mask` says which. Bits of the neighbour that the shift brings in are masked.
Bytes bits_of(Bytes v, int low, uint8_t mask) { return (Bytes)((Halves)v >> (uint16_t)low) & (Bytes{} + mask); }

// Codes k ... k + 15 of row n.
void put(Codes& codes, int k, int n, Bytes v) {
  std::memcpy(&codes[k / 8][n], &v, 8);
  std::memcpy(&codes[k / 8 + 1][n], (const char*)&v + 8, 8);
}

void put_or(Codes& codes, int k, int n, Bytes v) {
  uint64_t two[2];
  std::memcpy(two, &v, sizeof two);
  codes[k / 8][n] |= two[0];
  codes[k / 8 + 1][n] |= two[1];
}

// Codes of one row from a block of GGUF.
void unpack_nibbles(const uint8_t* qs, int half, Codes& codes, int k, int n) {  // low nibbles first, then the high ones
  for (int i = 0; i < half; i += 16) {
    const Bytes v = load(qs + i);
    put(codes, k + i, n, v & 15);
    put(codes, k + half + i, n, bits_of(v, 4, 15));
  }
}

// Eight bits as bit 4 of eight bytes.
uint64_t spread_bits(uint8_t bits) {
  const uint64_t own = bits * 0x0101010101010101u & 0x8040201008040201u;  // each byte keeps the bit of its place
  return (own + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
}

void unpack_q5(const uint8_t* qh, const uint8_t* qs, Codes& codes, int n) {
  unpack_nibbles(qs, 16, codes, 0, n);
  for (int i = 0; i < 4; i++) codes[i][n] |= spread_bits(qh[i]);
}

void unpack_q2_k(const uint8_t* qs, Codes& codes, int n) {
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 32; i += 16) {
      const Bytes v = load(qs + half * 32 + i);
      for (int part = 0; part < 4; part++) put(codes, half * 128 + part * 32 + i, n, bits_of(v, 2 * part, 3));
    }
}

// Bit k / 32 of byte k % 32 as bit `to` of code k.
void add_bits(const uint8_t* bits, int to, Codes& codes, int n) {
  for (int i = 0; i < 32; i += 16) {
    const Bytes v = load(bits + i);
    for (int part = 0; part < 8; part++)
      put_or(codes, part * 32 + i, n, (Bytes)((Halves)bits_of(v, part, 1) << (uint16_t)to));
  }
}

void unpack_q4_k(const uint8_t* qs, Codes& codes, int n) {
  for (int k = 0; k < 256; k += 64) unpack_nibbles(qs + k / 2, 32, codes, k, n);
}

void unpack_q6_k(const uint8_t* ql, const uint8_t* qh, Codes& codes, int n) {
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 32; i += 16) {
      const Bytes high = load(qh + half * 32 + i);
      for (int part = 0; part < 4; part++) {
        const Bytes low = bits_of(load(ql + half * 64 + part % 2 * 32 + i), part / 2 * 4, 15);
        put(codes, half * 128 + part * 32 + i, n, low | (Bytes)((Halves)bits_of(high, 2 * part, 3) << 4));
      }
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

inline void read_codes(Codec codec, const uint8_t* b, Codes& codes, int n) {
  switch (codec) {
    case Codec::q8_0:
      put(codes, 0, n, load(b + 2));
      return put(codes, 16, n, load(b + 18));
    case Codec::q4_0:
    case Codec::iq4_nl:
      return unpack_nibbles(b + 2, 16, codes, 0, n);
    case Codec::q4_1:
      return unpack_nibbles(b + 4, 16, codes, 0, n);
    case Codec::q5_0:
      return unpack_q5(b + 2, b + 6, codes, n);
    case Codec::q5_1:
      return unpack_q5(b + 4, b + 8, codes, n);
    case Codec::q2_k:
      return unpack_q2_k(b + 16, codes, n);
    case Codec::q3_k:
      unpack_q2_k(b + 32, codes, n);
      return add_bits(b, 2, codes, n);
    case Codec::q4_k:
      return unpack_q4_k(b + 16, codes, n);
    case Codec::q5_k:
      unpack_q4_k(b + 48, codes, n);
      return add_bits(b + 16, 4, codes, n);
    case Codec::q6_k:
      return unpack_q6_k(b, b + 128, codes, n);
    case Codec::iq4_xs:
      for (int k = 0; k < 256; k += 32) unpack_nibbles(b + 8 + k / 2, 16, codes, k, n);
      return;
    case Codec::tq2_0:
      return unpack_q2_k(b, codes, n);
    default:
      return;
  }
}

// Indices into a grid: the bytes of 8 k tiles of a row.
void read_indices(Codec codec, const uint8_t* b, uint8_t* out) {
  switch (codec) {
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
      return join_tiles(b + 2, 4, b + 34, 4, out);
    case Codec::iq3_xxs:
      return join_tiles(b + 2, 8, b + 66, 4, out);
    case Codec::iq3_s:
      return join_tiles(b + 2, 8, b + 74, 4, out);
    default:
      return;
  }
}

// One number of every row, whose headers are `stride` bytes apart, as an array.
template <class Number>
void gather_numbers(const uint8_t* headers, int64_t stride, int rows, char* out) {
  for (int n = 0; n < rows; n++) std::memcpy(out + n * (int)sizeof(Number), headers + n * stride, sizeof(Number));
}

// A field of the headers of `rows` rows: every number into its array over the strip's rows.
inline void store_field(int size, int count, const uint8_t* headers, int64_t stride, int rows, int strip_rows,
                        char* out) {
  for (int number = 0; number < count; number++, headers += size, out += size * strip_rows) {
    if (size == 1) gather_numbers<uint8_t>(headers, stride, rows, out);
    if (size == 2) gather_numbers<uint16_t>(headers, stride, rows, out);
    if (size == 4) gather_numbers<uint32_t>(headers, stride, rows, out);
  }
}

Bytes even_bytes(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b, Bytes{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
}
Bytes odd_bytes(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b, Bytes{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
}

// The words of four rows at even and at odd k, alternating.
void store_alternating(Words even, Words odd, char* out) {
  const Words first = __builtin_shuffle(even, odd, Words{0, 4, 1, 5});
  const Words second = __builtin_shuffle(even, odd, Words{2, 6, 3, 7});
  std::memcpy(out, &first, sizeof first);
  std::memcpy(out + sizeof first, &second, sizeof second);
}

// Two neighbouring codes of `bits` in a byte: first those of `a`, then those of `b`.
template <int bits>
Bytes join_pairs(Bytes a, Bytes b) {
  return even_bytes(a, b) | (Bytes)((Halves)odd_bytes(a, b) << bits);
}

// [4 quads][4 rows][4 codes of `bits`] to [4 rows][4 quads], a byte for the four codes of a quad.
template <int bits>
Words join_quads(const Bytes (&quad)[kQuads]) {
  const Bytes v = join_pairs<2 * bits>(join_pairs<bits>(quad[0], quad[1]), join_pairs<bits>(quad[2], quad[3]));
  return (Words)__builtin_shuffle(v, Bytes{0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15});
}

// [2 quads][4 rows][4 codes of 4 bits] to [4 rows][2 quads].
Words join_nibbles(Bytes a, Bytes b) {
  return (Words)__builtin_shuffle((Halves)join_pairs<4>(a, b), Halves{0, 4, 1, 5, 2, 6, 3, 7});
}

// The words of two rows in a vector: from codes that were opened, and from rows as they are.
struct OpenedCodes {
  const uint64_t (*codes)[kTileN];
  Bytes operator()(int word, int n) const { return load(&codes[word][n]); }
};
struct RowCodes {
  const uint8_t* rows;
  int64_t stride;
  Bytes operator()(int word, int n) const {
    typedef uint64_t Two __attribute__((vector_size(16)));
    const uint8_t* at = rows + n * stride + 8 * word;
    return (Bytes)Two{load_word(at), load_word(at + stride)};
  }
};

// One plane of a k tile: `bits` of every code from bit `low` on.
template <int bits, class Codes>
void store_plane_of(const Codes& codes, int low, char* out) {
  for (int n = 0; n < kTileN; n += 4) {
    Bytes even[kQuads], odd[kQuads];  // [4 rows][4 codes]
    for (int quad = 0; quad < kQuads; quad++) {
      const Bytes first = codes(quad, n), second = codes(quad, n + 2);
      even[quad] = even_bytes(first, second), odd[quad] = odd_bytes(first, second);
      if constexpr (bits < 8) {
        even[quad] = bits_of(even[quad], low, (1 << bits) - 1);
        odd[quad] = bits_of(odd[quad], low, (1 << bits) - 1);
      }
    }
    if constexpr (bits == 8) {
      for (int quad = 0; quad < kQuads; quad++)
        store_alternating((Words)even[quad], (Words)odd[quad], out + quad * 2 * kTileN * 4 + n * 8);
    } else if constexpr (bits == 4) {
      for (int w = 0; w < 2; w++)
        store_alternating(join_nibbles(even[2 * w], even[2 * w + 1]), join_nibbles(odd[2 * w], odd[2 * w + 1]),
                          out + w * 2 * kTileN * 4 + n * 8);
    } else if constexpr (bits == 2) {
      store_alternating(join_quads<2>(even), join_quads<2>(odd), out + n * 8);
    } else {
      // Four bits in each byte: 16 of a row at even k, then 16 at odd k.
      auto halves = [](Words v) {
        v = (v | v >> 4) & 0x00ff00ffu;
        return (v | v >> 8) & 0xffffu;
      };
      const Words both = halves(join_quads<1>(even)) | halves(join_quads<1>(odd)) << 16;
      std::memcpy(out + n * 4, &both, sizeof both);
    }
  }
}

char* store_plane(const uint64_t (*codes)[kTileN], int bits, int low, char* out) {
  const OpenedCodes opened{codes};
  if (bits == 8) store_plane_of<8>(opened, low, out);
  if (bits == 4) store_plane_of<4>(opened, low, out);
  if (bits == 2) store_plane_of<2>(opened, low, out);
  if (bits == 1) store_plane_of<1>(opened, low, out);
  return out + kTileN * kTileK * bits / 8;
}

// The same for codes that lie two in a byte, 16 in a word.
void store_nibbles(const RowCodes& codes, char* out) {
  for (int w = 0; w < 2; w++)
    for (int n = 0; n < kTileN; n += 4) {
      const Bytes first = codes(w, n), second = codes(w, n + 2);
      const Bytes even = even_bytes(first, second), odd = odd_bytes(first, second);  // bytes: k 0 and 1, k 2 and 3
      const Bytes low = (even & 15) | (Bytes)((Halves)(odd & 15) << 4);
      const Bytes high = bits_of(even, 4, 15) | (odd & 0xf0);
      store_alternating((Words)low, (Words)high, out + w * 2 * kTileN * 4 + n * 8);
    }
}

// A strip of 16 rows of a matrix in its released bytes.
struct StripJob {
  const Format& f;
  const Released& from;
  int32_t n0, rows, k, k_tiles;  // rows of the matrix in the strip, 0 ... 16
  const Strip& s;
  char* strip;
};

// The fields of the headers of some rows of GGUF blocks from field `i` on, straight from the blocks. Sizes are
// constants of the format.
template <Codec codec, int i = 0>
void store_block_headers(const StripJob& job, const uint8_t* blocks, char* out) {
  constexpr const FormatRow& row = kFormats[(int)codec];
  if constexpr (i < row.fields()) {
    constexpr Field field = row.header[i];
    constexpr int size = size_of(field.type);
    store_field(size, field.count, blocks + field.at, job.from.row_bytes, job.rows, kTileN, out);
    store_block_headers<codec, i + 1>(job, blocks, out + size * field.count * kTileN);
  }
}

template <Codec codec>
void pack_blocks(const StripJob& job) {
  constexpr const FormatRow& row = kFormats[(int)codec];
  constexpr int tiles = row.span / kTileK;
  const Strip& s = job.s;
  alignas(16) Codes codes = {};
  for (int32_t kt = 0; kt < job.k_tiles; kt += tiles) {
    const uint8_t* blocks = job.from.codes + job.n0 * job.from.row_bytes + (int64_t)(kt / tiles) * row.block;
    for (int n = 0; n < job.rows; n++) {
      const uint8_t* block = blocks + n * job.from.row_bytes;
      __builtin_prefetch(block + kPackAhead);
      read_codes(codec, block, codes, n);
    }
    store_block_headers<codec>(job, blocks, job.strip + s.headers + kt / tiles * s.span_bytes);
    for (int i = 0; i < tiles && kt + i < job.k_tiles; i++) {
      char* out = job.strip + s.codes + (int64_t)(kt + i) * s.tile_bytes;
      out = store_plane(codes + i * kQuads, row.plane[0], 0, out);
      if constexpr (row.plane[1] != 0) store_plane(codes + i * kQuads, row.plane[1], row.plane[0], out);
    }
  }
}

// Rows of bytes: what a k tile has of each row is copied.
template <Codec codec>
void pack_indices(const StripJob& job) {
  constexpr const FormatRow& row = kFormats[(int)codec];
  constexpr int tiles = row.span / kTileK, bytes = kTileK * row.plane[0] / 8;
  const Strip& s = job.s;
  uint8_t indices[kTileN][tiles * bytes] = {};
  for (int32_t kt = 0; kt < job.k_tiles; kt += tiles) {
    const uint8_t* blocks = job.from.codes + job.n0 * job.from.row_bytes + (int64_t)(kt / tiles) * row.block;
    char* header = job.strip + s.headers + kt / tiles * s.span_bytes;
    uint8_t trit_headers[kTileN][kTritHeader];
    for (int n = 0; n < job.rows; n++) {
      const uint8_t* block = blocks + n * job.from.row_bytes;
      __builtin_prefetch(block + kPackAhead);
      if constexpr (codec == Codec::tq1_0) {
        pack_trits(block, indices[n], trit_headers[n]);
      } else {
        read_indices(codec, block, indices[n]);
      }
    }
    if constexpr (codec == Codec::tq1_0) {
      store_field(1, kTritHeader - 2, trit_headers[0], kTritHeader, job.rows, kTileN, header);
      store_field(2, 1, trit_headers[0] + kTritHeader - 2, kTritHeader, job.rows, kTileN,
                  header + (kTritHeader - 2) * kTileN);
    } else {
      store_block_headers<codec>(job, blocks, header);
    }
    for (int i = 0; i < tiles && kt + i < job.k_tiles; i++) {
      char* out = job.strip + s.codes + (int64_t)(kt + i) * s.tile_bytes;
      for (int n = 0; n < kTileN; n++) std::memcpy(out + n * bytes, indices[n] + i * bytes, bytes);
    }
  }
}

// The bytes of 16 rows of one k tile as they are, or in `padded` where some are past the matrix.
template <int bytes>
RowCodes tile_rows(const StripJob& job, int32_t kt, uint8_t (&padded)[kTileN][bytes]) {
  const int64_t stride = job.from.row_bytes;
  const uint8_t* at = job.from.codes + job.n0 * stride + (int64_t)kt * bytes;
  if (job.k < (kt + 1) * kTileK || job.rows < kTileN) {
    const int left = job.k - kt * kTileK, columns = left < kTileK ? left : kTileK;
    const bool halved = bytes < kTileK && columns % 2;  // the last byte has one code of the row
    std::memset(padded, 0, sizeof padded);
    for (int n = 0; n < job.rows; n++) {
      std::memcpy(padded[n], at + n * stride, (size_t)ceil_div(columns * bytes, kTileK));
      if (halved) padded[n][columns / 2] &= 15;
    }
    return {padded[0], bytes};
  }
  if (kt * bytes % 64 == 0) {
    // At the end of these rows the next strip's begin.
    const int64_t row = (int64_t)job.k_tiles * bytes;
    const int64_t ahead = kt * bytes + kPackAhead < row ? kPackAhead : kPackAhead - row + kTileN * stride;
    for (int n = 0; n < kTileN; n++) __builtin_prefetch(at + n * stride + ahead);
  }
  return {at, stride};
}

template <int bits>
void pack_rows(const StripJob& job) {
  const Strip& s = job.s;
  const Format& f = job.f;
  const Field& field = f.row().header[0];
  const int scale_bytes = f.field_bytes(field), size = size_of(f.type_of(field)),
            scale_rows = f.rows() < job.rows ? f.rows() : job.rows;
  const char* scales = job.from.scales + job.n0 / job.from.scale_rows * job.from.scale_stride;
  char* headers = job.strip + s.headers;
  for (int32_t kt = 0; kt < job.k_tiles; kt += s.span_tiles, scales += scale_bytes, headers += s.span_bytes) {
    store_field(size, field.count, (const uint8_t*)scales, job.from.scale_stride, scale_rows, f.rows(), headers);
    if (f.row().has_zeros())
      store_field(1, 1, job.from.zeros + job.n0 * job.from.zero_stride + kt / s.span_tiles, job.from.zero_stride,
                  job.rows, kTileN, headers + scale_bytes * kTileN);
  }
  uint8_t padded[kTileN][kTileK * bits / 8];
  for (int32_t kt = 0; kt < job.k_tiles; kt++) {
    char* out = job.strip + s.codes + (int64_t)kt * s.tile_bytes;
    const RowCodes codes = tile_rows(job, kt, padded);
    if constexpr (bits == 8) {
      store_plane_of<8>(codes, 0, out);
    } else {
      store_nibbles(codes, out);
    }
  }
}

// The values of a span's rows, [16][128], zero past the matrix.
using SpanValues = uint16_t[kTileN][128];

void read_span(const StripJob& job, int32_t column, SpanValues& values) {
  const int32_t left = job.k - column, columns = left < 128 ? left : 128;
  if (columns < 128 || job.rows < kTileN) std::memset(values, 0, sizeof values);
  for (int n = 0; n < job.rows && columns > 0; n++) {
    const uint8_t* row = job.from.codes + (job.n0 + n) * job.from.row_bytes + 2 * (int64_t)column;
    std::memcpy(values[n], row, 2 * (size_t)columns);
    __builtin_prefetch(row + kPackAhead);
    __builtin_prefetch(row + kPackAhead + 64);
  }
}

// The 16 most frequent high bytes of the first columns, ascending; of two that are as frequent, the smaller one.
void find_table(const SpanValues& values, int columns, uint8_t* table) {
  uint16_t counts[256] = {};
  for (const auto& row : values)
    for (int k = 0; k < columns; k++) counts[row[k] >> 8]++;
  bool taken[256] = {};
  for (int i = 0; i < 16; i++) {
    int best = -1;
    for (int high = 0; high < 256; high++)
      if (!taken[high] && (best < 0 || counts[high] > counts[best])) best = high;
    taken[best] = true;
  }
  for (int high = 0, i = 0; high < 256; high++)
    if (taken[high]) table[i++] = (uint8_t)high;
}

// bf16:12 from rows of bf16 (bf16_12.h). False: it has more patches than fit.
bool pack_bf16_12(const StripJob& job) {
  const Strip& s = job.s;
  char *first = job.strip + s.patches, *patch = first + patch_index_bytes(job.k_tiles);
  const int most = patches_of(job.k_tiles);
  std::memset(patch, 255, 4 * (size_t)most);
  int count = 0;
  auto end_tile = [&](int32_t tile) {
    const uint16_t number = (uint16_t)count;
    std::memcpy(first + 2 * tile, &number, 2);
  };
  end_tile(0);
  SpanValues values;
  for (int32_t kt = 0; kt < job.k_tiles; kt++) {
    const int32_t in_span = kt % s.span_tiles;
    uint8_t* table = (uint8_t*)job.strip + s.headers + kt / s.span_tiles * s.span_bytes;
    if (in_span == 0) {
      read_span(job, kt * kTileK, values);
      const int tiles = job.k_tiles - kt < s.span_tiles ? job.k_tiles - kt : s.span_tiles;
      find_table(values, tiles * kTileK, table);
    }
    int8_t index_of[256];
    std::memset(index_of, -1, sizeof index_of);
    for (int i = 15; i >= 0; i--) index_of[table[i]] = (int8_t)i;
    uint8_t* codes = (uint8_t*)job.strip + s.codes + (int64_t)kt * s.tile_bytes;
    for (int k = 0; k < kTileK; k++)
      for (int n = 0; n < kTileN; n++) {
        const uint16_t value = values[n][in_span * kTileK + k];
        const int row = k / 2, lane = 2 * n + k % 2;  // of the tile
        const int at = row / 2 * 64 + lane / 8 * 16 + row % 2 * 8 + lane % 8;
        codes[at] = (uint8_t)value;
        int index = index_of[value >> 8];
        if (index < 0) {
          if (count == most) return false;
          const uint32_t entry = (uint32_t)kt << 17 | (uint32_t)(row * 32 + lane) << 8 | value >> 8;
          std::memcpy(patch + 4 * count++, &entry, 4);
          index = 0;
        }
        uint8_t& both = codes[kTileN * kTileK + at / 128 * 64 + at % 64];
        both = at % 128 < 64 ? (uint8_t)index : (uint8_t)(both | index << 4);
      }
    end_tile(kt + 1);
  }
  return true;
}

constexpr bool rows_are_bytes_or_nibbles() {
  for (const FormatRow& row : kFormats)
    if (row.fields() && !row.block && row.element != ElementKind::bf16_12 &&
        (row.fields() > 1 + row.has_zeros() || (row.plane[0] != 8 && row.plane[0] != 4)))
      return false;
  return true;
}
static_assert(rows_are_bytes_or_nibbles(),
              "pack_rows takes formats with one or two codes in a byte, a scale and a zero");

template <Codec codec>
constexpr auto packer_of() {
  constexpr const FormatRow& row = kFormats[(int)codec];
  if constexpr (row.in_grid()) {
    return &pack_indices<codec>;
  } else if constexpr (row.block != 0) {
    return &pack_blocks<codec>;
  } else {
    return row.plane[0] == 8 ? &pack_rows<8> : &pack_rows<4>;
  }
}

constexpr void (*kPackers[])(const StripJob&) = {
#define KT_FORMAT(name, ...) packer_of<Codec::name>(),
#include "kernels/format_table.h"
};

}  // namespace

bool pack_strip(const Format& f, const Released& from, int32_t n0, int32_t n_valid, int32_t k, int32_t k_tiles,
                char* strip) {
  const Strip s = strip_of(f, k_tiles);
  const int32_t rows = n_valid - n0 < kTileN ? (n_valid > n0 ? n_valid - n0 : 0) : kTileN;
  std::memset(strip, 0, (size_t)s.codes);
  if (f.row().has_tensor_scale()) std::memcpy(strip, from.tensor, 4);
  if (!rows) {
    std::memset(strip + s.codes, 0, (size_t)(s.bytes - s.codes));
    return true;
  }
  const StripJob job{f, from, n0, rows, k, k_tiles, s, strip};
  if (f.row().element == ElementKind::bf16_12) return pack_bf16_12(job);
  kPackers[(int)f.codec](job);
  return true;
}

}  // namespace kt
