// The two products of an expert (gate/up and down), written once for every ISA.
//
// An ISA provides `multiply`: up to two token tiles times one weight block of 32 outputs, into sums [rows][32]. This
// file adds the loops over blocks and token tiles and the epilogues: the activation that makes the hidden panel of gate
// and up, and the scaled addition of down's rows to the running sums. Weights are streamed: while one block is
// multiplied, the next one is prefetched into L2, its lines distributed evenly over the k steps of the current one, so
// that memory and arithmetic overlap (docs/log.md has how far). For the same reason the epilogue of one product runs
// during the k steps of the next one, where the matrix unit leaves the vector units idle. A token's result does not
// depend on its neighbours in the tile or on the number of threads: every row sees the same operations in the same
// order. Small batches of quantised experts may take packed_gemv.h instead.
#pragma once

#include "kernels/pack.h"
#include "kernels/packed_gemv_int16.h"
#include "kernels/packed_gemv_int8.h"

namespace kt {
namespace {

// Dropout of W elements of a row from `column` on: dropped ones become zero, the others are scaled. The mask is a hash
// of seed and column by the integer mixer "lowbias32" of C. Wellons.
template <class V>
inline V apply_dropout(V v, const Dropout& dropout, uint32_t seed, int column) {
  constexpr int W = kLanes<V>;
  U32<W> x = {};
  for (int i = 0; i < W; i++) x[i] = (uint32_t)(column + i);
  x = (x * 0x9e3779b9u) ^ seed;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  x ^= x >> 16;
  Mask<V> dropped = __builtin_convertvector((I32<W>)(x < dropout.threshold), Mask<V>);
  return select<V>(dropped, splat<V>(0.0), v * splat<V>(dropout.scale));
}

// LoRA terms with dropout of their result cannot share the accumulation: they are computed first, and the product adds
// to them.
template <class Isa>
inline void begin_with_lora_terms(ProductOf<typename Isa::Real>& p, const Dropout& dropout) {
  using V = typename Isa::Vector;
  p.accumulate = multiply_lora_terms<Isa>(p);
  p.lora_terms = 0;
  for (int r = 0; p.accumulate && r < p.live; r++)
    for (int i = 0; i < kBlockN; i += Isa::width) {
      typename Isa::Real* c = p.c + r * kBlockN + i;
      uint32_t seed = dropout.seeds[p.tile * p.rows + r];
      store(c, apply_dropout<V>(load<V>(c), dropout, seed, p.block * kBlockN + i));
    }
}

// Few rows: pairs of tiles that are decoded at a time, 16 KB.
template <class Tiles>
constexpr int kTilesInL1 = 16384 / (2 * Tiles::tile_bytes);

// Decodes a few k tiles of a block and multiplies them while they are in L1, and so on. The sums are those of one
// product over all of K: they are continued in the same order. `Tiles` multiplies the decoded tiles, `decode(k, count)`
// makes them.
template <class Isa, class Tiles, class Decode, class Overlap>
inline void multiply_in_chunks(const EncodedBlocks& encoded, ProductOf<typename Isa::Real> p, Overlap& overlapped,
                               const Decode& decode) {
  const int k_tiles = p.contraction.k_tiles, lora_terms = p.lora_terms;
  p.contraction.b = encoded.decoded;
  p.lora_terms = 0;
  for (int k = 0; k < k_tiles; k += kTilesInL1<Tiles>) {
    const int count = k_tiles - k < kTilesInL1<Tiles> ? k_tiles - k : kTilesInL1<Tiles>;
    decode(k, count);
    p.contraction.k_tiles = count;
    Tiles::multiply(p, overlapped);
    p.contraction.a += (int64_t)count * p.rows * kTileK * Isa::elem;
    p.prefetch.at += (int64_t)count * p.prefetch.lines * 64;
    p.accumulate = true;
  }
  p.lora_terms = lora_terms;
  multiply_lora_terms<Isa>(p);
}

// One block of few rows: f32 tiles where the ISA multiplies those, its own for bf16:12.
template <class Isa, class Overlap>
inline void multiply_few_rows(const EncodedBlocks& encoded, const ProductOf<typename Isa::Real>& p,
                              Overlap& overlapped) {
  const Encoding& e = *encoded.encoding;
  const char* block = p.contraction.b;
  if constexpr (kMultipliesF32<Isa>)
    if (!e.format[0].row().has_patches())
      return multiply_in_chunks<Isa, typename Isa::F32Tiles>(encoded, p, overlapped, [&](int k, int count) {
        decode_product_block<Isa::width, RoundedF32Tile>(e, block, encoded.k0 + k, count, encoded.decoded);
      });
  multiply_in_chunks<Isa, Isa>(encoded, p, overlapped, [&](int k, int count) {
    decode_block<Isa>(e, block, encoded.k0 + k, count, encoded.decoded);
  });
}

// Multiplies every block with every pair of token tiles. Weights are prefetched one block ahead, and `after` during the
// last block, unless the blocks are transposed ones in scratch. `place_sums` sets the address of a product's sums,
// `epilogue(product, first, end)` takes rows whose sums are complete.
template <class Isa, bool transposes = false, class Unit, class PlaceSums, class Epilogue>
inline void for_each_product(const Unit& u, bool complete, const char* after, const TransposedBlocks* transposed,
                             const Dropout& dropout, const PlaceSums& place_sums, const Epilogue& epilogue) {
  int passes = (u.tiling.tiles + kPassTiles - 1) / kPassTiles;
  using Rows = PendingRows<typename Isa::Real, Epilogue>;
  Rows pending(epilogue);
  const Encoding* encoding = nullptr;
  DecodeAhead<Isa> decode_ahead(u, passes), *decoding = nullptr;
  if constexpr (requires { u.encoded; }) encoding = u.encoded.encoding;
  if (encoding && Isa::overlaps) decoding = &decode_ahead;
  constexpr bool chunks = !Isa::overlaps && !kIntegerSums<Isa>;
  const bool in_chunks =
      chunks && encoding && passes == 1 && (kMultipliesF32<Isa> || encoding->format[0].row().has_patches());
  using Transposer = typename OverlappedTransposeOf<Isa, transposes && !kIntegerSums<Isa>>::type;
  Transposer overlapped_transpose(transposed);
  Transposer* transposer = transposed && transposed->count ? &overlapped_transpose : nullptr;
  Isa::enter(u.tiling.rows);
  for (int block = u.block0; block < u.block1; block++) {
    ProductOf<typename Isa::Real> p;
    p.contraction = u.base;
    p.contraction.b += (transposer ? (block - u.block0) % 2 : block - u.block0) * u.block_bytes;
    if (transposer) transposer->begin(passes * u.base.k_tiles);
    p.block = block;
    p.block0 = u.block0;
    p.lora_term = u.lora_term;
    p.rows = u.tiling.rows;
    const char* next = block + 1 < u.block1 ? p.contraction.b + u.block_bytes : after;
    if (transposed) next = nullptr;
    if constexpr (requires { u.encoded; } && !Isa::overlaps)
      if (encoding && !in_chunks) {
        float* channel = kIntegerSums<Isa> ? u.encoded.channel + (int64_t)(block - u.block0) * kBlockN : nullptr;
        begin_decode<Isa>(*encoding, p.contraction.b, channel);
        unpack_block<Isa>(*encoding, p.contraction.b, channel, u.encoded.k0, u.base.k_tiles, u.encoded.decoded);
        p.contraction.b = u.encoded.decoded;
      }
    for (int pass = 0; pass < passes; pass++) {
      p.tile = pass * kPassTiles;
      p.lora_terms = u.lora_terms;
      p.tiles = u.tiling.tiles - p.tile < kPassTiles ? u.tiling.tiles - p.tile : kPassTiles;
      p.live = u.live - p.tile * p.rows < p.tiles * p.rows ? u.live - p.tile * p.rows : p.tiles * p.rows;
      p.prefetch = encoding ? prefetch_share_encoded(next, pass, passes, u.base.k_tiles, (int64_t)u.block_bytes)
                            : prefetch_share(next, pass, passes, u.base.k_tiles, Isa::tile_bytes);
      place_sums(p);
      if constexpr (!kIntegerSums<Isa>)
        if (dropout.seeds && !p.accumulate && p.lora_terms) begin_with_lora_terms<Isa>(p, dropout);
      if (decoding && pass == 0) decoding->begin();
      OverlappedWork<Rows, DecodeAhead<Isa>, Transposer> overlapped{pending, decoding, transposer};
      if constexpr (requires { u.encoded; } && chunks)
        if (in_chunks) multiply_few_rows<Isa>(u.encoded, p, overlapped);
      if (!in_chunks) Isa::multiply(p, overlapped);
      pending.all();
      if (complete) pending.set(p);
    }
    if (transposer) transposer->finish();
  }
  pending.all();
  Isa::leave();
}

template <class Isa>
void dropout_panel(const DropoutPanel& t) {
  int64_t row_bytes = kTileK * Isa::elem, step = row_bytes * t.tiling.rows;
  for (int r = 0; r < t.live; r++) {
    int64_t at = (r / t.tiling.rows) * step * t.k_tiles + (r % t.tiling.rows) * row_bytes;
    for (int k = 0; k < t.k_tiles; k++)
      for (int i = 0; i < kTileK; i += Isa::width) {
        auto v = get_element<Isa>(t.in + at + k * step, i);
        put_element<Isa>(t.out + at + k * step, i,
                         apply_dropout(v, t.dropout, t.dropout.seeds[r], t.column + k * kTileK + i));
      }
  }
}

// Activates row r of a product's `sums`. Never inlined: in a loop that the compiler splits it might fuse a
// multiplication and an addition in one copy and not in the other, and a row's bits would depend on its position.
template <class Isa, Activation A, class Sums>
__attribute__((noinline)) void hidden_row(const Sums& sums, int r, const Gate& gate, const typename Isa::Real* bias,
                                          char* out) {
  using V = typename Isa::Vector;
  for (int i = 0; i < (gate.gated ? kTileN : kBlockN); i += Isa::width) {
    V g = sums.at(r, i), h;
    if (bias) g += load<V>(bias + i);
    if (gate.gated) {
      V u = sums.at(r, kTileN + i);
      if (bias) u += load<V>(bias + kTileN + i);
      h = gated<V, A>(g, u, gate);
    } else {
      h = activate<V, A>(g, gate.alpha);
    }
    put_element<Isa>(out, i, h);
  }
}

template <class Isa, class Sums>
inline void keep_row(const Sums& sums, int r, const typename Isa::Real* bias, char* out) {
  using V = typename Isa::Vector;
  for (int i = 0; i < kBlockN; i += Isa::width) {
    V v = sums.at(r, i);
    if (bias) v += load<V>(bias + i);
    put_element<Isa>(out, i, v);
  }
}

// Whether sums are multiplied with row and channel scales at the end, and LoRA terms are added after that.
template <class Multiplier>
constexpr bool kScaled = kIntegerSums<Multiplier>;
template <class Dp4a, class Sums>
constexpr bool kScaled<PackedGemvInt8<Dp4a, Sums>> = true;

// int32 sums cannot accumulate the LoRA terms: these are a separate product, added in the epilogue.
template <class Isa, class Multiplier, class Unit>
inline void multiply_lora_apart(const Unit& u, int buffer, ProductOf<typename Multiplier::Real>& p) {
  if constexpr (kScaled<Multiplier>) {
    constexpr int sums = kPassTiles * kMaxRows * kBlockN;
    Product q{{},    p.block,     p.tile,  p.tiles,     p.rows,       p.live,
              false, kNoPrefetch, nullptr, p.lora_term, p.lora_terms, p.block0};
    q.c = (float*)u.scratch + (2 + buffer) * sums;
    p.lora_sums = p.lora_terms && multiply_lora_terms<Isa>(q) ? q.c : nullptr;
    p.lora_terms = 0;
  }
}

// Float sums of a product: W values of row r from output n on.
template <class V>
struct PlainSums {
  const Lane<V>* c;
  V at(int r, int n) const { return load<V>(c + r * kBlockN + n); }
};

template <class Isa, class Multiplier, class Unit>
inline auto sums_of(const Unit& u, const ProductOf<typename Multiplier::Real>& p) {
  using V = typename Isa::Vector;
  if constexpr (kScaled<Multiplier>) {
    const float* channel = u.encoded.channel + (int64_t)(p.block - p.block0) * kBlockN;
    return ScaledSums<V, typename Multiplier::Real>{p.c, u.row_scale + p.tile * p.rows, channel, p.lora_sums};
  } else {
    return PlainSums<V>{p.c};
  }
}

// `Multiplier` computes the products: the ISA itself, its int8 form, or a packed GEMV.
template <class Isa, class Multiplier, Activation A>
void run_up_as(const Up& u) {
  using Real = typename Multiplier::Real;
  int64_t block_sums = (int64_t)u.tiling.tiles * u.tiling.rows * kBlockN;
  constexpr int64_t row_bytes = kTileK * Isa::elem;
  int64_t tile_bytes = row_bytes * u.tiling.rows * u.hidden_k_tiles;
  int buffer = 0;
  auto place_sums = [&](ProductOf<Real>& p) {
    p.accumulate = !u.first;
    // Two buffers alternate, because the epilogue still reads one while the other is filled.
    buffer ^= 1;
    p.c = u.first && u.last ? (Real*)u.scratch + buffer * kPassTiles * kMaxRows * kBlockN
                            : (Real*)u.sums + (p.block - u.block0) * block_sums + (int64_t)p.tile * p.rows * kBlockN;
    multiply_lora_apart<Isa, Multiplier>(u, buffer, p);
  };
  // Fields are copied to locals: the stores of a row may alias the arguments, which would be reloaded after each.
  auto epilogue = [&](const ProductOf<Real>& p, int first, int end) {
    using Number = typename Isa::Real;
    const Number* bias = u.bias ? (const Number*)u.bias + (int64_t)p.block * kBlockN : nullptr;
    const auto sums = sums_of<Isa, Multiplier>(u, p);
    const Gate gate = u.gate;
    const int rows = p.rows, column = gate.gated ? p.block * kTileN : p.block * kBlockN;
    const int64_t keep_stride = u.keep_stride, next_tile = tile_bytes, row = (int64_t)p.tile * rows;
    char* keep = u.keep ? u.keep + row * keep_stride + (int64_t)(p.block - u.block0) * kBlockN * Isa::elem : nullptr;
    char* out =
        u.hidden ? u.hidden + p.tile * next_tile + (column / kTileK) * row_bytes * rows + (column % kTileK) * Isa::elem
                 : nullptr;
    for (int r = first; r < end; r++) {
      if (keep) keep_row<Isa>(sums, r, bias, keep + r * keep_stride);
      int second = r >= rows;
      if (out) hidden_row<Isa, A>(sums, r, gate, bias, out + second * next_tile + (r - second * rows) * row_bytes);
    }
  };
  if constexpr (kIsPackedGemv<Multiplier>) {
    for_each_packed_gemv<Isa, Multiplier>(u, place_sums, epilogue);
  } else {
    for_each_product<Multiplier>(u, u.last, u.next, nullptr, Dropout{}, place_sums, epilogue);
  }
}

template <class Isa, class Multiplier>
void run_up_with(const Up& u) {
  switch (u.gate.kind) {
    case Activation::silu:
      return run_up_as<Isa, Multiplier, Activation::silu>(u);
    case Activation::gelu:
      return run_up_as<Isa, Multiplier, Activation::gelu>(u);
    case Activation::gelu_tanh:
      return run_up_as<Isa, Multiplier, Activation::gelu_tanh>(u);
    case Activation::relu2:
      return run_up_as<Isa, Multiplier, Activation::relu2>(u);
    case Activation::swiglu_oai:
      return run_up_as<Isa, Multiplier, Activation::swiglu_oai>(u);
    case Activation::none:
      return run_up_as<Isa, Multiplier, Activation::none>(u);
  }
}

// Most rows that a packed GEMV takes of blocks with this encoding; 0: none.
template <class Gemv>
int32_t packed_gemv_rows(const Encoding& e, bool x_int8) {
  const int32_t a = Gemv::rows_of(e.format[0], x_int8), b = Gemv::rows_of(e.format[1], x_int8);
  return a < b ? a : b;
}

// `Int8Isa`: the int8 form of the ISA, or void.
template <class Isa, class Int8Isa>
void run_up(const Up& u) {
  if constexpr (kHasInt8<Int8Isa>) {
    using Dp4a = typename Int8Isa::Arithmetic::Dp4a;
    if (u.row_scale && u.packed_gemv.step)
      return integer_sums(*u.encoded.encoding) ? run_up_with<Isa, PackedGemvInt8<Dp4a, int32_t>>(u)
                                               : run_up_with<Isa, PackedGemvInt8<Dp4a, float>>(u);
    if (u.row_scale) return run_up_with<Isa, Int8Isa>(u);
  }
  if constexpr (kHasPackedGemvInt16<Isa>)
    if (u.packed_gemv.step) return run_up_with<Isa, PackedGemvInt16<Isa>>(u);
  run_up_with<Isa, Isa>(u);
}

template <class V>
inline void write_columns(const Down& d, int token, int column, const V (&v)[kBlockN / kLanes<V>]) {
  constexpr int W = kLanes<V>;
  int64_t at = token * d.out_stride + column;
  if (column + kBlockN <= d.width) {
    for (int i = 0; i < kBlockN / W; i++) store_as<V>(d.out, at + i * W, d.dtype, v[i]);
    return;
  }
  alignas(64) char edge[kBlockN * 8];
  for (int i = 0; i < kBlockN / W; i++) store_as<V>(edge, i * W, d.dtype, v[i]);
  size_t size = size_of(d.dtype);
  __builtin_memcpy((char*)d.out + at * (int64_t)size, edge, (d.width - column) * size);
}

// The running sums of a block.
template <class Real>
inline Real* sums_at(const Down& d, int block) {
  return (Real*)d.sum + (block - d.block0) * d.sum_block;
}

// Adds rows [first, end) of one expert's block to their tokens' sums: stored if first, added otherwise, rounded into
// the output if last. `current` is the product being computed. Fields are copied for the reason given above.
template <class Isa, class Multiplier>
inline void add_rows(const Down& d, const ProductOf<typename Multiplier::Real>& p,
                     const ProductOf<typename Multiplier::Real>& current, int first, int end) {
  using V = typename Isa::Vector;
  using Real = typename Isa::Real;
  constexpr int W = kLanes<V>;
  const auto sums = sums_of<Isa, Multiplier>(d, p);
  const int block = p.block, row = p.tile * p.rows, last = current.live - 1;
  const int32_t *token = d.rows.token + row, *next_token = d.rows.token + current.tile * current.rows;
  const uint8_t* mark = d.rows.mark + row;
  const double* weight = d.rows.weight ? d.rows.weight + row : nullptr;
  const uint8_t starts = d.first ? kFirst : 0, ends = d.last ? kLast : 0;
  const Real* bias = d.bias && d.first ? (const Real*)d.bias + (int64_t)block * kBlockN : nullptr;
  Real *block_sums = sums_at<Real>(d, block), *next = sums_at<Real>(d, current.block);
  for (int r = first; r < end; r++) {
    // Sums are scattered by token: those that the current product will need are prefetched into L1.
    const Real* next_sums = next + (int64_t)next_token[r < last ? r : last] * kBlockN;
    __builtin_prefetch(next_sums, 1, 3);
    __builtin_prefetch(next_sums + 16, 1, 3);
    Real* sum = block_sums + (int64_t)token[r] * kBlockN;
    const bool begins = mark[r] & starts;
    V v[kBlockN / W], scale = splat<V>(weight ? weight[r] : 1.0);
    for (int i = 0; i < kBlockN / W; i++) {
      V x = sums.at(r, i * W);
      if (bias) x += load<V>(bias + i * W);
      v[i] = apart(
          x *
          scale);  // rounded before the addition: the compiler might fuse the two in one loop copy and not in another
      if (!begins) v[i] += load<V>(sum + i * W);
    }
    if (mark[r] & ends) {
      write_columns<V>(d, token[r], block * kBlockN, v);
    } else {
      for (int i = 0; i < kBlockN / W; i++) store(sum + i * W, v[i]);
    }
  }
}

template <class Isa, class Multiplier>
void run_down_with(const Down& d) {
  using Real = typename Multiplier::Real;
  int buffer = 0;
  ProductOf<Real> current = {};
  auto place_sums = [&](ProductOf<Real>& p) {
    p.accumulate = false;
    p.c = (Real*)d.scratch + (buffer ^= 1) * kPassTiles * kMaxRows * kBlockN;
    multiply_lora_apart<Isa, Multiplier>(d, buffer, p);
    current = p;
  };
  auto epilogue = [&](const ProductOf<Real>& p, int first, int end) {
    add_rows<Isa, Multiplier>(d, p, current, first, end);
  };
  if constexpr (kIsPackedGemv<Multiplier>) {
    for_each_packed_gemv<Isa, Multiplier>(d, place_sums, epilogue);
  } else {
    // Forward transposes nothing, and its loop is instantiated without that code.
    if (d.transposed.in_scratch)
      return for_each_product<Multiplier, true>(d, true, d.next, &d.transposed, d.dropout, place_sums, epilogue);
    for_each_product<Multiplier>(d, true, d.next, nullptr, d.dropout, place_sums, epilogue);
  }
}

template <class Isa, class Int8Isa>
void run_down(const Down& d) {
  if constexpr (kHasInt8<Int8Isa>) {
    using Dp4a = typename Int8Isa::Arithmetic::Dp4a;
    if (d.row_scale && d.packed_gemv.step)
      return integer_sums(*d.encoded.encoding) ? run_down_with<Isa, PackedGemvInt8<Dp4a, int32_t>>(d)
                                               : run_down_with<Isa, PackedGemvInt8<Dp4a, float>>(d);
    if (d.row_scale) return run_down_with<Isa, Int8Isa>(d);
  }
  if constexpr (kHasPackedGemvInt16<Isa>)
    if (d.packed_gemv.step) return run_down_with<Isa, PackedGemvInt16<Isa>>(d);
  run_down_with<Isa, Isa>(d);
}

template <class Isa>
constexpr auto packed_gemv_rows_of() -> int32_t (*)(const Encoding&, bool) {
  if constexpr (kHasPackedGemvInt16<Isa>) return &packed_gemv_rows<PackedGemvInt16<Isa>>;
  return nullptr;
}

template <class Isa>
constexpr auto packed_row_bytes_of() -> int32_t (*)(const Encoding&) {
  if constexpr (kHasPackedGemvInt16<Isa>) return &PackedGemvInt16<Isa>::packed_row_bytes;
  return nullptr;
}

template <class Isa>
constexpr auto write_packed_rows_of() -> void (*)(const PackedRows&) {
  if constexpr (kHasPackedGemvInt16<Isa>) return &PackedGemvInt16<Isa>::write_packed_rows;
  return nullptr;
}

template <class Isa>
constexpr int32_t packed_gemv_row_bytes_of() {
  if constexpr (kHasPackedGemvInt16<Isa>) return PackedGemvInt16<Isa>::row_bytes;
  return 0;
}

}  // namespace
}  // namespace kt
