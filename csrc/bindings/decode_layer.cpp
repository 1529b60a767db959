// A decoder layer for new tokens, from Python: its weights are bound once, a call brings hidden states and caches.
#include "moe/decode_layer.h"

#include "bindings/objects.h"

namespace kt {

struct PyDecodeLayer::Call {
  Array x, out;
  HiddenRows rows;
};

struct PyDecodeLayer::BoundRotary {
  Array cos, sin;
  Rotary rotary;
};

PyDecodeLayer::PyDecodeLayer(const PyPool& pool, int64_t hidden) {
  const int32_t size = in_range("hidden", hidden, 1, 1 << 20);
  if (size % kGemvK) refuse_value("hidden", std::to_string(size), "a multiple of " + std::to_string(kGemvK));
  layer = std::make_unique<DecodeLayer>(pool.engine, kernels(), size);
}

const char* PyDecodeLayer::bind_vector(const char* name, nb::handle vector, int64_t size) {
  if (vector.is_none()) return nullptr;
  const Array& v = tensors.emplace_back(array_of({name, 1, {kBFloat16, kFloat32}, Strides::dense}, vector));
  check_shape(name, v, {size}, "numbers of a row");
  if (typed_ && dtype_of(v) != type_) refuse_type(name, "another dtype", "the dtype of the norms");
  type_ = dtype_of(v), typed_ = true;
  return (const char*)v.data();
}

RmsNorm PyDecodeLayer::bind_norm(const char* name, nb::handle weight, int64_t size, double epsilon) {
  return {bind_vector(name, weight, size), (float)epsilon};
}

DenseWeight PyDecodeLayer::bind_weight(const char* name, nb::handle weight, int64_t rows, int64_t columns) {
  if (nb::isinstance<PyCodedLinear>(weight)) {
    const CodedLinear& coded = *nb::cast<const PyCodedLinear&>(weight).linear;
    if (coded.rows() != rows || coded.columns() != columns)
      refuse_value(name, std::to_string(coded.rows()) + " rows of " + std::to_string(coded.columns()),
                   std::to_string(rows) + " rows of " + std::to_string(columns));
    if (!coded.packed()) throw std::runtime_error("the weight is not packed; pack() it before the first call");
    objects.push_back(nb::borrow(weight));
    return {nullptr, 0, &coded, nullptr, (int32_t)rows, (int32_t)columns};
  }
  const Array& w = tensors.emplace_back(array_of({name, 2, {kBFloat16}}, weight));
  check_shape(name, w, {rows, columns}, "outputs, inputs");
  if (columns % kGemvK)
    refuse_value(name, std::to_string(columns) + " columns", "a multiple of " + std::to_string(kGemvK));
  return {(const char*)w.data(), row_stride(w) * 2, nullptr, nullptr, (int32_t)rows, (int32_t)columns};
}

namespace {

int64_t rows_of(const char* name, nb::handle weight) {
  if (nb::isinstance<PyCodedLinear>(weight)) return nb::cast<const PyCodedLinear&>(weight).linear->rows();
  return (int64_t)array_of({name, 2, {kBFloat16}}, weight).shape(0);
}

}  // namespace

void PyDecodeLayer::set_attention(nb::handle norm, nb::handle query_norm, nb::handle key_norm, nb::list epsilons,
                                  nb::list weights, nb::list biases, nb::handle sinks, int64_t head_size,
                                  double scale) {
  if (length_of("weights", weights) != 4)
    refuse_value("weights", std::to_string(weights.size()), "4, of queries, keys, values and the output");
  if (length_of("biases", biases) != 4) refuse_value("biases", std::to_string(biases.size()), "4, one of each weight");
  if (length_of("epsilons", epsilons) != 3) refuse_value("epsilons", std::to_string(epsilons.size()), "3");
  const int64_t hidden = layer->hidden(), size = in_range("head_size", head_size, kHeadSizeStep, 4096);
  if (size % kHeadSizeStep)
    refuse_value("head_size", std::to_string(size), "a multiple of " + std::to_string(kHeadSizeStep));
  const int64_t q_rows = rows_of("weight of queries", weights[0]), k_rows = rows_of("weight of keys", weights[1]);
  const int64_t heads = q_rows / size, groups = k_rows / size;
  if (q_rows % size || k_rows % size || !groups || heads % groups)
    refuse_value("weights", std::to_string(q_rows) + " and " + std::to_string(k_rows) + " rows",
                 "heads of " + std::to_string(size) + ", those of queries a multiple of those of keys");
  AttentionBlock a{};
  a.input = bind_norm("norm", norm, hidden, nb::cast<double>(epsilons[0]));
  a.query = bind_norm("query_norm", query_norm, size, nb::cast<double>(epsilons[1]));
  a.key = bind_norm("key_norm", key_norm, size, nb::cast<double>(epsilons[2]));
  if (!a.input.weight) refuse_type("norm", "None", "a tensor");
  a.q = bind_weight("weight of queries", weights[0], q_rows, hidden);
  a.k = bind_weight("weight of keys", weights[1], k_rows, hidden);
  a.v = bind_weight("weight of values", weights[2], k_rows, hidden);
  a.o = bind_weight("weight of the output", weights[3], hidden, q_rows);
  a.q.bias = bind_vector("bias of queries", biases[0], q_rows);
  a.k.bias = bind_vector("bias of keys", biases[1], k_rows);
  a.v.bias = bind_vector("bias of values", biases[2], k_rows);
  a.o.bias = bind_vector("bias of the output", biases[3], hidden);
  a.heads = (int32_t)heads, a.groups = (int32_t)groups, a.head_size = (int32_t)size, a.scale = (float)scale;
  a.sinks = sinks_of(sinks, heads, tensors);
  layer->attention = a;
  attends = true;
}

void PyDecodeLayer::set_experts(nb::handle norm, double epsilon, nb::handle router, nb::handle bias,
                                const PyExperts& given, int64_t top_k, bool normalise) {
  if (&given.experts->engine() != layer->engine().get())
    refuse_value("experts", "experts of another pool", "experts of the layer's pool",
                 "make both with the same Pool: a step runs on the threads for which the experts have workspace");
  ExpertBlock e{};
  e.input = bind_norm("norm", norm, layer->hidden(), epsilon);
  if (!e.input.weight) refuse_type("norm", "None", "a tensor");
  const LayerShape& shape = given.experts->shape();
  const Array& w = tensors.emplace_back(array_of({"router", 2, {kBFloat16, kFloat32}, Strides::dense}, router));
  check_shape("router", w, {shape.experts, layer->hidden()}, "experts, hidden");
  if (shape.hidden != layer->hidden())
    refuse_value("experts", std::to_string(shape.hidden) + " hidden", std::to_string(layer->hidden()));
  e.router = (const char*)w.data(), e.router_type = dtype_of(w);
  if (e.router_type == DType::f32 && type_ != DType::f32)
    refuse_type("router", "float32", "bfloat16 beside hidden states in bfloat16");
  e.bias = bind_vector("bias", bias, shape.experts);
  e.num_experts = shape.experts, e.top_k = in_range("top_k", top_k, 1, shape.experts), e.normalise = normalise;
  e.experts = given.experts;
  layer->experts = e;
  routes = true;
}

PyDecodeLayer::Call PyDecodeLayer::bind(nb::handle x, nb::handle out) const {
  Call call{array_of({"x", 2, {kBFloat16, kFloat32}, Strides::dense}, x),
            array_of({"out", 2, {kBFloat16, kFloat32}, Strides::dense, Access::write}, out),
            {}};
  const int32_t tokens = in_range("rows of x", (int64_t)call.x.shape(0), 1, layer->max_tokens());
  check_shape("x", call.x, {tokens, layer->hidden()}, "tokens, hidden");
  check_shape("out", call.out, {tokens, layer->hidden()}, "tokens, hidden");
  check_same_dtype("out", call.out, "x", call.x);
  if (dtype_of(call.x) != type_) refuse_type("x", "another dtype", "the dtype of the norms");
  if (share_memory(call.x, call.out))
    refuse_value("out", "memory that overlaps x", "memory of its own", "pass another tensor");
  call.rows = {(const char*)call.x.data(), (char*)const_cast<void*>(call.out.data()), type_, tokens};
  return call;
}

PyDecodeLayer::BoundRotary PyDecodeLayer::bind_rotary(nb::handle cos, nb::handle sin, const Call& call) const {
  BoundRotary bound{
      array_of({"cos", 2, {kBFloat16, kFloat32}}, cos), array_of({"sin", 2, {kBFloat16, kFloat32}}, sin), {}};
  const Array &c = bound.cos, &s = bound.sin;
  const int64_t size = (int64_t)c.shape(1), tokens = call.rows.tokens, head_size = layer->attention.head_size;
  if (size % 2 || size > head_size)
    refuse_value("cos", std::to_string(size) + " columns", "an even number, at most " + std::to_string(head_size));
  check_shape("cos", c, {tokens, size}, "tokens, rotated numbers of a head");
  check_shape("sin", s, {tokens, size}, "tokens, rotated numbers of a head");
  check_same_dtype("cos", c, "x", call.x);
  check_same_dtype("sin", s, "x", call.x);
  if (row_stride(c) != row_stride(s)) refuse_value("sin", "another stride than cos", "the same");
  bound.rotary = {(const char*)c.data(), (const char*)s.data(), row_stride(c) * (int64_t)size_of(type_), (int32_t)size};
  return bound;
}

LayerCache PyDecodeLayer::bind_cache(nb::handle cache, const PyStepSequences& sequences, const Call& call,
                                     std::vector<Array>& alive) const {
  const AttentionBlock& a = layer->attention;
  if (sequences.step.size() != call.rows.tokens)
    refuse_value("sequences", std::to_string(sequences.step.size()) + " rows",
                 std::to_string(call.rows.tokens) + ", one for each row of x");
  sequences.check_rows(call.rows.tokens);
  return cache_of(cache, call.x, {a.groups, a.head_size, a.head_size}, sequences, alive);
}

void PyDecodeLayer::check_attends() const {
  if (!attends) throw std::runtime_error("the layer has no attention; call set_attention() first");
}

void PyDecodeLayer::check_routes(bool w8a8) const {
  if (!routes) throw std::runtime_error("the layer has no experts; call set_experts() first");
  const std::string why = w8a8 ? layer->experts.experts->w8a8_unsupported() : "";
  if (!why.empty()) refuse_value("w8a8", "True", "False for these experts", why);
}

void PyDecodeLayer::attend(nb::handle x, nb::handle out, nb::handle cos, nb::handle sin, nb::handle cache,
                           const PyStepSequences& sequences, int64_t window) const {
  check_attends();
  const Call call = bind(x, out);
  const BoundRotary bound = bind_rotary(cos, sin, call);
  std::vector<Array> alive;
  const LayerCache bound_cache = bind_cache(cache, sequences, call, alive);
  const int32_t keys = key_count_of("window", window);
  nb::gil_scoped_release released;
  layer->attend(call.rows, bound.rotary, bound_cache, keys, sequences.step);
}

void PyDecodeLayer::route(nb::handle x, nb::handle out, bool w8a8, bool needs_grad) const {
  check_routes(w8a8);
  const Call call = bind(x, out);
  nb::gil_scoped_release released;
  layer->route(call.rows, w8a8, needs_grad);
}

void PyDecodeLayer::decode_layers(nb::list layers, nb::handle x, nb::handle out, nb::handle cos, nb::handle sin,
                                  nb::list caches, nb::list windows, const PyStepSequences& sequences, nb::list w8a8,
                                  bool needs_grad) {
  const int64_t count = length_of("layers", layers);
  if (!count) refuse_value("layers", "none", "one or more");
  for (auto [name, list] : {std::pair<const char*, nb::handle>{"caches", caches}, {"windows", windows}, {"w8a8", w8a8}})
    if (length_of(name, list) != count)
      refuse_value(name, std::to_string(length_of(name, list)), std::to_string(count) + ", as many as layers");
  const auto& first = nb::cast<const PyDecodeLayer&>(layers[0]);
  const Call call = first.bind(x, out);
  const BoundRotary bound = first.bind_rotary(cos, sin, call);
  std::vector<Array> alive;
  std::vector<LayerCall> calls;
  for (int64_t i = 0; i < count; i++) {
    const auto& given = nb::cast<const PyDecodeLayer&>(layers[i]);
    const bool rounds = nb::cast<bool>(w8a8[i]);
    given.check_attends();
    given.check_routes(rounds);
    if (given.layer->engine() != first.layer->engine() || given.layer->hidden() != first.layer->hidden() ||
        given.type_ != first.type_ || given.layer->attention.head_size < bound.rotary.size)
      refuse_value("layers", "layers of several pools, hidden sizes, dtypes or head sizes", "the same of all");
    for (const LayerCall& other : calls)
      if (other.layer == given.layer.get()) refuse_value("layers", "a layer twice", "each once");
    calls.push_back({given.layer.get(), given.bind_cache(caches[i], sequences, call, alive),
                     key_count_of("windows", integer_of("windows", windows[i])), rounds, needs_grad && !rounds});
  }
  nb::gil_scoped_release released;
  kt::decode_layers(calls, call.rows, bound.rotary, sequences.step);
}

}  // namespace kt
