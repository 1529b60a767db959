// Checks of single arguments from Python: a tensor as an array, a number in its range, a word of a list.
//
// Every error names the argument, what was given, what was expected and what to do. Tensors are taken through DLPack
// from any library that implements it; neither torch nor numpy is used here. array_of() is the only way to the memory
// of a tensor, and it takes everything that can be wrong with one as an argument, so that no binding can leave a check
// out; tests/kernels/test_bindings.py passes every kind of wrong tensor to every binding.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "types.h"

namespace kt {

namespace nb = nanobind;

std::string text_of(const char* name, const std::string& given, const std::string& expected, const std::string& remedy);

[[noreturn]] void refuse_type(const char* name, const std::string& given, const std::string& expected,
                              const std::string& remedy = "");

[[noreturn]] void refuse_value(const char* name, const std::string& given, const std::string& expected,
                               const std::string& remedy = "");

// DLPack's dtypes by the names that torch and numpy give them.
struct Element {
  const char* name;
  nb::dlpack::dtype_code code;
  int bits;
};
inline constexpr Element kFloat64{"float64", nb::dlpack::dtype_code::Float, 64};
inline constexpr Element kFloat32{"float32", nb::dlpack::dtype_code::Float, 32};
inline constexpr Element kBFloat16{"bfloat16", nb::dlpack::dtype_code::Bfloat, 16};
inline constexpr Element kFloat16{"float16", nb::dlpack::dtype_code::Float, 16};
inline constexpr Element kInt32{"int32", nb::dlpack::dtype_code::Int, 32};
inline constexpr Element kInt64{"int64", nb::dlpack::dtype_code::Int, 64};
inline constexpr Element kBool{"bool", nb::dlpack::dtype_code::Bool, 8};
inline constexpr Element kUint64{"uint64", nb::dlpack::dtype_code::UInt, 64};
inline constexpr Element kUint8{"uint8", nb::dlpack::dtype_code::UInt, 8};
inline constexpr Element kInt8{"int8", nb::dlpack::dtype_code::Int, 8};

bool is(const nb::dlpack::dtype& type, const Element& e);

// Any of them may be given whatever the precision of the experts.
inline constexpr std::initializer_list<Element> kFloats = {kBFloat16, kFloat16, kFloat32, kFloat64};

using Array = nb::ndarray<nb::ro>;

enum class Access : uint8_t { read, write };
// any: every dimension has its own stride. rows: the last one is 1. dense: all as in a contiguous tensor.
enum class Strides : uint8_t { any, rows, dense };

// What a binding expects of a tensor.
struct TensorArgument {
  const char* name;
  int dims;
  std::initializer_list<Element> elements;
  Strides strides = Strides::rows;
  Access access = Access::read;
  int alignment = 1;  // of the address in bytes, beyond that of the element
};

// The tensor as an array in host memory. The array keeps the memory alive.
Array array_of(const TensorArgument& argument, nb::handle tensor);

DType dtype_of(const Array& array);  // of one of kFloats

void check_shape(const char* name, const Array& array, std::initializer_list<int64_t> shape, const char* meaning);
void check_same_dtype(const char* name, const Array& array, const char* other, const Array& than);
int64_t length_of(const char* name, nb::handle sequence);  // of a list or tuple
int64_t integer_of(const char* name, nb::handle number);

inline int64_t row_stride(const Array& array) { return array.shape(0) > 1 ? array.stride(0) : 0; }

bool share_memory(const Array& x, const Array& y);  // of two or three dimensions, rows dense

int32_t in_range(const char* name, int64_t value, int64_t low, int64_t high);

// Maps a word to the enum value at its index in the list.
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

}  // namespace kt
