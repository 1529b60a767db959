// Pools and experts: construction, packing, and calls. tensors.h checks single arguments, this file that arguments
// agree with each other.
#include <climits>
#include <cmath>

#include "bindings/objects.h"
#include "cpu.h"
#include "mapped_file.h"
#include "measure.h"

namespace kt {

const KernelTable& table_for(const std::string& isa, Precision precision) {
  if (isa.empty()) return kernels(precision);
  try {
    return kernels(isa.c_str(), precision);
  } catch (const std::runtime_error& error) {
    throw nb::value_error(("isa: " + std::string(error.what())).c_str());
  }
}

PyPool::PyPool(int64_t threads, int64_t groups, int64_t spin_us, bool pin, int64_t yield_us) {
  PoolOptions options;
  options.threads = in_range("threads", threads, 0, 4096);
  options.groups = in_range("groups", groups, 0, 1024);
  options.spin_us = in_range("spin_us", spin_us, 0, 1000000);
  options.pin = pin;
  options.yield_us = in_range("yield_us", yield_us, 0, 1000000);
  nb::gil_scoped_release released;
  engine = std::make_shared<Engine>(options);
}

double PyPool::rate(const std::string& what, double seconds, int64_t threads, const std::string& isa, int64_t bytes) {
  Measurement m;
  m.what = word_of<Rate>("what", what, {"registers", "panels", "read", "bytes"});
  m.seconds = seconds;
  if (!(seconds > 0 && seconds <= 60)) refuse_value("seconds", std::to_string(seconds), "more than 0 and at most 60");
  m.threads = in_range("threads", threads, 0, engine->pool.threads());
  if (bytes < 0) refuse_value("bytes", std::to_string(bytes), "0 (the default) or more");
  m.bytes = (size_t)bytes;
  const KernelTable& table = table_for(isa);
  nb::gil_scoped_release released;
  std::lock_guard lock(measuring);  // two at once would wait for each other's threads
  return measure(engine->pool, table, m);
}

double PyPool::codes_rate(const std::string& format, int64_t rows, double seconds, int64_t threads,
                          const std::string& isa, bool w8a8) {
  constexpr int32_t k_tiles = 16;  // of a block that stays in L1
  const Format of_codes = format_of("format", format);
  const Encoding codes(of_codes, of_codes, k_tiles);
  Measurement m{.what = Rate::panels, .seconds = seconds, .codes = &codes};
  if (!(seconds > 0 && seconds <= 60)) refuse_value("seconds", std::to_string(seconds), "more than 0 and at most 60");
  m.threads = in_range("threads", threads, 0, engine->pool.threads());
  m.rows = in_range("rows", rows, 1, kMaxRows);
  m.x_int8 = w8a8;
  const KernelTable& table = table_for(isa);
  nb::gil_scoped_release released;
  std::lock_guard lock(measuring);
  return measure(engine->pool, table, m);
}

PyExperts::PyExperts(const PyPool& pool, int64_t num_experts, int64_t hidden, int64_t intermediate, bool gated,
                     const std::string& activation, double limit, double alpha, const std::string& isa,
                     const std::string& precision, const std::string& gate_format, const std::string& up_format,
                     const std::string& down_format) {
  LayerShape shape{in_range("num_experts", num_experts, 1, 1 << 16), in_range("hidden", hidden, 1, 1 << 20),
                   in_range("intermediate", intermediate, 1, 1 << 20), gated};
  Gate gate{word_of<Activation>("activation", activation, {"silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"}), gated,
            limit, alpha};
  if (!(limit >= 0) || std::isinf(limit)) refuse_value("limit", std::to_string(limit), "0 (no clamp) or more");
  if (limit > 0 && !gated) refuse_value("limit", std::to_string(limit), "0 for experts without a gate");
  bool oai = gate.kind == Activation::swiglu_oai;
  if (oai && !gated) refuse_value("gated", "False", "True with activation \"swiglu_oai\"");
  if (oai ? !(alpha > 0) || std::isinf(alpha) : alpha != 0)
    refuse_value("alpha", std::to_string(alpha), oai ? "more than 0" : "0 unless activation is \"swiglu_oai\"");
  LayerFormats formats{format_of("gate_format", gate_format), format_of("up_format", up_format),
                       format_of("down_format", down_format)};
  if (gated && formats.gate.is_tiles() != formats.up.is_tiles())
    refuse_value("gate_format", gate_format, "a format of the same kind as up's, " + up_format,
                 "bf16 for both, or for neither");
  const KernelTable& table = table_for(isa, word_of<Precision>("precision", precision, {"bf16", "f32", "f64"}));
  nb::gil_scoped_release released;
  experts = std::make_shared<Experts>(shape, gate, table, pool.engine, formats);
}

void PyExperts::pack(int64_t first, nb::handle gate, nb::handle up, nb::handle down, nb::handle gate_bias,
                     nb::handle up_bias, nb::handle down_bias) {
  const LayerShape& s = experts->shape();
  if (s.gated == gate.is_none())
    refuse_value("gate", s.gated ? "None" : "a tensor",
                 s.gated ? "a tensor: these experts are gated" : "None: these experts have no gate");
  if (!s.gated && !gate_bias.is_none()) refuse_value("gate_bias", "a tensor", "None: these experts have no gate");
  std::vector<Array> alive;
  SourceLayer layer{};
  auto bind_tensor = [&](const char* name, nb::handle tensor, int dims, int64_t rows, int64_t columns,
                         const char* meaning) {
    SourceMatrix matrix{};
    if (tensor.is_none()) return matrix;
    const Array& a = alive.emplace_back(array_of({name, dims, kFloats, Strides::any}, tensor));
    if (!layer.count) layer.count = in_range("first dimension of up", (int64_t)a.shape(0), 1, s.experts);
    if (dims == 3) {
      check_shape(name, a, {layer.count, rows, columns}, meaning);
    } else {
      check_shape(name, a, {layer.count, rows}, meaning);
    }
    return SourceMatrix{{a.data(), dtype_of(a), a.stride(1), dims == 3 ? a.stride(2) : 0}, a.stride(0)};
  };
  auto bind_matrix = [&](const char* name, nb::handle given, const Format& format, int64_t rows, int64_t columns,
                         const char* meaning) {
    if (format.is_tiles() || given.is_none()) return bind_tensor(name, given, 3, rows, columns, meaning);
    if (!layer.count) layer.count = in_range("number of experts in up", experts_in(name, given, format), 1, s.experts);
    return released_of(name, given, format, layer.count, rows, columns, alive);
  };
  if (up.is_none()) refuse_type("up", "None", "a tensor");
  if (down.is_none()) refuse_type("down", "None", "a tensor");
  const LayerFormats& formats = experts->weights().formats();
  layer.up = bind_matrix("up", up, formats.up, s.intermediate, s.hidden, "experts, intermediate, hidden");
  layer.gate = bind_matrix("gate", gate, formats.gate, s.intermediate, s.hidden, "experts, intermediate, hidden");
  layer.down = bind_matrix("down", down, formats.down, s.hidden, s.intermediate, "experts, hidden, intermediate");
  layer.gate_bias = bind_tensor("gate_bias", gate_bias, 2, s.intermediate, 0, "experts, intermediate");
  layer.up_bias = bind_tensor("up_bias", up_bias, 2, s.intermediate, 0, "experts, intermediate");
  layer.down_bias = bind_tensor("down_bias", down_bias, 2, s.hidden, 0, "experts, hidden");
  layer.first = in_range("first_expert", first, 0, s.experts - layer.count);
  nb::gil_scoped_release released;
  experts->weights().pack(layer);
  for (const Array& a : alive) check_mapping(mapping_at(a.data()));
}

namespace {

constexpr int64_t kMaxCallRows = INT_MAX - 64;  // (token, slot) pairs of a call: rounding up to a tile stays in 32 bits

}  // namespace

BoundArguments PyExperts::bind(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out,
                               nb::handle adapter, nb::handle skip, nb::handle adapters, const char* out_name) const {
  const LayerShape& s = experts->shape();
  BoundArguments bound;
  auto bind_tensor = [&](const char* name, nb::handle tensor, int dims, std::initializer_list<Element> elements) {
    return bound.tensors.emplace_back(array_of({name, dims, elements}, tensor));
  };
  Batch& b = bound.batch;
  Array x = bind_tensor("hidden", hidden, 2, kFloats);
  int64_t tokens = in_range("tokens in hidden", (int64_t)x.shape(0), 0, kMaxCallRows);
  check_shape("hidden", x, {tokens, s.hidden}, "tokens, hidden");
  Array i = bind_tensor("ids", ids, 2, {kInt64, kInt32});
  int64_t top_k =
      in_range("second dimension of ids", (int64_t)i.shape(1), 1, kMaxCallRows / std::max<int64_t>(tokens, 1));
  check_shape("ids", i, {tokens, top_k}, "tokens, top k");
  Array w = bind_tensor("weights", weights, 2, kFloats);
  check_shape("weights", w, {tokens, top_k}, "tokens, top k");
  Array y = bound.tensors.emplace_back(array_of({out_name, 2, kFloats, Strides::rows, Access::write}, out));
  check_shape(out_name, y, {tokens, s.hidden}, "tokens, hidden");
  if (share_memory(x, y))
    refuse_value(out_name, "memory that overlaps hidden", "memory of its own", "pass another tensor");
  b.tokens = (int32_t)tokens;
  b.top_k = (int32_t)top_k;
  b.hidden = x.data();
  b.hidden_dtype = dtype_of(x);
  b.hidden_stride = row_stride(x);
  b.ids = i.data();
  b.ids_64 = is(i.dtype(), kInt64);
  b.ids_stride = row_stride(i);
  b.weights = w.data();
  b.weights_dtype = dtype_of(w);
  b.weights_stride = row_stride(w);
  b.out = const_cast<void*>(y.data());
  b.out_dtype = dtype_of(y);
  b.out_stride = row_stride(y);
  if (!adapter.is_none()) {
    Array a = bind_tensor("adapter", adapter, 1, {kInt32});
    check_shape("adapter", a, {tokens}, "tokens");
    b.adapter = (const int32_t*)a.data();
  }
  if (!skip.is_none()) {
    Array m = bind_tensor("skip", skip, 1, {kBool, kUint8});
    check_shape("skip", m, {s.experts}, "experts");
    b.skip = (const uint8_t*)m.data();
  }
  int64_t count = adapters.is_none() ? 0 : length_of("adapters", adapters);
  for (int64_t n = 0; n < count; n++) {
    nb::object one = adapters[n];
    if (!nb::isinstance<PyAdapter>(one)) refuse_type("adapters", "another object", "an Adapter of these experts");
    const PyAdapter& given = nb::cast<const PyAdapter&>(one);
    if (given.experts != experts)
      refuse_value("adapters", "an adapter of another layer", "adapters made for these experts");
    bound.adapters.push_back(given.adapter);
  }
  // One adapter without token ids applies to all tokens.
  if (!b.adapter && bound.adapters.size() == 1) b.every_adapter = 0;
  return bound;
}

Adapters BoundArguments::table() const {
  Adapters all;
  for (const auto& adapter : adapters) all.push_back(adapter.get());
  return all;
}

void BoundArguments::set_dropout(double dropout, int64_t seed) {
  if (!(dropout >= 0 && dropout < 1)) refuse_value("dropout", std::to_string(dropout), "at least 0 and less than 1");
  batch.dropout = dropout;
  batch.dropout_seed = (uint64_t)seed;
}

void BoundArguments::check_adapters() const {
  int32_t count = (int32_t)adapters.size();
  for (int32_t t = 0; batch.adapter && t < batch.tokens; t++)
    if (batch.adapter[t] < -1 || batch.adapter[t] >= count)
      throw std::invalid_argument(text_of(
          "adapter", std::to_string(batch.adapter[t]) + " for token " + std::to_string(t),
          count ? "-1 (none) to " + std::to_string(count - 1) : "-1 (none)", count ? "" : "no adapter is loaded"));
}

void PyExperts::set_w8a8(bool w8a8, BoundArguments& bound) const {
  bound.batch.w8a8 = w8a8;
  std::string why = w8a8 ? experts->w8a8_unsupported() : "";
  if (!why.empty()) refuse_value("w8a8", "True", "False for these experts", why);
}

// Memory for gate and up of every (token, slot) of a call, or null.
char* PyExperts::bind_keep(nb::handle keep, BoundArguments& bound, Access access) const {
  if (keep.is_none()) return nullptr;
  const Array& a =
      bound.tensors.emplace_back(array_of({"keep", 1, {kUint8}, Strides::dense, access, kAlignment}, keep));
  check_shape("keep", a, {(int64_t)bound.batch.tokens * bound.batch.top_k * experts->keep_row_bytes()},
              "tokens * top k * keep_row_bytes");
  return (char*)const_cast<void*>(a.data());
}

void PyExperts::forward(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
                        nb::handle skip, nb::handle keep, nb::handle adapters, double dropout, int64_t seed, bool w8a8,
                        bool needs_grad) const {
  BoundArguments bound = bind(hidden, ids, weights, out, adapter, skip, adapters);
  bound.set_dropout(dropout, seed);
  bound.batch.needs_grad = needs_grad;
  set_w8a8(w8a8, bound);
  if (w8a8 && (!keep.is_none() || dropout > 0))
    refuse_value("w8a8", "True", "False beside keep and dropout", "training computes with all bits");
  char* kept = bind_keep(keep, bound, Access::write);
  nb::gil_scoped_release released;
  bound.check_adapters();
  Call(*experts, bound.batch, bound.table(), kept).run();
}

void PyExperts::backward(nb::handle grad_out, nb::handle hidden, nb::handle ids, nb::handle weights,
                         nb::handle grad_hidden, nb::handle grad_weights, nb::handle skip, nb::handle keep,
                         nb::handle adapter, nb::handle adapters, nb::handle factors, double dropout,
                         int64_t seed) const {
  // The gradient of the hidden states is this call's output.
  BoundArguments bound = bind(hidden, ids, weights, grad_hidden, adapter, skip, adapters, "grad_hidden");
  bound.set_dropout(dropout, seed);
  Gradients gradients;
  gradients.keep = bind_keep(keep, bound, Access::read);
  const Array dy = bound.tensors.emplace_back(array_of({"grad_out", 2, kFloats}, grad_out));
  check_shape("grad_out", dy, {bound.batch.tokens, experts->shape().hidden}, "tokens, hidden");
  const Array dw = bound.tensors.emplace_back(
      array_of({"grad_weights", 2, {kFloat32, kFloat64}, Strides::rows, Access::write}, grad_weights));
  check_shape("grad_weights", dw, {bound.batch.tokens, bound.batch.top_k}, "tokens, top k");
  gradients.out = dy.data();
  gradients.out_dtype = dtype_of(dy);
  gradients.out_stride = row_stride(dy);
  gradients.weights = const_cast<void*>(dw.data());
  gradients.weights_dtype = dtype_of(dw);
  gradients.weights_stride = row_stride(dw);
  if (!factors.is_none()) {
    int64_t sets = length_of("factors", factors);
    if (sets != (int64_t)bound.adapters.size())
      refuse_value("factors", std::to_string(sets) + " sets of tensors",
                   "one for each of the " + std::to_string(bound.adapters.size()) + " adapters");
    for (size_t n = 0; n < bound.adapters.size(); n++)
      gradients.lora.push_back(bind_targets(factors[n], nb::cast<const PyAdapter&>(adapters[n]), bound));
  }
  nb::gil_scoped_release released;
  bound.check_adapters();
  Backward(*experts, bound.batch, gradients, bound.table()).run();
}

PyCall* PyExperts::prepare(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
                           nb::handle skip, nb::handle adapters, bool w8a8) const {
  auto prepared = std::make_unique<PyCall>();
  prepared->bound = bind(hidden, ids, weights, out, adapter, skip, adapters);
  set_w8a8(w8a8, prepared->bound);
  prepared->experts = experts;
  prepared->bound.check_adapters();
  experts->weights().enter();  // reports now what submit() would report later
  experts->weights().leave();
  prepared->call.emplace(*experts, prepared->bound.batch, prepared->bound.table());
  return prepared.release();  // Python owns it from here on
}

PyCall::~PyCall() {
  {
    nb::gil_scoped_release released;
    call.reset();
  }
  raise_later();
}

void PyCall::submit() {
  bound.check_adapters();
  call->submit();
}

void PyCall::raise_error() {
  std::exception_ptr thrown;
  {
    std::lock_guard lock(error_mutex);
    std::swap(thrown, error);
  }
  if (!thrown) return;
  try {
    std::rethrow_exception(thrown);
  } catch (const DamagedFile&) {
    throw;  // Python has a class of its own for it
  } catch (const std::exception& e) {
    throw std::runtime_error("in a host callback: " + std::string(e.what()));
  }
}

}  // namespace kt
