// Tiles of bf16 and f32 from encoded blocks of random bytes: whatever the codes and scales, NaN, infinite and subnormal
// ones included, a decoded tile of f32 has the weights of precision f64, which are decoded code by code, one of bf16
// has them rounded once, and a transposed tile the same numbers. Products along rows read these weights too. Products
// dequantise in their own way where the CPU has no bf16 instructions: their sums are those of decoded tiles.
#include <cstring>

#include "check.h"
#include "kernels/table.h"
#include "random_layer.h"

using namespace kt;
using namespace kt::check;

namespace {

constexpr int kTiles = 9;  // more than a span of GGUF's types has

std::vector<Format> decoded_formats() {
  std::vector<Format> all;
  for (int c = 1; c < kCodecs; c++) {
    Format f;
    f.codec = (Codec)c;
    if (f.row().suffix == Suffix::none) all.push_back(f);
    if (f.row().suffix == Suffix::block)
      for (bool shared : {false, true}) f.group = 128, f.shared = shared, all.push_back(f);
    if (f.row().suffix == Suffix::group)
      for (DType type : {DType::bf16, DType::f16, DType::f32}) f.group = 64, f.scale = type, all.push_back(f);
  }
  return all;
}

// Random bytes, with scales among them that are NaN to the last bit; codes of e4m3 have NaNs in some k tiles, subnormal
// numbers in others, and neither in the rest.
std::vector<char> random_block(const Encoding& e, std::mt19937& random) {
  std::vector<char> block((size_t)e.block_bytes());
  for (char& c : block) c = (char)random();
  for (int half = 0; half < 2; half++)
    for (int64_t at = 0; at + 8 <= e.strip[half].codes; at += 8)
      if (random() % 32 == 0) std::memset(block.data() + half * e.strip[0].bytes + at, 255, 8);
  for (int half = 0; half < 2; half++) {
    if (e.format[half].row().element != ElementKind::e4m3) continue;
    const Strip& s = e.strip[half];
    for (int k = 0; k < kTiles; k++)
      for (int i = 0; i < s.tile_bytes && k % 3; i++) {
        char& code = block[(size_t)(half * e.strip[0].bytes + s.codes + k * s.tile_bytes + i)];
        int magnitude = code & 127;
        if (magnitude == 127 || (k % 3 == 2 && magnitude < 8)) code = (char)(code ^ 0x38);
      }
  }
  return block;
}

// The same bits, or both NaN: which of two NaNs a sum keeps is the compiler's choice.
bool equal_numbers(uint16_t a, uint16_t b) {
  auto is_nan = [](uint16_t x) { return (x & 0x7fff) > 0x7f80; };
  return a == b || (is_nan(a) && is_nan(b));
}

bool equal_weights(double a, float b) { return a == b || (a != a && b != b); }

// Hardware that rounds to bf16 flushes subnormal numbers.
bool equal_but_subnormal(uint16_t a, uint16_t b) {
  return equal_numbers(a, b) || ((a & 0x7fff) <= 0x80 && (b & 0x7fff) <= 0x80);
}

}  // namespace

TEST(decoded_tiles_are_the_exact_weights_rounded_once) {
  std::mt19937 random(7);
  const KernelTable& exact = kernels("generic", Precision::f64);
  for (const Format& f : decoded_formats()) {
    Encoding e(f, f, kTiles);
    std::vector<char> block = random_block(e, random);
    std::vector<double> numbers(kTiles * 2 * kTileK * kTileN);  // [k tile][half][32 k][16 n]
    exact.decode({&e, block.data(), 0, kTiles, (char*)numbers.data()});
    for (const KernelTable* kernels : all_kernels()) {
      if (kernels->precision == Precision::f32) {
        std::vector<float> unrounded(numbers.size());
        kernels->decode({&e, block.data(), 0, kTiles, (char*)unrounded.data()});
        CHECK(std::equal(numbers.begin(), numbers.end(), unrounded.begin(), equal_weights));
      }
      if (kernels->precision != Precision::bf16) continue;
      alignas(64) static uint16_t decoded[kTiles][2][kTileK / 2][kTileN][2];
      alignas(
          64) static uint16_t transposed[kTiles][2][kTileN][kTileK / 2][2];  // [k tile][k / 16][n / 2][k % 16][n % 2]
      kernels->decode({&e, block.data(), 0, kTiles, (char*)decoded});
      for (int k = 0; k < kTiles; k++)
        kernels->transpose({block.data(), (size_t)e.block_bytes(), 1, (char*)transposed[k], &e, k});
      int wrong = 0, wrong_transposed = 0;
      for (int tile = 0; tile < kTiles; tile++)
        for (int half = 0; half < 2; half++)
          for (int k = 0; k < kTileK; k++)
            for (int n = 0; n < kTileN; n++) {
              float number = (float)numbers[(size_t)(((tile * 2 + half) * kTileK + k) * kTileN + n)];
              uint16_t expected = from_float(number, DType::bf16), found = decoded[tile][half][k / 2][n][k % 2];
              const int output = half * kTileN + n;
              wrong += !equal_but_subnormal(found, expected);
              wrong_transposed += !equal_numbers(transposed[tile][k / 16][output / 2][k % 16][output % 2], found);
            }
      if (wrong || wrong_transposed)
        std::printf("%s on %s: %d decoded, %d transposed\n", f.row().name, kernels->name, wrong, wrong_transposed);
      CHECK(wrong == 0 && wrong_transposed == 0);
    }
  }
}

namespace {

// Finite scales, of which the second half of the block has some that rounding by float instructions does not take, and
// codes of e4m3 that are not NaN.
std::vector<char> block_with_scales(const Encoding& e, std::mt19937& random) {
  constexpr float kUsual[] = {0.01f, -0.02f, 0.0f, 1.5f}, kUnusual[] = {0x1p-140f, 0x1p-125f, 0x1p108f, -0x1p-133f};
  std::vector<char> block((size_t)e.block_bytes());
  for (char& c : block) c = (char)random();
  for (int half = 0; half < 2; half++) {
    const Strip& s = e.strip[half];
    char* strip = block.data() + half * e.strip[0].bytes;
    for (int64_t at = 0; at + 4 <= s.codes; at += 4) {
      const float scale = half && random() % 4 == 0 ? kUnusual[random() % 4] : kUsual[random() % 4];
      std::memcpy(strip + at, &scale, 4);
    }
    for (int64_t at = s.codes; at < s.bytes; at++)
      if (e.format[half].row().element == ElementKind::e4m3 && (strip[at] & 127) == 127) strip[at] = 1;
  }
  return block;
}

std::vector<float> down_sums(const KernelTable& kernels, Contraction base, const EncodedBlocks& encoded, int live) {
  const Tiling tiling = kernels.tiling(live);
  std::vector<int32_t> token((size_t)live);
  std::vector<uint8_t> mark((size_t)live, kFirst | kLast);
  for (int r = 0; r < live; r++) token[(size_t)r] = r;
  std::vector<float> sum((size_t)live * kBlockN), out((size_t)live * kBlockN);
  alignas(64) static float scratch[2 * 2 * kMaxRows * kBlockN];
  Down d{};
  d.tiling = tiling, d.live = live, d.base = base, d.encoded = encoded;
  d.block_bytes = encoded.encoding ? (size_t)encoded.encoding->block_bytes() : 2 * kTileBytes * (size_t)base.k_tiles;
  d.block1 = 1, d.first = d.last = true, d.rows = {token.data(), nullptr, mark.data()};
  d.sum = (char*)sum.data(), d.sum_block = live * kBlockN, d.out = out.data(), d.dtype = DType::f32;
  d.out_stride = d.width = kBlockN, d.scratch = (char*)scratch;
  kernels.down(d);
  return out;
}

}  // namespace

TEST(products_of_encoded_blocks_are_those_of_decoded_tiles) {
  std::mt19937 random(11);
  for (const Format& f : decoded_formats()) {
    if (f.row().header[0].type != FieldType::f32 &&
        (f.row().header[0].type != FieldType::by_name || f.scale != DType::f32))
      continue;
    if (f.row().has_zeros()) continue;  // the bytes of zeros would be those of scales
    Encoding e(f, f, kTiles);
    std::vector<char> block = block_with_scales(e, random);
    for (const KernelTable* kernels : all_kernels()) {
      if (kernels->precision != Precision::bf16 || kernels->panel != DType::f32) continue;
      std::vector<char> tiles((size_t)(kTiles * 2 * kTileBytes)), decoded((size_t)(kTiles * 2 * kTileBytes));
      kernels->decode({&e, block.data(), 0, kTiles, tiles.data()});
      for (int live : {1, 5, 13, 41}) {  // one pass and several
        const Tiling tiling = kernels->tiling(live);
        const size_t of_tile = (size_t)(kTiles * tiling.rows * kTileK);
        std::vector<float> panel = random_f32((size_t)tiling.tiles * of_tile, 1, random);
        const Contraction base{(const char*)panel.data(), of_tile * 4, block.data(), kTiles};
        Contraction plain = base;
        plain.b = tiles.data();
        const std::vector<float> encoded = down_sums(*kernels, base, {&e, 0, decoded.data()}, live);
        CHECK(encoded == down_sums(*kernels, plain, {nullptr, 0, nullptr}, live));
      }
    }
  }
}

// One row of x for each output, which selects its weights: sums of them and of zeros are exact.
TEST(products_along_rows_have_the_exact_weights) {
  std::mt19937 random(13);
  const KernelTable& exact = kernels("generic", Precision::f64);
  for (const Format& f : decoded_formats()) {
    if (f.row().header[0].type != FieldType::f32 &&
        (f.row().header[0].type != FieldType::by_name || f.scale != DType::f32))
      continue;
    if (f.row().has_zeros()) continue;  // zero * scale may be fused with the addition, which f32 scales show
    Encoding e(f, f, kTiles);
    const std::vector<char> blocks[] = {block_with_scales(e, random), block_with_scales(e, random)};
    const char *block[] = {blocks[0].data(), blocks[1].data()}, *next[] = {nullptr, blocks[0].data()};
    constexpr int kRows = 2 * kBlockN, kWidth = kTiles * kTileK - 5, kStride = kWidth + 3;
    std::vector<float> x((size_t)(kRows * kRows));
    for (size_t n = 0; n < kRows; n++) x[n * kRows + n] = 1;
    for (const KernelTable* kernels : all_kernels()) {
      CHECK((kernels->precision == Precision::bf16) == (kernels->multiply_rows != nullptr));
      if (!kernels->multiply_rows) continue;
      alignas(64) static char scratch[rows_product_scratch(2)];
      std::vector<float> out((size_t)(kRows * kStride), -7);
      for (int k0 : {0, 4})  // in two parts
        kernels->multiply_rows({&e, block, next, 2, k0, k0 ? kTiles - 4 : 4, 4 - k0, x.data(), kRows, out.data(),
                                DType::f32, kStride, kWidth, scratch});
      for (size_t n = 0; n < kRows; n++) {
        std::vector<double> numbers(kTiles * 2 * kTileK * kTileN);
        exact.decode({&e, block[n / kBlockN], 0, kTiles, (char*)numbers.data()});
        int wrong = 0;
        for (size_t k = 0; k < kStride; k++) {
          const size_t tile = k / kTileK * 2 + n % kBlockN / kTileN;
          const double number = numbers[(tile * kTileK + k % kTileK) * kTileN + n % kTileN];
          wrong += out[n * kStride + k] != (k < kWidth ? number : -7);
        }
        if (wrong) std::printf("%s on %s: %d of row %d\n", f.row().name, kernels->name, wrong, (int)n);
        CHECK(wrong == 0);
      }
    }
  }
}
