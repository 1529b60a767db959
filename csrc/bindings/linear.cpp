// Dense matrices from Python: linear layers, LoRA on a linear layer and RMS norm for a few rows, argmax of rows,
// transpose.
#include "moe/linear.h"

#include <numeric>

#include "bindings/objects.h"
#include "mapped_file.h"
#include "moe/argmax.h"
#include "moe/transpose.h"

namespace kt {

void PyExperts::transpose(nb::handle source, nb::handle target) const {
  Array from = array_of({"source", 2, kFloats, Strides::dense}, source),
        to = array_of({"target", 2, kFloats, Strides::dense, Access::write}, target);
  int64_t rows = (int64_t)from.shape(0), columns = (int64_t)from.shape(1);
  check_shape("target", to, {columns, rows}, "columns and rows of the source");
  check_same_dtype("target", to, "the source", from);
  nb::gil_scoped_release released;
  kt::transpose(experts->engine().pool, from.data(), const_cast<void*>(to.data()), rows, columns,
                from.dtype().bits / 8);
}

namespace {

void check_tokens(const KernelTable& table, int64_t tokens, int64_t k) {
  if (tokens < 1 || tokens > table.gemv_max_tokens)
    refuse_value("x", std::to_string(tokens) + " rows", "1 to " + std::to_string(table.gemv_max_tokens));
  if (k % kGemvK || k > (1 << 24))
    refuse_value("x", std::to_string(k) + " columns", "a multiple of " + std::to_string(kGemvK));
}

}  // namespace

void PyPool::linear(nb::handle x, nb::list weights, nb::list outs) const {
  const KernelTable& table = kernels();
  Array rows = array_of({"x", 2, {kBFloat16, kFloat32}}, x);
  int64_t tokens = (int64_t)rows.shape(0), k = (int64_t)rows.shape(1);
  check_tokens(table, tokens, k);
  if (weights.size() != outs.size() || !weights.size())
    refuse_value("outs", std::to_string(outs.size()) + " tensors", "one for each of weights, of which there is one");
  std::vector<Array> arrays;  // keeps the memory alive
  std::vector<Matrix> matrices;
  for (size_t i = 0; i < weights.size(); i++) {
    Array w = array_of({"weight", 2, {kBFloat16}}, weights[i]),
          to = array_of({"out", 2, {kBFloat16, kFloat32}, Strides::rows, Access::write}, outs[i]);
    int64_t n = (int64_t)w.shape(0);
    check_shape("weight", w, {n, k}, "outputs, columns of x");
    check_shape("out", to, {tokens, n}, "rows of x, outputs");
    check_same_dtype("out", to, "x", rows);
    matrices.push_back(
        {rows.data(), (const char*)w.data(), row_stride(w) * 2, n, const_cast<void*>(to.data()), row_stride(to)});
    arrays.push_back(std::move(w));
    arrays.push_back(std::move(to));
  }
  Linear l{row_stride(rows), k, dtype_of(rows), (int32_t)tokens, matrices.data(), (int32_t)matrices.size()};
  nb::gil_scoped_release released;
  multiply(engine->pool, table, l);
}

void PyPool::linear_heads(nb::handle x, nb::handle weights, nb::handle out) const {
  const KernelTable& table = kernels();
  Array rows = array_of({"x", 3, {kBFloat16, kFloat32}}, x), w = array_of({"weights", 3, {kBFloat16}}, weights),
        to = array_of({"out", 3, {kBFloat16, kFloat32}, Strides::rows, Access::write}, out);
  int64_t heads = (int64_t)rows.shape(0), tokens = (int64_t)rows.shape(1), k = (int64_t)rows.shape(2),
          n = (int64_t)w.shape(1);
  check_tokens(table, tokens, k);
  check_shape("weights", w, {heads, n, k}, "heads of x, outputs, columns of x");
  check_shape("out", to, {heads, tokens, n}, "heads and rows of x, outputs");
  check_same_dtype("out", to, "x", rows);
  const int64_t elem = rows.dtype().bits / 8;
  std::vector<Matrix> matrices;
  for (int64_t head = 0; head < heads; head++)
    matrices.push_back({(const char*)rows.data() + head * rows.stride(0) * elem,
                        (const char*)w.data() + head * w.stride(0) * 2, w.stride(1) * 2, n,
                        (char*)const_cast<void*>(to.data()) + head * to.stride(0) * elem, to.stride(1)});
  Linear l{rows.stride(1), k, dtype_of(rows), (int32_t)tokens, matrices.data(), (int32_t)heads};
  nb::gil_scoped_release released;
  multiply(engine->pool, table, l);
}

nb::list PyPool::argmax(nb::handle x) const {
  Array rows = array_of({"x", 2, {kBFloat16, kFloat32}}, x);
  int64_t count = (int64_t)rows.shape(0), columns = (int64_t)rows.shape(1);
  if (!columns) refuse_value("x", "no columns", "one or more");
  std::vector<int64_t> indices((size_t)count);
  {
    nb::gil_scoped_release released;
    kt::argmax(engine->pool, rows.data(), dtype_of(rows), count, columns, row_stride(rows), indices.data());
  }
  nb::list result;
  for (int64_t index : indices) result.append(index);
  return result;
}

void rms_norm(nb::handle x, nb::handle weight, nb::handle out, double epsilon) {
  Array rows = array_of({"x", 2, {kBFloat16, kFloat32}, Strides::dense}, x),
        w = array_of({"weight", 1, {kBFloat16, kFloat32}, Strides::dense}, weight),
        to = array_of({"out", 2, {kBFloat16, kFloat32}, Strides::dense, Access::write}, out);
  int64_t count = (int64_t)rows.shape(0), size = (int64_t)rows.shape(1);
  check_shape("weight", w, {size}, "columns of x");
  check_shape("out", to, {count, size}, "like x");
  check_same_dtype("weight", w, "x", rows);
  check_same_dtype("out", to, "x", rows);
  if (!size) return;
  nb::gil_scoped_release released;
  kernels().norm({(const char*)rows.data(), (const char*)w.data(), (char*)const_cast<void*>(to.data()), dtype_of(rows),
                  count, size, (float)epsilon});
}

void add_lora(nb::handle x, nb::handle a, nb::handle b, nb::handle out, double scale) {
  Array rows = array_of({"x", 2, {kBFloat16, kFloat32}}, x),
        to = array_of({"out", 2, {kBFloat16, kFloat32}, Strides::rows, Access::write}, out),
        factor_a = array_of({"a", 2, {kFloat32}, Strides::dense}, a),
        factor_b = array_of({"b", 2, {kFloat32}, Strides::dense}, b);
  int64_t count = (int64_t)rows.shape(0), k = (int64_t)rows.shape(1), rank = (int64_t)factor_a.shape(0),
          columns = (int64_t)to.shape(1);
  check_shape("a", factor_a, {rank, k}, "rank, columns of x");
  check_shape("b", factor_b, {rank, columns}, "rank, columns of out");
  check_shape("out", to, {count, columns}, "rows of x, its columns");
  check_same_dtype("out", to, "x", rows);
  nb::gil_scoped_release released;
  std::vector<float> scratch((size_t)rank);
  kernels().lora_gemv({(const char*)rows.data(), (char*)const_cast<void*>(to.data()), row_stride(rows), row_stride(to),
                       dtype_of(rows), (const float*)factor_a.data(), (const float*)factor_b.data(), count, k, rank,
                       columns, (float)scale, scratch.data()});
}

PyCodedLinear::PyCodedLinear(const PyPool& pool, int64_t rows, int64_t columns, const std::string& name,
                             const std::string& isa)
    : format(format_of("format", name)) {
  if (format.is_tiles())
    refuse_value("format", name, "a format with codes", "bf16 matrices are multiplied as they are");
  const int32_t n = in_range("rows", rows, 1, 1 << 24), k = in_range("columns", columns, 1, 1 << 20);
  released_row_bytes("matrix", format, k);
  const KernelTable& table = table_for(isa);
  nb::gil_scoped_release released;
  linear = std::make_unique<CodedLinear>(n, k, format, table, pool.engine);
}

void PyCodedLinear::pack(nb::handle matrix) {
  std::vector<Array> alive;
  const SourceMatrix source = released_of("matrix", matrix, format, 1, linear->rows(), linear->columns(), alive);
  nb::gil_scoped_release released;
  linear->pack(source.released);
  for (const Array& a : alive) check_mapping(mapping_at(a.data()));
}

void PyCodedLinear::check_packed() const {
  if (!linear->packed()) throw std::runtime_error("the weight is not packed; pack() it before the first call");
}

void PyCodedLinear::forward(nb::handle x, nb::handle out) const {
  check_packed();
  Array rows = array_of({"x", 2, {kBFloat16, kFloat32}}, x),
        to = array_of({"out", 2, {kBFloat16, kFloat32}, Strides::rows, Access::write}, out);
  const int32_t tokens = in_range("rows of x", (int64_t)rows.shape(0), 0, 1 << 30);
  check_shape("x", rows, {tokens, linear->columns()}, "rows, columns of the weight");
  check_shape("out", to, {tokens, linear->rows()}, "rows of x, rows of the weight");
  check_same_dtype("out", to, "x", rows);
  const LinearRows given{rows.data(), const_cast<void*>(to.data()), dtype_of(rows), row_stride(rows), row_stride(to),
                         tokens};
  nb::gil_scoped_release released;
  linear->multiply(given);
  linear->check_source();
}

void PyCodedLinear::multiply_heads(nb::handle x, nb::handle out, int64_t first, int64_t count, int64_t step,
                                   bool along_rows) const {
  check_packed();
  Array rows = array_of({"x", 3, {kBFloat16, kFloat32}}, x),
        to = array_of({"out", 3, {kBFloat16, kFloat32}, Strides::rows, Access::write}, out);
  const int32_t heads = in_range("heads of x", (int64_t)rows.shape(0), 0, linear->rows()),
                tokens = in_range("rows of x", (int64_t)rows.shape(1), 0, kMaxHeadRows),
                each = in_range("step", step, 1, linear->rows()), from = in_range("first", first, 0, each - 1),
                wanted = in_range("count", count, 1, each - from);
  if ((int64_t)heads * each > linear->rows())
    refuse_value("x", std::to_string(heads) + " heads", "at most rows of the weight / step");
  const int64_t columns = linear->columns(), given = along_rows ? wanted : columns,
                made = along_rows ? columns : wanted;
  check_shape("x", rows, {heads, tokens, given},
              along_rows ? "heads, rows, count" : "heads, rows, columns of the weight");
  check_shape("out", to, {heads, tokens, made},
              along_rows ? "heads, rows, columns of the weight" : "heads, rows, count");
  check_same_dtype("out", to, "x", rows);
  if (share_memory(rows, to)) refuse_value("out", "memory that overlaps x", "memory of its own", "pass another tensor");
  const HeadProducts products{
      {rows.data(), const_cast<void*>(to.data()), dtype_of(rows), rows.stride(1), to.stride(1), tokens},
      rows.stride(0),
      to.stride(0),
      heads,
      from,
      wanted,
      each,
      along_rows};
  nb::gil_scoped_release released;
  linear->multiply_heads(products);
  linear->check_source();
}

void PyCodedLinear::set_w8a8(bool on) {
  if (on && !linear->supports_w8a8()) refuse_value("w8a8", "True", "False for this format", kNoIntegerCodes);
  linear->set_w8a8(on);
}

void PyCodedLinear::decode(int64_t first, nb::handle out) const {
  check_packed();
  Array to = array_of({"out", 2, {kBFloat16, kFloat32}, Strides::dense, Access::write}, out);
  const int32_t count = in_range("rows of out", (int64_t)to.shape(0), 0, linear->rows());
  check_shape("out", to, {count, linear->columns()}, "rows, columns of the weight");
  const int32_t from = in_range("first", first, 0, linear->rows() - count);
  std::vector<int64_t> rows((size_t)count);
  std::iota(rows.begin(), rows.end(), from);
  nb::gil_scoped_release released;
  linear->decode(rows.data(), count, dtype_of(to), (char*)const_cast<void*>(to.data()));
  linear->check_source();
}

void PyCodedLinear::gather(nb::handle rows, nb::handle out) const {
  check_packed();
  Array ids = array_of({"rows", 1, {kInt64}, Strides::dense}, rows),
        to = array_of({"out", 2, {kBFloat16, kFloat32}, Strides::dense, Access::write}, out);
  const int64_t count = (int64_t)ids.shape(0);
  check_shape("out", to, {count, linear->columns()}, "rows, columns of the weight");
  const int64_t* wanted = (const int64_t*)ids.data();
  for (int64_t i = 0; i < count; i++) in_range("rows", wanted[i], 0, linear->rows() - 1);
  nb::gil_scoped_release released;
  linear->decode(wanted, count, dtype_of(to), (char*)const_cast<void*>(to.data()));
  linear->check_source();
}

void PyCodedLinear::adopt(nb::handle blocks) {
  std::vector<Array> alive;
  alive.push_back(array_of({"blocks", 1, {kUint8}, Strides::dense, Access::read, kAlignment}, blocks));
  const Array& given = alive.back();
  check_shape("blocks", given, {(int64_t)linear->bytes()}, "bytes of packed blocks");
  const char* at = (const char*)given.data();
  auto owner = std::make_shared<std::vector<Array>>(std::move(alive));  // released under the GIL, which nanobind takes
  nb::gil_scoped_release released;
  linear->adopt(at, std::move(owner));
}

nb::object PyCodedLinear::memory() const {
  check_packed();
  return blocks_of(linear->store(), 1);
}

uint32_t PyCodedLinear::checksum() const {
  check_packed();
  nb::gil_scoped_release released;
  return linear->checksum();
}

}  // namespace kt
