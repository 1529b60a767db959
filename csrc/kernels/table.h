// The only interface to ISA code: one table of functions per CPU variant and precision, chosen by dispatch.cpp.
//
// Each function is a unit of work of tens of microseconds or more, so the indirect call is negligible. Shapes: an
// activation panel is [tiles][k_tiles][rows][32] elements (`panel`: bf16 where the CPU multiplies bf16, else the type
// of the sums); a weight block is [k_tiles][2 tiles][tile_bytes]; results are sums that are rounded once. Sums, scratch
// and biases are f32, or f64 in a table of that precision (`sums`), and are passed untyped; scalars (routing weights,
// limits) are passed as double, which holds both.
#pragma once

#include "kernels/dense.h"
#include "kernels/grids.h"
#include "types.h"

namespace kt {

// How the live rows of a panel are divided into tiles of equal height; the last tile may be short.
struct Tiling {
  int32_t rows;  // tokens per tile
  int32_t tiles;
};

// A contraction over a range of K: an activation panel times weight blocks.
struct Contraction {
  const char* a;  // tile 0 of the panel at the first k tile of the range
  size_t a_tile;  // bytes from one token tile to the next
  const char* b;  // weight block at the first k tile of the range
  int32_t k_tiles;
  bool half = false;  // outputs 16-31 of the blocks are zero and may be skipped
};

// Encoded (quantised) weight blocks of a product: `base.b` is then a block's first byte, and k tiles from `k0` on are
// dequantised into `decoded`, which has space for k_tiles pairs of tiles and at least for kRingTiles pairs. `encoding`
// null: blocks are plain tiles.
constexpr int kRingTiles = 8;
struct EncodedBlocks {
  const Encoding* encoding;
  int32_t k0;
  char* decoded;
  float* channel = nullptr;  // W8A8: scales of the 32 outputs of each block, written when it is unpacked
  bool x_int8 = false;       // packed GEMV rounds x to int8, each k tile of a row with a scale of its own
  // Packed GEMV adds sums of so many k tiles. Where K comes in chunks they are the chunks, so that a row's bits do not
  // depend on whether its neighbours fit the caches.
  int32_t sum_tiles = 1 << 30;
};

// Small batches: codes are multiplied straight from the packed weights (packed_gemv.h), without dequantised tiles;
// `decoded` then holds the reordered activation rows, for which it may be larger (KernelTable::packed_gemv_row_bytes).
// int16 activations are taken from the panel, any number of rows; for the others, a row comes in steps of 64 bytes: 64
// of K in W8A8 (Quantise), where there is no panel and all of K is taken at once, or one k tile of a bf16 panel.
constexpr int kPackedGemvRows = 6;      // at most; `packed_gemv_rows` gives the limit per encoding
constexpr int kPackedGemvInt8Rows = 4;  // of int8 and int4 in W8A8
constexpr int kAnyRows = 1 << 20;       // no limit
struct PackedGemvRows {
  const char* row[kPackedGemvRows];
  int64_t step;  // bytes from one step to the next; 0: packed GEMV is not used
};

// A LoRA contribution: a contraction over the rank that is added to the sums of a product. Only token tiles [tile0,
// tile1) take it; the panel extends one tile beyond on each side and is zero in rows of other adapters.
struct LoraTerm {
  Contraction contraction;  // b: at the product's first block
  size_t block_bytes;       // from one block to the next
  int32_t tile0, tile1;
};

// Dropout of LoRA's inputs. Whether an element is dropped is a function of the row's seed and the column, so that
// backward recomputes the same mask. Kept elements are scaled by 1 / (1 - p).
struct Dropout {
  const uint32_t* seeds;  // [rows]; null: nothing is dropped
  uint32_t threshold;     // p * 2^32: elements whose hash is smaller are dropped
  double scale;
};

struct Gate {
  Activation kind;
  bool gated;    // the two tiles of a block are gate and up of the same 16 outputs; else 32 outputs of up
  double limit;  // > 0: gate clamped from above, up to +-limit
  double alpha;  // swiglu_oai: gate * sigmoid(alpha * gate) * (up + 1)
};

// Gathers rows of x into a panel: out[tile][k_tile][row][32] = x[token[r]][k0 ...], zero beyond `live` and H.
struct Gather {
  const void* x;  // [T, H], row stride in elements
  DType dtype;
  int64_t x_stride;
  const int32_t* token;  // [live]
  int32_t live;
  Tiling tiling;
  int32_t k0, k_tiles;  // first column, number of k tiles
  int32_t width;        // H: columns past it are zero
  char* out;
};

// Gate/up product and activation for blocks [block0, block1) of one expert over one panel of tokens; writes the hidden
// panel.
struct Up {
  Tiling tiling;
  int32_t live;
  Contraction base;       // b: block `block0`, all of K or a chunk of it
  EncodedBlocks encoded;  // encoding of the blocks of base
  size_t block_bytes;     // from one block to the next
  int32_t block0, block1;
  const LoraTerm* lora_term;  // [lora_terms]
  int32_t lora_terms;
  bool first, last;  // chunk of K: the first starts from zero, the last applies the activation
  char* sums;        // [blocks][tiles * rows][32] between chunks; unused when first && last
  Gate gate;
  const char* bias;  // [blocks * 32] laid out as the blocks are, or null
  char* hidden;      // panel [tiles][hidden_k_tiles][rows][32]; null: only `keep` is written
  int32_t hidden_k_tiles;
  char* keep;  // gate and up before the activation, in block order: row r of the panel at keep + r * keep_stride; or
               // null
  int64_t keep_stride;
  const char* next;  // weight block that this thread reads next, or null
  char* scratch;     // [2][2 * 16][32] sums, double-buffered: one product accumulates, the epilogue reads the other
  const float* row_scale;  // W8A8 (Quantise): [live], and scratch is twice as large; null: the panel holds floats
  PackedGemvRows packed_gemv;
  const char* packed_rows;  // the rows of `base` as write_packed_rows wrote them; null: they are written here
};

// Output rows of a down product: row r is added to `token[r]`, scaled by weight[r]. The first contribution to a token
// stores, the last one rounds into the output, so no extra pass clears or converts the sums.
struct OutputRows {
  const int32_t* token;
  const double* weight;  // null: all are 1
  const uint8_t* mark;   // kFirst | kLast
};
constexpr uint8_t kFirst = 1, kLast = 2;

// Transposes a k tile of stored blocks: out is one block of the transposed matrix, whose 32 outputs are the k tile at
// `in`, and whose contraction runs over the outputs of `count` stored blocks.
struct Transpose {
  const char* in;    // [2 tiles] of the first block at that k tile; the block's first byte where it is encoded
  size_t in_stride;  // from one stored block to the next
  int32_t count;
  char* out;                 // [count][2 tiles]
  const Encoding* encoding;  // null: tiles
  int32_t k_tile;            // index, for encoded blocks
};

// Blocks of a product that were transposed into scratch (`in_scratch`), so there are no weights to prefetch. With jobs,
// only the first block is ready when the product starts; each next one is transposed during the products of the one
// before, `jobs_per_block` jobs each, into two alternating buffers.
struct TransposedBlocks {
  bool in_scratch;
  const Transpose* jobs;
  int32_t count, jobs_per_block;
};

// Down product of one expert for blocks [block0, block1) of output columns.
struct Down {
  Tiling tiling;
  int32_t live;
  Contraction base;
  EncodedBlocks encoded;
  size_t block_bytes;
  int32_t block0, block1;
  const LoraTerm* lora_term;  // applied in the first chunk
  int32_t lora_terms;
  Dropout dropout;   // of the LoRA terms' sum
  bool first, last;  // chunk of K
  OutputRows rows;
  const char* bias;   // [blocks * 32] or null
  char* sum;          // running sums, [block][T][32], at block0
  int64_t sum_block;  // elements from one block to the next
  void* out;          // [T, H] at column 0
  DType dtype;
  int64_t out_stride;
  int32_t width;  // H
  const char* next;
  TransposedBlocks transposed;
  char* scratch;
  const float* row_scale;  // as in Up
  PackedGemvRows packed_gemv;
  const char* packed_rows;  // as in Up
};

// Writes the rows of a panel as packed GEMV with int16 activations takes them, once for all blocks that they are
// multiplied with.
struct PackedRows {
  Contraction panel;
  Tiling tiling;
  int32_t live;
  const Encoding* encoding;
  char* out;            // live * k_tiles times packed_row_bytes
  bool x_int8 = false;  // as in EncodedBlocks
};

// W8A8: quantises rows to int8, each row with its own scale, largest magnitude / 127. An int8 panel has steps of 64 of
// K where a float panel has k tiles, at the same strides; wherever int8 is multiplied, k tiles count those steps.
// Within eight, k is stored in the order 0 2 4 6 1 3 5 7, as in the codes of format int8.
constexpr int kStepK = 64;
struct Quantise {
  const void* x;  // [rows, width], row stride in elements
  DType dtype;
  int64_t x_stride;
  int32_t rows, width;
  char* out;  // [rows][width rounded up to 64]
  float* scale;
};

// Quantises rows [0, live) of a float panel to int8 in place.
struct QuantisePanel {
  char* panel;  // [tiles][k_tiles][rows][32]
  Tiling tiling;
  int32_t live, k_tiles;
  float* scale;  // [live]
};

// Gathers quantised rows and their scales into a panel; as Gather.
struct GatherInt8 {
  const char* bytes;  // [T][stride], written by Quantise
  const float* scale;
  int64_t stride;
  const int32_t* token;
  int32_t live;
  Tiling tiling;
  int32_t step0, steps;
  char* out;
  float* row_scale;  // [live]
};

// Dequantises k tiles of one encoded block into [count][2 tiles].
struct Decode {
  const Encoding* encoding;
  const char* block;
  int32_t k0, count;
  char* out;
};

// Rows of x times rows of a weight in encoded blocks, along these rows: out[t][k] = sum over n of x[t][n] W[n][k], for
// `count` k tiles from `k0` on. Numbers of W are not rounded. n runs over the outputs of all blocks; where these have
// rows of others, x is zero.
struct RowsProduct {
  const Encoding* encoding;
  const char* const* block;  // [blocks]
  const char* const* next;   // [blocks] what is read next, `count` k tiles from next_k0 on; each null or prefetched
  int32_t blocks;
  int32_t k0, count, next_k0;
  const float* x;  // [tokens][blocks * 32]
  int32_t tokens;
  void* out;  // [tokens][out_stride] at column 0
  DType dtype;
  int64_t out_stride;
  int32_t width;  // columns of W
  char* scratch;  // rows_product_scratch(blocks) bytes, aligned to 64
};
constexpr int64_t rows_product_scratch(int64_t blocks) { return blocks * kBlockN * kTileK * 4; }

// Backward through down and the activation, for blocks [block0, block1) of 32 intermediate columns each: the output's
// gradient times down transposed, with the activation's derivative at the kept gate and up as epilogue.
struct DownBackward {
  Tiling tiling;
  int32_t live;
  Contraction base;  // a: gradient rows; b: transposed blocks from block0 on
  TransposedBlocks transposed;
  size_t block_bytes;
  int32_t block0, block1;
  const LoraTerm* lora_term;  // applied in the last chunk, with dropout in the first
  int32_t lora_terms;
  Dropout dropout;  // of the LoRA terms' sum
  bool first, last;
  char* sums;
  Gate gate;
  const char* keep;  // as in Up, offset so that a gate/up block is indexed by its number
  int64_t keep_stride;
  const double* weight;  // [live] routing weights
  char* weight_grad;     // sums [live][weight_grad_stride]: the routing weight's gradient, one part per block
  int64_t weight_grad_stride;
  char* grad;  // panel [tiles][grad_k_tiles][rows][32]: gradients of gate and up in block order
  int32_t grad_k_tiles;
  char* hidden;  // panel [tiles][hidden_k_tiles][rows][32]: the activated rows, recomputed; or null
  int32_t hidden_k_tiles;
  char* scratch;
};

// Applies dropout to rows [0, live) of a panel, columns from `column` on, into another panel.
struct DropoutPanel {
  const char* in;
  char* out;
  Tiling tiling;
  int32_t live, column, k_tiles;
  Dropout dropout;
};

// Weight gradient of a LoRA factor, a contraction over rows: c[r][n] (+)= sum over m of weight[m] * p[m][r] * q[m][n].
struct LoraWgrad {
  const char* const* p;  // [rows] addresses of the rows of a rank panel
  int64_t p_block;       // bytes from a row's ranks 0-31 to its ranks 32-63, and so on
  const double* weight;  // [rows], or null: all are 1
  int32_t rows;
  int32_t rank;          // a multiple of kRankStep
  const char* const* q;  // [rows] address of each row's first column
  int64_t q_block;       // bytes from a row's columns 0-31 to its columns 32-63, and so on
  DType dtype;
  int32_t columns;
  Dropout dropout;  // of q, whose first column has index `column`
  int32_t column;
  bool first;        // c starts from zero
  char* c;           // [rank rounded up to 16][c_stride]; written up to a multiple of 32 columns, which are in the
  int64_t c_stride;  // variant's own order within each 32
  char* scratch;     // wgrad_scratch(rank, sum_bytes) bytes
};
constexpr int kWgradRows = 128;                    // rows of a call, at most
constexpr int kWgradColumns = 1024;                // converted to tiles at a time
constexpr int kWideRows = 64, kWideColumns = 256;  // converted to the type of the sums at a time
constexpr int kWideStride = kWideColumns + 16;     // not a power of two: rows must not share cache sets
constexpr int64_t wgrad_scratch(int64_t rank, int64_t sum_bytes) {
  int64_t ranks = round_up(rank, kTileN), tiles = (ranks + kWgradColumns) * kWgradRows * 2;
  int64_t wide = (kWgradRows * ranks + kWideRows * kWideStride) * sum_bytes;
  return wide > tiles ? wide : tiles;
}

// Stores the sums of `lora_wgrad`, times `scale`, into a tensor: element (r, n) to data[r * r_stride + n * n_stride].
struct StoreGrad {
  const char* c;  // at the first rank to store
  int64_t c_stride;
  int32_t ranks;
  int32_t from, each;  // of every 32 columns, `each` columns starting at `from`: all, or the 16 of gate or of up
  int32_t count;       // of n
  double scale;
  void* data;
  DType dtype;
  int64_t r_stride, n_stride;
};
constexpr int kRankStep = 8;

// One matrix of one expert in the checkpoint's layout: element (n, k) at data + n * n_stride + k * k_stride (elements).
struct Source {
  const void* data;
  DType dtype;
  int64_t n_stride, k_stride;
};

// Packs one block from one source (32 outputs) or two (16 of gate, 16 of up). Outputs past n_valid and k past K are
// zero.
struct Pack {
  Source half[2];
  int32_t n0[2];  // first output of each half
  int32_t n_valid;
  int32_t k;
  int32_t k_tiles;
  char* out;
};

// Encodes rows of a matrix: codes and scales as a checkpoint has them (`Released`), or blocks of GGUF. The same bytes
// on every CPU. Without `codes` the rows are only read.
struct EncodeSums {
  double moved;   // squares of what the numbers change by when they are decoded and rounded to bf16
  double norm;    // squares of the numbers
  float largest;  // magnitude; where there are no codes
  bool finite;
};
struct Encode {
  const Format* format;  // one that `kt quant` writes
  Source source;         // k_stride 1
  int32_t rows, k;       // rows from one that begins what shares a scale
  float tensor;          // scale of the whole matrix, where the format has one
  uint8_t* codes;        // null: only norm, largest and finite are wanted
  int64_t row_bytes;
  char* scales;          // null for blocks of GGUF
  int64_t scale_stride;  // bytes
  char* scratch;         // encode_scratch(k) bytes
  EncodeSums* sums;
};
// Numbers and codes of a row in groups that may reach past K, and some arrays over groups of 16.
constexpr int64_t encode_scratch(const Format& format, int64_t k) {
  int64_t columns = round_up(k, format.span() > 16 ? format.span() : 16);
  return columns * 8 + 7 * 4 * round_up(ceil_div(columns, 16), 16);
}

// Peak rates measured by bare loops, for the benches' roofline and the thread probe; each runs on the calling thread
// for about `seconds`.
enum class Rate : uint8_t { registers, panels, read, bytes };

struct KernelTable {
  const char* name;  // of the variant
  Precision precision;
  DType panel, sums;               // of activations in a panel; of all sums: f32 or f64
  int32_t elem, sum_bytes;         // their sizes
  int32_t tile_bytes;              // of a weight tile
  Tiling (*tiling)(int32_t live);  // how to divide `live` rows
  void (*gather)(const Gather&);
  void (*up)(const Up&);
  void (*down)(const Down&);
  void (*pack)(const Pack&);
  void (*decode)(const Decode&);
  void (*transpose)(const Transpose&);
  void (*down_backward)(const DownBackward&);
  void (*lora_wgrad)(const LoraWgrad&);
  void (*store_grad)(const StoreGrad&);
  void (*apply_dropout)(const DropoutPanel&);
  int32_t gemv_max_tokens;                         // rows of x in one call, at most
  void (*pack_rows)(const PackRows&);              // null: absent in this precision
  void (*gemv_rows)(const Gemv&);                  // likewise
  void (*attention_split)(const AttentionSplit&);  // likewise
  void (*decode_cache)(const CacheRows&);          // likewise
  void (*norm)(const Norm&);                       // likewise
  void (*lora_gemv)(const LoraGemv&);              // likewise
  void (*multiply_rows)(const RowsProduct&);       // likewise
  void (*quantise)(const Quantise&);               // likewise, and then W8A8 is unsupported
  void (*quantise_panel)(const QuantisePanel&);    // likewise
  void (*gather_int8)(const GatherInt8&);          // likewise
  void (*encode)(const Encode&);                   // likewise
  // Most rows for which packed GEMV takes this encoding, 0 if it does not; null: none.
  int32_t (*packed_gemv_rows)(const Encoding&, bool x_int8);
  int32_t packed_gemv_row_bytes;  // scratch for a k tile of a row in packed GEMV; 0: that of dequantised tiles suffices
  int32_t (*packed_row_bytes)(const Encoding&);  // of a k tile of a row in PackedRows; 0 or null: not for this encoding
  void (*write_packed_rows)(const PackedRows&);
  // Units (flop, or bytes for `read`) per second. `panels` multiplies with K = 2048 over `bytes` of scratch, and so
  // does `bytes` in W8A8.
  double (*rate)(Rate what, double seconds, char* scratch, size_t bytes);
  // Weights per second of packed GEMV times `rows` rows, over one block that stays in L1; 0 where it does not take
  // them.
  double (*codes_rate)(const Encoding& encoding, int32_t rows, bool x_int8, double seconds, char* scratch,
                       size_t bytes);
};

// What a variant exports: a table for each precision that it has, null for the others.
struct KernelTables {
  const KernelTable* of[kPrecisions];
};

// One CPU variant as this process may use it. At most one of `native` and `emulated` is set; neither: it cannot run.
struct Variant {
  const char* name;
  const KernelTables* tables;  // null: not in this build
  bool native;                 // in this build, real instructions, and this CPU and OS run them
  bool emulated;               // software intrinsics (KT_EMULATE): runs where it was built, if requested by name
  const char* missing;         // comma-separated features the machine lacks; "" when it lacks none

  const KernelTable* table(Precision p) const { return tables ? tables->of[(int)p] : nullptr; }
};

// Every variant that exists, in ascending order of preference.
int variant_count();
const Variant& variant(int index);

// The table in use: the variant requested by the environment (cpu.h), else the best native one that has the precision;
// chosen once. Throws std::runtime_error that says what is missing and what to do instead.
const KernelTable& kernels(Precision precision = Precision::bf16);
// By name, emulated ones included; throws likewise.
const KernelTable& kernels(const char* name, Precision precision = Precision::bf16);
// The choice behind kernels(), made anew from the current environment.
const KernelTable& choose_kernels(Precision precision = Precision::bf16);

constexpr const char* name_of(Precision p) {
  return p == Precision::f64 ? "f64" : p == Precision::f32 ? "f32" : "bf16";
}

}  // namespace kt
