// Packs on the thread pool, one unit per block; each group of threads packs its own blocks first. Memory that was never
// written is populated before, one unit per huge page.
#include "moe/weights.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace kt {

void Readers::enter(const char* what) const {
  int32_t readers = count_.load(std::memory_order_relaxed);
  do {
    if (readers < 0)
      throw std::runtime_error(std::string(what) + " cannot be used while another thread packs them; wait for pack()");
  } while (!count_.compare_exchange_weak(readers, readers + 1, std::memory_order_acquire));
}

void Readers::lock(const char* what) {
  int32_t readers = 0;
  if (!count_.compare_exchange_strong(readers, -1, std::memory_order_acquire))
    throw std::runtime_error(std::string(what) + " cannot be packed while " + std::to_string(readers) +
                             " calls read them; wait for those calls first");
}

namespace {
// Backward sweeps across blocks, k tile by k tile. If they were a large power of two apart, they would map to a few
// cache sets and evict each other before use.
size_t block_distance(int32_t k_tiles, int32_t tile_bytes) {
  return (size_t)(2 * k_tiles + (k_tiles % 8 == 0 && k_tiles ? 1 : 0)) * (size_t)tile_bytes;
}
}  // namespace

BlockStore::BlockStore(int32_t experts, int32_t blocks, int32_t k_tiles, int32_t tile_bytes)
    : blocks_(blocks),
      k_tiles_(k_tiles),
      tile_bytes_(tile_bytes),
      block_bytes_(block_distance(k_tiles, tile_bytes)),
      first_{0, blocks} {
  bytes_ = (size_t)experts * (size_t)blocks * block_bytes_;
  auto buffer = std::make_shared<Buffer>(bytes_);
  base_.push_back(buffer->data());
  stride_.push_back((size_t)blocks * block_bytes_);
  owner_ = std::move(buffer);
}

BlockStore::BlockStore(int32_t experts, int32_t blocks, int32_t k_tiles, int32_t tile_bytes, int32_t step,
                       const Pool& pool, const Format (&half)[2])
    : blocks_(blocks), k_tiles_(k_tiles), tile_bytes_(tile_bytes), block_bytes_(block_distance(k_tiles, tile_bytes)) {
  if (!half[0].is_tiles()) {
    encoding_.emplace(half[0], half[1], k_tiles);
    block_bytes_ = (size_t)encoding_->block_bytes();
  }
  bytes_ = (size_t)experts * (size_t)blocks * block_bytes_;
  int groups = pool.groups();
  for (int g = 0; g <= groups; g++) first_.push_back((int32_t)((int64_t)(blocks / step) * g / groups) * step);
  first_.back() = blocks;
  auto parts = std::make_shared<std::vector<Buffer>>();
  for (int g = 0; g < groups; g++) {
    parts->emplace_back((size_t)experts * part_bytes(g), pool.node_of(g));
    base_.push_back(parts->back().data());
    stride_.push_back(part_bytes(g));
  }
  whole_ = groups == 1;
  owner_ = std::move(parts);
}

int BlockStore::group_of(int32_t block) const {
  int g = 0;
  while (block >= first_[g + 1]) g++;
  return g;
}

const char* BlockStore::at(int32_t expert, int32_t block) const {
  int g = group_of(block);
  return base_[(size_t)g] + (size_t)expert * stride_[(size_t)g] + (size_t)(block - begin(g)) * block_bytes_;
}

namespace {
int32_t up_blocks(const LayerShape& s) {
  int32_t tiles = (int32_t)ceil_div(s.intermediate, kBlockN);
  return s.gated ? 2 * tiles : tiles;
}

// All blocks of the call's experts, one by one; gate/up first, then down. `fresh`: into memory that is populated first.
class PackJob : public Job {
 public:
  PackJob(const SourceLayer& source, const LayerShape& shape, const KernelTable& kernels, BlockStore& up,
          BlockStore& down, bool fresh)
      : source_(source),
        shape_(shape),
        kernels_(kernels),
        up_(up),
        down_(down),
        fresh_(fresh),
        next_(up.parts()),
        next_page_(up.parts()) {}

  // The matrix and the expert of the call of which a strip has more values to patch than patches, or empty.
  std::string unpatched() const {
    const int64_t at = unpatched_;
    if (at < 0) return "";
    const char* const matrices[] = {"gate", "up", "down"};
    return std::string(matrices[at % 3]) + " of expert " + std::to_string(source_.first + at / 3);
  }

  void work(const Worker& worker) override {
    int groups = (int)next_.size();
    for (int i = 0; fresh_ && i < groups; i++) populate_pages((worker.group + i) % groups);
    for (int i = 0; i < groups; i++) {
      int g = (worker.group + i) % groups;
      int64_t ups = up_.end(g) - up_.begin(g), per_expert = ups + down_.end(g) - down_.begin(g);
      for (int64_t n; !cancelled() && (n = next_[g]++) < per_expert * source_.count;) {
        int32_t expert = (int32_t)(n / per_expert), block = (int32_t)(n % per_expert);
        if (block < ups) {
          pack_up(expert, up_.begin(g) + block);
        } else {
          pack_down(expert, down_.begin(g) + block - (int32_t)ups);
        }
      }
    }
  }

 private:
  // Page by page, first those of gate/up and then those of down.
  void populate_pages(int g) {
    struct Range {
      char *begin, *end;
      uintptr_t first() const { return (uintptr_t)begin / kHugePage; }
      int64_t pages() const { return (int64_t)(ceil_div((int64_t)(uintptr_t)end, kHugePage) - (int64_t)first()); }
    };
    auto range = [&](BlockStore& store) {
      size_t bytes = (size_t)source_.count * (size_t)(store.end(g) - store.begin(g)) * store.block_bytes();
      char* begin = bytes ? store.at(source_.first, store.begin(g)) : nullptr;
      return Range{begin, begin + bytes};
    };
    const Range up = range(up_), down = range(down_);
    for (int64_t n; !cancelled() && (n = next_page_[g]++) < up.pages() + down.pages();) {
      const Range& from = n < up.pages() ? up : down;
      const uintptr_t page = (from.first() + (uintptr_t)(n < up.pages() ? n : n - up.pages())) * kHugePage;
      char *begin = std::max(from.begin, (char*)page), *end = std::min(from.end, (char*)(page + kHugePage));
      populate(begin, (size_t)(end - begin));
    }
  }

  static Source of_expert(const SourceMatrix& m, int32_t expert) {
    Source s = m.source;
    s.data = (const char*)s.data + expert * m.expert_stride * (int64_t)size_of(s.dtype);
    return s;
  }

  void pack_up(int32_t expert, int32_t block) {
    Source up = of_expert(source_.up, expert);
    Pack p;
    if (shape_.gated) {
      p = {{of_expert(source_.gate, expert), up}, {block * kTileN, block * kTileN}, 0, 0, 0, nullptr};
    } else {
      p = {{up, up}, {block * kBlockN, block * kBlockN + kTileN}, 0, 0, 0, nullptr};
    }
    p.n_valid = shape_.intermediate;
    p.k = shape_.hidden;
    p.k_tiles = up_.k_tiles();
    p.out = up_.at(source_.first + expert, block);
    pack_block(p, shape_.gated ? source_.gate : source_.up, source_.up, expert, up_.encoding(), shape_.gated ? 0 : 1,
               1);
  }

  void pack_down(int32_t expert, int32_t block) {
    Source down = of_expert(source_.down, expert);
    Pack p{{down, down},    {block * kBlockN, block * kBlockN + kTileN}, shape_.hidden, shape_.intermediate,
           down_.k_tiles(), down_.at(source_.first + expert, block)};
    pack_block(p, source_.down, source_.down, expert, down_.encoding(), 2, 2);
  }

  // Numbers of the halves' matrices: gate, up and down.
  void pack_block(const Pack& p, const SourceMatrix& first, const SourceMatrix& second, int32_t expert,
                  const Encoding* encoding, int first_number, int second_number) {
    if (!encoding) return kernels_.pack(p);
    char* strip = p.out;
    for (int half = 0; half < 2; half++) {
      const SourceMatrix& m = half ? second : first;
      Released r = m.released;
      r.codes += expert * m.codes_stride;
      if (r.scales) r.scales += expert * m.scales_stride;
      if (r.tensor) r.tensor += expert;
      if (r.zeros) r.zeros += expert * m.zeros_stride;
      if (!pack_strip(encoding->format[half], r, p.n0[half], p.n_valid, p.k, p.k_tiles, strip))
        unpatched_ = 3 * (int64_t)expert + (half ? second_number : first_number);
      strip += encoding->strip[half].bytes;
    }
  }

  const SourceLayer& source_;
  const LayerShape& shape_;
  const KernelTable& kernels_;
  BlockStore& up_;
  BlockStore& down_;
  const bool fresh_;
  std::atomic<int64_t> unpatched_{-1};
  std::vector<std::atomic<int64_t>> next_, next_page_;
};

// Biases are added to the sums and not rounded further. An absent one is zero.
template <class Real>
Real bias_at(const SourceMatrix& m, int32_t expert, int32_t n) {
  if (!m.source.data) return 0;
  return element_of<Real>(m.source.data, expert * m.expert_stride + n * m.source.n_stride, m.source.dtype);
}
}  // namespace

Weights::Weights(const LayerShape& shape, const LayerFormats& formats, const KernelTable& kernels, Pool& pool)
    : shape_(shape),
      formats_(formats),
      kernels_(kernels),
      pool_(pool),
      up_(shape.experts, up_blocks(shape), (int32_t)ceil_div(shape.hidden, kTileK), kernels.tile_bytes,
          shape.gated ? 2 : 1, pool, {shape.gated ? formats.gate : formats.up, formats.up}),
      down_(shape.experts, (int32_t)ceil_div(shape.hidden, kBlockN), (int32_t)ceil_div(shape.intermediate, kTileK),
            kernels.tile_bytes, 1, pool, {formats.down, formats.down}),
      present_((size_t)shape.experts),
      populated_((size_t)shape.experts) {}

void Weights::pack(const SourceLayer& source) {
  std::lock_guard lock(packing_);
  readers_.lock("experts");
  struct Unlock {
    Readers& readers;
    ~Unlock() { readers.unlock(); }
  } unlock{readers_};
  if (adopted_)
    throw std::runtime_error("pack() of experts that use the memory of " + source_ +
                             ", expected experts with memory of their own; make new ones to pack");
  // Incomplete until the end, also where the packing is interrupted.
  std::fill_n(present_.begin() + source.first, source.count, (uint8_t)0);
  const auto written = populated_.begin() + source.first;
  PackJob job(source, shape_, kernels_, up_, down_,
              std::find(written, written + source.count, 0) != written + source.count);
  pool_.run(job);
  if (const std::string unpatched = job.unpatched(); !unpatched.empty())
    throw std::overflow_error(unpatched + kUnpatched);
  std::fill_n(written, source.count, (uint8_t)1);
  with_sums_of(kernels_, [&](auto zero) { pack_biases<decltype(zero)>(source); });
  std::fill_n(present_.begin() + source.first, source.count, (uint8_t)1);
}

void Weights::enter() const {
  readers_.enter("experts");
  int32_t missing = first_missing();
  if (missing < 0) return;
  leave();
  throw std::runtime_error("expert " + std::to_string(missing) + " of " + std::to_string(shape_.experts) +
                           " is not packed; pack() every expert before the first call");
}

template <class Real>
void Weights::pack_biases(const SourceLayer& s) {
  // An expert without biases has zeros where others have some.
  bool up = s.gate_bias.source.data || s.up_bias.source.data || !up_bias_->empty();
  bool down = s.down_bias.source.data || !down_bias_->empty();
  size_t up_row = (size_t)up_.blocks() * kBlockN, down_row = (size_t)down_.blocks() * kBlockN;
  if (up && up_bias_->empty())
    up_bias_ = std::make_shared<std::vector<char>>((size_t)shape_.experts * up_row * sizeof(Real));
  if (down && down_bias_->empty())
    down_bias_ = std::make_shared<std::vector<char>>((size_t)shape_.experts * down_row * sizeof(Real));
  for (int32_t e = 0; e < s.count; e++) {
    for (int32_t i = 0; up && i < shape_.intermediate; i++) {
      Real* row = (Real*)up_bias_->data() + (size_t)(s.first + e) * up_row;
      int32_t at = shape_.gated ? (i / kTileN) * kBlockN + i % kTileN : i;
      if (shape_.gated) row[at] = bias_at<Real>(s.gate_bias, e, i);
      row[shape_.gated ? at + kTileN : at] = bias_at<Real>(s.up_bias, e, i);
    }
    for (int32_t h = 0; down && h < shape_.hidden; h++)
      ((Real*)down_bias_->data())[(size_t)(s.first + e) * down_row + (size_t)h] = bias_at<Real>(s.down_bias, e, h);
  }
}

int32_t Weights::first_missing() const {
  auto it = std::find(present_.begin(), present_.end(), 0);
  return it == present_.end() ? -1 : (int32_t)(it - present_.begin());
}

const char* Weights::up_bias(int32_t expert) const {
  size_t row = (size_t)(up_.blocks() * kBlockN * kernels_.sum_bytes);
  return up_bias_->empty() ? nullptr : up_bias_->data() + (size_t)expert * row;
}

const char* Weights::down_bias(int32_t expert) const {
  size_t row = (size_t)(down_.blocks() * kBlockN * kernels_.sum_bytes);
  return down_bias_->empty() ? nullptr : down_bias_->data() + (size_t)expert * row;
}

}  // namespace kt
