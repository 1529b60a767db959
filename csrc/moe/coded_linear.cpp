// A pass takes some hundred rows. They are gathered into a panel, and where codes are multiplied as they lie written as
// operands, once for all threads; then threads take ranges of blocks, long ones first. A thread claims its next range
// before it multiplies the current one, so that the next weights are prefetched.
#include "moe/coded_linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
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
struct HeadMemory {};

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

// Blocks [first, first + count) of the weight, which are adjacent in memory. The outputs of block `origin` are columns
// 0 to 31 of the result, which has `width` columns.
struct CodedLinear::Range {
  int32_t first, count, origin, width;
};

// The rows of a pass as the kernels read them.
struct CodedLinear::Panel {
  Panel(const CodedLinear& linear, const LinearRows& given, bool rounds, int which = 0)
      : rows(given), tiling(linear.kernels_.tiling(given.tokens)), x_int8(rounds) {
    const KernelTable& kernels = linear.kernels_;
    const Encoding& encoding = *linear.store_.encoding();
    k_tiles = linear.store_.k_tiles();
    row_bytes = (int64_t)kTileK * kernels.elem;
    tile_bytes = tiling.rows * row_bytes * k_tiles;
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
  bool x_int8;  // codes that are multiplied as they lie are multiplied with x in int8
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
        linear_.multiply_range(panel_, range, next.count ? linear_.store_.at(0, next.first) : nullptr, slice);
        range = next;
      }
    }
  }

 private:
  Range take(int group) {
    const int32_t end = linear_.store_.end(group);
    std::atomic<int32_t>& next = next_[(size_t)group];
    int32_t first = next.load(std::memory_order_relaxed);
    while (first < end) {
      const int64_t share = (end - first) / (kRanges * linear_.engine_->pool.threads());
      const int32_t count = (int32_t)std::min<int64_t>(std::clamp<int64_t>(share, 1, kMaxBlocks), end - first);
      if (next.compare_exchange_weak(first, first + count, std::memory_order_relaxed))
        return {first, count, 0, linear_.rows_};
    }
    return {};
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

void CodedLinear::multiply_range(const Panel& panel, const Range& range, const char* next, char* slice) const {
  const LinearRows& rows = panel.rows;
  Down down{};
  down.tiling = panel.tiling;
  down.live = rows.tokens;
  down.block_bytes = store_.block_bytes();
  down.block0 = range.first - range.origin;
  down.block1 = down.block0 + range.count;
  down.rows = {panel.token.data(), nullptr, panel.mark.data()};
  down.sum_block = (int64_t)rows.tokens * kBlockN;
  down.sum = panel.sum + range.first * down.sum_block * kernels_.sum_bytes;
  down.out = rows.out;
  down.dtype = rows.dtype;
  down.out_stride = rows.out_stride;
  down.width = range.width;
  down.scratch = slice;
  down.packed_rows = panel.packed_rows;
  char* decoded = slice + kScratchSums * kernels_.sum_bytes;
  for (int32_t k = 0; k < panel.k_tiles; k += panel.chunk) {
    const int32_t count = std::min(panel.chunk, panel.k_tiles - k);
    down.first = k == 0;
    down.last = k + count == panel.k_tiles;
    down.base = {panel.data + k * panel.tiling.rows * panel.row_bytes, (size_t)panel.tile_bytes,
                 store_.at(0, range.first), count};
    down.encoded = {store_.encoding(), k, decoded, nullptr, panel.x_int8};
    down.next = down.last ? next : nullptr;
    if (panel.packed) {
      for (int32_t r = 0; r < std::min(rows.tokens, kPackedGemvRows); r++)
        down.packed_gemv.row[r] = panel.data + r * panel.row_bytes;
      down.packed_gemv.step = panel.tiling.rows * panel.row_bytes;
    }
    kernels_.down(down);
  }
}

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
int32_t CodedLinear::pass_rows(DType dtype, bool x_int8) const {
  const int32_t most = dtype == DType::f32 && kernels_.packed_gemv_rows
                           ? std::min(kPassRows, kernels_.packed_gemv_rows(*store_.encoding(), x_int8))
                           : kPassRows;
  return most > 0 ? most : kPassRows;
}

bool CodedLinear::supports_w8a8() const {
  return kernels_.packed_gemv_rows && kernels_.packed_gemv_rows(*store_.encoding(), true) > 0;
}

// Calls act with `step` rows at a time.
template <class Act>
void CodedLinear::for_each_pass(const LinearRows& rows, int32_t step, const Act& act) {
  const int64_t size = (int64_t)size_of(rows.dtype);
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
  const bool x_int8 = w8a8();
  for_each_pass(rows, pass_rows(rows.dtype, x_int8), [&](const LinearRows& pass) { multiply_pass(pass, x_int8); });
}

// A thread that finds no range of one product takes those of the next: nothing waits between them.
class CodedLinear::JointJob : public Job {
 public:
  explicit JointJob(const std::vector<Product>& products) {
    for (const Product& product : products) {
      reads_.emplace_back(product.linear->readers_);
      const CodedLinear& linear = *product.linear;
      const bool x_int8 = linear.w8a8();
      for_each_pass(product.rows, linear.pass_rows(product.rows.dtype, x_int8), [&](const LinearRows& pass) {
        const Panel* same = panel_of_same_rows(linear, pass, x_int8);
        if (same) {
          panels_.emplace_back(*same, pass);
        } else {
          panels_.emplace_back(linear, pass, x_int8, (int)panels_.size())
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
  const Panel* panel_of_same_rows(const CodedLinear& linear, const LinearRows& rows, bool x_int8) const {
    for (size_t i = 0; i < panels_.size(); i++) {
      const LinearRows& given = panels_[i].rows;
      const bool same_rows = given.x == rows.x && given.x_stride == rows.x_stride && given.dtype == rows.dtype &&
                             given.tokens == rows.tokens;
      const bool same_operands = linears_[i]->store_.encoding()->format[0] == linear.store_.encoding()->format[0] &&
                                 linears_[i]->columns_ == linear.columns_ && panels_[i].x_int8 == x_int8 &&
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

void CodedLinear::multiply_pass(const LinearRows& rows, bool x_int8) const {
  const Panel panel(*this, rows, x_int8);
  if (rows.tokens < kParallelRows) {
    panel.gather(kernels_, *store_.encoding(), columns_, 0, panel.tiling.tiles);
  } else {
    GatherJob gather(*this, panel);
    engine_->pool.run(gather);
  }
  ProductJob product(*this, panel);
  engine_->pool.run(product);
}

// A unit is a part of a head: blocks of it where sums run over K, k tiles of all its blocks where they run along rows.
// Units of heads that begin on each group's node come first.
class CodedLinear::HeadsJob : public Job {
 public:
  HeadsJob(const CodedLinear& linear, const HeadProducts& products)
      : linear_(linear),
        p_(products),
        x_int8_(linear.w8a8()),
        pass_rows_(linear.pass_rows(DType::f32, x_int8_)),
        next_((size_t)linear.store_.parts()) {
    const int32_t most = p_.along_rows ? linear_.store_.k_tiles() : blocks_of(0).count;
    const int64_t wanted = ceil_div(kUnits * linear_.engine_->pool.threads(), p_.heads);
    parts_ = (int32_t)std::clamp<int64_t>(wanted, 1, most);
    int32_t head = 0;
    for (int group = 0; group < linear_.store_.parts(); group++) {
      next_[(size_t)group] = head * parts_;
      while (head < p_.heads && blocks_of(head).first < linear_.store_.end(group)) head++;
      end_.push_back(head * parts_);
    }
  }

  void work(const Worker& worker) override {
    const int groups = linear_.store_.parts();
    for (int i = 0; i < groups; i++) {
      const int group = (worker.group + i) % groups;
      for (int32_t unit = take(group); unit >= 0 && !cancelled();) {
        const int32_t next = take(group);
        p_.along_rows ? multiply_along_rows(unit, next) : multiply_over_columns(unit, next);
        unit = next;
      }
    }
  }

 private:
  static constexpr int64_t kUnits = 2;  // per thread, at least

  // The blocks that have rows of a head, and the place of its first row in them.
  struct HeadBlocks {
    int32_t first, count, offset;
  };
  HeadBlocks blocks_of(int32_t head) const {
    const int32_t row = head * p_.step + p_.first, first = row / kBlockN;
    return {first, (int32_t)ceil_div(row + p_.count, kBlockN) - first, row % kBlockN};
  }

  int32_t take(int group) {
    const int32_t unit = next_[(size_t)group].fetch_add(1, std::memory_order_relaxed);
    return unit < end_[(size_t)group] ? unit : -1;
  }

  LinearRows rows_of(int32_t head) const {
    const int64_t size = (int64_t)size_of(p_.rows.dtype);
    LinearRows rows = p_.rows;
    rows.x = (const char*)rows.x + head * p_.x_head * size;
    rows.out = (char*)rows.out + head * p_.out_head * size;
    return rows;
  }

  // Of `count` pieces of a head, those of a unit.
  struct Share {
    int32_t begin, end;
  };
  Share share_of(int32_t unit, int32_t count) const {
    const int64_t part = unit % parts_;
    return {(int32_t)(count * part / parts_), (int32_t)(count * (part + 1) / parts_)};
  }

  void multiply_over_columns(int32_t unit, int32_t next) const {
    const HeadBlocks blocks = blocks_of(unit / parts_);
    const Share share = share_of(unit, blocks.count);
    const char* then = nullptr;
    if (next >= 0) {
      const HeadBlocks of_next = blocks_of(next / parts_);
      then = linear_.store_.at(0, of_next.first + share_of(next, of_next.count).begin);
    }
    for_each_pass(rows_of(unit / parts_), pass_rows_, [&](const LinearRows& pass) {
      Panel panel(linear_, pass, x_int8_);
      panel.gather(linear_.kernels_, *linear_.store_.encoding(), linear_.columns_, 0, panel.tiling.tiles);
      if (blocks.offset) return multiply_apart(panel, blocks, share, then);
      multiply_blocks(panel, blocks.first + share.begin, blocks.first + share.end, blocks.first, p_.count, then);
    });
  }

  // A head whose first row is not the first of a block: its blocks begin with rows of others, and have results of
  // their own, from which those of the head are copied.
  void multiply_apart(Panel& panel, const HeadBlocks& blocks, const Share& share, const char* then) const {
    const int64_t size = (int64_t)size_of(p_.rows.dtype);
    const int32_t width = (share.end - share.begin) * kBlockN, column = share.begin * kBlockN - blocks.offset,
                  from = std::max(0, -column), to = std::min(width, p_.count - column);
    const LinearRows wanted = panel.rows;
    panel.rows.out = thread_memory<HeadMemory>((size_t)((int64_t)wanted.tokens * width * size));
    panel.rows.out_stride = width;
    const int32_t first = blocks.first + share.begin;
    multiply_blocks(panel, first, blocks.first + share.end, first, width, then);
    for (int32_t t = 0; t < wanted.tokens && from < to; t++)
      std::memcpy((char*)wanted.out + (t * wanted.out_stride + column + from) * size,
                  (const char*)panel.rows.out + ((int64_t)t * width + from) * size, (size_t)((to - from) * size));
  }

  // Blocks [first, end), as many at a time as are adjacent in memory.
  void multiply_blocks(const Panel& panel, int32_t first, int32_t end, int32_t origin, int32_t width,
                       const char* then) const {
    char* slice = thread_memory<ThreadMemory>(panel.slice_bytes);
    for (int32_t stop; first < end; first = stop) {
      stop = std::min(end, linear_.store_.end(linear_.store_.group_of(first)));
      linear_.multiply_range(panel, {first, stop - first, origin, width}, stop == end ? then : nullptr, slice);
    }
  }

  void multiply_along_rows(int32_t unit, int32_t next) const {
    const HeadBlocks blocks = blocks_of(unit / parts_);
    const Share tiles = share_of(unit, linear_.store_.k_tiles());
    const LinearRows rows = rows_of(unit / parts_);
    const int64_t width = (int64_t)blocks.count * kBlockN;
    const size_t factors = (size_t)round_up(rows.tokens * width * (int64_t)sizeof(float), 64);
    char* memory = thread_memory<HeadMemory>(factors + (size_t)rows_product_scratch(blocks.count));
    float* x = (float*)memory;
    std::memset(x, 0, factors);
    for (int32_t t = 0; t < rows.tokens; t++)
      for (int32_t n = 0; n < p_.count; n++)
        x[t * width + blocks.offset + n] = element_of<float>(rows.x, t * rows.x_stride + n, rows.dtype);
    std::vector<const char*> block, then;
    const HeadBlocks of_next = next >= 0 ? blocks_of(next / parts_) : HeadBlocks{};
    const int32_t next_tile = next >= 0 ? share_of(next, linear_.store_.k_tiles()).begin : 0;
    for (int32_t i = 0; i < blocks.count; i++) {
      block.push_back(linear_.store_.at(0, blocks.first + i));
      then.push_back(i < of_next.count ? linear_.store_.at(0, of_next.first + i) : nullptr);
    }
    linear_.kernels_.multiply_rows({linear_.store_.encoding(), block.data(), then.data(), blocks.count, tiles.begin,
                                    tiles.end - tiles.begin, next_tile, x, rows.tokens, rows.out, rows.dtype,
                                    rows.out_stride, linear_.columns_, memory + factors});
  }

  const CodedLinear& linear_;
  const HeadProducts& p_;
  const bool x_int8_;
  const int32_t pass_rows_;
  int32_t parts_;  // of a head
  std::vector<std::atomic<int32_t>> next_;
  std::vector<int32_t> end_;
};

void CodedLinear::multiply_heads(const HeadProducts& products) const {
  const Read read(readers_);
  if (!products.heads || !products.rows.tokens) return;
  HeadsJob job(*this, products);
  engine_->pool.run(job);
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
      kernels_.tile_bytes == 4 * kTileK* kTileN ? copy_rows<uint32_t>(tiles, first, begin_[group + 1])
                                                : copy_rows<uint16_t>(tiles, first, begin_[group + 1]);
    }
  }

 private:
  struct Wanted {
    int32_t row;
    int64_t at;
  };

  // Rows [first, end) of those that are wanted, tile by tile: a tile stays in L1 for all of them.
  template <class Number>
  void copy_rows(const char* tiles, size_t first, size_t end) const {
    constexpr int along_k = sizeof(Number) == 4 ? 1 : 2;  // numbers of a row that lie together
    const int32_t columns = linear_.columns_;
    for (int32_t k0 = 0; k0 < columns; k0 += kTileK, tiles += 2 * kernels_.tile_bytes)
      for (size_t i = first; i < end; i++) {
        const int32_t half = wanted_[i].row % kBlockN / kTileN, lane = wanted_[i].row % kTileN,
                      count = std::min(kTileK, columns - k0);
        const Number* from = (const Number*)(tiles + half * kernels_.tile_bytes) + lane * along_k;
        Number* out = (Number*)out_ + wanted_[i].at * columns + k0;
        for (int32_t k = 0; k < count; k++) out[k] = from[k / along_k * kTileN * along_k + k % along_k];
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
