// Attention of single new tokens (decoding), each over the KV cache of its own sequence.
#pragma once

#include <memory>
#include <vector>

#include "kernels/table.h"
#include "threads.h"

namespace kt {

// One sequence. Its new key and value are written to index `count - 1`, then its query attends to all `count` keys.
struct KVSequence {
  // [groups][tokens][key_size], [groups][tokens][value_size]; from the first visible token on. Values may be the first
  // numbers of the keys (latents).
  char *keys, *values;
  int64_t key_group_stride, value_group_stride;  // bytes from group to group
  int64_t key_stride, value_stride;              // bytes from token to token
  int32_t count;                                 // keys, including the new one
  const char *query, *key, *value;  // the new token's: [heads][key_size], [groups][key_size], [groups][value_size]
  int64_t query_head_stride, key_head_stride, value_head_stride;  // bytes from head to head of these
  char* out;                                                      // [heads][value_size]
  // Of a cache in codes of e4m3: e8m0 [groups][tokens], from the first visible token on. Null: the cache has the type
  // of the other tensors.
  uint8_t *key_scales = nullptr, *value_scales = nullptr;
  int64_t key_scale_group_stride = 0, value_scale_group_stride = 0;
};

struct Attention {
  std::vector<KVSequence> sequences;
  int32_t heads, groups, key_size, value_size;
  DType type;  // of all tensors, apart from a cache in codes
  float scale;
  const float* sinks = nullptr;  // [heads]: one more score of a head's softmax, which has no value; null: there is none
};

void attend(Pool& pool, const KernelTable& kernels, const Attention& attention);
// The same as a step of a job of `threads` threads; `attention` outlives it.
std::unique_ptr<Job> attention_job(const KernelTable& kernels, const Attention& attention, int threads);

}  // namespace kt
