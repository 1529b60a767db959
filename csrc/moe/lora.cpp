// Packs LoRA factors. They are small and come in any strides and dtype, so each expert's are first copied to contiguous
// matrices in the type of the sums, scaled, and packed from there like weights. PEFT's B has the experts innermost, 16
// of them in a cache line: a few experts are copied together, so that a line is read a few times, not 16. The copies
// use workspace memory of earlier calls: fresh pages would cost more than the packing.
#include "moe/lora.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

namespace kt {

namespace {

int32_t tiles_of(int32_t rank) { return (int32_t)ceil_div(rank, kTileK); }

constexpr int32_t kExpertsTogether = 4;  // experts

// Arguments of copy_factor; the dtype is a template argument below, so that contiguous loops are vectorised.
template <class Real>
struct FactorCopy {
  const SourceMatrix& m;
  int32_t expert, count, rows, columns;
  Real scale;
  Real* out;
  int64_t width, next;
};

template <DType type, class Real>
void copy_factor_as(const FactorCopy<Real>& p) {
  const Source& s = p.m.source;
  auto number = [&](int64_t at) { return p.scale * element_of<Real>(s.data, at, type); };
  if (p.m.expert_stride == 1 && p.count == kExpertsTogether) {
    for (int32_t n = 0; n < p.rows; n++)
      for (int32_t k = 0; k < p.columns; k++)
        for (int32_t e = 0; e < kExpertsTogether; e++)
          p.out[e * p.next + n * p.width + k] = number(p.expert + n * s.n_stride + k * s.k_stride + e);
    return;
  }
  for (int32_t e = 0; e < p.count; e++)
    for (int32_t n = 0; n < p.rows; n++) {
      int64_t at = (p.expert + e) * p.m.expert_stride + n * s.n_stride;
      Real* out = p.out + e * p.next + n * p.width;
      if (s.k_stride == 1) {
        for (int32_t k = 0; k < p.columns; k++) out[k] = number(at + k);
      } else {
        for (int32_t k = 0; k < p.columns; k++) out[k] = number(at + k * s.k_stride);
      }
    }
}

// out[n][k] = scale * m(n, k), rows of `width`; likewise for `count` experts, `next` elements apart.
template <class Real>
void copy_factor(const SourceMatrix& m, int32_t expert, int32_t count, int32_t rows, int32_t columns, Real scale,
                 Real* out, int64_t width, int64_t next) {
  FactorCopy<Real> p{m, expert, count, rows, columns, scale, out, width, next};
  switch (m.source.dtype) {
    case DType::f32:
      return copy_factor_as<DType::f32>(p);
    case DType::bf16:
      return copy_factor_as<DType::bf16>(p);
    case DType::f16:
      return copy_factor_as<DType::f16>(p);
    case DType::f64:
      return copy_factor_as<DType::f64>(p);
  }
}

}  // namespace

// A unit is one expert or a few; Real is the type of the kernels' sums.
template <class Real>
class FactorJob : public Job {
 public:
  FactorJob(Adapter& adapter, const SourceLora& source) : a_(adapter), source_(source) {
    const LayerShape& s = a_.layer_;
    for (const SourceFactor* f : {&source.gate, &source.up, &source.down})
      if (f->a.expert_stride == 1 || f->b.expert_stride == 1) experts_together_ = kExpertsTogether;
    a_size_ = std::max<int64_t>((int64_t)a_.gate_up_rank() * s.hidden, (int64_t)a_.ranks_.down * s.intermediate);
    gate_up_size_ = (int64_t)2 * s.intermediate * a_.gate_up_tiles() * kTileK;
    down_size_ = (int64_t)s.hidden * a_.down_tiles() * kTileK;
    bytes_ = round_up((a_size_ + gate_up_size_ + down_size_) * experts_together_ * (int64_t)sizeof(Real), 4096);
    memory_ = a_.arena_.acquire((size_t)(bytes_ * a_.pool_.threads()));
  }
  ~FactorJob() override { a_.arena_.release(std::move(memory_)); }

  void work(const Worker& worker) override {
    Real *a = (Real*)(memory_.data() + worker.index * bytes_), *wide = a + a_size_ * experts_together_,
         *down = wide + gate_up_size_ * experts_together_;
    // Whole tiles of K are packed faster, so the ranks of B are padded with zeros, once for all experts.
    bool cleared = false;
    for (int32_t e; !cancelled() && (e = next_.fetch_add(experts_together_)) < a_.layer_.experts;) {
      int32_t count = std::min(experts_together_, a_.layer_.experts - e);
      if (!cleared) std::fill(wide, down + down_size_ * experts_together_, Real(0));
      cleared = true;
      if (a_.gate_up_tiles()) pack_gate_up(e, count, a, wide);
      if (a_.down_tiles()) pack_down(e, count, a, down);
    }
  }

 private:
  void pack(const BlockStore& store, int32_t expert, const Real* half0, const Real* half1, int32_t step, int32_t gap,
            int32_t rows, int32_t columns) {
    for (int32_t b = 0; b < store.blocks(); b++) {
      Source first{half0, a_.kernels_.sums, columns, 1}, second{half1, a_.kernels_.sums, columns, 1};
      a_.kernels_.pack({{first, second},
                        {b * step, b * step + gap},
                        rows,
                        columns,
                        store.k_tiles(),
                        const_cast<char*>(store.at(expert, b))});
    }
  }

  void pack_gate_up(int32_t first, int32_t count, Real* all, Real* gate) {
    const LayerShape& s = a_.layer_;
    const LoraRanks& r = a_.ranks_;
    int64_t hidden = s.hidden, rank = a_.gate_up_rank(), next = rank * hidden;
    if (r.gate) copy_factor(source_.gate.a, first, count, r.gate, s.hidden, Real(1), all, hidden, next);
    if (r.up && !r.shared)
      copy_factor(source_.up.a, first, count, r.up, s.hidden, Real(1), all + r.gate * hidden, hidden, next);
    for (int32_t e = 0; e < count; e++, all += next)
      pack(a_.gate_up_a_, first + e, all, all, kBlockN, kTileN, (int32_t)rank, s.hidden);

    int32_t width = a_.gate_up_tiles() * kTileK;
    Real* up = gate + (int64_t)s.intermediate * width;
    if (r.gate)
      copy_factor(source_.gate.b, first, count, s.intermediate, r.gate, Real(source_.gate.scale), gate, width,
                  gate_up_size_);
    if (r.up)
      copy_factor(source_.up.b, first, count, s.intermediate, r.up, Real(source_.up.scale), up + a_.up_at(), width,
                  gate_up_size_);
    for (int32_t e = 0; e < count; e++, gate += gate_up_size_, up += gate_up_size_) {
      if (s.gated) {
        pack(a_.gate_up_b_, first + e, gate, up, kTileN, 0, s.intermediate, width);
      } else {
        pack(a_.gate_up_b_, first + e, up, up, kBlockN, kTileN, s.intermediate, width);
      }
    }
  }

  void pack_down(int32_t first, int32_t count, Real* all, Real* b) {
    const LayerShape& s = a_.layer_;
    int32_t rank = a_.ranks_.down, width = a_.down_tiles() * kTileK;
    int64_t next = (int64_t)rank * s.intermediate;
    copy_factor(source_.down.a, first, count, rank, s.intermediate, Real(1), all, s.intermediate, next);
    for (int32_t e = 0; e < count; e++, all += next)
      pack(a_.down_a_, first + e, all, all, kBlockN, kTileN, rank, s.intermediate);
    copy_factor(source_.down.b, first, count, s.hidden, rank, Real(source_.down.scale), b, width, down_size_);
    for (int32_t e = 0; e < count; e++, b += down_size_)
      pack(a_.down_b_, first + e, b, b, kBlockN, kTileN, s.hidden, width);
  }

  Adapter& a_;
  const SourceLora& source_;
  int32_t experts_together_ = 1;                           // experts
  int64_t a_size_ = 0, gate_up_size_ = 0, down_size_ = 0;  // elements of one expert: an A, B of gate and up, B of down
  int64_t bytes_ = 0;                                      // per thread
  Buffer memory_;
  std::atomic<int32_t> next_{0};
};

Adapter::Adapter(const LayerShape& layer, const LoraRanks& ranks, const KernelTable& kernels, Pool& pool, Arena& arena)
    : layer_(layer), ranks_(ranks), kernels_(kernels), pool_(pool), arena_(arena) {
  int32_t hidden_tiles = (int32_t)ceil_div(layer.hidden, kTileK), inner = (int32_t)ceil_div(layer.intermediate, kTileK);
  if (int32_t tiles = tiles_of(gate_up_rank())) {
    gate_up_a_ = BlockStore(layer.experts, tiles, hidden_tiles, kernels.tile_bytes);
    gate_up_b_ = BlockStore(layer.experts, layer.gated ? 2 * inner : inner, tiles, kernels.tile_bytes);
  }
  if (int32_t tiles = tiles_of(ranks.down)) {
    down_a_ = BlockStore(layer.experts, tiles, inner, kernels.tile_bytes);
    down_b_ = BlockStore(layer.experts, hidden_tiles, tiles, kernels.tile_bytes);
  }
}

void Adapter::enter() const {
  readers_.enter("factors of an adapter");
  if (complete_) return;
  leave();
  throw std::runtime_error("the factors of an adapter are incomplete: pack() was interrupted; pack() them again");
}

void Adapter::pack(const SourceLora& source) {
  std::lock_guard lock(packing_);
  readers_.lock("factors of an adapter");
  struct Unlock {
    Readers& readers;
    ~Unlock() { readers.unlock(); }
  } unlock{readers_};
  complete_ = false;  // until the end, also where the packing is interrupted
  with_sums_of(kernels_, [&](auto zero) {
    FactorJob<decltype(zero)> job(*this, source);
    pool_.run(job);
  });
  complete_ = true;
}

}  // namespace kt
