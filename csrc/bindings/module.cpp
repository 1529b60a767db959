// The Python module: pools, experts and prepared calls, with the GIL released around everything that takes time.
//
// Nothing past this folder checks anything, so everything that could read or write outside a tensor is refused here;
// tensors.h has the checks of one argument, this file those of arguments that have to agree.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <cmath>
#include <optional>

#include "bindings/tensors.h"
#include "cpu.h"
#include "measure.h"
#include "moe/moe.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kt {
namespace {

const KernelTable& table_for(const std::string& isa) {
  if (isa.empty()) return kernels();
  try {
    return kernels(isa.c_str());
  } catch (const std::runtime_error& error) {
    throw nb::value_error(("isa: " + std::string(error.what())).c_str());
  }
}

struct PyPool {
  std::shared_ptr<Engine> engine;
  std::mutex measuring;

  PyPool(int64_t threads, int64_t groups, int64_t spin_us, bool pin) {
    PoolOptions options;
    options.threads = in_range("threads", threads, 0, 4096);
    options.groups = in_range("groups", groups, 0, 1024);
    options.spin_us = in_range("spin_us", spin_us, 0, 1000000);
    options.pin = pin;
    nb::gil_scoped_release released;
    engine = std::make_shared<Engine>(options);
  }

  double rate(const std::string& what, double seconds, int64_t threads, const std::string& isa, int64_t bytes) {
    Measurement m;
    m.what = word_of<Rate>("what", what, {"registers", "panels", "read"});
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
};

constexpr int64_t kMostRows = INT_MAX - 64;  // (token, slot) pairs of a call: rounding up to a tile stays in 32 bits

// A prepared call with the tensors that it reads and writes.
struct PyCall {
  std::vector<Array> tensors;
  std::shared_ptr<const Experts> experts;
  Batch batch;
  std::string error;  // of a callback, which has nobody to throw to
  std::mutex error_mutex;
  std::optional<Call> call;

  ~PyCall() {
    nb::gil_scoped_release released;
    call.reset();
  }

  void submit();

  // A C callback: whatever is thrown is told to the next one who can hear it.
  template <class Act>
  void quietly(Act&& act) noexcept {
    try {
      act();
    } catch (const std::exception& e) {
      std::lock_guard lock(error_mutex);
      error = e.what();
    }
  }

  void raise_error() {
    std::lock_guard lock(error_mutex);
    if (error.empty()) return;
    std::string text;
    std::swap(text, error);
    throw std::runtime_error("in a host callback: " + text);
  }
};

// Adapters are for the next version; -1 (none) is what there is to choose from.
void check_adapters(const Batch& batch) {
  for (int32_t t = 0; batch.adapter && t < batch.tokens; t++)
    if (batch.adapter[t] != -1)
      throw std::invalid_argument(text_of("adapter",
                                          std::to_string(batch.adapter[t]) + " for token " + std::to_string(t),
                                          "-1 (none)", "no adapter is loaded"));
}

void PyCall::submit() {
  check_adapters(batch);
  call->submit();
}

struct PyExperts {
  std::shared_ptr<Experts> experts;

  PyExperts(const PyPool& pool, int64_t num_experts, int64_t hidden, int64_t intermediate, bool gated,
            const std::string& activation, double limit, double alpha, const std::string& isa) {
    LayerShape shape{in_range("num_experts", num_experts, 1, 1 << 16), in_range("hidden", hidden, 1, 1 << 20),
                     in_range("intermediate", intermediate, 1, 1 << 20), gated};
    Gate gate{word_of<Activation>("activation", activation, {"silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"}),
              gated, (float)limit, (float)alpha};
    if (!(limit >= 0) || std::isinf(limit)) refuse_value("limit", std::to_string(limit), "0 (no clamp) or more");
    if (limit > 0 && !gated) refuse_value("limit", std::to_string(limit), "0 for experts without a gate");
    bool oai = gate.kind == Activation::swiglu_oai;
    if (oai && !gated) refuse_value("gated", "False", "True with activation \"swiglu_oai\"");
    if (oai ? !(alpha > 0) || std::isinf(alpha) : alpha != 0)
      refuse_value("alpha", std::to_string(alpha), oai ? "more than 0" : "0 unless activation is \"swiglu_oai\"");
    const KernelTable& table = table_for(isa);
    nb::gil_scoped_release released;
    experts = std::make_shared<Experts>(shape, gate, table, pool.engine);
  }

  void pack(int64_t first, nb::handle gate, nb::handle up, nb::handle down, nb::handle gate_bias, nb::handle up_bias,
            nb::handle down_bias) {
    const LayerShape& s = experts->shape();
    if (s.gated == gate.is_none())
      refuse_value("gate", s.gated ? "None" : "a tensor",
                   s.gated ? "a tensor: these experts are gated" : "None: these experts have no gate");
    if (!s.gated && !gate_bias.is_none()) refuse_value("gate_bias", "a tensor", "None: these experts have no gate");
    std::vector<Array> alive;
    SourceLayer layer{};
    auto take = [&](const char* name, nb::handle tensor, int dims, int64_t rows, int64_t columns, const char* meaning) {
      SourceMatrix matrix{};
      if (tensor.is_none()) return matrix;
      const Array& a = alive.emplace_back(array_of(name, tensor, dims, kFloats));
      if (!layer.count) layer.count = in_range("first dimension of up", (int64_t)a.shape(0), 1, s.experts);
      if (dims == 3) {
        check_shape(name, a, {layer.count, rows, columns}, meaning);
      } else {
        check_shape(name, a, {layer.count, rows}, meaning);
      }
      return SourceMatrix{{a.data(), dtype_of(a), a.stride(1), dims == 3 ? a.stride(2) : 0}, a.stride(0)};
    };
    if (up.is_none()) refuse_type("up", "None", "a tensor");
    if (down.is_none()) refuse_type("down", "None", "a tensor");
    layer.up = take("up", up, 3, s.intermediate, s.hidden, "experts, intermediate, hidden");
    layer.gate = take("gate", gate, 3, s.intermediate, s.hidden, "experts, intermediate, hidden");
    layer.down = take("down", down, 3, s.hidden, s.intermediate, "experts, hidden, intermediate");
    layer.gate_bias = take("gate_bias", gate_bias, 2, s.intermediate, 0, "experts, intermediate");
    layer.up_bias = take("up_bias", up_bias, 2, s.intermediate, 0, "experts, intermediate");
    layer.down_bias = take("down_bias", down_bias, 2, s.hidden, 0, "experts, hidden");
    layer.first = in_range("first_expert", first, 0, s.experts - layer.count);
    nb::gil_scoped_release released;
    experts->weights().pack(layer);
  }

  Batch bind(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter, nb::handle skip,
             std::vector<Array>& alive) const {
    const LayerShape& s = experts->shape();
    alive.reserve(6);
    auto take = [&](const char* name, nb::handle tensor, int dims, std::initializer_list<Element> elements) {
      const Array& a = alive.emplace_back(array_of(name, tensor, dims, elements));
      check_dense(name, a);
      return a;
    };
    Batch b;
    Array x = take("hidden", hidden, 2, kFloats);
    int64_t tokens = in_range("tokens in hidden", (int64_t)x.shape(0), 0, kMostRows);
    check_shape("hidden", x, {tokens, s.hidden}, "tokens, hidden");
    Array i = take("ids", ids, 2, {kInt64, kInt32});
    int64_t top_k =
        in_range("second dimension of ids", (int64_t)i.shape(1), 1, kMostRows / std::max<int64_t>(tokens, 1));
    check_shape("ids", i, {tokens, top_k}, "tokens, top k");
    Array w = take("weights", weights, 2, kFloats);
    check_shape("weights", w, {tokens, top_k}, "tokens, top k");
    Array y = take("out", out, 2, kFloats);
    check_writable("out", out);
    check_shape("out", y, {tokens, s.hidden}, "tokens, hidden");
    if (tokens > 1 && std::abs(y.stride(0)) < s.hidden)
      refuse_value("out", "a row stride of " + std::to_string(y.stride(0)), "rows that do not overlap",
                   "pass out.contiguous()");
    if (share_memory(x, y))
      refuse_value("out", "memory that overlaps hidden", "memory of its own", "pass another tensor");
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
      Array a = take("adapter", adapter, 1, {kInt32});
      check_shape("adapter", a, {tokens}, "tokens");
      b.adapter = (const int32_t*)a.data();
    }
    if (!skip.is_none()) {
      Array m = take("skip", skip, 1, {kBool, kUint8});
      check_shape("skip", m, {s.experts}, "experts");
      b.skip = (const uint8_t*)m.data();
    }
    return b;
  }

  // Memory for gate and up of every (token, slot) of a call, or null.
  char* bind_keep(nb::handle keep, const Batch& batch, std::vector<Array>& alive) const {
    if (keep.is_none()) return nullptr;
    const Array& a = alive.emplace_back(array_of("keep", keep, 1, {kUint8}));
    check_dense("keep", a);
    check_writable("keep", keep);
    check_shape("keep", a, {(int64_t)batch.tokens * batch.top_k * experts->keep_row_bytes()},
                "tokens * top k * keep_row_bytes");
    return (char*)const_cast<void*>(a.data());
  }

  void forward(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
               nb::handle skip, nb::handle keep) const {
    std::vector<Array> alive;
    Batch batch = bind(hidden, ids, weights, out, adapter, skip, alive);
    char* kept = bind_keep(keep, batch, alive);
    nb::gil_scoped_release released;
    check_adapters(batch);
    Call(*experts, batch, kept).run();
  }

  void backward(nb::handle grad_out, nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle grad_hidden,
                nb::handle grad_weights, nb::handle skip, nb::handle keep) const {
    std::vector<Array> alive;
    // The gradient of the hidden states is this call's output.
    Batch batch = bind(hidden, ids, weights, grad_hidden, nb::none(), skip, alive);
    Gradients gradients;
    gradients.keep = bind_keep(keep, batch, alive);
    const Array dy = alive.emplace_back(array_of("grad_out", grad_out, 2, kFloats));
    check_dense("grad_out", dy);
    check_shape("grad_out", dy, {batch.tokens, experts->shape().hidden}, "tokens, hidden");
    const Array dw = alive.emplace_back(array_of("grad_weights", grad_weights, 2, {kFloat32}));
    check_dense("grad_weights", dw);
    check_writable("grad_weights", grad_weights);
    check_shape("grad_weights", dw, {batch.tokens, batch.top_k}, "tokens, top k");
    gradients.out = dy.data();
    gradients.out_dtype = dtype_of(dy);
    gradients.out_stride = row_stride(dy);
    gradients.weights = (float*)const_cast<void*>(dw.data());
    gradients.weights_stride = row_stride(dw);
    nb::gil_scoped_release released;
    Backward(*experts, batch, gradients).run();
  }

  PyCall* prepare(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
                  nb::handle skip) const {
    auto bound = std::make_unique<PyCall>();
    bound->batch = bind(hidden, ids, weights, out, adapter, skip, bound->tensors);
    bound->experts = experts;
    check_adapters(bound->batch);
    experts->weights().enter();  // tells now what submit() would tell later
    experts->weights().leave();
    bound->call.emplace(*experts, bound->batch);
    return bound.release();  // Python's from here on
  }
};

// void(void*), as CUDA's host callbacks are; they need no GIL.
void submit_callback(void* call) {
  ((PyCall*)call)->quietly([&] { ((PyCall*)call)->submit(); });
}
void wait_callback(void* call) {
  ((PyCall*)call)->quietly([&] { ((PyCall*)call)->call->wait(); });
}

nb::list list_variants() {
  nb::list all;
  for (int i = 0; i < variant_count(); i++) {
    const Variant& v = variant(i);
    nb::dict d;
    d["name"] = v.name;
    d["native"] = v.native;
    d["emulated"] = v.emulated;
    d["missing"] = v.missing;
    all.append(d);
  }
  return all;
}

nb::dict describe_machine() {
  const Topology& t = topology();
  nb::dict d;
  d["cpu"] = cpu_name();
  d["cpus"] = t.cpus.size();
  d["cores"] = t.cores;
  d["nodes"] = t.nodes.size();
  d["l1d"] = t.l1d;
  d["l2"] = t.l2;
  d["l3"] = t.l3;
  d["hypervisor"] = t.hypervisor;
  d["quota"] = t.quota;
  return d;
}

}  // namespace
}  // namespace kt

NB_MODULE(_core, m) {
  using namespace kt;
  m.doc() = "The native core; ktransformers.nn is the face for users.";
  m.def("variants", &list_variants);
  m.def("isa", [] { return kernels().name; });
  m.def("machine", &describe_machine);
  m.def("host_callbacks", [] {
    nb::dict d;
    d["submit"] = (uintptr_t)&submit_callback;
    d["wait"] = (uintptr_t)&wait_callback;
    return d;
  });

  nb::class_<PyPool>(m, "Pool")
      .def(nb::init<int64_t, int64_t, int64_t, bool>(), "threads"_a = 0, "groups"_a = 0, "spin_us"_a = 50,
           "pin"_a = true)
      .def_prop_ro("threads", [](const PyPool& p) { return p.engine->pool.threads(); })
      .def_prop_ro("groups", [](const PyPool& p) { return p.engine->pool.groups(); })
      .def_prop_ro("cpus", [](const PyPool& p) { return p.engine->pool.cpus(); })
      .def("rate", &PyPool::rate, "what"_a, "seconds"_a = 0.1, "threads"_a = 0, "isa"_a = "", "bytes"_a = 0);

  nb::class_<PyCall>(m, "Call")
      .def("submit",
           [](PyCall& c) {
             nb::gil_scoped_release released;
             c.raise_error();
             c.submit();
           })
      .def("wait",
           [](PyCall& c) {
             nb::gil_scoped_release released;
             c.call->wait();
             c.raise_error();
           })
      .def_prop_ro("done", [](const PyCall& c) { return c.call->done(); })
      .def_prop_ro("address", [](const PyCall& c) { return (uintptr_t)&c; });

  nb::class_<PyExperts>(m, "Experts")
      .def(nb::init<const PyPool&, int64_t, int64_t, int64_t, bool, const std::string&, double, double,
                    const std::string&>(),
           "pool"_a, "num_experts"_a, "hidden"_a, "intermediate"_a, "gated"_a = true, "activation"_a = "silu",
           "limit"_a = 0.0, "alpha"_a = 0.0, "isa"_a = "")
      .def("pack", &PyExperts::pack, "first_expert"_a, "gate"_a.none(), "up"_a.none(), "down"_a.none(),
           "gate_bias"_a.none() = nb::none(), "up_bias"_a.none() = nb::none(), "down_bias"_a.none() = nb::none())
      .def("forward", &PyExperts::forward, "hidden"_a.none(), "ids"_a.none(), "weights"_a.none(), "out"_a.none(),
           "adapter"_a.none() = nb::none(), "skip"_a.none() = nb::none(), "keep"_a.none() = nb::none())
      .def("backward", &PyExperts::backward, "grad_out"_a.none(), "hidden"_a.none(), "ids"_a.none(), "weights"_a.none(),
           "grad_hidden"_a.none(), "grad_weights"_a.none(), "skip"_a.none() = nb::none(), "keep"_a.none() = nb::none())
      .def("prepare", &PyExperts::prepare, "hidden"_a.none(), "ids"_a.none(), "weights"_a.none(), "out"_a.none(),
           "adapter"_a.none() = nb::none(), "skip"_a.none() = nb::none())
      .def_prop_ro("packed_bytes", [](const PyExperts& e) { return e.experts->weights().bytes(); })
      .def_prop_ro("keep_row_bytes", [](const PyExperts& e) { return e.experts->keep_row_bytes(); })
      .def_prop_ro("isa", [](const PyExperts& e) { return e.experts->kernels().name; })
      .def_prop_ro("num_experts", [](const PyExperts& e) { return e.experts->shape().experts; })
      .def_prop_ro("hidden", [](const PyExperts& e) { return e.experts->shape().hidden; })
      .def_prop_ro("intermediate", [](const PyExperts& e) { return e.experts->shape().intermediate; })
      .def_prop_ro("threads", [](const PyExperts& e) { return e.experts->engine().pool.threads(); });
}
