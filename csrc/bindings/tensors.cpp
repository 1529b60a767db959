// Takes tensors through DLPack. The surprising part is dlpack_capsule(): torch's `__dlpack__` takes 6 us a tensor, a
// third of the overhead of a call, and DLPack's C exchange API a twentieth of that.
#include "bindings/tensors.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "mapped_file.h"

namespace kt {
namespace {

std::string list_of(const int64_t* values, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; i++) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string name_of(const nb::dlpack::dtype& type) {
  for (const Element& e : {kFloat64, kFloat32, kBFloat16, kFloat16, kInt32, kInt64, kBool, kUint8, kUint64})
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

// The part of the C exchange API of DLPack 1.2 that is used here. A producer's type holds it in a capsule.
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

void delete_unconsumed(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kCapsule)) return;  // renamed by its consumer
  ManagedHead* head = (ManagedHead*)PyCapsule_GetPointer(capsule, kCapsule);
  if (head->deleter) head->deleter(head);
}

// The tensor as a DLPack capsule where its type has the exchange API, otherwise the tensor itself.
nb::object dlpack_capsule(nb::handle tensor) {
  nb::object holder = nb::getattr(tensor.type(), kExchange, nb::none());
  if (!PyCapsule_IsValid(holder.ptr(), "dlpack_exchange_api")) return nb::borrow(tensor);
  auto* api = (ExchangeApi*)PyCapsule_GetPointer(holder.ptr(), "dlpack_exchange_api");
  if (api->major != 1) return nb::borrow(tensor);
  void* managed = nullptr;
  if (api->to_managed(tensor.ptr(), &managed)) nb::raise_python_error();
  PyObject* capsule = PyCapsule_New(managed, kCapsule, delete_unconsumed);
  if (!capsule) nb::raise_python_error();
  return nb::steal(capsule);
}

// The bytes of a matrix: from the first element to past the last one, from row to row, of a row.
struct MatrixBytes {
  intptr_t begin, end, step, row;
};

// Of a matrix, or of one of several.
MatrixBytes bytes_of(const Array& a, size_t index) {
  const size_t rows = a.ndim() - 2;
  const intptr_t size = a.dtype().bits / 8, row = (intptr_t)a.shape(rows + 1) * size,
                 begin = (intptr_t)a.data() + (rows ? (intptr_t)index * a.stride(0) * size : 0),
                 step = a.shape(rows) > 1 ? a.stride(rows) * size : 0, span = step * ((intptr_t)a.shape(rows) - 1);
  return {begin + std::min<intptr_t>(span, 0), begin + std::max<intptr_t>(span, 0) + row, std::abs(step), row};
}

bool overlap(const MatrixBytes& x, const MatrixBytes& y) {
  if (x.end <= y.begin || y.end <= x.begin) return false;
  if (x.step == 0 || x.step != y.step) return true;
  // The rows interleave in one buffer: compares the column ranges.
  const intptr_t apart = ((y.begin - x.begin) % x.step + x.step) % x.step;
  return apart < x.row || apart + y.row > x.step;
}

}  // namespace

std::string text_of(const char* name, const std::string& given, const std::string& expected,
                    const std::string& remedy) {
  return std::string(name) + ": given " + given + ", expected " + expected + (remedy.empty() ? "" : "; " + remedy);
}

[[noreturn]] void refuse_type(const char* name, const std::string& given, const std::string& expected,
                              const std::string& remedy) {
  throw nb::type_error(text_of(name, given, expected, remedy).c_str());
}

[[noreturn]] void refuse_value(const char* name, const std::string& given, const std::string& expected,
                               const std::string& remedy) {
  throw nb::value_error(text_of(name, given, expected, remedy).c_str());
}

bool is(const nb::dlpack::dtype& type, const Element& e) {
  return type.code == (uint8_t)e.code && type.bits == e.bits && type.lanes == 1;
}

namespace {

// An attribute by a name that is made once; null: there is none.
nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (!value) PyErr_Clear();
  return nb::steal(value);
}

// torch negates lazily: memory holds the number before. It does so with complex conjugates too, but no binding takes
// complex numbers.
void check_bits(const char* name, nb::handle tensor) {
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  if (attribute(tensor, requires_grad).ptr() == Py_True)
    refuse_type(name, kind_of(tensor) + " that requires grad", "one without",
                "pass " + std::string(name) + ".detach()");
  nb::object method = attribute(tensor, is_neg);
  if (method.is_valid() && method().ptr() == Py_True)
    refuse_type(name, kind_of(tensor) + " whose memory holds other numbers (is_neg)", "the numbers themselves",
                "pass " + std::string(name) + ".resolve_neg()");
}

void check_strides(const char* name, const Array& array, Strides strides) {
  if (strides == Strides::any || !array.size()) return;
  int64_t dense = 1;
  for (size_t d = array.ndim(); d-- > (strides == Strides::rows ? array.ndim() - 1 : 0);) {
    if (array.shape(d) > 1 && array.stride(d) != dense)
      refuse_value(name, "strides " + list_of(array.stride_ptr(), array.ndim()),
                   strides == Strides::rows ? "1 in the last dimension" : "a dense tensor",
                   "pass " + std::string(name) + ".contiguous()");
    dense *= (int64_t)array.shape(d);
  }
}

// Whether no element lies at the address of another. Sufficient, not necessary: the dimensions are nested.
bool has_own_elements(const Array& array) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t d = 0; d < array.ndim(); d++)
    if (array.shape(d) > 1) dims.emplace_back(std::abs(array.stride(d)), (int64_t)array.shape(d));
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (auto [stride, size] : dims) {
    if (stride < extent) return false;
    extent = stride * (size - 1) + extent;
  }
  return true;
}

// torch's tensors are never marked as read-only, not even over a read-only mapping.
void check_writable(const char* name, nb::handle tensor, const Array& array) {
  nb::ndarray<> writable;
  if (!nb::hasattr(tensor.type(), kExchange) && !nb::try_cast(tensor, writable))
    refuse_type(name, kind_of(tensor) + " that is read-only", "one that can be written", "copy it");
  if (!array.size()) return;
  if (const Mapping* mapping = mapping_at(array.data()))
    refuse_value(name, "memory of the file " + path_of(*mapping), "memory that can be written", "copy it");
  if (!has_own_elements(array))
    refuse_value(name, "strides " + list_of(array.stride_ptr(), array.ndim()) + ", elements that overlap",
                 "elements of its own", "clone it");
}

}  // namespace

Array array_of(const TensorArgument& argument, nb::handle tensor) {
  const char* name = argument.name;
  check_bits(name, tensor);
  Array array;
  try {
    array = nb::cast<Array>(dlpack_capsule(tensor));
  } catch (nb::python_error& error) {
    nb::object device = nb::getattr(tensor, "device", nb::none());
    std::string where = device.is_none() ? "" : " on " + nb::cast<std::string>(nb::str(device));
    refuse_type(name, kind_of(tensor) + where, "a tensor in CPU memory",
                "it cannot be read: " + nb::cast<std::string>(nb::str(error.value())));
  } catch (nb::cast_error&) {
    refuse_type(name, kind_of(tensor), "a torch tensor, a numpy array or another DLPack tensor in CPU memory");
  }
  // Pinned host memory (cuda_host) is accepted like any other.
  if (array.device_type() != nb::device::cpu::value && array.device_type() != nb::device::cuda_host::value)
    refuse_type(name, kind_of(tensor) + " on a device of DLPack type " + std::to_string(array.device_type()),
                "a tensor in CPU memory", "copy it with .cpu()");
  auto matches = [&](const Element& e) { return is(array.dtype(), e); };
  if (std::none_of(argument.elements.begin(), argument.elements.end(), matches)) {
    std::string expected;
    for (const Element& e : argument.elements) expected += (expected.empty() ? "" : ", ") + std::string(e.name);
    refuse_type(name, kind_of(tensor) + " of " + name_of(array.dtype()), expected, "convert it with .to()");
  }
  if ((int)array.ndim() != argument.dims)
    refuse_value(name, "shape " + list_of(array.shape_ptr(), array.ndim()),
                 std::to_string(argument.dims) + " dimensions");
  if (array.size() && !array.data()) refuse_value(name, "a tensor without memory", "one whose storage was not freed");
  const int alignment = std::max(array.dtype().bits / 8, argument.alignment);
  if (array.size() && (uintptr_t)array.data() % (uintptr_t)alignment)
    refuse_value(name, "an address that is no multiple of " + std::to_string(alignment), "an aligned tensor",
                 "copy it");
  check_strides(name, array, argument.strides);
  if (argument.access == Access::write) check_writable(name, tensor, array);
  return array;
}

DType dtype_of(const Array& array) {
  if (is(array.dtype(), kFloat64)) return DType::f64;
  return is(array.dtype(), kFloat32) ? DType::f32 : is(array.dtype(), kBFloat16) ? DType::bf16 : DType::f16;
}

void check_shape(const char* name, const Array& array, std::initializer_list<int64_t> shape, const char* meaning) {
  if (std::equal(shape.begin(), shape.end(), array.shape_ptr())) return;
  refuse_value(name, "shape " + list_of(array.shape_ptr(), array.ndim()),
               list_of(shape.begin(), shape.size()) + " (" + meaning + ")");
}

void check_same_dtype(const char* name, const Array& array, const char* other, const Array& than) {
  if (array.dtype() != than.dtype())
    refuse_type(name, name_of(array.dtype()), name_of(than.dtype()) + ", the dtype of " + other,
                "convert it with .to()");
}

int64_t length_of(const char* name, nb::handle sequence) {
  if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr()))
    refuse_type(name, kind_of(sequence), "a list or tuple");
  return (int64_t)nb::len(sequence);
}

int64_t integer_of(const char* name, nb::handle number) {
  int64_t value = 0;
  if (!nb::try_cast(number, value)) refuse_type(name, kind_of(number), "an integer of 64 bits");
  return value;
}

int32_t in_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    refuse_value(name, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
  return (int32_t)value;
}

bool share_memory(const Array& x, const Array& y) {
  if (x.size() == 0 || y.size() == 0) return false;
  const auto count = [](const Array& a) { return a.ndim() == 3 ? a.shape(0) : 1; };
  const auto all = [&](const Array& a) {  // their bytes, whatever lies between them
    const MatrixBytes first = bytes_of(a, 0), last = bytes_of(a, count(a) - 1);
    return MatrixBytes{std::min(first.begin, last.begin), std::max(first.end, last.end), 0, 0};
  };
  if (!overlap(all(x), all(y))) return false;
  for (size_t i = 0; i < count(x); i++)
    for (size_t j = 0; j < count(y); j++)
      if (overlap(bytes_of(x, i), bytes_of(y, j))) return true;
  return false;
}

}  // namespace kt
