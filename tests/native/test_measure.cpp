// Rates of a pool: every kind of rate for any number of threads, and an error where the scratch is too small.
#include "check.h"
#include "measure.h"

using namespace kt;
using check::contains;
using check::thrown;

TEST(measure_every_rate) {
  PoolOptions options;
  options.threads = 3;
  Pool pool(options);
  for (Rate what : {Rate::registers, Rate::panels, Rate::read})
    for (int threads : {0, 1, 2}) {
      Measurement m{what, 0.005, threads, what == Rate::read ? size_t{1} << 20 : size_t{0}};
      CHECK(measure(pool, kernels(), m) > 0);
    }
  CHECK(contains(thrown([&] { measure(pool, kernels(), {Rate::panels, 0.005, 1, 4096}); }), "4096 bytes are too few"));
}
