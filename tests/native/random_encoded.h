// Random matrices in the released layout of a format, for the native tests of formats.
#pragma once

#include <cstring>

#include "random_layer.h"

namespace kt::check {

// Random released bytes of one matrix of all experts. Scales are small normal numbers in every format.
struct RandomEncoded {
  std::vector<uint8_t> codes, zeros;
  std::vector<char> scales;
  std::vector<float> tensor;
  SourceMatrix source{};

  RandomEncoded(const Format& f, int32_t experts, int32_t rows, int32_t columns, std::mt19937& random) {
    const FormatRow& row = f.row();
    int64_t row_bytes = row.block                             ? columns / row.span * row.block
                        : row.element == ElementKind::bf16_12 ? 2 * columns
                                                              : columns * f.bits() / 8;
    codes.resize((size_t)(experts * rows * row_bytes));
    std::uniform_int_distribution<int> any(0, 255);
    for (uint8_t& c : codes) c = (uint8_t)any(random);
    if (row.element == ElementKind::e4m3)
      for (uint8_t& c : codes) c &= 0xbf;  // no NaN
    if (row.element == ElementKind::bf16_12) put_bf16(random);
    source.released.codes = codes.data();
    source.released.row_bytes = row_bytes;
    source.codes_stride = rows * row_bytes;
    source.released.scale_rows = f.shared ? 128 : 1;
    if (row.block) put_halves(f, experts * rows * (columns / row.span));
    if (row.block || row.element == ElementKind::bf16_12) return;
    int64_t spans = f.span() ? ceil_div(columns, f.span()) : 1, width = spans * f.field_bytes(row.header[0]);
    int64_t high = ceil_div(rows, source.released.scale_rows);
    scales.resize((size_t)(experts * high * width));
    if (row.span) {
      for (char& c : scales) c = (char)(row.scales == ScaleKind::e4m3 ? 0x30 : 120);
    } else {
      DType type = row.suffix == Suffix::group ? f.scale : DType::f32;
      for (int64_t n = 0; n < (int64_t)(scales.size() / size_of(type)); n++)
        set_element(scales.data(), n, type, 0.01f * (float)(1 + n % 7));
    }
    source.released.scales = scales.data();
    source.released.scale_stride = width;
    source.scales_stride = high * width;
    if (row.has_zeros()) {
      zeros.resize((size_t)(experts * rows * spans));
      for (uint8_t& zero : zeros) zero = (uint8_t)(any(random) % 16);
      source.released.zeros = zeros.data();
      source.released.zero_stride = spans;
      source.zeros_stride = rows * spans;
    }
    tensor.assign((size_t)experts, 0.25f);
    source.released.tensor = tensor.data();
  }

  // Weights as trained ones are, and one in 2048 of any bits.
  void put_bf16(std::mt19937& random) {
    std::normal_distribution<float> normal(0, 0.05f);
    for (size_t at = 0; at < codes.size(); at += 2) {
      uint16_t bits = from_float(random() % 2048 ? normal(random) : (float)random() * 0x1p-50f, DType::bf16);
      std::memcpy(&codes[at], &bits, 2);
    }
  }

  // Sets GGUF's 16-bit scales, at their offsets in a block.
  void put_halves(const Format& f, int64_t blocks) {
    std::vector<int> at;
    for (const Field& field : f.row().header)
      if (field.type == FieldType::f16) at.push_back(field.at);
    if (f.codec == Codec::iq1_m) at.push_back(0);
    for (int64_t b = 0; b < blocks; b++)
      for (int place : at) {
        uint16_t half = from_float(0.01f * (float)(1 + b % 5), DType::f16);
        uint8_t* block = codes.data() + b * f.row().block;
        if (f.codec != Codec::iq1_m) {
          std::memcpy(block + place, &half, 2);
          continue;
        }
        // Its four nibbles are at the top of the words of scales.
        for (int i = 0; i < 4; i++)
          block[49 + 2 * i] = (uint8_t)((block[49 + 2 * i] & 15) | ((half >> (4 * i)) & 15) << 4);
      }
  }
};

}  // namespace kt::check
