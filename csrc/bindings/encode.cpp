// Encoding of matrices: checks that codes, scales and tensor scale have the shapes of the format.
#include "moe/encode.h"

#include "bindings/objects.h"
#include "kt_rows.h"

namespace kt {

nb::tuple encode(const std::string& spec, nb::handle source, nb::handle codes, nb::handle scales, nb::handle tensor,
                 const std::string& isa) {
  const Format f = format_of("format", spec);
  const FormatRow& row = f.row();
  if (!row.written) refuse_value("format", "\"" + spec + "\"", "one that is written: " + written_formats());
  const KernelTable& kernels = table_for(isa);
  const Array from = array_of({"source", 3, kFloats}, source);
  const int64_t experts = (int64_t)from.shape(0), rows = (int64_t)from.shape(1), columns = (int64_t)from.shape(2);
  in_range("rows of source", rows, 0, INT32_MAX);
  in_range("columns of source", columns, 1, INT32_MAX / 2);
  const Array to = array_of({"codes", 3, {kUint8, kInt8}, Strides::rows, Access::write}, codes);
  check_shape("codes", to, {experts, rows, released_row_bytes("source", f, columns)}, "experts, rows, bytes of a row");
  EncodedMatrix m{};
  m.codes = (uint8_t*)const_cast<void*>(to.data());
  m.row_bytes = to.stride(1);
  int64_t scales_stride = 0;
  Array scale_array, tensor_array;
  const std::string in_format = std::string(" in format ") + row.name;
  if (!has_scale_tensor(f)) {
    if (!scales.is_none()) refuse_value("scales", "a tensor", "None" + in_format);
  } else {
    const ReleasedScales shape = released_scales(f, rows, columns);
    scale_array = array_of({"scales", shape.flat ? 2 : 3, {shape.element}, Strides::dense, Access::write}, scales);
    if (shape.flat) {
      check_shape("scales", scale_array, {experts, rows}, "experts, rows");
    } else {
      check_shape("scales", scale_array, {experts, shape.rows, shape.spans}, "experts, rows, spans");
    }
    m.scales = (char*)const_cast<void*>(scale_array.data());
    m.scale_stride = shape.spans * (shape.element.bits / 8);
    scales_stride = shape.rows * m.scale_stride;
  }
  if (row.has_tensor_scale()) {
    tensor_array = array_of({"tensor_scale", 1, {kFloat32}, Strides::dense, Access::write}, tensor);
    check_shape("tensor_scale", tensor_array, {experts}, "experts");
    m.tensor = (float*)const_cast<void*>(tensor_array.data());
  } else if (!tensor.is_none()) {
    refuse_value("tensor_scale", "a tensor", "None" + in_format);
  }
  EncodeSums all{0, 0, 0, true};
  {
    nb::gil_scoped_release released;
    for (int64_t e = 0; e < experts; e++) {
      Source matrix{from.data(), dtype_of(from), from.stride(1), 1};
      matrix.data = (const char*)matrix.data + e * from.stride(0) * (int64_t)size_of(matrix.dtype);
      EncodedMatrix expert = m;
      expert.codes += e * to.stride(0);
      if (expert.scales) expert.scales += e * scales_stride;
      if (expert.tensor) expert.tensor += e;
      const EncodeSums sums = encode_matrix(kernels, f, matrix, (int32_t)rows, (int32_t)columns, expert);
      all.moved += sums.moved, all.norm += sums.norm, all.finite &= sums.finite;
    }
    check_mapping(mapping_at(from.data()));
  }
  return nb::make_tuple(all.moved, all.norm, all.finite);
}

bool quantise_rows(nb::handle source, int64_t bits, nb::handle codes, nb::handle scales) {
  if (bits != 4 && bits != 8) refuse_value("bits", std::to_string(bits), "4 or 8");
  const Array from = array_of({"source", 2, {kBFloat16, kFloat32}, Strides::rows}, source);
  const Array to = array_of({"codes", 2, {kInt8, kUint8}, Strides::dense, Access::write}, codes);
  const Array scale = array_of({"scales", 1, {kFloat32}, Strides::dense, Access::write}, scales);
  const int64_t rows = (int64_t)from.shape(0), columns = (int64_t)from.shape(1);
  const bool paired = to.dtype() == nb::dtype<uint8_t>();
  if (paired && (bits != 4 || columns % 2))
    refuse_value("codes", "uint8", "int8, or bits 4 and an even number of columns");
  check_shape("codes", to, {rows, paired ? columns / 2 : columns}, paired ? "rows, pairs of columns" : "rows, columns");
  check_shape("scales", scale, {rows}, "rows");
  const KtRows matrix{from.data(), dtype_of(from) == DType::bf16, from.stride(0), rows, columns};
  nb::gil_scoped_release released;
  const bool finite = quantise_kt_rows(matrix, (int)bits, paired, const_cast<void*>(to.data()), (float*)scale.data());
  check_mapping(mapping_at(from.data()));
  return finite;
}

}  // namespace kt
