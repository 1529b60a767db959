// LoRA factors from Python: shapes are those of PEFT's views, a [E, r, in] and b [E, out, r], in any strides.
#include <cmath>

#include "bindings/objects.h"

namespace kt {
namespace {

constexpr int64_t kMaxRank = 4096;

// A factor's tensor in the caller's layout; with `rank` 0 there must be none.
Array factor_of(const char* name, nb::handle tensor, int32_t rank, int64_t experts, int64_t rows, int64_t columns,
                Access access = Access::read) {
  if (!rank && !tensor.is_none()) refuse_value(name, "a tensor", "None: this adapter has no such factor");
  if (rank && tensor.is_none()) refuse_type(name, "None", "a tensor");
  Array a = array_of({name, 3, kFloats, Strides::any, access}, tensor);
  check_shape(name, a, {experts, rows, columns}, "experts, rows, columns");
  return a;
}

}  // namespace

PyAdapter::PyAdapter(const PyExperts& of, int64_t gate_rank, int64_t up_rank, int64_t down_rank, bool shared)
    : experts(of.experts) {
  LoraRanks ranks{in_range("gate_rank", gate_rank, 0, kMaxRank), in_range("up_rank", up_rank, 0, kMaxRank),
                  in_range("down_rank", down_rank, 0, kMaxRank), shared};
  if (ranks.gate && !experts->shape().gated)
    refuse_value("gate_rank", std::to_string(gate_rank), "0: these experts have no gate");
  if (shared && (ranks.gate != ranks.up || !ranks.gate))
    refuse_value("shared", "True with ranks " + std::to_string(gate_rank) + " and " + std::to_string(up_rank),
                 "one rank for gate and up");
  nb::gil_scoped_release released;
  Engine& engine = experts->engine();
  adapter = std::make_shared<Adapter>(experts->shape(), ranks, experts->kernels(), engine.pool, engine.arena);
}

void PyAdapter::pack(nb::handle gate_a, nb::handle gate_b, nb::handle up_a, nb::handle up_b, nb::handle down_a,
                     nb::handle down_b, double gate, double up, double down) {
  const LayerShape& s = experts->shape();
  const LoraRanks& r = adapter->ranks();
  std::vector<Array> alive;
  auto bind_tensor = [&](const char* name, nb::handle tensor, int32_t rank, int64_t rows, int64_t columns) {
    if (!rank && tensor.is_none()) return SourceMatrix{};
    const Array& a = alive.emplace_back(factor_of(name, tensor, rank, s.experts, rows, columns));
    return SourceMatrix{{a.data(), dtype_of(a), a.stride(1), a.stride(2)}, a.stride(0)};
  };
  auto scale = [&](const char* name, double value) {
    if (!std::isfinite(value)) refuse_value(name, std::to_string(value), "a finite number");
    return value;
  };
  SourceLora source{};
  source.gate.a = bind_tensor("gate_a", gate_a, r.gate, r.gate, s.hidden);
  source.gate.b = bind_tensor("gate_b", gate_b, r.gate, s.intermediate, r.gate);
  source.up.a = bind_tensor("up_a", up_a, r.shared ? 0 : r.up, r.up, s.hidden);
  source.up.b = bind_tensor("up_b", up_b, r.up, s.intermediate, r.up);
  source.down.a = bind_tensor("down_a", down_a, r.down, r.down, s.intermediate);
  source.down.b = bind_tensor("down_b", down_b, r.down, s.hidden, r.down);
  source.gate.scale = gate_scale = scale("gate_scale", gate);
  source.up.scale = up_scale = scale("up_scale", up);
  source.down.scale = down_scale = scale("down_scale", down);
  nb::gil_scoped_release released;
  adapter->pack(source);
}

LoraTargets PyExperts::bind_targets(nb::handle six, const PyAdapter& of, BoundArguments& bound) const {
  const LayerShape& s = experts->shape();
  const LoraRanks& r = of.adapter->ranks();
  int64_t given = length_of("factors", six);
  if (given != 6) refuse_value("factors", std::to_string(given) + " tensors", "6, or None in their place");
  int place = 0;
  auto bind_tensor = [&](const char* name, int32_t rank, int64_t rows, int64_t columns) {
    nb::object tensor = six[place++];
    if (tensor.is_none()) return Target{};
    const Array& a = bound.tensors.emplace_back(factor_of(name, tensor, rank, s.experts, rows, columns, Access::write));
    return Target{const_cast<void*>(a.data()), dtype_of(a), a.stride(1), a.stride(2), a.stride(0)};
  };
  LoraTargets t{};
  t.gate_a = bind_tensor("grad gate_a", r.gate, r.gate, s.hidden);
  t.gate_b = bind_tensor("grad gate_b", r.gate, s.intermediate, r.gate);
  t.up_a = bind_tensor("grad up_a", r.shared ? 0 : r.up, r.up, s.hidden);
  t.up_b = bind_tensor("grad up_b", r.up, s.intermediate, r.up);
  t.down_a = bind_tensor("grad down_a", r.down, r.down, s.intermediate);
  t.down_b = bind_tensor("grad down_b", r.down, s.hidden, r.down);
  t.gate_scale = of.gate_scale;
  t.up_scale = of.up_scale;
  t.down_scale = of.down_scale;
  return t;
}

}  // namespace kt
