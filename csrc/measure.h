// Combined rate of the threads of a pool: the bare loops of the kernel table, all started at the same moment.
//
// The benches report every measurement relative to these rates, so the loops run on the threads that do the work, the
// caller included, each on scratch that it touched first.
#pragma once

#include "kernels/table.h"
#include "threads.h"

namespace kt {

struct Measurement {
  Rate what;
  double seconds;                   // duration of each thread's loop
  int threads = 0;                  // number of threads; 0: all
  size_t bytes = 0;                 // scratch of each thread; 0: 640 KiB for `panels`, 64 MiB for `read`
  const Encoding* codes = nullptr;  // instead of `what`: KernelTable::codes_rate of such a block ...
  int32_t rows = 1;                 // ... and of this many rows,
  bool x_int8 = false;              // in int8
};

// Units per second of all threads together. Throws std::runtime_error where the threads do not arrive in time because
// the pool is busy, std::invalid_argument where `bytes` is too little for one block.
double measure(Pool& pool, const KernelTable& kernels, const Measurement& measurement);

}  // namespace kt
