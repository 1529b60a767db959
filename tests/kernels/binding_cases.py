"""A call that works for every binding of the core that takes tensors; `test_bindings.py` replaces their tensors.

KT_CORE names another build of the core, which is then loaded in place of the installed one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

if (path := os.environ.get("KT_CORE")) and "ktransformers._core" not in sys.modules:
    spec = importlib.util.spec_from_file_location("ktransformers._core", path)
    assert spec is not None and spec.loader is not None
    sys.modules["ktransformers._core"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["ktransformers._core"])

from ktransformers import _core

__all__ = ["CASES", "WITHOUT_TENSORS", "Case", "H", "T", "_core", "batch", "matrices", "new_experts", "packed_experts"]

E, H, I, T, K, R = 3, 64, 96, 5, 2, 4  # noqa: E741


@dataclass(frozen=True)
class Case:
    call: Callable[[dict[str, Any]], list[Any]]  # with the tensors by name; returns what it computed
    tensors: dict[str, Tensor]  # by argument, or by argument.name within a list
    written: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()  # None is a legal value
    plain: frozenset[str] = field(default=frozenset())  # arguments that hold no tensors


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


def f32(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def new_pool() -> _core.Pool:
    return _core.Pool(threads=2, groups=1, spin_us=0, pin=False)


def new_experts(**options: Any) -> _core.Experts:
    return _core.Experts(new_pool(), E, H, I, **options)


def matrices() -> dict[str, Tensor]:
    return {"gate": bf16(E, I, H), "up": bf16(E, I, H), "down": bf16(E, H, I)}


def biases() -> dict[str, Tensor]:
    return {"gate_bias": f32(E, I), "up_bias": f32(E, I), "down_bias": f32(E, H)}


def packed_experts(with_biases: bool = False, pool: _core.Pool | None = None) -> _core.Experts:
    experts = _core.Experts(pool or new_pool(), E, H, I)
    experts.pack(0, *matrices().values(), *(biases().values() if with_biases else ()))
    return experts


def factors() -> dict[str, Tensor]:
    shapes = {"a": (E, R, H), "b": (E, I, R)}
    named = {f"{role}_{ab}": f32(*shapes[ab]) for role in ("gate", "up") for ab in "ab"}
    return named | {"down_a": f32(E, R, I), "down_b": f32(E, H, R)}


def packed_adapter(experts: _core.Experts) -> _core.Adapter:
    adapter = _core.Adapter(experts, R, R, R)
    adapter.pack(**factors())
    return adapter


def batch() -> dict[str, Tensor]:
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [-1, 1], [0, 2]])
    return {"hidden": f32(T, H), "ids": ids, "weights": f32(T, K)}


def rms_norm() -> Case:
    def call(given: dict[str, Any]) -> list[Any]:
        _core.rms_norm(**given, epsilon=1e-6)
        return [given["out"]]

    return Case(call, {"x": f32(3, H), "weight": f32(H), "out": f32(3, H)}, frozenset({"out"}))


def add_lora() -> Case:
    def call(given: dict[str, Any]) -> list[Any]:
        _core.add_lora(**given, scale=2.0)
        return [given["out"]]

    return Case(call, {"x": f32(3, H), "a": f32(R, H), "b": f32(R, 48), "out": f32(3, 48)}, frozenset({"out"}))


def copy_rows() -> Case:
    seen: list[tuple[int, int, int]] = []
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    record = function(lambda target, source, count, stream: seen.append((target, source or 0, count)) or 0)
    address = ctypes.cast(record, ctypes.c_void_p).value
    assert address is not None

    def call(given: dict[str, Any]) -> list[Any]:
        seen.clear()
        assert _core.copy_rows(call=address, stream=0, **given) == 0
        return [*seen, bool(record)]

    return Case(call, {"rows": torch.arange(12).reshape(4, 3).to(torch.uint64)})


def crc32c() -> Case:
    return Case(lambda given: [_core.crc32c(**given)], {"data": torch.arange(200, dtype=torch.uint8)})


def linear() -> Case:
    pool = new_pool()

    def call(given: dict[str, Any]) -> list[Any]:
        pool.linear(given["x"], [given["weights.weight"]], [given["outs.out"]])
        return [given["outs.out"]]

    return Case(call, {"x": f32(2, H), "weights.weight": bf16(40, H), "outs.out": f32(2, 40)}, frozenset({"outs.out"}))


def linear_heads() -> Case:
    pool = new_pool()

    def call(given: dict[str, Any]) -> list[Any]:
        pool.linear_heads(**given)
        return [given["out"]]

    return Case(call, {"x": f32(3, 2, H), "weights": bf16(3, 40, H), "out": f32(3, 2, 40)}, frozenset({"out"}))


def codes_of(rows: int, columns: int) -> dict[str, Tensor]:
    codes = torch.arange(rows * columns // 2).to(torch.uint8).view(1, rows, columns // 2)
    return {"matrix.codes": codes, "matrix.scales": bf16(1, rows, columns // 32).abs()}


def coded_linear() -> _core.CodedLinear:
    linear, parts = _core.CodedLinear(new_pool(), 40, H, "int4:32"), codes_of(40, H)
    linear.pack((parts["matrix.codes"], parts["matrix.scales"], None))
    return linear


def linear_pack() -> Case:
    def call(given: dict[str, Any]) -> list[Any]:
        linear, out = _core.CodedLinear(new_pool(), 40, H, "int4:32"), torch.empty(40, H, dtype=torch.bfloat16)
        linear.pack((given["matrix.codes"], given["matrix.scales"], None))
        linear.decode(0, out)
        return [out]

    return Case(call, codes_of(40, H))


def linear_forward(tokens: int) -> Case:
    linear = coded_linear()

    def call(given: dict[str, Any]) -> list[Any]:
        linear.forward(**given)
        return [given["out"]]

    return Case(call, {"x": f32(tokens, H), "out": f32(tokens, 40)}, frozenset({"out"}))


def linear_multiply_heads(along_rows: bool) -> Case:
    linear = coded_linear()

    def call(given: dict[str, Any]) -> list[Any]:
        linear.multiply_heads(**given, first=8, count=12, step=20, along_rows=along_rows)
        return [given["out"]]

    sizes = (12, H) if along_rows else (H, 12)
    return Case(call, {"x": f32(2, 3, sizes[0]), "out": f32(2, 3, sizes[1])}, frozenset({"out"}))


def linear_decode() -> Case:
    linear = coded_linear()

    def call(given: dict[str, Any]) -> list[Any]:
        linear.decode(0, **given)
        return [given["out"]]

    return Case(call, {"out": bf16(40, H)}, frozenset({"out"}))


def linear_gather() -> Case:
    linear = coded_linear()

    def call(given: dict[str, Any]) -> list[Any]:
        linear.gather(**given)
        return [given["out"]]

    return Case(call, {"rows": torch.tensor([3, 0, 39, 3]), "out": f32(4, H)}, frozenset({"out"}))


def linear_adopt() -> Case:
    source = coded_linear()

    def call(given: dict[str, Any]) -> list[Any]:
        linear, out = _core.CodedLinear(new_pool(), 40, H, "int4:32"), torch.empty(40, H)
        linear.adopt(given["blocks"])
        linear.decode(0, out)
        return [out]

    return Case(call, {"blocks": torch.from_numpy(source.memory().copy())})


def argmax() -> Case:
    pool = new_pool()
    return Case(lambda given: pool.argmax(given["x"]), {"x": f32(3, 100)})


def sequences(row: int) -> _core.StepSequences:
    """One, whose new token is its 71st; in the blocks 2 and 0 of a cache."""
    return _core.StepSequences(i32(row), i32(70), i32(2, 0)[None])


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def step_sequences() -> Case:
    pool, (query, key), cache = new_pool(), (f32(2, 3, 16), f32(1, 3, 16)), f32(4, 1, 64, 16)

    def call(given: dict[str, Any]) -> list[Any]:
        keys, out = cache.clone(), torch.zeros(3, 2, 16)
        pool.attend(query, key, key, out, (keys, keys.clone()), _core.StepSequences(**given), scale=0.5)
        return [out, keys]

    return Case(call, {"rows": i32(2, 0), "positions": i32(70, 5), "table": i32(3, 1, 2, 0).view(2, 2)})


def attend(heads: int = 4, groups: int = 2) -> Case:
    pool = new_pool()

    def call(given: dict[str, Any]) -> list[Any]:
        keys, values = given.pop("cache.keys"), given.pop("cache.values")
        pool.attend(**given, cache=(keys, values), sequences=sequences(1), scale=0.5, window=66)
        return [given["out"][1], keys, values]

    tensors = {"query": f32(heads, 3, 32), "key": f32(groups, 3, 32), "value": f32(groups, 3, 16)}
    tensors |= {"out": f32(3, heads, 16)} | cache_tensors(groups, 32)
    written, optional = frozenset({"out", "cache.keys", "cache.values"}), frozenset({"sinks"})
    return Case(call, tensors | {"sinks": f32(heads)}, written, optional=optional)


def cache_tensors(groups: int, key: int) -> dict[str, Tensor]:
    return {"cache.keys": f32(3, groups, 64, key), "cache.values": f32(3, groups, 64, 16)}


OUTPUTS = ("queries", "keys", "values", "the output")


def attention_tensors() -> dict[str, Tensor]:
    """Of a layer with four heads of 16 numbers, and two of keys."""
    norms = {"norm": f32(H), "query_norm": f32(16), "key_norm": f32(16)}
    matrices = (bf16(64, H), bf16(32, H), bf16(32, H), bf16(H, 64))
    weights = {f"weights.weight of {name}": matrix for name, matrix in zip(OUTPUTS, matrices, strict=True)}
    biases = {f"biases.bias of {name}": f32(len(matrix)) for name, matrix in zip(OUTPUTS, matrices, strict=True)}
    return norms | weights | biases | {"sinks": f32(4)}


def set_attention(layer: _core.DecodeLayer, given: dict[str, Any]) -> None:
    weights = [given[f"weights.weight of {name}"] for name in OUTPUTS]
    biases = [given[f"biases.bias of {name}"] for name in OUTPUTS]
    norms = (given["norm"], given["query_norm"], given["key_norm"])
    layer.set_attention(*norms, [1e-6, 1e-5, 1e-4], weights, biases, given["sinks"], head_size=16, scale=0.25)


def attention_inputs() -> dict[str, Tensor]:
    tensors = {"x": f32(1, H), "out": f32(1, H), "cos": f32(1, 8), "sin": f32(1, 8)}
    return tensors | cache_tensors(2, 16)


def attend_in_layer(layer: _core.DecodeLayer, given: dict[str, Any]) -> list[Any]:
    keys, values = given["cache.keys"], given["cache.values"]
    layer.attend(given["x"], given["out"], given["cos"], given["sin"], (keys, values), sequences(0), window=66)
    return [given["out"], keys, values]


def decode_layer_set_attention() -> Case:
    def call(given: dict[str, Any]) -> list[Any]:
        layer = _core.DecodeLayer(new_pool(), H)
        set_attention(layer, given)
        return attend_in_layer(layer, attention_inputs())

    optional = frozenset({"query_norm", "key_norm", "sinks", *(f"biases.bias of {name}" for name in OUTPUTS)})
    return Case(call, attention_tensors(), optional=optional, plain=frozenset({"epsilons"}))


def decode_layer_attend() -> Case:
    layer = _core.DecodeLayer(new_pool(), H)
    set_attention(layer, attention_tensors())
    written = frozenset({"out", "cache.keys", "cache.values"})
    return Case(lambda given: attend_in_layer(layer, given), attention_inputs(), written)


def decode_layer_set_experts() -> Case:
    pool = new_pool()
    experts = packed_experts(pool=pool)

    def call(given: dict[str, Any]) -> list[Any]:
        layer, out = _core.DecodeLayer(pool, H), torch.empty(3, H)
        layer.set_experts(**given, epsilon=1e-6, experts=experts, top_k=2, normalise=True)
        layer.route(f32(3, H), out)
        return [out]

    return Case(call, {"norm": f32(H), "router": f32(E, H), "bias": f32(E)}, optional=frozenset({"bias"}))


def layer_with_experts() -> _core.DecodeLayer:
    pool = new_pool()
    layer = _core.DecodeLayer(pool, H)
    layer.set_experts(f32(H), 1e-6, bf16(E, H), f32(E), packed_experts(pool=pool), top_k=2, normalise=False)
    return layer


def decode_layer_route() -> Case:
    layer = layer_with_experts()

    def call(given: dict[str, Any]) -> list[Any]:
        layer.route(**given)
        return [given["out"]]

    return Case(call, {"x": f32(3, H), "out": f32(3, H)}, frozenset({"out"}))


def decode_layers() -> Case:
    layer = layer_with_experts()
    set_attention(layer, attention_tensors())

    def call(given: dict[str, Any]) -> list[Any]:
        keys, values = given["cache.keys"], given["cache.values"]
        tensors = (given["x"], given["out"], given["cos"], given["sin"])
        _core.decode_layers([layer], *tensors, [(keys, values)], [66], sequences(0), w8a8=[False])
        return [given["out"], keys, values]

    written = frozenset({"out", "cache.keys", "cache.values"})
    return Case(call, attention_inputs(), written, plain=frozenset({"layers", "caches", "windows", "w8a8"}))


def attend_codes() -> Case:
    """A cache in codes of e4m3 with scales of e8m0, all bytes."""
    pool, parts = new_pool(), ("keys", "values", "key scales", "value scales")

    def call(given: dict[str, Any]) -> list[Any]:
        cache = tuple(given.pop(f"cache.{part}") for part in parts)
        pool.attend(**given, cache=cache, sequences=sequences(1), scale=0.5, window=66)
        return [given["out"][1], *cache]

    tensors = {"query": f32(4, 3, 32), "key": f32(2, 3, 32), "value": f32(2, 3, 16), "out": f32(3, 4, 16)}
    for part, size in zip(parts, (32, 16, 1, 1), strict=True):
        tensors[f"cache.{part}"] = torch.full((3, 2, 64, size), 60 if size > 1 else 127, dtype=torch.uint8)
    written, optional = frozenset({"out", *(f"cache.{part}" for part in parts)}), frozenset({"sinks"})
    return Case(call, tensors | {"sinks": f32(4)}, written, optional=optional)


def pack() -> Case:
    def call(given: dict[str, Any]) -> list[Any]:
        experts = new_experts()
        experts.pack(0, **given)
        return [torch.from_numpy(array.copy()) for array in experts.memory().values()]

    return Case(call, matrices() | biases(), optional=frozenset(biases()))


def encoded(format: str, scales: Callable[[int, int], Tensor], tensor_scale: bool) -> Case:
    bits = sum(_core.format(format)["planes"])

    def parts(role: str, rows: int, columns: int) -> dict[str, Tensor]:
        codes = torch.arange(E * rows * columns * bits // 8).to(torch.uint8).view(E, rows, columns * bits // 8)
        named = {f"{role}.codes": codes, f"{role}.scales": scales(rows, columns)}
        return named | ({f"{role}.tensor scale": f32(E).abs()} if tensor_scale else {})

    def call(given: dict[str, Any]) -> list[Any]:
        experts = new_experts(gate_format=format, up_format=format, down_format=format)
        three = {
            role: (given[f"{role}.codes"], given[f"{role}.scales"], given.get(f"{role}.tensor scale"))
            for role in ("gate", "up", "down")
        }
        experts.pack(0, **three)
        return [torch.from_numpy(array.copy()) for array in experts.memory().values()]

    plain = frozenset({"gate_bias", "up_bias", "down_bias"})
    return Case(call, parts("gate", I, H) | parts("up", I, H) | parts("down", H, I), plain=plain)


def adopt() -> Case:
    source = packed_experts(with_biases=True)
    memory = {name: torch.from_numpy(array.copy()) for name, array in source.memory().items()}
    inputs = batch()

    def call(given: dict[str, Any]) -> list[Any]:
        experts, out = new_experts(), torch.zeros(T, H)
        experts.adopt(**given)
        experts.forward(**inputs, out=out)
        return [out]

    optional = frozenset({"gate_up_bias", "down_bias", "checksums"})
    return Case(call, memory | {"checksums": torch.tensor(source.checksums())}, optional=optional)


def decode() -> Case:
    experts = packed_experts()

    def call(given: dict[str, Any]) -> list[Any]:
        experts.decode("up", 1, given["out"])
        return [given["out"]]

    return Case(call, {"out": bf16(I, H)}, frozenset({"out"}))


def encode(format: str, scales: Tensor, tensor_scale: Tensor | None = None) -> Case:
    def call(given: dict[str, Any]) -> list[Any]:
        sums = _core.encode(format, given["source"], given["codes"], given["scales"], given.get("tensor_scale"))
        return [given[name] for name in tensors if name != "source"] + [torch.tensor(sums[:2])]

    codes = torch.zeros(E, I, H // 2, dtype=torch.uint8)
    tensors = {"source": bf16(E, I, H), "codes": codes, "scales": scales}
    tensors |= {} if tensor_scale is None else {"tensor_scale": tensor_scale}
    return Case(call, tensors, frozenset(tensors) - {"source"}, plain=frozenset({"tensor_scale"} - tensors.keys()))


def quantise_rows() -> Case:
    def call(given: dict[str, Any]) -> list[Any]:
        _core.quantise_rows(given["source"], 8, given["codes"], given["scales"])
        return [given["codes"], given["scales"]]

    tensors = {"source": bf16(I, H), "codes": torch.zeros(I, H, dtype=torch.int8), "scales": f32(I)}
    return Case(call, tensors, frozenset({"codes", "scales"}))


def transpose() -> Case:
    experts = packed_experts()

    def call(given: dict[str, Any]) -> list[Any]:
        experts.transpose(**given)
        return [given["target"]]

    return Case(call, {"source": f32(40, 24), "target": f32(24, 40)}, frozenset({"target"}))


def forward() -> Case:
    experts = packed_experts(with_biases=True)
    adapter = packed_adapter(experts)

    def call(given: dict[str, Any]) -> list[Any]:
        experts.forward(**given, adapters=[adapter])
        return [given["out"], given["keep"]]

    keep = torch.zeros(T * K * experts.keep_row_bytes, dtype=torch.uint8)
    tensors = batch() | {"out": f32(T, H), "adapter": torch.tensor([0, -1, 0, 0, -1], dtype=torch.int32), "keep": keep}
    tensors |= {"skip": torch.tensor([False, True, False])}
    plain = frozenset({"adapters"})
    return Case(call, tensors, frozenset({"out", "keep"}), frozenset({"adapter", "skip", "keep"}), plain)


def backward() -> Case:
    experts = packed_experts(with_biases=True)
    adapter = packed_adapter(experts)

    def call(given: dict[str, Any]) -> list[Any]:
        gradients = [given.pop(f"factors.{name}") for name in factors()]
        experts.backward(**given, adapters=[adapter], factors=[gradients])
        return [given["grad_hidden"], given["grad_weights"], *gradients]

    keep = torch.zeros(T * K * experts.keep_row_bytes, dtype=torch.uint8)
    given = batch() | {"adapter": torch.tensor([0, -1, 0, 0, -1], dtype=torch.int32), "keep": keep}
    given |= {"skip": torch.tensor([False, True, False])}
    experts.forward(**given, out=torch.empty(T, H), adapters=[adapter])
    outputs = {"grad_hidden": f32(T, H), "grad_weights": f32(T, K)}
    outputs |= {f"factors.{name}": tensor for name, tensor in factors().items()}
    optional = frozenset({"adapter", "skip", "keep"} | {name for name in outputs if name.startswith("factors.")})
    tensors = given | {"grad_out": f32(T, H)} | outputs
    return Case(call, tensors, frozenset(outputs), optional, frozenset({"adapters"}))


def prepare() -> Case:
    experts = packed_experts(with_biases=True)
    adapter = packed_adapter(experts)

    def call(given: dict[str, Any]) -> list[Any]:
        prepared = experts.prepare(**given, adapters=[adapter])
        prepared.submit()
        prepared.wait()
        return [given["out"]]

    tensors = batch() | {"out": f32(T, H), "adapter": torch.tensor([0, -1, 0, 0, -1], dtype=torch.int32)}
    tensors |= {"skip": torch.tensor([False, True, False])}
    return Case(call, tensors, frozenset({"out"}), frozenset({"adapter", "skip"}), frozenset({"adapters"}))


def adapter_pack() -> Case:
    experts, inputs = packed_experts(), batch()

    def call(given: dict[str, Any]) -> list[Any]:
        adapter, out = _core.Adapter(experts, R, R, R), torch.zeros(T, H)
        adapter.pack(**given)
        experts.forward(**inputs, out=out, adapters=[adapter])
        return [out]

    return Case(call, factors())


CASES: dict[str, Callable[[], Case]] = {
    "rms_norm": rms_norm,
    "add_lora": add_lora,
    "copy_rows": copy_rows,
    "crc32c": crc32c,
    "Pool.linear": linear,
    "Pool.linear_heads": linear_heads,
    "CodedLinear.pack": linear_pack,
    "CodedLinear.forward": lambda: linear_forward(3),
    "CodedLinear.forward, many rows": lambda: linear_forward(70),
    "CodedLinear.multiply_heads": lambda: linear_multiply_heads(False),
    "CodedLinear.multiply_heads, along rows": lambda: linear_multiply_heads(True),
    "CodedLinear.decode": linear_decode,
    "CodedLinear.gather": linear_gather,
    "CodedLinear.adopt": linear_adopt,
    "Pool.argmax": argmax,
    "StepSequences.__init__": step_sequences,
    "Pool.attend": attend,
    "Pool.attend, one head": lambda: attend(1, 1),
    "Pool.attend, codes": attend_codes,
    "DecodeLayer.set_attention": decode_layer_set_attention,
    "DecodeLayer.set_experts": decode_layer_set_experts,
    "DecodeLayer.attend": decode_layer_attend,
    "DecodeLayer.route": decode_layer_route,
    "decode_layers": decode_layers,
    "Experts.pack": pack,
    "Experts.pack, int8": lambda: encoded("int8", lambda rows, columns: f32(E, rows).abs(), False),
    "Experts.pack, int4": lambda: encoded("int4:32", lambda rows, columns: bf16(E, rows, columns // 32).abs(), False),
    "Experts.pack, nvfp4": lambda: encoded(
        "nvfp4", lambda rows, columns: torch.full((E, rows, columns // 16), 56, dtype=torch.uint8), True
    ),
    "encode": lambda: encode("int4:32", bf16(E, I, H // 32)),
    "encode, nvfp4": lambda: encode("nvfp4", torch.zeros(E, I, H // 16, dtype=torch.uint8), f32(E)),
    "quantise_rows": quantise_rows,
    "Experts.adopt": adopt,
    "Experts.decode": decode,
    "Experts.transpose": transpose,
    "Experts.forward": forward,
    "Experts.backward": backward,
    "Experts.prepare": prepare,
    "Adapter.pack": adapter_pack,
}
WITHOUT_TENSORS = {
    "DecodeLayer.__init__", "CodedLinear.__init__", "CodedLinear.memory", "CodedLinear.checksum",
    "variants", "isa", "machine", "formats", "format", "grid", "linear_rows", "pooled_array", "pooled_bytes",
    "TaskQueue.__init__", "TaskQueue.submit", "TaskQueue.wait", "TaskQueue.step",
    "host_callbacks", "map_file", "Pool.__init__", "Pool.rate", "Pool.codes_rate", "Call.submit", "Call.wait",
    "Experts.parts", "Experts.biases", "Experts.place_pages",
    "Experts.__init__", "Experts.memory", "Experts.checksums", "Experts.verify", "Experts.layout", "Adapter.__init__",
}  # fmt: skip
