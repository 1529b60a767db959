// The door from Python: shapes, dtypes, strides and devices are checked here, and the GIL is released here.
//
// Nothing past this file checks anything, so everything that could read or write outside a tensor is refused here, with
// the name of the argument, what was given, what was expected and what to do. Tensors come through DLPack. The
// surprising part is exported(): torch's `__dlpack__` takes 6 us a tensor, a third of what a call may cost, and
// DLPack's C exchange API a twentieth of that.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "cpu.h"
#include "measure.h"
#include "moe/moe.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kt {
namespace {

std::string text_of(const char* name, const std::string& given, const std::string& expected,
                    const std::string& remedy) {
  return std::string(name) + ": given " + given + ", expected " + expected + (remedy.empty() ? "" : "; " + remedy);
}

[[noreturn]] void refuse_type(const char* name, const std::string& given, const std::string& expected,
                              const std::string& remedy = "") {
  throw nb::type_error(text_of(name, given, expected, remedy).c_str());
}

[[noreturn]] void refuse_value(const char* name, const std::string& given, const std::string& expected,
                               const std::string& remedy = "") {
  throw nb::value_error(text_of(name, given, expected, remedy).c_str());
}

std::string list_of(const int64_t* values, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; i++) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// DLPack's dtypes by the names that torch and numpy give them.
struct Element {
  const char* name;
  nb::dlpack::dtype_code code;
  int bits;
};
constexpr Element kFloat32{"float32", nb::dlpack::dtype_code::Float, 32};
constexpr Element kBFloat16{"bfloat16", nb::dlpack::dtype_code::Bfloat, 16};
constexpr Element kFloat16{"float16", nb::dlpack::dtype_code::Float, 16};
constexpr Element kInt32{"int32", nb::dlpack::dtype_code::Int, 32};
constexpr Element kInt64{"int64", nb::dlpack::dtype_code::Int, 64};
constexpr Element kBool{"bool", nb::dlpack::dtype_code::Bool, 8};
constexpr Element kUint8{"uint8", nb::dlpack::dtype_code::UInt, 8};

bool is(const nb::dlpack::dtype& type, const Element& e) {
  return type.code == (uint8_t)e.code && type.bits == e.bits && type.lanes == 1;
}

std::string name_of(const nb::dlpack::dtype& type) {
  for (const Element& e : {kFloat32, kBFloat16, kFloat16, kInt32, kInt64, kBool, kUint8})
    if (is(type, e)) return e.name;
  using Code = nb::dlpack::dtype_code;
  const char* kind = type.code == (uint8_t)Code::Float     ? "float"
                     : type.code == (uint8_t)Code::Int     ? "int"
                     : type.code == (uint8_t)Code::UInt    ? "uint"
                     : type.code == (uint8_t)Code::Complex ? "complex"
                                                           : "another type of bits: ";
  return kind + std::to_string(type.bits);
}

std::string kind_of(nb::handle object) { return "a " + nb::cast<std::string>(nb::str(object.type().attr("__name__"))); }

// The C exchange API of DLPack 1.2, as far as it is used here. A producer's type carries it as a capsule.
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  int (*to_managed)(void* object, void** managed);  // a new DLManagedTensorVersioned; -1 with a Python error set
};

struct ManagedHead {
  uint32_t major, minor;
  void* context;
  void (*deleter)(void* self);
};

constexpr const char* kExchange = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dltensor_versioned";

void drop_unused(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kCapsule)) return;  // renamed by the one who took it
  ManagedHead* head = (ManagedHead*)PyCapsule_GetPointer(capsule, kCapsule);
  if (head->deleter) head->deleter(head);
}

// The tensor as a DLPack capsule where its type has the exchange API, as itself elsewhere.
nb::object exported(nb::handle tensor) {
  nb::object holder = nb::getattr(tensor.type(), kExchange, nb::none());
  if (!PyCapsule_IsValid(holder.ptr(), "dlpack_exchange_api")) return nb::borrow(tensor);
  auto* api = (ExchangeApi*)PyCapsule_GetPointer(holder.ptr(), "dlpack_exchange_api");
  if (api->major != 1) return nb::borrow(tensor);
  void* managed = nullptr;
  if (api->to_managed(tensor.ptr(), &managed)) nb::raise_python_error();
  PyObject* capsule = PyCapsule_New(managed, kCapsule, drop_unused);
  if (!capsule) nb::raise_python_error();
  return nb::steal(capsule);
}

using Array = nb::ndarray<nb::ro>;

// The tensor as an array in host memory with `dims` dimensions. The array keeps the memory alive.
Array array_of(const char* name, nb::handle tensor, int dims, std::initializer_list<Element> elements) {
  if (nb::cast<bool>(nb::bool_(nb::getattr(tensor, "requires_grad", nb::bool_(false)))))
    refuse_type(name, kind_of(tensor) + " that requires grad", "one without",
                "pass " + std::string(name) + ".detach()");
  Array array;
  try {
    array = nb::cast<Array>(exported(tensor));
  } catch (nb::python_error& error) {
    nb::object device = nb::getattr(tensor, "device", nb::none());
    std::string where = device.is_none() ? "" : " on " + nb::cast<std::string>(nb::str(device));
    refuse_type(name, kind_of(tensor) + where, "a tensor in CPU memory",
                "it cannot be read: " + nb::cast<std::string>(nb::str(error.value())));
  } catch (nb::cast_error&) {
    refuse_type(name, kind_of(tensor), "a torch tensor, a numpy array or another DLPack tensor in CPU memory");
  }
  // Pinned host memory (cuda_host) is as good as any.
  if (array.device_type() != nb::device::cpu::value && array.device_type() != nb::device::cuda_host::value)
    refuse_type(name, kind_of(tensor) + " on a device of DLPack type " + std::to_string(array.device_type()),
                "a tensor in CPU memory", "copy it with .cpu()");
  if (std::none_of(elements.begin(), elements.end(), [&](const Element& e) { return is(array.dtype(), e); })) {
    std::string expected;
    for (const Element& e : elements) expected += (expected.empty() ? "" : ", ") + std::string(e.name);
    refuse_type(name, kind_of(tensor) + " of " + name_of(array.dtype()), expected, "convert it with .to()");
  }
  if ((int)array.ndim() != dims)
    refuse_value(name, "shape " + list_of(array.shape_ptr(), array.ndim()), std::to_string(dims) + " dimensions");
  if ((uintptr_t)array.data() % (array.dtype().bits / 8))
    refuse_value(name, "an address that is no multiple of the element's size", "an aligned tensor", "copy it");
  return array;
}

const std::initializer_list<Element> kFloats = {kBFloat16, kFloat16, kFloat32};

DType dtype_of(const Array& array) {
  return is(array.dtype(), kFloat32) ? DType::f32 : is(array.dtype(), kBFloat16) ? DType::bf16 : DType::f16;
}

void check_shape(const char* name, const Array& array, std::initializer_list<int64_t> shape, const char* meaning) {
  if (std::equal(shape.begin(), shape.end(), array.shape_ptr())) return;
  refuse_value(name, "shape " + list_of(array.shape_ptr(), array.ndim()),
               list_of(shape.begin(), shape.size()) + " (" + meaning + ")");
}

void check_dense(const char* name, const Array& array) {
  size_t last = array.ndim() - 1;
  if (array.shape(last) > 1 && array.stride(last) != 1)
    refuse_value(name, "stride " + std::to_string(array.stride(last)) + " in the last dimension", "1",
                 "pass " + std::string(name) + ".contiguous()");
}

// torch has no read-only tensors; numpy has.
void check_writable(const char* name, nb::handle tensor) {
  nb::ndarray<> writable;
  if (!nb::hasattr(tensor.type(), kExchange) && !nb::try_cast(tensor, writable))
    refuse_type(name, kind_of(tensor) + " that is read-only", "one that can be written");
}

int64_t row_stride(const Array& array) { return array.shape(0) > 1 ? array.stride(0) : 0; }

int32_t in_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    refuse_value(name, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
  return (int32_t)value;
}

const KernelTable& table_for(const std::string& isa) {
  if (isa.empty()) return kernels();
  try {
    return kernels(isa.c_str());
  } catch (const std::runtime_error& error) {
    throw nb::value_error(("isa: " + std::string(error.what())).c_str());
  }
}

// A word from a list, by its place.
template <class Enum>
Enum word_of(const char* name, const std::string& word, std::initializer_list<const char*> words) {
  std::string all;
  int place = 0;
  for (const char* w : words) {
    if (word == w) return (Enum)place;
    all += (place++ ? ", " : "") + std::string(w);
  }
  refuse_value(name, "\"" + word + "\"", "one of " + all);
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

// Bytes from the first element to past the last one.
std::pair<intptr_t, intptr_t> extent(const Array& a) {
  intptr_t size = a.dtype().bits / 8, begin = (intptr_t)a.data(),
           span = row_stride(a) * ((intptr_t)a.shape(0) - 1) * size;
  return {begin + std::min<intptr_t>(span, 0), begin + std::max<intptr_t>(span, 0) + (intptr_t)a.shape(1) * size};
}

bool share_memory(const Array& x, const Array& y) {
  auto [x0, x1] = extent(x);
  auto [y0, y1] = extent(y);
  if (x.size() == 0 || x1 <= y0 || y1 <= x0) return false;
  intptr_t size = x.dtype().bits / 8, other = y.dtype().bits / 8, step = std::abs(row_stride(x)) * size;
  if (step == 0 || step != std::abs(row_stride(y)) * other) return true;
  // Columns of one buffer, side by side.
  intptr_t apart = ((y0 - x0) % step + step) % step;
  return apart < (intptr_t)x.shape(1) * size || apart + (intptr_t)y.shape(1) * other > step;
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
    int64_t tokens = in_range("tokens in hidden", (int64_t)x.shape(0), 0, INT_MAX);
    check_shape("hidden", x, {tokens, s.hidden}, "tokens, hidden");
    Array i = take("ids", ids, 2, {kInt64, kInt32});
    int64_t top_k = in_range("second dimension of ids", (int64_t)i.shape(1), 1, INT_MAX / std::max<int64_t>(tokens, 1));
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

  void forward(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
               nb::handle skip) const {
    std::vector<Array> alive;
    Batch batch = bind(hidden, ids, weights, out, adapter, skip, alive);
    nb::gil_scoped_release released;
    check_adapters(batch);
    Call(*experts, batch).run();
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
           "adapter"_a.none() = nb::none(), "skip"_a.none() = nb::none())
      .def("prepare", &PyExperts::prepare, "hidden"_a.none(), "ids"_a.none(), "weights"_a.none(), "out"_a.none(),
           "adapter"_a.none() = nb::none(), "skip"_a.none() = nb::none())
      .def_prop_ro("packed_bytes", [](const PyExperts& e) { return e.experts->weights().bytes(); })
      .def_prop_ro("isa", [](const PyExperts& e) { return e.experts->kernels().name; })
      .def_prop_ro("num_experts", [](const PyExperts& e) { return e.experts->shape().experts; })
      .def_prop_ro("hidden", [](const PyExperts& e) { return e.experts->shape().hidden; })
      .def_prop_ro("intermediate", [](const PyExperts& e) { return e.experts->shape().intermediate; })
      .def_prop_ro("threads", [](const PyExperts& e) { return e.experts->engine().pool.threads(); });
}
