// A pass takes some hundred rows. They are gathered into a panel, and where codes are multiplied as they lie written as
// operands, once for all threads; then threads take ranges of blocks, long ones first. A thread claims its next range
// before it multiplies the current one, so that the next weights are prefetched.
#include "moe/coded_linear.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32c.h"

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

// Memory of the calling thread for one purpose, which its later calls reuse; `which`: one of several at a time.
template <class Purpose>
char* thread_memory(size_t bytes, int which = 0) {
  thread_local std::deque<Buffer> memory;
  while (memory.size() <= (size_t)which) memory.emplace_back();
  Buffer& own = memory[(size_t)which];
  if (own.size() < bytes) own = Buffer(bytes);
  return own.data();
}

// All variants decode to the same bits: the best native one that has the precision.
const KernelTable& best_native(Precision precision) {
  const KernelTable* best = nullptr;
  for (int i = 0; i < variant_count(); i++)
    if (variant(i).native && variant(i).table(precision)) best = variant(i).table(precision);
  return best ? *best : kernels(precision);
}

}  // namespace

// The rows of a pass as the kernels read them.
struct CodedLinear::Panel {
  Panel(const CodedLinear& linear, const LinearRows& given, int which = 0)
      : rows(given), tiling(linear.kernels_.tiling(given.tokens)) {
    const KernelTable& kernels = linear.kernels_;
    const Encoding& encoding = *linear.store_.encoding();
    k_tiles = linear.store_.k_tiles();
    row_bytes = (int64_t)kTileK * kernels.elem;
    tile_bytes = tiling.rows * row_bytes * k_tiles;
    x_int8 = linear.w8a8();
    packed = kernels.packed_gemv_rows && given.tokens <= kernels.packed_gemv_rows(encoding, x_int8);
    packed_bytes = packed && kernels.packed_row_bytes ? kernels.packed_row_bytes(encoding) : 0;
    chunk = packed ? k_tiles : std::min(k_tiles, kChunkTiles);
    const int64_t panel = round_up(tiling.tiles * tile_bytes, 64),
                  operands = round_up((int64_t)given.tokens * k_tiles * packed_bytes, 64),
                  sums = chunk < k_tiles ? (int64_t)linear.store_.blocks() * given.tokens * kBlockN * kernels.sum_bytes
                                         : 0;
    data = thread_memory<PanelMemory>((size_t)(panel + operands + sums), which);
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

  // The same rows, for another weight.
  Panel(const Panel& same, const LinearRows& given) : Panel(same) { rows = given; }

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
                                 packed_rows + (int64_t)row * k_tiles * packed_bytes,
                                 x_int8});
  }

  LinearRows rows;
  Tiling tiling;
  int32_t k_tiles, chunk, packed_bytes;
  int64_t row_bytes, tile_bytes;
  bool packed;  // codes are multiplied as they lie
  bool x_int8;  // with x in int8
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
        if (!pack_strip(encoding.format[half], source_, block * kBlockN + half * kTileN, linear_.rows_,
                        linear_.columns_, store.k_tiles(), strip))
          unpatched_ = true;
        strip += encoding.strip[half].bytes;
      }
    }
  }

  bool unpatched() const { return unpatched_; }

 private:
  CodedLinear& linear_;
  const Released& source_;
  std::atomic<bool> unpatched_{false};  // a strip has more values to patch than patches
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
      down.encoded = {store.encoding(), k, decoded, nullptr, panel_.x_int8};
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
  if (adopted_) throw std::runtime_error("the weight is in memory of another; it cannot be packed");
  packed_ = false;
  PackJob job(*this, source);
  engine_->pool.run(job);
  if (job.unpatched()) throw std::overflow_error(std::string("the weight") + kUnpatched);
  packed_ = true;
}

// Dequantised tiles are rounded to bf16, codes as they lie are not. In float32 all rows are multiplied with codes, so
// that a token has the same result in a prompt and alone.
int32_t CodedLinear::pass_rows(DType dtype) const {
  const int32_t most = dtype == DType::f32 && kernels_.packed_gemv_rows
                           ? std::min(kPassRows, kernels_.packed_gemv_rows(*store_.encoding(), w8a8()))
                           : kPassRows;
  return most > 0 ? most : kPassRows;
}

bool CodedLinear::supports_w8a8() const {
  return kernels_.packed_gemv_rows && kernels_.packed_gemv_rows(*store_.encoding(), true) > 0;
}

// Calls act with some rows at a time, as many as a pass takes.
template <class Act>
void CodedLinear::for_each_pass(const LinearRows& rows, const Act& act) const {
  const int64_t size = (int64_t)size_of(rows.dtype);
  const int32_t step = pass_rows(rows.dtype);
  for (int32_t first = 0; first < rows.tokens; first += step) {
    LinearRows pass = rows;
    pass.x = (const char*)rows.x + first * rows.x_stride * size;
    pass.out = (char*)rows.out + first * rows.out_stride * size;
    pass.tokens = std::min(step, rows.tokens - first);
    act(pass);
  }
}

void CodedLinear::multiply(const LinearRows& rows) const {
  const Read read(readers_);
  for_each_pass(rows, [&](const LinearRows& pass) { multiply_pass(pass); });
}

// A thread that finds no range of one product takes those of the next: nothing waits between them.
class CodedLinear::JointJob : public Job {
 public:
  explicit JointJob(const std::vector<Product>& products) {
    for (const Product& product : products) {
      reads_.emplace_back(product.linear->readers_);
      product.linear->for_each_pass(product.rows, [&](const LinearRows& pass) {
        const CodedLinear& linear = *product.linear;
        const Panel* same = panel_of_same_rows(linear, pass);
        if (same) {
          panels_.emplace_back(*same, pass);
        } else {
          panels_.emplace_back(linear, pass, (int)panels_.size())
              .gather(linear.kernels_, *linear.store_.encoding(), linear.columns_, 0, panels_.back().tiling.tiles);
        }
        linears_.push_back(&linear);
        products_.emplace_back(linear, panels_.back());
      });
    }
  }

  void work(const Worker& worker) override {
    for (ProductJob& product : products_)
      if (!cancelled()) product.work(worker);
  }

 private:
  // Operands depend on the format alone. What is dequantised has sums of its own.
  const Panel* panel_of_same_rows(const CodedLinear& linear, const LinearRows& rows) const {
    for (size_t i = 0; i < panels_.size(); i++) {
      const LinearRows& given = panels_[i].rows;
      const bool same_rows = given.x == rows.x && given.x_stride == rows.x_stride && given.dtype == rows.dtype &&
                             given.tokens == rows.tokens;
      const bool same_operands = linears_[i]->store_.encoding()->format[0] == linear.store_.encoding()->format[0] &&
                                 linears_[i]->columns_ == linear.columns_ && linears_[i]->w8a8() == linear.w8a8() &&
                                 &linears_[i]->kernels_ == &linear.kernels_;
      if (same_rows && same_operands && panels_[i].packed) return &panels_[i];
    }
    return nullptr;
  }

  std::deque<Read> reads_;  // neither they nor jobs can be moved
  std::deque<Panel> panels_;
  std::vector<const CodedLinear*> linears_;
  std::deque<ProductJob> products_;
};

std::unique_ptr<Job> CodedLinear::product_job(const std::vector<Product>& products) {
  return std::make_unique<JointJob>(products);
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

// Rows of W by their numbers, each to its place in `out`; a thread decodes a block for all rows that are wanted of it.
class CodedLinear::DecodeJob : public Job {
 public:
  DecodeJob(const CodedLinear& linear, const KernelTable& kernels, const int64_t* rows, int64_t count, char* out)
      : linear_(linear), kernels_(kernels), out_(out) {
    wanted_.reserve((size_t)count);
    for (int64_t at = 0; at < count; at++) wanted_.push_back({(int32_t)rows[at], at});
    std::sort(wanted_.begin(), wanted_.end(), [](const Wanted& a, const Wanted& b) { return a.row < b.row; });
    for (size_t i = 0; i < wanted_.size(); i++)
      if (!i || wanted_[i].row / kBlockN != wanted_[i - 1].row / kBlockN) begin_.push_back(i);
    begin_.push_back(wanted_.size());
  }

  void work(const Worker&) override {
    const BlockStore& store = linear_.store_;
    char* tiles = thread_memory<ThreadMemory>((size_t)store.k_tiles() * 2 * (size_t)kernels_.tile_bytes);
    for (size_t group; !cancelled() && (group = next_.fetch_add(1)) + 1 < begin_.size();) {
      const size_t first = begin_[group];
      kernels_.decode({store.encoding(), store.at(0, wanted_[first].row / kBlockN), 0, store.k_tiles(), tiles});
      for (size_t i = first; i < begin_[group + 1]; i++) copy(tiles, wanted_[i]);
    }
  }

 private:
  struct Wanted {
    int32_t row;
    int64_t at;
  };

  void copy(const char* tiles, const Wanted& wanted) const {
    const int32_t half = wanted.row % kBlockN / kTileN, lane = wanted.row % kTileN, columns = linear_.columns_;
    const char* first = tiles + half * kernels_.tile_bytes;
    if (kernels_.tile_bytes == 4 * kTileK * kTileN)
      copy_row<uint32_t>(first, columns, wanted.at, [&](int32_t k) { return k * kTileN + lane; });
    else
      copy_row<uint16_t>(first, columns, wanted.at, [&](int32_t k) { return (k / 2 * kTileN + lane) * 2 + k % 2; });
  }

  template <class Number, class Place>
  void copy_row(const char* first, int32_t columns, int64_t at, const Place& place) const {
    Number* out = (Number*)out_ + at * columns;
    for (int32_t k0 = 0; k0 < columns; k0 += kTileK, first += 2 * kernels_.tile_bytes) {
      const Number* tile = (const Number*)first;
      const int32_t count = std::min(kTileK, columns - k0);
      for (int32_t k = 0; k < count; k++) out[k0 + k] = tile[place(k)];
    }
  }

  const CodedLinear& linear_;
  const KernelTable& kernels_;
  char* out_;
  std::vector<Wanted> wanted_;
  std::vector<size_t> begin_;  // of the rows of each block, and the end
  std::atomic<size_t> next_{0};
};

void CodedLinear::decode(const int64_t* rows, int64_t count, DType dtype, char* out) const {
  const Read read(readers_);
  DecodeJob job(*this, dtype == DType::f32 ? best_native(Precision::f32) : kernels_, rows, count, out);
  count < kBlockN ? job.work({}) : engine_->pool.run(job);
}

void CodedLinear::adopt(const char* blocks, std::shared_ptr<const void> owner) {
  readers_.lock(kWeights);
  struct Unlock {
    Readers& readers;
    ~Unlock() { readers.unlock(); }
  } unlock{readers_};
  packed_ = false;
  mapping_ = mapping_at(blocks);
  store_.adopt(blocks, std::move(owner));
  check_mapping(mapping_);
  packed_ = adopted_ = true;
}

uint32_t CodedLinear::checksum() const {
  const Read read(readers_);
  uint32_t checksum = 0;
  for (int group = 0; group < store_.parts(); group++)
    for (int32_t block = store_.begin(group); block < store_.end(group); block++)
      checksum = crc32c(store_.at(0, block), store_.block_bytes(), checksum);
  check_mapping(mapping_);
  return checksum;
}

}  // namespace kt
