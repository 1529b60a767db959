// Attention of single new tokens, each over the keys and values of its own sequence.
#pragma once

#include <vector>

#include "kernels/table.h"
#include "threads.h"

namespace kt {

// One sequence. Its new key and value are written to place `count - 1`, then its query meets `count` of them.
struct Past {
  char *keys, *values;              // [groups][tokens][key_size], [groups][tokens][value_size]; first one to look at
  int64_t key_group, value_group;   // bytes from group to group
  int32_t count;                    // of keys, the new one included
  const char *query, *key, *value;  // the new token's: [heads][key_size], [groups][key_size], [groups][value_size]
  int64_t query_head, key_head, value_head;  // bytes from head to head of these
  char* out;                                 // [heads][value_size]
};

struct Attention {
  std::vector<Past> pasts;
  int32_t heads, groups, key_size, value_size;
  DType type;  // of everything
  float scale;
};

void attend(Pool& pool, const KernelTable& kernels, const Attention& attention);

}  // namespace kt
