// The table of formats, formats by name, matrices in the bytes of a checkpoint, and packed bytes in and out.
#include "bindings/objects.h"

namespace kt {
namespace {

constexpr Element kInt8{"int8", nb::dlpack::dtype_code::Int, 8};

std::string all_formats() {
  std::string all;
  for (const FormatRow& row : kFormats) all += (all.empty() ? "" : ", ") + std::string(row.name);
  return all + " (int4:GROUP[:f16|f32], fp8:128x128|1x128|row)";
}

// Text up to the next colon, which is taken away.
std::string next_word(std::string& text) {
  size_t at = text.find(':');
  std::string word = text.substr(0, at);
  text = at == std::string::npos ? "" : text.substr(at + 1);
  return word;
}

// A tensor whose last dimension lies dense.
const Array& dense(const char* name, nb::handle tensor, int dims, std::initializer_list<Element> elements,
                   std::vector<Array>& alive) {
  const Array& a = alive.emplace_back(array_of(name, tensor, dims, elements));
  if (a.shape((size_t)dims - 1) > 1 && a.stride((size_t)dims - 1) != 1)
    refuse_value(name, "a last dimension in steps of " + std::to_string(a.stride((size_t)dims - 1)), "a dense one",
                 "pass .contiguous()");
  return a;
}

Element element_of_scales(const Format& f) {
  switch (f.type_of(f.row().header[0])) {
    case FieldType::f32:
      return kFloat32;
    case FieldType::f16:
      return kFloat16;
    case FieldType::bf16:
      return kBFloat16;
    default:
      return kUint8;
  }
}

constexpr const char* kBlocks[] = {"128x128", "1x128", "row"};

// The name in the one spelling that Python compares.
std::string spec_of(const Format& f) {
  const std::string name = f.row().name;
  if (f.row().suffix == Suffix::group)
    return name + ":" + std::to_string(f.group) +
           (f.scale == DType::bf16  ? ""
            : f.scale == DType::f16 ? ":f16"
                                    : ":f32");
  if (f.row().suffix == Suffix::block) return name + ":" + kBlocks[f.shared ? 0 : f.group ? 1 : 2];
  return name;
}

// Columns and rows that share a scale in the checkpoint: columns 0, all of a row; rows 1, each its own.
int32_t scale_columns(const Format& f) { return f.span() / f.row().header[0].count; }
int32_t scale_rows(const Format& f) { return f.shared ? kBlockScale : 1; }
// One scale a row is [rows], but [rows, 1] where the name says how many groups there are.
bool has_flat_scales(const Format& f) { return !f.span() && f.row().suffix != Suffix::group; }

nb::dict describe(const Format& f) {
  const FormatRow& row = f.row();
  nb::list planes, header;
  for (int bits : row.plane)
    if (bits) planes.append(bits);
  if (f.is_tiles()) planes.append(16);
  for (int i = 0; i < row.fields(); i++)
    header.append(nb::make_tuple(kFieldTypes[(int)f.type_of(row.header[i])], (int)row.header[i].count));
  nb::dict all;
  all["spec"] = spec_of(f);
  all["name"] = row.name;
  all["element"] = kElementKinds[(int)row.element];
  all["zero_point"] = (int)row.zero_point;
  all["planes"] = planes;
  all["scales"] = kScaleKinds[(int)row.scales];
  all["span"] = f.span();
  all["header"] = header;
  all["header_bytes"] = f.header();
  all["shared_header"] = f.shared;
  all["tensor_scale"] = row.has_tensor_scale();
  all["scale_columns"] = row.fields() ? scale_columns(f) : 0;
  all["scale_rows"] = scale_rows(f);
  all["flat_scales"] = has_flat_scales(f);
  all["gguf_type"] = row.gguf_type < 0 ? nb::object(nb::none()) : nb::cast((int)row.gguf_type);
  all["block_bytes"] = (int)row.block;
  all["written"] = row.written;
  return all;
}

}  // namespace

Format format_of(const char* name, const std::string& text) {
  std::string rest = text, word = next_word(rest);
  Format f;
  int codec = 0;
  while (codec < kCodecs && word != kFormats[codec].name) codec++;
  if (codec == kCodecs) refuse_value(name, "\"" + text + "\"", "one of " + all_formats());
  f.codec = (Codec)codec;
  if (f.row().suffix == Suffix::group) {
    std::string group = next_word(rest), scale = next_word(rest);
    bool digits = !group.empty() && group.size() < 7 && group.find_first_not_of("0123456789") == std::string::npos;
    f.group = digits ? std::stoi(group) : -1;
    if (f.group < 0 || f.group % kTileK)
      refuse_value(name, "\"" + text + "\"", word + ":GROUP with a multiple of 32, or 0 for one scale a row");
    f.scale = scale.empty() ? DType::bf16 : word_of<DType>("type of scales", scale, {"f32", "bf16", "f16"});
  } else if (f.row().suffix == Suffix::block) {
    enum class Block : uint8_t { square, row, whole };
    Block block = word_of<Block>(("block of " + word).c_str(), next_word(rest), {kBlocks[0], kBlocks[1], kBlocks[2]});
    f.group = block == Block::whole ? 0 : kBlockScale;
    f.shared = block == Block::square;
  }
  if (!rest.empty()) refuse_value(name, "\"" + text + "\"", "one of " + all_formats());
  return f;
}

nb::dict describe_format(const std::string& text) { return describe(format_of("format", text)); }

nb::list list_formats() {
  nb::list all;
  for (int codec = 0; codec < kCodecs; codec++) {
    const std::string name = kFormats[codec].name;
    if (kFormats[codec].suffix == Suffix::group) {
      all.append(describe_format(name + ":32"));
    } else if (kFormats[codec].suffix == Suffix::block) {
      for (const char* block : kBlocks) all.append(describe_format(name + ":" + block));
    } else {
      all.append(describe_format(name));
    }
  }
  return all;
}

nb::tuple describe_grid(const std::string& text) {
  Format f = format_of("format", text);
  if (!f.row().in_grid()) refuse_value("format", "\"" + text + "\"", "one with a grid: iq1_s to iq3_s or tq1_0");
  const Grid& grid = grid_of(f.codec);
  // Constants of the library, without an owner.
  using Entries = nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>;
  using Levels = nb::ndarray<nb::numpy, const float, nb::ndim<1>>;
  return nb::make_tuple(Entries(grid.entries, {(size_t)grid.count}, nb::handle()),
                        Levels(grid.levels, {16}, nb::handle()));
}

SourceMatrix released_of(const char* name, nb::handle three, const Format& f, int64_t experts, int64_t rows,
                         int64_t columns, std::vector<Array>& alive) {
  if (!nb::isinstance<nb::sequence>(three) || nb::len(three) != 3)
    refuse_type(name, "no encoded matrix", std::string("(codes, scales, tensor scale) of format ") + f.row().name);
  const std::string in_format = std::string(" in format ") + f.row().name;
  const FormatRow& row = f.row();
  int64_t step = row.block ? row.span : row.span ? row.span : 8 / f.bits();
  if (columns % step)
    refuse_value(name, std::to_string(columns) + " columns" + in_format, "a multiple of " + std::to_string(step));
  int64_t row_bytes = row.block ? columns / row.span * row.block : columns * f.bits() / 8;
  const std::string codes_name = std::string("codes of ") + name, scales_name = std::string("scales of ") + name;
  const Array& codes = dense(codes_name.c_str(), three[0], 3, {kUint8, kInt8}, alive);
  check_shape(codes_name.c_str(), codes, {experts, rows, row_bytes}, "experts, rows, bytes of a row");
  SourceMatrix m{};
  m.released.codes = (const uint8_t*)codes.data();
  m.released.row_bytes = codes.stride(1);
  m.codes_stride = codes.stride(0);
  m.released.scale_rows = 1;
  if (row.block) {
    if (!three[1].is_none()) refuse_value(scales_name.c_str(), "a tensor", "None: GGUF's blocks hold their scales");
    return m;
  }
  const bool flat = has_flat_scales(f);
  Element element = element_of_scales(f);
  const Array& scales = dense(scales_name.c_str(), three[1], flat ? 2 : 3, {element}, alive);
  int64_t bytes = element.bits / 8;
  if (flat) {
    check_shape(scales_name.c_str(), scales, {experts, rows}, "experts, rows");
    m.released.scale_stride = bytes;
  } else {
    int64_t spans = f.span() ? ceil_div(columns, scale_columns(f)) : 1;
    m.released.scale_rows = scale_rows(f);
    check_shape(scales_name.c_str(), scales, {experts, ceil_div(rows, m.released.scale_rows), spans},
                "experts, rows, spans");
    m.released.scale_stride = scales.stride(1) * bytes;
  }
  m.released.scales = (const char*)scales.data();
  m.scales_stride = scales.stride(0) * bytes;
  if (row.has_tensor_scale()) {
    const std::string tensor_name = std::string("tensor scale of ") + name;
    const Array& tensor = dense(tensor_name.c_str(), three[2], 1, {kFloat32}, alive);
    check_shape(tensor_name.c_str(), tensor, {experts}, "experts");
    m.released.tensor = (const float*)tensor.data();
  }
  return m;
}

void PyExperts::adopt(nb::handle up, nb::handle down, nb::handle up_bias, nb::handle down_bias) {
  Weights& w = experts->weights();
  std::vector<Array> alive;
  auto take = [&](const char* name, nb::handle tensor, const BlockStore& store) {
    const Array& a = dense(name, tensor, 1, {kUint8}, alive);
    check_shape(name, a, {(int64_t)experts->shape().experts * store.blocks() * (int64_t)store.block_bytes()},
                "bytes of packed blocks");
    return (const char*)a.data();
  };
  auto take_bias = [&](const char* name, nb::handle tensor, const BlockStore& store) -> const char* {
    if (tensor.is_none()) return nullptr;
    bool wide = experts->kernels().sum_bytes == 8;
    const Array& a = dense(name, tensor, 1, {wide ? kFloat64 : kFloat32}, alive);
    check_shape(name, a, {(int64_t)experts->shape().experts * store.blocks() * kBlockN}, "biases as the blocks lie");
    return (const char*)a.data();
  };
  const char *wide = take("gate_up", up, w.up()), *narrow = take("down", down, w.down());
  const char *wide_bias = take_bias("gate_up_bias", up_bias, w.up()),
             *narrow_bias = take_bias("down_bias", down_bias, w.down());
  {
    nb::gil_scoped_release released;
    w.adopt(wide, narrow);
    w.adopt_biases(wide_bias, narrow_bias);
  }
  adopted = std::move(alive);
}

nb::dict PyExperts::memory(nb::handle self) const {
  const Weights& w = experts->weights();
  nb::dict all;
  auto put = [&](const char* name, const BlockStore& store) {
    size_t bytes = (size_t)experts->shape().experts * (size_t)store.blocks() * store.block_bytes();
    char* at = const_cast<char*>(store.whole());
    nb::object owner = nb::borrow(self);
    if (!at) {
      at = new char[bytes];
      owner = nb::capsule(at, [](void* p) noexcept { delete[] (char*)p; });
      store.copy_to(at, experts->shape().experts);
    }
    all[name] = nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(at, {bytes}, owner));
  };
  auto put_bias = [&](const char* name, const char* at, const BlockStore& store) {
    if (!at) return;
    size_t count = (size_t)experts->shape().experts * (size_t)store.blocks() * kBlockN;
    nb::object owner = nb::borrow(self);
    if (experts->kernels().sum_bytes == 8) {
      all[name] = nb::cast(nb::ndarray<nb::numpy, double, nb::ndim<1>>((void*)at, {count}, owner));
    } else {
      all[name] = nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<1>>((void*)at, {count}, owner));
    }
  };
  put("gate_up", w.up());
  put("down", w.down());
  put_bias("gate_up_bias", w.up_bias(0), w.up());
  put_bias("down_bias", w.down_bias(0), w.down());
  return all;
}

void PyExperts::decode(const std::string& matrix, int64_t expert, nb::handle out) const {
  const Weights& w = experts->weights();
  auto which = word_of<Weights::Matrix>("matrix", matrix, {"gate", "up", "down"});
  if (which == Weights::Matrix::gate && !experts->shape().gated)
    refuse_value("matrix", "gate", "up or down: these experts have no gate");
  Precision p = experts->kernels().precision;
  Array a = array_of("out", out, 2, {p == Precision::bf16 ? kBFloat16 : p == Precision::f32 ? kFloat32 : kFloat64});
  check_writable("out", out);
  check_shape("out", a, {w.rows_of(which), w.columns_of(which)}, "rows, columns");
  if (a.shape(0) > 1 && a.stride(0) != (int64_t)a.shape(1)) refuse_value("out", "rows apart", "a dense tensor");
  int32_t e = in_range("expert", expert, 0, experts->shape().experts - 1);
  nb::gil_scoped_release released;
  w.enter();
  w.decode(which, e, (char*)const_cast<void*>(a.data()));
  w.leave();
}

}  // namespace kt
