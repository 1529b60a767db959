#include "moe/transpose.h"

#include <algorithm>
#include <atomic>

#include "types.h"

namespace kt {

namespace {

// Rows are often a power of two apart and map to one cache set, so few are read at a time. A block writes whole cache
// lines.
constexpr int64_t kRows = 16, kColumns = 64;

template <class Element>
class TransposeJob : public Job {
 public:
  TransposeJob(const Element* from, Element* to, int64_t rows, int64_t columns)
      : from_(from), to_(to), rows_(rows), columns_(columns) {}

  void work(const Worker&) override {
    for (int64_t c0; !cancelled() && (c0 = next_.fetch_add(kColumns)) < columns_;) {
      int64_t c1 = std::min(columns_, c0 + kColumns);
      for (int64_t r0 = 0; r0 < rows_; r0 += kRows) {
        int64_t r1 = std::min(rows_, r0 + kRows);
        for (int64_t c = c0; c < c1; c++)
          for (int64_t r = r0; r < r1; r++) to_[c * rows_ + r] = from_[r * columns_ + c];
      }
    }
  }

 private:
  const Element* from_;
  Element* to_;
  int64_t rows_, columns_;
  std::atomic<int64_t> next_{0};
};

template <class Element>
void run(Pool& pool, const void* from, void* to, int64_t rows, int64_t columns) {
  TransposeJob<Element> job((const Element*)from, (Element*)to, rows, columns);
  pool.run(job);
}

}  // namespace

void transpose(Pool& pool, const void* from, void* to, int64_t rows, int64_t columns, int64_t element) {
  if (element == 2) run<uint16_t>(pool, from, to, rows, columns);
  if (element == 4) run<uint32_t>(pool, from, to, rows, columns);
  if (element == 8) run<uint64_t>(pool, from, to, rows, columns);
}

}  // namespace kt
