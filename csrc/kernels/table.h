// The only door to ISA code: a table of functions per CPU variant and precision, chosen by dispatch.cpp.
//
// Each function does a unit of work that takes tens of microseconds or more, so a call through the table costs nothing.
// The shapes: an activation panel is [tiles][k_tiles][rows][32] elements (`panel`: bf16 where the CPU multiplies bf16,
// else the type of the sums); a weight block is [k_tiles][2 tiles][tile_bytes]; results leave as sums and are rounded
// once. Sums, scratch and biases are f32, or f64 in a table of that precision (`sums`), and cross this door untyped;
// numbers that come one by one (routing weights, limits) cross it as double, which holds both.
#pragma once

#include "kernels/dense.h"
#include "kernels/grids.h"
#include "types.h"

namespace kt {

// How the live rows of a panel are cut into tiles of equal height; the last tile may be short.
struct Tiling {
  int32_t rows;  // tokens per tile
  int32_t tiles;
};

// One stretch of a contraction: an activation panel against weight blocks.
struct Contraction {
  const char* a;  // tile 0 of the panel at the first k tile of this stretch
  size_t a_tile;  // bytes from one token tile to the next
  const char* b;  // weight block at the first k tile of this stretch
  int32_t k_tiles;
  bool half = false;  // outputs 16-31 of the blocks are zero, and may be left out
};

// Where a product reads encoded blocks: `base.b` is then a block's first byte, and k tiles from `k0` on are decoded
// into `decoded`, which has room for k_tiles pairs of tiles, and for kRingTiles at least. `how` null: blocks are tiles.
constexpr int kRingTiles = 8;
struct EncodedBlocks {
  const Encoding* encoding;
  int32_t k0;
  char* decoded;
  float* channel = nullptr;  // of bytes: scales of 32 outputs for each block of the product, made where it is decoded
};

// Few rows: codes are not decoded but multiplied as they lie; what is written to `decoded` are the rows once more. Rows
// come in steps of 64 bytes each: 64 of K in W8A8 (Quantise), where there is no panel and all of K is taken at once, or
// a k tile of a panel of bf16.
constexpr int kPackedGemvRows = 6;      // at most, and as many as `packed_gemv_rows` says
constexpr int kPackedGemvInt8Rows = 4;  // in W8A8
struct PackedGemvRows {
  const char* row[kPackedGemvRows];
  int64_t step;  // bytes from one step to the next; 0: there are no such rows
};

// A stretch that joins the sums of a product after its own contraction, as LoRA's does. Only token tiles [tile0, tile1)
// take it; the panel reaches one tile further on each side, and is zero in rows that are not concerned.
struct LoraTerm {
  Contraction contraction;  // b: of the product's first block
  size_t block_bytes;       // from one block to the next
  int32_t tile0, tile1;
};

// Dropout of LoRA's inputs: which elements go is a function of the row's seed and the column, so that backward finds
// the same ones. Elements that stay are scaled by 1 / (1 - p).
struct Dropout {
  const uint32_t* seeds;  // [rows]; null: nothing is dropped
  uint32_t threshold;     // p * 2^32: an element whose number is smaller goes
  double scale;
};

struct Gate {
  Activation kind;
  bool gated;    // two tiles of a block are gate and up of the same 16 outputs; else 32 outputs of up
  double limit;  // > 0: gate clamped from above, up to +-limit
  double alpha;  // swiglu_oai: gate * sigmoid(alpha * gate) * (up + 1)
};

// Rows of X gathered into a panel: out[tile][k_tile][row][32] = x[token[r]][k0 ...], zero beyond `live` and H.
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

// Gate/up and activation for blocks [block0, block1) of one expert over one panel of tokens; writes the hidden panel.
struct Up {
  Tiling tiling;
  int32_t live;
  Contraction base;       // b: block `block0`, all of K or a chunk of it
  EncodedBlocks encoded;  // the blocks of base
  size_t block_bytes;     // from one block to the next
  int32_t block0, block1;
  const LoraTerm* lora_term;  // [extras]
  int32_t lora_terms;
  bool first, last;  // of the chunks of K: start from zero, apply the activation
  char* sums;        // [blocks][tiles * rows][32] between chunks; unused when first && last
  Gate gate;
  const char* bias;  // [blocks * 32] laid out as the blocks are, or null
  char* hidden;      // panel [tiles][hidden_k_tiles][rows][32]; null: only `keep` is wanted
  int32_t hidden_k_tiles;
  char* keep;  // gate and up before the activation, as the blocks lie: row r of the panel at keep + r * keep_stride, or
               // null
  int64_t keep_stride;
  const char* next;        // block of weights that this thread will read after these, or null
  char* scratch;           // [2][2 * 16][32] sums: one product being made, one being finished
  const float* row_scale;  // of bytes (Quantise): [live], and scratch is twice as large; null: the panel holds numbers
  PackedGemvRows packed_gemv;
};

// Where a down product goes: row r belongs to `token[r]` and is scaled by weight[r]. The first contribution to a token
// stores, the last one rounds into the output, so no pass clears or converts anything.
struct OutputRows {
  const int32_t* token;
  const double* weight;  // null: all are 1
  const uint8_t* mark;   // kFirst | kLast
};
constexpr uint8_t kFirst = 1, kLast = 2;

// Blocks of a stored matrix turned around: out is one block of the transposed matrix, whose 32 outputs are the k tile
// that `in` points to, and whose contraction runs over the outputs of `count` stored blocks.
struct Transpose {
  const char* in;    // [2 tiles] of the first block at that k tile; the block itself where it is encoded
  size_t in_stride;  // from one stored block to the next
  int32_t count;
  char* out;                 // [count][2 tiles]
  const Encoding* encoding;  // null: tiles
  int32_t k_tile;            // of encoded blocks
};

// Whether the blocks of a product are turned ones, made in scratch: nothing is to be fetched then. With jobs, only the
// first is there when it begins; the next one is made beside the products of each, `each` jobs for it, and two places
// take turns.
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
  const LoraTerm* lora_term;  // in the first chunk
  int32_t lora_terms;
  Dropout dropout;   // of what the extras add
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
};

// W8A8: rows of numbers as bytes, each row with a scale of its own, largest magnitude / 127. A panel of bytes has steps
// of 64 of K where one of numbers has k tiles, at the same distances, and wherever bytes are multiplied k tiles are
// counted in those steps. Within eight, k lie in the order 0 2 4 6 1 3 5 7, as the codes of format int8 do.
constexpr int kStepK = 64;
struct Quantise {
  const void* x;  // [rows, width], row stride in elements
  DType dtype;
  int64_t x_stride;
  int32_t rows, width;
  char* out;  // [rows][width up to a multiple of 64]
  float* scale;
};

// Rows [0, live) of a panel of numbers become bytes, in place.
struct QuantisePanel {
  char* panel;  // [tiles][k_tiles][rows][32]
  Tiling tiling;
  int32_t live, k_tiles;
  float* scale;  // [live]
};

// Rows of bytes into a panel, with their scales; as Gather.
struct GatherInt8 {
  const char* bytes;  // [T][stride], as quantised
  const float* scale;
  int64_t stride;
  const int32_t* token;
  int32_t live;
  Tiling tiling;
  int32_t step0, steps;
  char* out;
  float* row_scale;  // [live]
};

// k tiles of one encoded block, as [count][2 tiles].
struct Decode {
  const Encoding* encoding;
  const char* block;
  int32_t k0, count;
  char* out;
};

// The way back through down and the activation, for blocks [block0, block1) of 32 intermediate columns each: the
// product of the output's gradient with down transposed meets the kept gate and up.
struct DownBackward {
  Tiling tiling;
  int32_t live;
  Contraction base;  // a: gradient rows; b: transposed blocks from block0 on
  TransposedBlocks transposed;
  size_t block_bytes;
  int32_t block0, block1;
  const LoraTerm* lora_term;  // in the first chunk
  int32_t lora_terms;
  Dropout dropout;  // of what the extras add
  bool first, last;
  char* sums;
  Gate gate;
  const char* keep;  // as in Up, shifted so that a gate/up block is found by its number
  int64_t keep_stride;
  const double* weight;  // [live] routing weights
  char* weight_grad;     // sums [live][weight_grad_stride]: this block's share of the routing weight's gradient, at its
                         // number
  int64_t weight_grad_stride;
  char* grad;  // panel [tiles][grad_k_tiles][rows][32]: gradients of gate and up as the blocks lie
  int32_t grad_k_tiles;
  char* hidden;  // panel [tiles][hidden_k_tiles][rows][32]: the activated rows once more, or null
  int32_t hidden_k_tiles;
  char* scratch;
};

// A panel with elements dropped, into another: rows [0, live), columns from `column` on.
struct DropoutPanel {
  const char* in;
  char* out;
  Tiling tiling;
  int32_t live, column, k_tiles;
  Dropout dropout;
};

// A contraction over rows: c[r][n] is, or grows by, the sum over m of weight[m] * p[m][r] * q[m][n].
struct LoraWgrad {
  const char* const* p;  // [rows] where each row of a rank panel lies
  int64_t p_block;       // bytes from there to its ranks 32 ..., and so on
  const double* weight;  // [rows], or null: all are 1
  int32_t rows;
  int32_t rank;          // a multiple of kRankStep
  const char* const* q;  // [rows] where each row's first column lies
  int64_t q_block;       // bytes from there to its columns 32 ..., and so on
  DType dtype;
  int32_t columns;
  Dropout dropout;  // of q, whose first column is number `column`
  int32_t column;
  bool first;  // c starts from zero
  char* c;     // [rank up to a multiple of 16][c_stride]; written up to a multiple of 32 columns, which lie in the
  int64_t c_stride;  // variant's own order within each 32
  char* scratch;     // wgrad_scratch(rank, sum_bytes) bytes
};
constexpr int kWgradRows = 128;                    // at most
constexpr int kWgradColumns = 1024;                // made into tiles at a time
constexpr int kWideRows = 64, kWideColumns = 256;  // written out as sums at a time
constexpr int kWideStride = kWideColumns + 16;     // not a power of two: rows must not share cache sets
constexpr int64_t wgrad_scratch(int64_t rank, int64_t sum_bytes) {
  int64_t ranks = round_up(rank, kTileN), tiles = (ranks + kWgradColumns) * kWgradRows * 2;
  int64_t wide = (kWgradRows * ranks + kWideRows * kWideStride) * sum_bytes;
  return wide > tiles ? wide : tiles;
}

// What `lora_wgrad` summed up, times `scale`, into a tensor: element (r, n) to data[r * r_stride + n * n_stride].
struct StoreGrad {
  const char* c;  // from the first rank wanted on
  int64_t c_stride;
  int32_t ranks;
  int32_t from, each;  // of every 32 columns `each` from `from` on: all, or 16 of gate or of up
  int32_t count;       // of n
  double scale;
  void* data;
  DType dtype;
  int64_t r_stride, n_stride;
};
constexpr int kRankStep = 8;

// One matrix of one expert as the checkpoint has it: element (n, k) at data + n * n_stride + k * k_stride (elements).
struct Source {
  const void* data;
  DType dtype;
  int64_t n_stride, k_stride;
};

// Fills one block from one source (32 outputs) or two (16 of gate, 16 of up). Outputs past n_valid and k past K are
// zero.
struct Pack {
  Source half[2];
  int32_t n0[2];  // first output of each half
  int32_t n_valid;
  int32_t k;
  int32_t k_tiles;
  char* out;
};

// Rates of bare loops for the benches' roof and the thread probe; all run on the calling thread for about `seconds`.
enum class Rate : uint8_t { registers, panels, read, bytes };

struct KernelTable {
  const char* name;  // of the variant
  Precision precision;
  DType panel, sums;               // of activations in a panel; of everything that is added up: f32 or f64
  int32_t elem, sum_bytes;         // their sizes
  int32_t tile_bytes;              // of a weight tile
  Tiling (*tiling)(int32_t live);  // how to cut `live` rows
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
  int32_t gemv_max_tokens;                         // at most, in one call
  void (*pack_rows)(const PackRows&);              // null: not in this precision
  void (*gemv_rows)(const Gemv&);                  // likewise
  void (*attention_split)(const AttentionSplit&);  // likewise
  void (*norm)(const Norm&);                       // likewise
  void (*lora_gemv)(const LoraGemv&);              // likewise
  void (*quantise)(const Quantise&);               // likewise, and then there is no W8A8
  void (*quantise_panel)(const QuantisePanel&);    // likewise
  void (*gather_int8)(const GatherInt8&);          // likewise
  int32_t (*packed_gemv_rows)(
      const Encoding&);  // rows of numbers that meet such codes as they lie, at most; null: none do
  // Units (flop, or bytes for `read`) per second. `panels` multiplies with K = 2048 over `bytes` of scratch, and so
  // does `bytes` in W8A8.
  double (*rate)(Rate what, double seconds, char* scratch, size_t bytes);
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
  bool emulated;               // software intrinsics (KT_EMULATE): runs anywhere, only when asked for
  const char* missing;         // comma-separated features the machine lacks; "" when it lacks none

  const KernelTable* table(Precision p) const { return tables ? tables->of[(int)p] : nullptr; }
};

// Every variant that exists, in ascending order of preference.
int variant_count();
const Variant& variant(int index);

// The table in use: what the environment asks for (cpu.h), else the best native one that has the precision; chosen
// once. Throws std::runtime_error that says what is missing and what to do instead.
const KernelTable& kernels(Precision precision = Precision::bf16);
// By name, emulated ones included; throws likewise.
const KernelTable& kernels(const char* name, Precision precision = Precision::bf16);
// What kernels() keeps, from the environment as it is now.
const KernelTable& choose_kernels(Precision precision = Precision::bf16);

constexpr const char* name_of(Precision p) {
  return p == Precision::f64 ? "f64" : p == Precision::f32 ? "f32" : "bf16";
}

}  // namespace kt
