// Encoded experts natively, for the sanitizers: every format and variant, sizes that fill no strip, several groups of
// threads. With needs_grad the result must have the bits of the dequantised weights packed as a plain layer.
#include <cstring>

#include "check.h"
#include "random_encoded.h"

using namespace kt;
using namespace kt::check;

namespace {

std::vector<Format> all_formats() {
  std::vector<Format> all;
  for (int c = 1; c < kCodecs; c++) {
    Format f;
    f.codec = (Codec)c;
    if (f.row().suffix == Suffix::group) f.group = 64, f.scale = DType::f16;
    if (f.row().suffix == Suffix::block) f.group = 128, f.shared = true;
    all.push_back(f);
  }
  return all;
}

// The dequantised weights of an encoded layer, packed as a plain one.
std::unique_ptr<Experts> plain_copy(const Experts& from, std::shared_ptr<Engine> engine) {
  const LayerShape& s = from.shape();
  auto plain = std::make_unique<Experts>(s, kSilu, from.kernels(), std::move(engine));
  DType type = dtype_of(from.kernels().precision);
  using Matrix = Weights::Matrix;
  size_t bytes = (size_t)s.hidden * (size_t)s.intermediate * size_of(type);
  std::vector<char> gate(bytes), up(bytes), down(bytes);
  for (int32_t e = 0; e < s.experts; e++) {
    from.weights().decode(Matrix::gate, e, gate.data());
    from.weights().decode(Matrix::up, e, up.data());
    from.weights().decode(Matrix::down, e, down.data());
    SourceLayer layer{};
    layer.first = e;
    layer.count = 1;
    layer.gate = {{gate.data(), type, s.hidden, 1}, 0};
    layer.up = {{up.data(), type, s.hidden, 1}, 0};
    layer.down = {{down.data(), type, s.intermediate, 1}, 0};
    plain->weights().pack(layer);
  }
  return plain;
}

template <class Real>
std::vector<Real> forward_and_backward(const Experts& experts, BatchOf<Real>& batch, const std::vector<Real>& grad) {
  const LayerShape& s = experts.shape();
  Batch b = batch.batch(s);
  b.needs_grad = true;
  Call(experts, b).run();
  std::vector<Real> all = batch.out, hidden(batch.hidden.size()), weights(batch.weights.size());
  b.out = hidden.data();
  Gradients g;
  g.out = grad.data(), g.out_dtype = kTypeOf<Real>, g.out_stride = s.hidden;
  g.weights = weights.data(), g.weights_dtype = kTypeOf<Real>, g.weights_stride = batch.top_k;
  Backward(experts, b, g).run();
  all.insert(all.end(), hidden.begin(), hidden.end());
  all.insert(all.end(), weights.begin(), weights.end());
  return all;
}

template <class Real>
void check_format(const Format& f, const KernelTable& kernels) {
  // Columns must fill GGUF's blocks; rows fill none.
  LayerShape s{2, 256, 256, true};
  if (!f.row().block) s = {2, 160, 96, true};
  std::mt19937 random(3);
  RandomEncoded gate(f, s.experts, s.intermediate, s.hidden, random),
      up(f, s.experts, s.intermediate, s.hidden, random);
  RandomEncoded down(f, s.experts, s.hidden, s.intermediate, random);
  std::vector<Real> grad;
  std::unique_ptr<Experts> plain;
  for (int groups = 1; groups <= 2; groups++) {
    auto engine = engine_of(2, groups);
    Experts experts(s, kSilu, kernels, engine, {f, f, f});
    SourceLayer layer{};
    layer.count = s.experts;
    layer.gate = gate.source, layer.up = up.source, layer.down = down.source;
    experts.weights().pack(layer);
    if (!plain) plain = plain_copy(experts, engine);
    for (int32_t tokens : groups == 1 ? std::vector<int32_t>{1, 40} : std::vector<int32_t>{9}) {
      BatchOf<Real> batch(s, tokens, 2);
      grad = random_reals<Real>((size_t)(tokens * s.hidden), 1, random);
      std::vector<Real> encoded = forward_and_backward(experts, batch, grad),
                        plain_result = forward_and_backward(*plain, batch, grad);
      CHECK(std::memcmp(encoded.data(), plain_result.data(), encoded.size() * sizeof(Real)) == 0);
    }
    // Blocks packed by one store are used in place by another.
    Experts other(s, kSilu, kernels, engine, {f, f, f});
    std::vector<char> gate_up_bytes(experts.weights().up().bytes()), down_bytes(experts.weights().down().bytes());
    experts.weights().up().copy_to(gate_up_bytes.data(), s.experts);
    experts.weights().down().copy_to(down_bytes.data(), s.experts);
    other.weights().adopt({gate_up_bytes.data(), down_bytes.data(), nullptr, nullptr, nullptr, {}, ""});
    BatchOf<Real> batch(s, 5, 2);
    grad = random_reals<Real>((size_t)(5 * s.hidden), 1, random);
    CHECK(forward_and_backward(other, batch, grad) == forward_and_backward(experts, batch, grad));
  }
}

}  // namespace

TEST(formats_have_the_bits_of_decoded_weights) {
  for (const KernelTable* kernels : all_kernels())
    for (const Format& f : all_formats())
      with_sums_of(*kernels, [&](auto zero) { check_format<decltype(zero)>(f, *kernels); });
}

TEST(formats_take_no_more_than_was_released) {
  for (const Format& f : all_formats()) {
    Strip s = strip_of(f, 64);
    double released = f.row().block ? 2048.0 / f.row().span * f.row().block
                                    : 2048.0 * f.bits() / 8 + (f.span() ? 2048.0 / f.span() : 1.0) * f.header();
    if (f.row().has_patches()) {
      CHECK((double)s.bytes <= 1.53 * 16 * 2048);
    } else {
      CHECK((double)s.bytes <= 16 * released + 128);
    }
  }
}
