// The grids with openers of narrower vectors than the CPU has: in plain C++, what `grid_of` gives without AVX2, and of
// a given width. Tests compare them.
#pragma once

#include "kernels/grids.h"

namespace kt {

const Grid& portable_grid_of(Codec codec);
// Opened with vectors of at most `width` lanes of 32 bits, if the CPU has them.
const Grid& grid_up_to(int width, Codec codec);

}  // namespace kt
