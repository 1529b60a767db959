// A pass takes some hundred rows. They are gathered into a panel, and where codes are multiplied as they lie written as
// operands, once for all threads; then threads take ranges of blocks, long ones first. A thread claims its next range
// before it multiplies the current one, so that the next weights are prefetched.
#include "moe/coded_linear.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

namespace kt {

namespace {

constexpr int32_t kPassRows = 512;
constexpr int32_t kParallelRows = 32;  // from which on rows are gathered by all threads
constexpr int32_t kChunkTiles = 64;    // k tiles of dequantised blocks at a time
constexpr int64_t kMaxBlocks = 8;      // of a range
constexpr int64_t kRanges = 4;         // per thread, of the remaining blocks
constexpr int64_t kScratchSums = 2 * 2 * kMaxRows * kBlockN;

constexpr const char* kWeights = "weights of a linear layer";

struct PanelMemory {};
struct ThreadMemory {};

// Memory of the calling thread for one purpose, which its later calls reuse.
template <class Purpose>
char* thread_memory(size_t bytes) {
  thread_local Buffer memory;
  if (memory.size() < bytes) memory = Buffer(bytes);
  return memory.data();
}

}  // namespace

// The rows of a pass as the kernels read them.
struct CodedLinear::Panel {
  Panel(const CodedLinear& linear, const LinearRows& given)
      : rows(given), tiling(linear.kernels_.tiling(given.tokens)) {
    const KernelTable& kernels = linear.kernels_;
    const Encoding& encoding = *linear.store_.encoding();
    k_tiles = linear.store_.k_tiles();
    row_bytes = (int64_t)kTileK * kernels.elem;
    tile_bytes = tiling.rows * row_bytes * k_tiles;
    packed = kernels.packed_gemv_rows && given.tokens <= kernels.packed_gemv_rows(encoding);
    packed_bytes = packed && kernels.packed_row_bytes ? kernels.packed_row_bytes(encoding) : 0;
    chunk = packed ? k_tiles : std::min(k_tiles, kChunkTiles);
    const int64_t panel = round_up(tiling.tiles * tile_bytes, 64),
                  operands = round_up((int64_t)given.tokens * k_tiles * packed_bytes, 64),
                  sums = chunk < k_tiles ? (int64_t)linear.store_.blocks() * given.tokens * kBlockN * kernels.sum_bytes
                                         : 0;
    data = thread_memory<PanelMemory>((size_t)(panel + operands + sums));
    packed_rows = packed_bytes ? data + panel : nullptr;
    sum = data + panel + operands;
    token.resize((size_t)given.tokens);
    std::iota(token.begin(), token.end(), 0);
    mark.assign((size_t)given.tokens, kFirst | kLast);
    const int64_t decoded = std::max<int64_t>(chunk, kRingTiles) * 2 * kernels.tile_bytes,
                  reordered =
                      packed && !packed_bytes ? (int64_t)k_tiles * given.tokens * kernels.packed_gemv_row_bytes : 0;
    slice_bytes = (size_t)(kScratchSums * kernels.sum_bytes + std::max(decoded, reordered));
  }

  // Gathers tiles [first, end) and writes them as operands; `first` is a multiple of two, as passes of the kernels are.
  void gather(const KernelTable& kernels, const Encoding& encoding, int32_t width, int32_t first, int32_t end) const {
    const int32_t row = first * tiling.rows, live = std::min(rows.tokens, end * tiling.rows) - row;
    char* to = data + first * tile_bytes;
    const Tiling part{tiling.rows, end - first};
    kernels.gather({rows.x, rows.dtype, rows.x_stride, token.data() + row, live, part, 0, k_tiles, width, to});
    if (packed_rows)
      kernels.write_packed_rows({{to, (size_t)tile_bytes, nullptr, k_tiles},
                                 part,
                                 live,
                                 &encoding,
                                 packed_rows + (int64_t)row * k_tiles * packed_bytes});
  }

  LinearRows rows;
  Tiling tiling;
  int32_t k_tiles, chunk, packed_bytes;
  int64_t row_bytes, tile_bytes;
  bool packed;  // codes are multiplied as they lie
  char *data, *packed_rows, *sum;
  size_t slice_bytes;  // of each thread
  std::vector<int32_t> token;
  std::vector<uint8_t> mark;
};

class CodedLinear::PackJob : public Job {
 public:
  PackJob(CodedLinear& linear, const Released& source) : linear_(linear), source_(source) {}

  void work(const Worker&) override {
    BlockStore& store = linear_.store_;
    const Encoding& encoding = *store.encoding();
    for (int32_t block; !cancelled() && (block = next_++) < store.blocks();) {
      char* strip = store.at(0, block);
      for (int half = 0; half < 2; half++) {
        pack_strip(encoding.format[half], source_, block * kBlockN + half * kTileN, linear_.rows_, linear_.columns_,
                   store.k_tiles(), strip);
        strip += encoding.strip[half].bytes;
      }
    }
  }

 private:
  CodedLinear& linear_;
  const Released& source_;
  std::atomic<int32_t> next_{0};
};

class CodedLinear::GatherJob : public Job {
 public:
  GatherJob(const CodedLinear& linear, const Panel& panel) : linear_(linear), panel_(panel) {}

  void work(const Worker&) override {
    for (int32_t tile; !cancelled() && (tile = next_.fetch_add(2)) < panel_.tiling.tiles;)
      panel_.gather(linear_.kernels_, *linear_.store_.encoding(), linear_.columns_, tile,
                    std::min(tile + 2, panel_.tiling.tiles));
  }

 private:
  const CodedLinear& linear_;
  const Panel& panel_;
  std::atomic<int32_t> next_{0};
};

// Blocks of each group's node first: its own threads read them.
class CodedLinear::ProductJob : public Job {
 public:
  ProductJob(const CodedLinear& linear, const Panel& panel)
      : linear_(linear), panel_(panel), next_((size_t)linear.store_.parts()) {
    for (int group = 0; group < linear.store_.parts(); group++) next_[(size_t)group] = linear.store_.begin(group);
  }

  void work(const Worker& worker) override {
    char* slice = thread_memory<ThreadMemory>(panel_.slice_bytes);
    const int groups = linear_.store_.parts();
    for (int i = 0; i < groups; i++) {
      const int group = (worker.group + i) % groups;
      for (Range range = take(group); range.count && !cancelled();) {
        const Range next = take(group);
        multiply(range, next.count ? linear_.store_.at(0, next.first) : nullptr, slice);
        range = next;
      }
    }
  }

 private:
  struct Range {
    int32_t first, count;
  };

  Range take(int group) {
    const int32_t end = linear_.store_.end(group);
    std::atomic<int32_t>& next = next_[(size_t)group];
    int32_t first = next.load(std::memory_order_relaxed);
    while (first < end) {
      const int64_t share = (end - first) / (kRanges * linear_.engine_->pool.threads());
      const int32_t count = (int32_t)std::min<int64_t>(std::clamp<int64_t>(share, 1, kMaxBlocks), end - first);
      if (next.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) return {first, count};
    }
    return {};
  }

  void multiply(const Range& range, const char* next, char* slice) const {
    const BlockStore& store = linear_.store_;
    const LinearRows& rows = panel_.rows;
    Down down{};
    down.tiling = panel_.tiling;
    down.live = rows.tokens;
    down.block_bytes = store.block_bytes();
    down.block0 = range.first;
    down.block1 = range.first + range.count;
    down.rows = {panel_.token.data(), nullptr, panel_.mark.data()};
    down.sum_block = (int64_t)rows.tokens * kBlockN;
    down.sum = panel_.sum + range.first * down.sum_block * linear_.kernels_.sum_bytes;
    down.out = rows.out;
    down.dtype = rows.dtype;
    down.out_stride = rows.out_stride;
    down.width = linear_.rows_;
    down.scratch = slice;
    down.packed_rows = panel_.packed_rows;
    char* decoded = slice + kScratchSums * linear_.kernels_.sum_bytes;
    for (int32_t k = 0; k < panel_.k_tiles; k += panel_.chunk) {
      const int32_t count = std::min(panel_.chunk, panel_.k_tiles - k);
      down.first = k == 0;
      down.last = k + count == panel_.k_tiles;
      down.base = {panel_.data + k * panel_.tiling.rows * panel_.row_bytes, (size_t)panel_.tile_bytes,
                   store.at(0, range.first), count};
      down.encoded = {store.encoding(), k, decoded};
      down.next = down.last ? next : nullptr;
      if (panel_.packed) {
        for (int32_t r = 0; r < std::min(rows.tokens, kPackedGemvRows); r++)
          down.packed_gemv.row[r] = panel_.data + r * panel_.row_bytes;
        down.packed_gemv.step = panel_.tiling.rows * panel_.row_bytes;
      }
      linear_.kernels_.down(down);
    }
  }

  const CodedLinear& linear_;
  const Panel& panel_;
  std::vector<std::atomic<int32_t>> next_;
};

CodedLinear::CodedLinear(int32_t rows, int32_t columns, const Format& format, const KernelTable& kernels,
                         std::shared_ptr<Engine> engine)
    : rows_(rows),
      columns_(columns),
      kernels_(kernels),
      engine_(std::move(engine)),
      store_(1, (int32_t)ceil_div(rows, kBlockN), (int32_t)ceil_div(columns, kTileK), kernels.tile_bytes, 1,
             engine_->pool, {format, format}) {}

// A reader of the weights, in a scope.
class CodedLinear::Read {
 public:
  explicit Read(const Readers& readers) : readers_(readers) { readers_.enter(kWeights); }
  ~Read() { readers_.leave(); }
  Read(const Read&) = delete;

 private:
  const Readers& readers_;
};

void CodedLinear::pack(const Released& source) {
  readers_.lock(kWeights);
  struct Unlock {
    Readers& readers;
    ~Unlock() { readers.unlock(); }
  } unlock{readers_};
  packed_ = false;
  PackJob job(*this, source);
  engine_->pool.run(job);
  packed_ = true;
}

void CodedLinear::multiply(const LinearRows& rows) const {
  const Read read(readers_);
  const int64_t size = (int64_t)size_of(rows.dtype);
  // Dequantised tiles are rounded to bf16, codes as they lie are not. In float32 all rows are multiplied with codes, so
  // that a token has the same result in a prompt and alone.
  const int32_t most = rows.dtype == DType::f32 && kernels_.packed_gemv_rows
                           ? std::min(kPassRows, kernels_.packed_gemv_rows(*store_.encoding()))
                           : kPassRows,
                pass_rows = most > 0 ? most : kPassRows;
  for (int32_t first = 0; first < rows.tokens; first += pass_rows) {
    LinearRows pass = rows;
    pass.x = (const char*)rows.x + first * rows.x_stride * size;
    pass.out = (char*)rows.out + first * rows.out_stride * size;
    pass.tokens = std::min(pass_rows, rows.tokens - first);
    multiply_pass(pass);
  }
}

void CodedLinear::multiply_pass(const LinearRows& rows) const {
  const Panel panel(*this, rows);
  if (rows.tokens < kParallelRows) {
    panel.gather(kernels_, *store_.encoding(), columns_, 0, panel.tiling.tiles);
  } else {
    GatherJob gather(*this, panel);
    engine_->pool.run(gather);
  }
  ProductJob product(*this, panel);
  engine_->pool.run(product);
}

void CodedLinear::decode(int32_t first, int32_t count, char* out) const {
  const Read read(readers_);
  const int64_t row_bytes = columns_ * (int64_t)(kernels_.tile_bytes / (kTileK * kTileN));
  std::vector<char> tiles(store_.k_bytes(store_.k_tiles()));
  for (int32_t row = first; row < first + count; row += kBlockN) {
    kernels_.decode({store_.encoding(), store_.at(0, row / kBlockN), 0, store_.k_tiles(), tiles.data()});
    for (int half = 0; half < 2; half++) {
      const int32_t from = row + half * kTileN;
      copy_half_rows(tiles.data(), half, std::min(kTileN, first + count - from), columns_, kernels_.tile_bytes,
                     out + (from - first) * row_bytes);
    }
  }
}

}  // namespace kt
