// A job that starts only when all measured threads have arrived, unlike other jobs, in which a late thread is simply
// not needed. So no thread leaves before all have arrived or a timeout has passed.
#include "measure.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "futex.h"
#include "memory.h"

namespace kt {
namespace {

constexpr std::chrono::seconds kTimeout{10};
constexpr double kSlice = 0.1;  // seconds

size_t scratch_bytes(const Measurement& m) {
  if (m.bytes) return m.bytes;
  return m.what == Rate::read ? size_t{64} << 20 : size_t{640} << 10;
}

class MeasureJob final : public Job {
 public:
  MeasureJob(const KernelTable& kernels, const Measurement& m, int threads)
      : kernels_(kernels), m_(m), rates_(threads) {
    for (int i = 0; i < threads; i++) scratch_.emplace_back(scratch_bytes(m));
  }

  void work(const Worker& worker) override {
    size_t index = (size_t)worker.index;
    bool measures = index < rates_.size();
    if (measures) {
      std::memset(scratch_[index].data(), 1, scratch_[index].size());
      arrived_.fetch_add(1);
    }
    if (!all_arrived() || !measures) return;
    // In slices, between which a long measurement can be cancelled.
    const int slices = std::max(1, (int)std::ceil(m_.seconds / kSlice));
    double sum = 0;
    for (int i = 0; i < slices && !cancelled(); i++)
      sum += m_.codes ? kernels_.codes_rate(*m_.codes, m_.rows, m_.x_int8, m_.seconds / slices, scratch_[index].data(),
                                            scratch_[index].size())
                      : kernels_.rate(m_.what, m_.seconds / slices, scratch_[index].data(), scratch_[index].size());
    rates_[index] = sum / slices;
  }

  size_t arrived() const { return arrived_.load(); }
  double sum() const {
    double all = 0;
    for (double rate : rates_) all += rate;
    return all;
  }

 private:
  // Threads that do not measure wait too: the first thread to return would close the job for those still to arrive.
  bool all_arrived() {
    const auto end = std::chrono::steady_clock::now() + kTimeout;
    while (arrived_.load() < rates_.size()) {
      if (cancelled() || std::chrono::steady_clock::now() > end) return false;
      sched_yield();
    }
    return true;
  }

  const KernelTable& kernels_;
  const Measurement& m_;
  std::vector<double> rates_;
  std::vector<Buffer> scratch_;
  std::atomic<size_t> arrived_{0};
};

}  // namespace

double measure(Pool& pool, const KernelTable& kernels, const Measurement& m) {
  int threads = m.threads ? m.threads : pool.threads();
  MeasureJob job(kernels, m, threads);
  pool.run(job);
  if (job.arrived() < (size_t)threads)
    throw std::runtime_error("only " + std::to_string(job.arrived()) + " of " + std::to_string(threads) +
                             " threads were free within 10 s; measure while nothing else runs on this pool");
  if (job.sum() <= 0 && m.codes)
    throw std::invalid_argument(std::string("packed GEMV of variant ") + kernels.name + " does not take " +
                                std::to_string(m.rows) + " rows of " + m.codes->format[0].row().name);
  if (job.sum() <= 0)
    throw std::invalid_argument(std::to_string(scratch_bytes(m)) + " bytes are too few for one block of this variant");
  return job.sum();
}

}  // namespace kt
