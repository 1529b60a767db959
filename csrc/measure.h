// How fast the threads of a pool are together: the bare loops of the kernel table, all started at the same moment.
//
// The benches set every measurement against these rates, so they run on the very threads that will do the work, the
// caller included, and each on scratch of its own that it touched first.
#pragma once

#include "kernels/table.h"
#include "threads.h"

namespace kt {

struct Measurement {
  Rate what;
  double seconds;    // that each thread loops for
  int threads = 0;   // the first so many of the pool; 0: all
  size_t bytes = 0;  // scratch of each thread; 0: 640 KiB for `panels`, 64 MiB for `read`
};

// Units per second of all threads together. Throws std::runtime_error where the pool is too busy to bring the threads
// together, std::invalid_argument where `bytes` is too little for one block.
double measure(Pool& pool, const KernelTable& kernels, const Measurement& measurement);

}  // namespace kt
