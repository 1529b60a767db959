// The table of formats, formats by name, matrices in the bytes of a checkpoint, and packed bytes in and out.
#include "bindings/objects.h"

namespace kt {
namespace {

std::string all_formats() {
  std::string all;
  for (const FormatRow& row : kFormats) all += (all.empty() ? "" : ", ") + std::string(row.name);
  return all + " (int4|uint4|uint8:GROUP[:f16|f32], fp8:128x128|1x128|row)";
}

// Text up to the next colon, which is taken away.
std::string next_word(std::string& text) {
  size_t at = text.find(':');
  std::string word = text.substr(0, at);
  text = at == std::string::npos ? "" : text.substr(at + 1);
  return word;
}

const Array& take(const TensorArgument& argument, nb::handle tensor, std::vector<Array>& alive) {
  return alive.emplace_back(array_of(argument, tensor));
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
  all["zeros"] = row.has_zeros();
  all["scale_columns"] = row.fields() ? scale_columns(f) : 0;
  all["scale_rows"] = scale_rows(f);
  all["flat_scales"] = has_flat_scales(f);
  all["gguf_type"] = row.gguf_type < 0 ? nb::object(nb::none()) : nb::cast((int)row.gguf_type);
  all["block_bytes"] = (int)row.block;
  all["scale_tensor"] = has_scale_tensor(f);
  all["patches"] = row.has_patches();
  all["written"] = row.written;
  return all;
}

}  // namespace

bool has_scale_tensor(const Format& f) { return !f.row().block && f.row().scales != ScaleKind::high_bytes; }

Format format_of(const char* name, const std::string& text) {
  std::string rest = text, word = next_word(rest);
  Format f;
  int codec = 0;
  while (codec < kCodecs && text != kFormats[codec].name) codec++;
  if (codec < kCodecs) {
    word = text, rest = "";  // bf16:12, and names without a suffix
  } else {
    for (codec = 0; codec < kCodecs && word != kFormats[codec].name;) codec++;
  }
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
  const Grid& grid = grid_of(f.codec, 1);  // the tables of all widths are the same
  // Constants of the library, without an owner.
  using Entries = nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>;
  using Levels = nb::ndarray<nb::numpy, const float, nb::ndim<1>>;
  return nb::make_tuple(Entries(grid.entries, {(size_t)grid.count}, nb::handle()),
                        Levels(grid.levels, {16}, nb::handle()));
}

std::string written_formats() {
  std::string all;
  for (const FormatRow& row : kFormats)
    if (row.written) all += (all.empty() ? "" : ", ") + std::string(row.name);
  return all;
}

int64_t released_row_bytes(const char* name, const Format& f, int64_t columns) {
  const FormatRow& row = f.row();
  if (row.element == ElementKind::bf16_12) return 2 * columns;
  const int64_t step = row.span ? row.span : 8 / f.bits();
  if (columns % step)
    refuse_value(name, std::to_string(columns) + " columns in format " + row.name,
                 "a multiple of " + std::to_string(step));
  return row.block ? columns / row.span * row.block : columns * f.bits() / 8;
}

ReleasedScales released_scales(const Format& f, int64_t rows, int64_t columns) {
  const bool flat = has_flat_scales(f);
  return {element_of_scales(f), flat, ceil_div(rows, flat ? 1 : scale_rows(f)),
          !flat && f.span() ? ceil_div(columns, scale_columns(f)) : 1};
}

static void check_three(const char* name, nb::handle three, const Format& f) {
  const std::string expected = std::string("(codes, scales, tensor scale or zeros) of format ") + f.row().name;
  if (!PyTuple_Check(three.ptr()) && !PyList_Check(three.ptr())) refuse_type(name, "no encoded matrix", expected);
  if (nb::len(three) != 3) refuse_type(name, std::to_string(nb::len(three)) + " tensors", expected);
}

int64_t experts_in(const char* name, nb::handle three, const Format& f) {
  check_three(name, three, f);
  const std::string codes = std::string("codes of ") + name;
  return (int64_t)array_of({codes.c_str(), 3, {kUint8, kInt8}}, three[0]).shape(0);
}

SourceMatrix released_of(const char* name, nb::handle three, const Format& f, int64_t experts, int64_t rows,
                         int64_t columns, std::vector<Array>& alive) {
  check_three(name, three, f);
  const std::string in_format = std::string(" in format ") + f.row().name;
  const FormatRow& row = f.row();
  const int64_t row_bytes = released_row_bytes(name, f, columns);
  const std::string codes_name = std::string("codes of ") + name, scales_name = std::string("scales of ") + name;
  const Array codes = take({codes_name.c_str(), 3, {kUint8, kInt8}}, three[0], alive);
  check_shape(codes_name.c_str(), codes, {experts, rows, row_bytes}, "experts, rows, bytes of a row");
  if (!row.has_tensor_scale() && !row.has_zeros() && !three[2].is_none())
    refuse_value((std::string("tensor scale of ") + name).c_str(), "a tensor", "None" + in_format);
  SourceMatrix m{};
  m.released.codes = (const uint8_t*)codes.data();
  m.released.row_bytes = codes.stride(1);
  m.codes_stride = codes.stride(0);
  m.released.scale_rows = 1;
  if (!has_scale_tensor(f)) {
    if (!three[1].is_none()) refuse_value(scales_name.c_str(), "a tensor", "None" + in_format);
    return m;
  }
  const ReleasedScales shape = released_scales(f, rows, columns);
  const Array scales = take({scales_name.c_str(), shape.flat ? 2 : 3, {shape.element}}, three[1], alive);
  const int64_t bytes = shape.element.bits / 8;
  if (shape.flat) {
    check_shape(scales_name.c_str(), scales, {experts, rows}, "experts, rows");
    m.released.scale_stride = bytes;
  } else {
    m.released.scale_rows = scale_rows(f);
    check_shape(scales_name.c_str(), scales, {experts, shape.rows, shape.spans}, "experts, rows, spans");
    m.released.scale_stride = scales.stride(1) * bytes;
  }
  m.released.scales = (const char*)scales.data();
  m.scales_stride = scales.stride(0) * bytes;
  if (row.has_tensor_scale()) {
    const std::string tensor_name = std::string("tensor scale of ") + name;
    const Array tensor = take({tensor_name.c_str(), 1, {kFloat32}}, three[2], alive);
    check_shape(tensor_name.c_str(), tensor, {experts}, "experts");
    m.released.tensor = (const float*)tensor.data();
  }
  if (row.has_zeros()) {
    const std::string zeros_name = std::string("zeros of ") + name;
    const Array zeros = take({zeros_name.c_str(), 3, {kUint8, kInt8}}, three[2], alive);
    check_shape(zeros_name.c_str(), zeros, {experts, shape.rows, shape.spans}, "experts, rows, spans");
    m.released.zeros = (const uint8_t*)zeros.data();
    m.released.zero_stride = zeros.stride(1);
    m.zeros_stride = zeros.stride(0);
  }
  return m;
}

namespace {

// Arrays that other memory belongs to; released under the GIL, which nanobind takes.
std::shared_ptr<const void> keep_alive(std::vector<Array> arrays) {
  return std::make_shared<std::vector<Array>>(std::move(arrays));
}

}  // namespace

void PyExperts::adopt(nb::handle up, nb::handle down, nb::handle up_bias, nb::handle down_bias, nb::handle checksums,
                      const std::string& source) {
  Weights& w = experts->weights();
  std::vector<Array> alive;
  const int64_t count = experts->shape().experts;
  auto take_blocks = [&](const char* name, nb::handle tensor, const BlockStore& store) {
    const Array a = take({name, 1, {kUint8}, Strides::dense, Access::read, kAlignment}, tensor, alive);
    check_shape(name, a, {count * store.blocks() * (int64_t)store.block_bytes()}, "bytes of packed blocks");
    return (const char*)a.data();
  };
  auto take_bias = [&](const char* name, nb::handle tensor, const BlockStore& store) -> const char* {
    if (tensor.is_none()) return nullptr;
    bool wide = experts->kernels().sum_bytes == 8;
    const Array a = take({name, 1, {wide ? kFloat64 : kFloat32}, Strides::dense}, tensor, alive);
    check_shape(name, a, {count * store.blocks() * kBlockN}, "biases as the blocks lie");
    return (const char*)a.data();
  };
  AdoptedLayer layer{};
  layer.up = take_blocks("gate_up", up, w.up());
  layer.down = take_blocks("down", down, w.down());
  layer.up_bias = take_bias("gate_up_bias", up_bias, w.up());
  layer.down_bias = take_bias("down_bias", down_bias, w.down());
  layer.source = source;
  if (!checksums.is_none()) {
    const Array a = take({"checksums", 1, {kInt64}, Strides::dense}, checksums, alive);
    check_shape("checksums", a, {count}, "experts");
    for (int64_t e = 0; e < count; e++) layer.checksums.push_back((uint32_t)((const int64_t*)a.data())[e]);
  }
  layer.owner = keep_alive(std::move(alive));
  nb::gil_scoped_release released;
  w.adopt(layer);
}

nb::list PyExperts::checksums() const {
  std::vector<uint32_t> all;
  {
    nb::gil_scoped_release released;
    const Weights& w = experts->weights();
    const Reading reading(w);
    for (int32_t e = 0; e < experts->shape().experts; e++) all.push_back(w.checksum(e));
    w.check_source();
  }
  nb::list result;
  for (uint32_t checksum : all) result.append(checksum);
  return result;
}

void PyExperts::verify(nb::handle ids) const {
  std::vector<int32_t> wanted;
  const int64_t count = length_of("experts", ids);
  for (int64_t n = 0; n < count; n++)
    wanted.push_back(in_range("experts", integer_of("experts", ids[n]), 0, experts->shape().experts - 1));
  nb::gil_scoped_release released;
  const Weights& w = experts->weights();
  const Reading reading(w);
  w.verify(wanted);
  w.check_source();
}

void PyExperts::place_pages() const {
  nb::gil_scoped_release released;
  const Reading reading(experts->weights());
  experts->weights().place_pages();
}

namespace {

nb::capsule owner_of(std::shared_ptr<const void> memory) {
  return nb::capsule(new std::shared_ptr<const void>(std::move(memory)),
                     [](void* p) noexcept { delete (std::shared_ptr<const void>*)p; });
}

}  // namespace

nb::dict PyExperts::parts() const {
  const Weights& w = experts->weights();
  const size_t count = (size_t)experts->shape().experts;
  nb::dict all;
  auto put = [&](const char* name, const BlockStore& store) {
    nb::list list;
    auto add = [&](size_t offset, const char* at, size_t bytes) {
      list.append(nb::make_tuple(
          offset,
          nb::ndarray<nb::numpy, const uint8_t, nb::ndim<2>>(at, {count, bytes}, owner_of(store.owner())).cast()));
    };
    if (const char* at = store.whole()) {
      add(0, at, (size_t)store.blocks() * store.block_bytes());
    } else {
      for (int g = 0; g < store.parts(); g++)
        if (store.part_bytes(g)) add((size_t)store.begin(g) * store.block_bytes(), store.part(g), store.part_bytes(g));
    }
    all[name] = list;
  };
  put("gate_up", w.up());
  put("down", w.down());
  w.check_source();
  return all;
}

nb::dict PyExperts::biases() const {
  const Weights& w = experts->weights();
  nb::dict all;
  auto put = [&](const char* name, std::shared_ptr<const std::vector<char>> biases, const BlockStore& store) {
    if (biases->empty()) return;
    size_t count = (size_t)experts->shape().experts * (size_t)store.blocks() * kBlockN;
    const void* at = biases->data();
    nb::object owner = owner_of(std::move(biases));
    if (experts->kernels().sum_bytes == 8) {
      all[name] = nb::cast(nb::ndarray<nb::numpy, const double, nb::ndim<1>>(at, {count}, owner));
    } else {
      all[name] = nb::cast(nb::ndarray<nb::numpy, const float, nb::ndim<1>>(at, {count}, owner));
    }
  };
  put("gate_up_bias", w.up_biases(), w.up());
  put("down_bias", w.down_biases(), w.down());
  return all;
}

nb::object blocks_of(const BlockStore& store, int32_t experts) {
  size_t bytes = (size_t)experts * (size_t)store.blocks() * store.block_bytes();
  const char* at = store.whole();
  nb::object owner;
  if (at) {
    owner = owner_of(store.owner());
  } else {
    auto buffer = std::make_shared<Buffer>(bytes);
    char* copy = buffer->data();
    owner = owner_of(std::move(buffer));
    at = copy;
    nb::gil_scoped_release released;
    store.copy_to(copy, experts);
  }
  return nb::cast(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(at, {bytes}, owner));
}

nb::dict PyExperts::memory() const {
  const Weights& w = experts->weights();
  nb::dict all;
  all["gate_up"] = blocks_of(w.up(), experts->shape().experts);
  all["down"] = blocks_of(w.down(), experts->shape().experts);
  all.update(biases());
  w.check_source();
  return all;
}

void PyExperts::decode(const std::string& matrix, int64_t expert, nb::handle out) const {
  const Weights& w = experts->weights();
  auto which = word_of<Weights::Matrix>("matrix", matrix, {"gate", "up", "down"});
  if (which == Weights::Matrix::gate && !experts->shape().gated)
    refuse_value("matrix", "gate", "up or down: these experts have no gate");
  Precision p = experts->kernels().precision;
  Element element = p == Precision::bf16 ? kBFloat16 : p == Precision::f32 ? kFloat32 : kFloat64;
  Array a = array_of({"out", 2, {element}, Strides::dense, Access::write}, out);
  check_shape("out", a, {w.rows_of(which), w.columns_of(which)}, "rows, columns");
  int32_t e = in_range("expert", expert, 0, experts->shape().experts - 1);
  nb::gil_scoped_release released;
  const Reading reading(w);
  w.verify({e});
  w.decode(which, e, (char*)const_cast<void*>(a.data()));
  w.check_source();
}

}  // namespace kt
