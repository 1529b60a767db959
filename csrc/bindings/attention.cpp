// Decode attention over a KV cache, from Python.
#include "moe/attention.h"

#include "bindings/objects.h"

namespace kt {

namespace {

int64_t bytes_between(const Array& array, size_t dim) {
  return array.shape(dim) > 1 ? array.stride(dim) * (array.dtype().bits / 8) : 0;
}

uint8_t* bytes_at(const Array& array, int64_t index) {
  return const_cast<uint8_t*>((const uint8_t*)array.data()) + index;
}

Array of_type(const char* name, nb::handle tensor, const Array& query, Access access = Access::read) {
  Array array = array_of({name, 3, {kBFloat16, kFloat32}, Strides::rows, access}, tensor);
  check_same_dtype(name, array, query.ndim() == 3 ? "query" : "x", query);
  return array;
}

// Rows of dimension 1 follow each other without a gap.
void check_rows(const char* name, const Array& array) {
  if (array.size() && array.shape(1) > 1 && array.stride(1) != (int64_t)array.shape(2))
    refuse_value(name, "a stride of " + std::to_string(array.stride(1)) + " in dimension 1",
                 std::to_string(array.shape(2)) + ", a dense one", "pass " + std::string(name) + ".contiguous()");
}

// Codes of e4m3 or scales of e8m0, as bytes.
Array codes_of(const char* name, nb::handle tensor) {
  return array_of({name, 3, {kUint8}, Strides::rows, Access::write}, tensor);
}

char* at(const Array& array, int64_t index, int64_t stride) {
  return const_cast<char*>((const char*)array.data()) + index * stride;
}

}  // namespace

BoundCache cache_of(nb::handle place, const Array& like, const CacheShape& shape, std::vector<Array>& alive) {
  int64_t given = length_of("places", place);
  if (given != 5 && given != 7) refuse_value("places", std::to_string(given) + " of a place", "5, or 7 of codes");
  const bool coded = given == 7;
  Array keys = coded ? codes_of("keys", place[3]) : of_type("keys", place[3], like, Access::write),
        values = coded ? codes_of("values", place[4]) : of_type("values", place[4], like, Access::write);
  int64_t capacity = (int64_t)keys.shape(1);
  check_shape("keys", keys, {shape.groups, capacity, shape.key_size},
              "heads of key, its capacity, size of key's heads");
  check_shape("values", values, {shape.groups, capacity, shape.value_size},
              "heads of value, capacity of keys, size of value's heads");
  BoundCache cache{integer_of("places: row", place[0]), {}};
  int64_t end = in_range("places: end", integer_of("places: end", place[2]), 1, capacity);
  int64_t start = in_range("places: start", integer_of("places: start", place[1]), 0, end - 1);
  KVSequence& s = cache.sequence;
  s.key_stride = bytes_between(keys, 1), s.value_stride = bytes_between(values, 1);
  s.keys = at(keys, start, s.key_stride), s.values = at(values, start, s.value_stride);
  s.key_group_stride = bytes_between(keys, 0), s.value_group_stride = bytes_between(values, 0);
  s.count = (int32_t)(end - start);
  if (coded) {
    Array key_scales = codes_of("key scales", place[5]), value_scales = codes_of("value scales", place[6]);
    check_shape("key scales", key_scales, {shape.groups, capacity, 1}, "heads and capacity of keys, 1");
    check_shape("value scales", value_scales, {shape.groups, capacity, 1}, "heads and capacity of values, 1");
    check_rows("key scales", key_scales);
    check_rows("value scales", value_scales);
    s.key_scales = bytes_at(key_scales, start), s.value_scales = bytes_at(value_scales, start);
    s.key_scale_group_stride = bytes_between(key_scales, 0);
    s.value_scale_group_stride = bytes_between(value_scales, 0);
    alive.push_back(std::move(key_scales));
    alive.push_back(std::move(value_scales));
  }
  alive.push_back(std::move(keys));
  alive.push_back(std::move(values));
  return cache;
}

const float* sinks_of(nb::handle sinks, int64_t heads, std::vector<Array>& alive) {
  if (sinks.is_none()) return nullptr;
  const Array& s = alive.emplace_back(array_of({"sinks", 1, {kFloat32}, Strides::dense}, sinks));
  check_shape("sinks", s, {heads}, "heads of query");
  return (const float*)s.data();
}

void PyPool::attend(nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::list places, double scale,
                    nb::handle sinks) const {
  Array q = array_of({"query", 3, {kBFloat16, kFloat32}}, query);
  Array k = of_type("key", key, q), v = of_type("value", value, q), to = of_type("out", out, q, Access::write);
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
  check_rows("out", to);

  Attention a{{}, (int32_t)heads, (int32_t)groups, (int32_t)size, (int32_t)wide, dtype_of(q), (float)scale};
  std::vector<Array> alive;
  a.sinks = sinks_of(sinks, heads, alive);
  for (nb::handle place : places) {
    BoundCache cache = cache_of(place, q, {groups, size, wide}, alive);
    const int64_t row = in_range("places: row", cache.row, 0, rows - 1);
    KVSequence& s = a.sequences.emplace_back(cache.sequence);
    s.query = at(q, row, bytes_between(q, 1)), s.query_head_stride = bytes_between(q, 0);
    s.key = at(k, row, bytes_between(k, 1)), s.key_head_stride = bytes_between(k, 0);
    s.value = at(v, row, bytes_between(v, 1)), s.value_head_stride = bytes_between(v, 0);
    s.out = at(to, row, bytes_between(to, 0));
  }
  nb::gil_scoped_release released;
  kt::attend(engine->pool, kernels(), a);
}

}  // namespace kt
