// Attention of single new tokens, each over the keys and values of its own sequence.
#pragma once

#include <vector>

#include "kernels/table.h"
#include "threads.h"

namespace kt {

// One sequence. Its new key and value are written to place `count - 1`, then its query meets `count` of them.
struct KVSequence {
  char *keys, *values;  // [groups][tokens][key_size], [groups][tokens][value_size]; first one to look at
  int64_t key_group_stride, value_group_stride;  // bytes from group to group
  int32_t count;                                 // of keys, the new one included
  const char *query, *key, *value;  // the new token's: [heads][key_size], [groups][key_size], [groups][value_size]
  int64_t query_head_stride, key_head_stride, value_head_stride;  // bytes from head to head of these
  char* out;                                                      // [heads][value_size]
};

struct Attention {
  std::vector<KVSequence> sequences;
  int32_t heads, groups, key_size, value_size;
  DType type;  // of everything
  float scale;
};

void attend(Pool& pool, const KernelTable& kernels, const Attention& attention);

}  // namespace kt
