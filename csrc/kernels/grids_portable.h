// The grids with openers in plain C++, whatever the CPU has: what `grid_of` gives without AVX2, and what tests compare
// the others with.
#pragma once

#include "kernels/grids.h"

namespace kt {

const Grid& portable_grid_of(Codec codec);

}  // namespace kt
