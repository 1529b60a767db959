// Attention of single new tokens (decoding), each over the paged KV cache of its own sequence: a pool of blocks of
// kBlockTokens tokens, of which a block table lists those of each sequence.
#pragma once

#include <memory>
#include <vector>

#include "kernels/table.h"
#include "threads.h"

namespace kt {

// The new tokens of a step, the same for all layers.
struct StepSequences {
  std::vector<int32_t> rows, positions;  // [n]: a token's row of the batch; its position in its sequence
  std::vector<int32_t> table;            // [n][table_width]: the blocks of each sequence in their order
  int64_t table_width = 0;

  int64_t size() const { return (int64_t)rows.size(); }
  const int32_t* blocks(int64_t sequence) const { return table.data() + sequence * table_width; }
};

// Keys or values of one layer in all blocks, [blocks][groups][kBlockTokens][size], with strides in bytes.
struct CachePart {
  char* data = nullptr;
  int64_t block_stride = 0, group_stride = 0, token_stride = 0;
  // If the data are codes of e4m3: e8m0 [blocks][groups][kBlockTokens]. Null: they have the type of the query.
  uint8_t* scales = nullptr;
  int64_t scale_block_stride = 0, scale_group_stride = 0;

  char* at(int64_t block, int64_t group, int64_t token) const {
    return data + block * block_stride + group * group_stride + token * token_stride;
  }
  uint8_t* scales_at(int64_t block, int64_t group, int64_t token) const {
    return scales + block * scale_block_stride + group * scale_group_stride + token;
  }
};

struct LayerCache {
  CachePart keys, values;  // values may be the first numbers of the keys (latents)
};

// [tokens][heads][size], with strides in bytes.
struct HeadRows {
  const char* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;

  const char* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// Each token's key and value are written to its position, then its query attends to the last `window` keys, its own
// included, that are of its own chunk; chunks begin at multiples of their size.
struct Attention {
  const StepSequences* sequences = nullptr;
  LayerCache cache{};
  HeadRows query{}, key{}, value{};
  char* out = nullptr;  // [tokens][heads][value_size], heads dense
  int64_t out_row_stride = 0;
  int32_t heads = 0, groups = 0, key_size = 0, value_size = 0;
  DType type = DType::f32;  // of all tensors, apart from a cache in codes
  float scale = 1;
  int32_t window = 0, chunk = 0;  // 0: none
  const float* sinks = nullptr;  // [heads]: one more score of a head's softmax, which has no value; null: there is none
};

void attend(Pool& pool, const KernelTable& kernels, const Attention& attention);
// The same as a step of a job of `threads` threads; `attention` outlives it.
std::unique_ptr<Job> attention_job(const KernelTable& kernels, const Attention& attention, int threads);

}  // namespace kt
