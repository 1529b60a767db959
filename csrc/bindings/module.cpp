// The Python module: its classes and functions, and the host callbacks, which do not call Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <optional>
#include <system_error>

#include "bindings/objects.h"
#include "cpu.h"
#include "crc32c.h"
#include "interrupt.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kt {
namespace {

// void(void*), the signature of CUDA host callbacks; they need no GIL.
void submit_callback(void* call) {
  ((PyCall*)call)->store_error([&] { ((PyCall*)call)->submit(); });
}
void wait_callback(void* call) {
  ((PyCall*)call)->store_error([&] { ((PyCall*)call)->call->wait(); });
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
    nb::list precisions;
    for (int p = 0; p < kPrecisions; p++)
      if (v.table((Precision)p)) precisions.append(name_of((Precision)p));
    d["precisions"] = precisions;
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

// Never destroyed: arrays may be released while the interpreter exits.
BufferPool& buffer_pool() {
  static BufferPool* pool = new BufferPool;
  return *pool;
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> pooled_array(int64_t bytes) {
  if (bytes < 0) refuse_value("bytes", std::to_string(bytes), "0 or more");
  auto buffer = std::make_unique<Buffer>(buffer_pool().acquire((size_t)bytes));
  char* data = buffer->data();
  nb::capsule owner(buffer.release(), [](void* p) noexcept {
    std::unique_ptr<Buffer> buffer((Buffer*)p);
    buffer_pool().release(std::move(*buffer));
  });
  return {data, {(size_t)bytes}, owner};
}

// Calls a copy function of the device driver, whose address the caller passes, for rows of (target, source, bytes); a
// call from Python would take as long as a small copy. Stops at the first error.
int copy_rows(uintptr_t call, nb::handle rows, uintptr_t stream) {
  const Array array = array_of({"rows", 2, {kUint64}, Strides::dense}, rows);
  check_shape("rows", array, {(int64_t)array.shape(0), 3}, "copies; target, source, bytes");
  const uint64_t* row = (const uint64_t*)array.data();
  size_t count = array.shape(0);
  nb::gil_scoped_release released;
  auto copy = (int (*)(uint64_t, const void*, size_t, void*))call;
  for (size_t i = 0; i < count; i++, row += 3)
    if (int code = copy(row[0], (const void*)row[1], row[2], (void*)stream)) return code;
  return 0;
}

nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> map_file(const std::string& path) {
  auto file = std::make_unique<MappedFile>(path);
  const char* data = file->data();
  const size_t bytes = file->size();
  nb::capsule owner(file.release(), [](void* p) noexcept { delete (MappedFile*)p; });
  return {data, {bytes}, owner};
}

uint32_t checksum_of(nb::handle data, uint32_t crc) {
  const Array array = array_of({"data", 1, {kUint8}, Strides::dense}, data);
  nb::gil_scoped_release released;
  crc = crc32c(array.data(), array.size(), crc);
  check_mapping(mapping_at(array.data()));
  return crc;
}

// Python's handlers run on its main thread only, which is that of the process.
thread_local std::optional<nb::python_error> raised;

bool run_signal_handlers() {
  if (gettid() != getpid()) return false;
  nb::gil_scoped_acquire acquired;
  if (!PyErr_CheckSignals()) return false;
  raised.emplace();  // takes the exception that the handler raised
  return true;
}

void set_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Interrupted&) {
    if (!raised) return PyErr_SetNone(PyExc_KeyboardInterrupt);
    nb::python_error error = std::move(*raised);
    raised.reset();
    error.restore();
  } catch (const DamagedFile& error) {
    nb::object type = nb::module_::import_("ktransformers.ground.errors").attr("DamagedFileError");
    PyErr_SetString(type.ptr(), error.what());
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
  }
}

}  // namespace

void raise_later() {
  if (!raised) return;
  raised.reset();
  PyErr_SetInterrupt();
}

}  // namespace kt

NB_MODULE(_core, m) {
  using namespace kt;
  m.doc() = "The native core; ktransformers.nn is the interface for users.";
  nb::register_exception_translator(set_error);
  set_interrupt_check(run_signal_handlers);
  m.def("variants", &list_variants);
  m.def("isa", [] { return kernels().name; });
  m.def("machine", &describe_machine);
  m.def("formats", &list_formats);
  m.def("format", &describe_format, "spec"_a);
  m.def("grid", &describe_grid, "format"_a);
  m.def("encode", &encode, "format"_a, "source"_a, "codes"_a, "scales"_a.none(), "tensor_scale"_a.none(), "isa"_a = "");
  m.def("quantise_rows", &quantise_rows, "source"_a, "bits"_a, "codes"_a, "scales"_a);
  m.def("linear_rows", [] { return kernels().gemv_max_tokens; });
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "out"_a, "epsilon"_a);
  m.def("add_lora", &add_lora, "x"_a, "a"_a, "b"_a, "out"_a, "scale"_a);
  m.def("pooled_array", &pooled_array, "bytes"_a);
  m.def("pooled_bytes", [] { return buffer_pool().total_bytes(); });
  m.def("copy_rows", &copy_rows, "call"_a, "rows"_a, "stream"_a);
  m.def("map_file", &map_file, "path"_a);
  m.def("crc32c", &checksum_of, "data"_a, "crc"_a = 0);
  m.def("host_callbacks", [] {
    nb::dict d;
    d["submit"] = (uintptr_t)&submit_callback;
    d["wait"] = (uintptr_t)&wait_callback;
    return d;
  });

  bind_task_queue(m);

  nb::class_<PyStepSequences>(m, "StepSequences")
      .def(nb::init<nb::handle, nb::handle, nb::handle>(), "rows"_a, "positions"_a, "table"_a);

  nb::class_<PyPool>(m, "Pool")
      .def(nb::init<int64_t, int64_t, int64_t, bool, int64_t>(), "threads"_a = 0, "groups"_a = 0, "spin_us"_a = 50,
           "pin"_a = true, "yield_us"_a = 500)
      .def_prop_ro("threads", [](const PyPool& p) { return p.engine->pool.threads(); })
      .def_prop_ro("groups", [](const PyPool& p) { return p.engine->pool.groups(); })
      .def_prop_ro("cpus", [](const PyPool& p) { return p.engine->pool.cpus(); })
      .def("linear", &PyPool::linear, "x"_a, "weights"_a, "outs"_a)
      .def("linear_heads", &PyPool::linear_heads, "x"_a, "weights"_a, "out"_a)
      .def("argmax", &PyPool::argmax, "x"_a)
      .def("attend", &PyPool::attend, "query"_a, "key"_a, "value"_a, "out"_a, "cache"_a, "sequences"_a, nb::kw_only(),
           "scale"_a, "window"_a = 0, "chunk"_a = 0, "sinks"_a.none() = nb::none())
      .def("rate", &PyPool::rate, "what"_a, "seconds"_a = 0.1, "threads"_a = 0, "isa"_a = "", "bytes"_a = 0)
      .def("codes_rate", &PyPool::codes_rate, "format"_a, "rows"_a = 1, "seconds"_a = 0.1, "threads"_a = 0,
           "isa"_a = "", "w8a8"_a = false);

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
                    const std::string&, const std::string&, const std::string&, const std::string&,
                    const std::string&>(),
           "pool"_a, "num_experts"_a, "hidden"_a, "intermediate"_a, "gated"_a = true, "activation"_a = "silu",
           "limit"_a = 0.0, "alpha"_a = 0.0, "isa"_a = "", "precision"_a = "bf16", "gate_format"_a = "bf16",
           "up_format"_a = "bf16", "down_format"_a = "bf16")
      .def("adopt", &PyExperts::adopt, "gate_up"_a, "down"_a, "gate_up_bias"_a.none() = nb::none(),
           "down_bias"_a.none() = nb::none(), "checksums"_a.none() = nb::none(), "source"_a = "")
      .def("memory", &PyExperts::memory)
      .def("parts", &PyExperts::parts)
      .def("biases", &PyExperts::biases)
      .def("place_pages", &PyExperts::place_pages)
      .def("checksums", &PyExperts::checksums)
      .def("verify", &PyExperts::verify, "experts"_a)
      .def("decode", &PyExperts::decode, "matrix"_a, "expert"_a, "out"_a)
      .def("transpose", &PyExperts::transpose, "source"_a, "target"_a)
      .def("layout",
           [](const PyExperts& e) {
             nb::dict all;
             auto put = [&](const char* name, const BlockStore& store) {
               nb::dict d;
               d["blocks"] = store.blocks();
               d["k_tiles"] = store.k_tiles();
               d["block_bytes"] = store.block_bytes();
               if (const Encoding* encoding = store.encoding()) {
                 nb::list strips;
                 for (const Strip& s : encoding->strip) {
                   nb::dict strip;
                   strip["headers"] = s.headers;
                   strip["codes"] = s.codes;
                   strip["bytes"] = s.bytes;
                   strip["span_tiles"] = s.span_tiles;
                   strip["span_bytes"] = s.span_bytes;
                   strip["tile_bytes"] = s.tile_bytes;
                   strips.append(strip);
                 }
                 d["strips"] = strips;
               }
               all[name] = d;
             };
             put("gate_up", e.experts->weights().up());
             put("down", e.experts->weights().down());
             return all;
           })
      .def("pack", &PyExperts::pack, "first_expert"_a, "gate"_a.none(), "up"_a.none(), "down"_a.none(),
           "gate_bias"_a.none() = nb::none(), "up_bias"_a.none() = nb::none(), "down_bias"_a.none() = nb::none())
      .def("forward", &PyExperts::forward, "hidden"_a.none(), "ids"_a.none(), "weights"_a.none(), "out"_a.none(),
           "adapter"_a.none() = nb::none(), "skip"_a.none() = nb::none(), "keep"_a.none() = nb::none(),
           "adapters"_a.none() = nb::none(), "dropout"_a = 0.0, "seed"_a = 0, "w8a8"_a = false, "needs_grad"_a = false)
      .def("backward", &PyExperts::backward, "grad_out"_a.none(), "hidden"_a.none(), "ids"_a.none(), "weights"_a.none(),
           "grad_hidden"_a.none(), "grad_weights"_a.none(), "skip"_a.none() = nb::none(), "keep"_a.none() = nb::none(),
           "adapter"_a.none() = nb::none(), "adapters"_a.none() = nb::none(), "factors"_a.none() = nb::none(),
           "dropout"_a = 0.0, "seed"_a = 0)
      .def("prepare", &PyExperts::prepare, "hidden"_a.none(), "ids"_a.none(), "weights"_a.none(), "out"_a.none(),
           "adapter"_a.none() = nb::none(), "skip"_a.none() = nb::none(), "adapters"_a.none() = nb::none(),
           "w8a8"_a = false)
      .def_prop_ro("packed_bytes", [](const PyExperts& e) { return e.experts->weights().bytes(); })
      .def_prop_ro("keep_row_bytes", [](const PyExperts& e) { return e.experts->keep_row_bytes(); })
      .def_prop_ro("w8a8_unsupported", [](const PyExperts& e) { return e.experts->w8a8_unsupported(); })
      .def_prop_ro("isa", [](const PyExperts& e) { return e.experts->kernels().name; })
      .def_prop_ro("precision", [](const PyExperts& e) { return name_of(e.experts->kernels().precision); })
      .def_prop_ro("num_experts", [](const PyExperts& e) { return e.experts->shape().experts; })
      .def_prop_ro("hidden", [](const PyExperts& e) { return e.experts->shape().hidden; })
      .def_prop_ro("intermediate", [](const PyExperts& e) { return e.experts->shape().intermediate; })
      .def_prop_ro("threads", [](const PyExperts& e) { return e.experts->engine().pool.threads(); });

  nb::class_<PyCodedLinear>(m, "CodedLinear")
      .def(nb::init<const PyPool&, int64_t, int64_t, const std::string&, const std::string&>(), "pool"_a, "rows"_a,
           "columns"_a, "format"_a, "isa"_a = "")
      .def("pack", &PyCodedLinear::pack, "matrix"_a)
      .def("forward", &PyCodedLinear::forward, "x"_a, "out"_a)
      .def("multiply_heads", &PyCodedLinear::multiply_heads, "x"_a, "out"_a, "first"_a, "count"_a, "step"_a,
           "along_rows"_a = false)
      .def("decode", &PyCodedLinear::decode, "first"_a, "out"_a)
      .def("gather", &PyCodedLinear::gather, "rows"_a, "out"_a)
      .def("adopt", &PyCodedLinear::adopt, "blocks"_a)
      .def("memory", &PyCodedLinear::memory)
      .def("checksum", &PyCodedLinear::checksum)
      .def_prop_ro("packed_bytes", [](const PyCodedLinear& l) { return l.linear->bytes(); })
      .def_prop_ro("supports_w8a8", [](const PyCodedLinear& l) { return l.linear->supports_w8a8(); })
      .def_prop_rw(
          "w8a8", [](const PyCodedLinear& l) { return l.linear->w8a8(); }, &PyCodedLinear::set_w8a8)
      .def_prop_ro("isa", [](const PyCodedLinear& l) { return l.linear->isa(); });

  nb::class_<PyDecodeLayer>(m, "DecodeLayer")
      .def(nb::init<const PyPool&, int64_t>(), "pool"_a, "hidden"_a)
      .def("set_attention", &PyDecodeLayer::set_attention, "norm"_a, "query_norm"_a.none(), "key_norm"_a.none(),
           "epsilons"_a, "weights"_a, "biases"_a, "sinks"_a.none(), "head_size"_a, "scale"_a)
      .def("set_experts", &PyDecodeLayer::set_experts, "norm"_a, "epsilon"_a, "router"_a, "bias"_a.none(), "experts"_a,
           "top_k"_a, "normalise"_a)
      .def("attend", &PyDecodeLayer::attend, "x"_a, "out"_a, "cos"_a, "sin"_a, "cache"_a, "sequences"_a, "window"_a = 0)
      .def("route", &PyDecodeLayer::route, "x"_a, "out"_a, "w8a8"_a = false, "needs_grad"_a = false);
  m.def("decode_layers", &PyDecodeLayer::decode_layers, "layers"_a, "x"_a, "out"_a, "cos"_a, "sin"_a, "caches"_a,
        "windows"_a, "sequences"_a, "w8a8"_a, "needs_grad"_a = false);

  nb::class_<PyAdapter>(m, "Adapter")
      .def(nb::init<const PyExperts&, int64_t, int64_t, int64_t, bool>(), "experts"_a, "gate_rank"_a = 0,
           "up_rank"_a = 0, "down_rank"_a = 0, "shared"_a = false)
      .def("pack", &PyAdapter::pack, "gate_a"_a.none() = nb::none(), "gate_b"_a.none() = nb::none(),
           "up_a"_a.none() = nb::none(), "up_b"_a.none() = nb::none(), "down_a"_a.none() = nb::none(),
           "down_b"_a.none() = nb::none(), "gate_scale"_a = 1.0, "up_scale"_a = 1.0, "down_scale"_a = 1.0)
      .def_prop_ro("packed_bytes", [](const PyAdapter& a) { return a.adapter->bytes(); });
}
