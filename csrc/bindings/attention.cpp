// Decode attention over a KV cache, from Python.
#include "moe/attention.h"

#include <algorithm>
#include <tuple>

#include "bindings/objects.h"

namespace kt {

namespace {

int64_t bytes_between(const Array& array, size_t dim) {
  return array.shape(dim) > 1 ? array.stride(dim) * (array.dtype().bits / 8) : 0;
}

Array of_type(const char* name, nb::handle tensor, const Array& query, int dims = 3, Access access = Access::read) {
  Array array = array_of({name, dims, {kBFloat16, kFloat32}, Strides::rows, access}, tensor);
  check_same_dtype(name, array, query.ndim() == 3 ? "query" : "x", query);
  return array;
}

// Rows of a dimension follow each other without a gap.
void check_rows(const char* name, const Array& array, size_t dim) {
  if (array.size() && array.shape(dim) > 1 && array.stride(dim) != (int64_t)array.shape(dim + 1))
    refuse_value(name, "a stride of " + std::to_string(array.stride(dim)) + " in dimension " + std::to_string(dim),
                 std::to_string(array.shape(dim + 1)) + ", a dense one", "pass " + std::string(name) + ".contiguous()");
}

// Codes of e4m3 or scales of e8m0, as bytes.
Array bytes_of(const char* name, nb::handle tensor) {
  return array_of({name, 4, {kUint8}, Strides::rows, Access::write}, tensor);
}

char* memory_of(const Array& array) { return (char*)const_cast<void*>(array.data()); }

HeadRows head_rows(const Array& array) {  // of [heads, T, size]
  return {memory_of(array), bytes_between(array, 1), bytes_between(array, 0)};
}

CachePart part_of(const Array& array) {
  return {memory_of(array), bytes_between(array, 0), bytes_between(array, 1), bytes_between(array, 2)};
}

void bind_scales(const char* name, nb::handle tensor, int64_t blocks, int64_t groups, CachePart& part,
                 std::vector<Array>& alive) {
  const Array& scales = alive.emplace_back(bytes_of(name, tensor));
  check_shape(name, scales, {blocks, groups, kBlockTokens, 1}, "blocks and heads of keys, tokens of a block, 1");
  check_rows(name, scales, 2);
  part.scales = (uint8_t*)memory_of(scales);
  part.scale_block_stride = bytes_between(scales, 0), part.scale_group_stride = bytes_between(scales, 1);
}

constexpr int64_t kMaxTokens = int64_t(1) << 30;

std::vector<int32_t> numbers_of(const Array& array) {
  const int32_t* data = (const int32_t*)array.data();
  return std::vector<int32_t>(data, data + array.size());
}

}  // namespace

PyStepSequences::PyStepSequences(nb::handle rows, nb::handle positions, nb::handle table) {
  const Array r = array_of({"rows", 1, {kInt32}, Strides::dense}, rows),
              p = array_of({"positions", 1, {kInt32}, Strides::dense}, positions),
              t = array_of({"table", 2, {kInt32}}, table);
  const int64_t count = (int64_t)r.shape(0), width = (int64_t)t.shape(1);
  check_shape("positions", p, {count}, "as many as rows");
  check_shape("table", t, {count, width}, "as many as rows, blocks of a sequence");
  step.rows = numbers_of(r), step.positions = numbers_of(p), step.table_width = width;
  for (int64_t s = 0; s < count; s++) {
    const int32_t* blocks = (const int32_t*)t.data() + s * row_stride(t);
    step.table.insert(step.table.end(), blocks, blocks + width);
    last_row = std::max(last_row, in_range("rows", step.rows[(size_t)s], 0, INT32_MAX));
    const int64_t tokens = std::min(width * kBlockTokens, kMaxTokens);
    const int32_t position = step.positions[(size_t)s];
    if (position < 0 || position >= tokens)
      refuse_value("positions", std::to_string(position) + " of sequence " + std::to_string(s),
                   "0 or more, and less than the " + std::to_string(tokens) + " tokens of its blocks in table");
    for (int32_t b = 0; b <= position / kBlockTokens; b++)
      last_block = std::max(last_block, in_range("table", blocks[b], 0, INT32_MAX));
  }
  std::vector<int32_t> sorted = step.rows;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) refuse_value("rows", std::to_string(*twice) + " twice", "each row once");
}

void PyStepSequences::check_rows(int64_t rows) const {
  if (last_row >= rows)
    refuse_value("sequences: rows", std::to_string(last_row),
                 "less than the " + std::to_string(rows) + " of the batch");
}

void PyStepSequences::check_blocks(int64_t blocks) const {
  if (last_block >= blocks)
    refuse_value("sequences: table", "block " + std::to_string(last_block),
                 "less than the " + std::to_string(blocks) + " blocks of cache");
}

LayerCache cache_of(nb::handle cache, const Array& like, const CacheShape& shape, const PyStepSequences& sequences,
                    std::vector<Array>& alive) {
  const int64_t given = length_of("cache", cache);
  if (given != 2 && given != 4) refuse_value("cache", std::to_string(given) + " tensors", "2, or 4 of codes");
  const bool coded = given == 4;
  const nb::object key_part = cache[0], value_part = cache[1];
  Array keys = coded ? bytes_of("keys", key_part) : of_type("keys", key_part, like, 4, Access::write),
        values = coded ? bytes_of("values", value_part) : of_type("values", value_part, like, 4, Access::write);
  const int64_t blocks = (int64_t)keys.shape(0);
  check_shape("keys", keys, {blocks, shape.groups, kBlockTokens, shape.key_size},
              "blocks, heads of key, tokens of a block, size of key's heads");
  check_shape("values", values, {blocks, shape.groups, kBlockTokens, shape.value_size},
              "blocks of keys, heads of value, tokens of a block, size of value's heads");
  sequences.check_blocks(blocks);
  LayerCache layer{part_of(keys), part_of(values)};
  const auto strides = [](const CachePart& part) {
    return std::tuple(part.block_stride, part.group_stride, part.token_stride);
  };
  if (layer.values.data == layer.keys.data && strides(layer.values) != strides(layer.keys))
    refuse_value("values", "the memory of keys with other strides", "those of keys", "pass keys[..., :dv]");
  if (coded) {
    bind_scales("key scales", cache[2], blocks, shape.groups, layer.keys, alive);
    bind_scales("value scales", cache[3], blocks, shape.groups, layer.values, alive);
  }
  alive.push_back(std::move(keys));
  alive.push_back(std::move(values));
  return layer;
}

int32_t key_count_of(const char* name, int64_t count) { return in_range(name, count, 0, INT32_MAX); }

const float* sinks_of(nb::handle sinks, int64_t heads, std::vector<Array>& alive) {
  if (sinks.is_none()) return nullptr;
  const Array& s = alive.emplace_back(array_of({"sinks", 1, {kFloat32}, Strides::dense}, sinks));
  check_shape("sinks", s, {heads}, "heads of query");
  return (const float*)s.data();
}

void PyPool::attend(nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::handle cache,
                    const PyStepSequences& sequences, double scale, int64_t window, int64_t chunk,
                    nb::handle sinks) const {
  Array q = array_of({"query", 3, {kBFloat16, kFloat32}}, query);
  Array k = of_type("key", key, q), v = of_type("value", value, q), to = of_type("out", out, q, 3, Access::write);
  int64_t heads = (int64_t)q.shape(0), rows = (int64_t)q.shape(1), size = (int64_t)q.shape(2),
          groups = (int64_t)k.shape(0), wide = (int64_t)v.shape(2);
  if (groups < 1 || heads % groups)
    refuse_value("key", std::to_string(groups) + " heads", "a divisor of query's " + std::to_string(heads));
  for (auto [name, given] : {std::pair{"query", size}, {"value", wide}})
    if (given < kHeadSizeStep || given % kHeadSizeStep || given > 4096)
      refuse_value(name, "heads of " + std::to_string(given), "a multiple of " + std::to_string(kHeadSizeStep));
  check_shape("key", k, {groups, rows, size}, "its heads, rows of query, size of query's heads");
  check_shape("value", v, {groups, rows, wide}, "heads of key, rows of query, its own size");
  check_shape("out", to, {rows, heads, wide}, "rows and heads of query, size of value's heads");
  check_rows("out", to, 1);
  sequences.check_rows(rows);

  std::vector<Array> alive;
  const Attention a{.sequences = &sequences.step,
                    .cache = cache_of(cache, q, {groups, size, wide}, sequences, alive),
                    .query = head_rows(q),
                    .key = head_rows(k),
                    .value = head_rows(v),
                    .out = memory_of(to),
                    .out_row_stride = bytes_between(to, 0),
                    .heads = (int32_t)heads,
                    .groups = (int32_t)groups,
                    .key_size = (int32_t)size,
                    .value_size = (int32_t)wide,
                    .type = dtype_of(q),
                    .scale = (float)scale,
                    .window = key_count_of("window", window),
                    .chunk = key_count_of("chunk", chunk),
                    .sinks = sinks_of(sinks, heads, alive)};
  nb::gil_scoped_release released;
  kt::attend(engine->pool, kernels(), a);
}

}  // namespace kt
