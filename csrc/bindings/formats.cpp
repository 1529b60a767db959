// Formats by name, matrices as they were released, and packed bytes in and out.
#include "bindings/objects.h"

namespace kt {
namespace {

constexpr Element kInt8{"int8", nb::dlpack::dtype_code::Int, 8};

std::string all_formats() {
  std::string all;
  for (const CodecRow& row : kCodecRows) all += (all.empty() ? "" : ", ") + std::string(row.name);
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
  if (f.codec == Codec::int8 || f.codec == Codec::fp8) return kFloat32;
  if (f.codec != Codec::int4) return kUint8;
  return f.scale == DType::bf16 ? kBFloat16 : f.scale == DType::f16 ? kFloat16 : kFloat32;
}

}  // namespace

Format format_of(const char* name, const std::string& text) {
  std::string rest = text, word = next_word(rest);
  Format f;
  int codec = 0;
  while (codec < kCodecs && word != kCodecRows[codec].name) codec++;
  if (codec == kCodecs) refuse_value(name, "\"" + text + "\"", "one of " + all_formats());
  f.codec = (Codec)codec;
  if (f.codec == Codec::int4) {
    std::string group = next_word(rest), scale = next_word(rest);
    bool digits = !group.empty() && group.size() < 7 && group.find_first_not_of("0123456789") == std::string::npos;
    f.group = digits ? std::stoi(group) : -1;
    if (f.group < 0 || f.group % kTileK)
      refuse_value(name, "\"" + text + "\"", "int4:GROUP with a multiple of 32, or 0 for one scale a row");
    f.scale = scale.empty() ? DType::bf16 : word_of<DType>("type of scales", scale, {"f32", "bf16", "f16"});
  } else if (f.codec == Codec::fp8) {
    enum class Block : uint8_t { square, row, whole };
    Block block = word_of<Block>("block of fp8", next_word(rest), {"128x128", "1x128", "row"});
    f.group = block == Block::whole ? 0 : 128;
    f.shared = block == Block::square;
  }
  if (!rest.empty()) refuse_value(name, "\"" + text + "\"", "one of " + all_formats());
  return f;
}

nb::tuple describe_grid(const std::string& text) {
  Format f = format_of("format", text);
  if (!f.row().in_rows) refuse_value("format", "\"" + text + "\"", "one with a grid: iq1_s to iq3_s or tq1_0");
  const Grid& grid = grid_of(f.codec);
  // Constants of the library: nobody owns them.
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
  const CodecRow& row = f.row();
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
  bool single = f.codec == Codec::int8 || (f.codec == Codec::fp8 && !f.group);
  Element element = element_of_scales(f);
  const Array& scales = dense(scales_name.c_str(), three[1], single ? 2 : 3, {element}, alive);
  int64_t bytes = element.bits / 8;
  if (single) {
    check_shape(scales_name.c_str(), scales, {experts, rows}, "experts, rows");
    m.released.scale_stride = bytes;
  } else {
    int64_t spans = f.codec == Codec::nvfp4 ? columns / 16 : f.span() ? ceil_div(columns, f.span()) : 1;
    m.released.scale_rows = f.shared ? 128 : 1;
    check_shape(scales_name.c_str(), scales, {experts, ceil_div(rows, m.released.scale_rows), spans},
                "experts, rows, spans");
    m.released.scale_stride = scales.stride(1) * bytes;
  }
  m.released.scales = (const char*)scales.data();
  m.scales_stride = scales.stride(0) * bytes;
  if (f.codec == Codec::nvfp4) {
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
