"""LoRA in llama.cpp's GGUF: `blk.3.ffn_gate_exps.weight.lora_a` and `.lora_b`, the experts of a layer stacked, a `[E,
r, in]` and b `[E, out, r]` (numpy's order; GGUF itself lists dimensions in reverse).

llama.cpp scales by `adapter.lora.alpha` over the rank of each tensor, so one alpha serves all and the difference goes
into B. ARCHITECTURES maps its tensor names to modules, for the families whose attention llama.cpp stores unchanged.
Mixtral (arch "llama") is the supported exception: llama.cpp permutes the rows of q and k within each head for its
rotary embedding, so the rows of B are permuted too. A module without an entry is refused by name. What GGUF has no
field for (the rest of adapter_config.json, the name prefix) goes into a metadata key of our own, which llama.cpp
ignores.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from pydantic import BaseModel
from torch import Tensor

from ktransformers.adapters.config import compact_number
from ktransformers.adapters.content import Content
from ktransformers.adapters.fit import refit_adapter, refit_form
from ktransformers.adapters.formats.adapter_format import AdapterFormat
from ktransformers.adapters.lora import ROLES, Adapter, Experts, Module, PairForm
from ktransformers.adapters.model import ModelFacts
from ktransformers.adapters.names import PROJ_NAMING, layers_prefix, order_targets
from ktransformers.adapters.parse import LoraTensors, ReadContext, pair_factors, stacked_experts
from ktransformers.adapters.write import WrittenTensor, record_tensor
from ktransformers.checkpoint.encoded import gguf_package
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.checkpoint.sources.gguf import FLOATS
from ktransformers.checkpoint.sources.gguf_names import ATTENTION, DENSE, MLA, ROUTER, shared_expert, unpermute
from ktransformers.checkpoint.tensorfile import byte_view
from ktransformers.experts.lora import LoraPair
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import parse_json, short, validate

GGUF_FILE = "adapter.gguf"
METADATA_KEY = "ktransformers.adapter"  # one JSON document: config, roots, stem, model
EXPERT_TENSORS = {f"ffn_{role}_exps": role for role in ROLES}
MLA_ATTENTION = {leaf: MLA[leaf] for leaf in ("attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_output")}


@dataclass(frozen=True)
class Arch:
    name: str  # llama.cpp's
    tensors: Mapping[str, str]  # tensor name within a layer -> module of the model
    permuted: bool = False  # rows of q and k are permuted within each head


PLAIN = ATTENTION | ROUTER
DEEPSEEK = Arch("deepseek2", MLA_ATTENTION | ROUTER | DENSE | shared_expert("shared_experts"))
ARCHITECTURES: dict[str, Arch] = {
    "qwen2_moe": Arch("qwen2moe", PLAIN | shared_expert("shared_expert")),
    "qwen3_moe": Arch("qwen3moe", PLAIN),
    "qwen3_next": Arch("qwen3next", PLAIN | shared_expert("shared_expert")),
    "qwen3_5_moe": Arch("qwen35moe", PLAIN | shared_expert("shared_expert")),
    "qwen3_5_moe_text": Arch("qwen35moe", PLAIN | shared_expert("shared_expert")),
    "mixtral": Arch("llama", PLAIN, permuted=True),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": Arch("gpt-oss", ATTENTION | {"ffn_gate_inp": "mlp.router"}),
}


def matches(content: Content) -> bool:
    return content.metadata is not None


def read(content: Content, context: ReadContext) -> Adapter:
    assert content.metadata is not None
    own_metadata = _own_metadata(content)
    facts = context.facts
    if facts is None and own_metadata.model is not None:
        facts = ModelFacts.from_json(own_metadata.model, f"{content.path}: {METADATA_KEY}, model")
    arch = _find_architecture(content, facts)
    alpha = content.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise InputError(f"{content.path}: adapter.lora.alpha", short(alpha), "a number")
    alpha = float(alpha)
    factors, others = pair_factors(content.tensors.values(), _parse_tensor)
    if others:
        raise InputError(others[0].name, "a tensor that is no LoRA factor", "...weight.lora_a or ...weight.lora_b")
    experts: dict[int, dict[str, LoraTensors]] = {}
    forms: dict[int, dict[str, PairForm]] = {}
    modules: list[Module] = []
    prefix = own_metadata.stem
    for name, pair in factors.items():
        layer, leaf = _split_tensor_name(name)
        if (leaf in EXPERT_TENSORS) != (len(pair.a.shape) == 3):
            raise InputError(
                pair.a.name, f"shape {list(pair.a.shape)}", "one matrix, or one for each expert of ffn_*_exps"
            )
        rank, inputs, outputs = pair.sizes(len(pair.a.shape))
        form = PairForm(rank, inputs, outputs, pair.dtype, alpha / rank if alpha else 1.0)
        if leaf in EXPERT_TENSORS:
            experts.setdefault(layer, {})[EXPERT_TENSORS[leaf]] = pair
            forms.setdefault(layer, {})[EXPERT_TENSORS[leaf]] = form
        else:
            modules.append(_module(name, layer, leaf, pair, form, arch, prefix, facts))
    layers = tuple(
        stacked_experts(f"{prefix}.{layer}.{own_metadata.block}", layer, pairs, forms[layer])
        for layer, pairs in experts.items()
    )
    naming = facts.naming if facts else PROJ_NAMING
    config = own_metadata.config or _config(layers, modules, alpha)
    return Adapter(layers, tuple(modules), config=config, naming=naming, model=facts)


class _OwnMetadata(BaseModel):
    """What this package writes in addition to llama.cpp's own metadata."""

    config: dict[str, Any] = {}
    stem: str = "model.layers"
    block: str = "mlp"
    model: dict[str, Any] | None = None


def _own_metadata(content: Content) -> _OwnMetadata:
    assert content.metadata is not None
    where, text = f"{content.path}: {METADATA_KEY}", content.metadata.get(METADATA_KEY, "{}")
    if not isinstance(text, str):
        raise InputError(where, short(text), "a JSON object")
    return validate(_OwnMetadata, parse_json(text, where), where)


def _config(layers: tuple[Experts, ...], modules: list[Module], alpha: float) -> dict[str, Any]:
    leaves = {module.name.rpartition(".")[2] for module in modules}
    forms = [*(form for layer in layers for form in layer.forms.values()), *(module.form for module in modules)]
    return {"r": forms[0].rank, "lora_alpha": compact_number(alpha), "target_modules": order_targets(leaves)}


def _find_architecture(content: Content, facts: ModelFacts | None) -> Arch:
    assert content.metadata is not None
    name = content.metadata.get("general.architecture")
    if facts is not None and facts.model_type in ARCHITECTURES and ARCHITECTURES[facts.model_type].name == name:
        return ARCHITECTURES[facts.model_type]
    for arch in ARCHITECTURES.values():
        if arch.name == name:
            return arch
    raise InputError(
        str(content.path), f"architecture {name!r}", ", ".join(sorted({a.name for a in ARCHITECTURES.values()}))
    )


def _parse_tensor(name: str) -> tuple[str, str] | None:
    """("blk.3.attn_q.weight.lora_a") -> ("blk.3.attn_q", "A")."""
    base, _, factor = name.rpartition(".lora_")
    return (base.removesuffix(".weight"), factor.upper()) if factor in ("a", "b") else None


def _split_tensor_name(name: str) -> tuple[int, str]:
    """("blk.3.attn_q") -> (3, "attn_q"); layer -1 for tensors outside the layers."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 3 and parts[1].isdigit():
        return int(parts[1]), parts[2]
    return -1, name


def _module(
    name: str, layer: int, leaf: str, factors: LoraTensors, form: PairForm, arch: Arch, prefix: str, facts: Any
) -> Module:
    if layer < 0 and leaf == "output":
        module = "lm_head"
    elif layer >= 0 and leaf in arch.tensors:
        module = f"{prefix}.{layer}.{arch.tensors[leaf]}"
    else:
        raise InputError(f"{name}.weight.lora_a", f"a tensor that is not known in {arch.name}", ", ".join(arch.tensors))
    heads = _permuted_heads(arch, leaf, facts)

    def read_module() -> LoraPair:
        pair = factors.pair(form.scaling)
        if heads and pair.b.shape[0] % (2 * heads):
            raise InputError(factors.b.name, f"{pair.b.shape[0]} rows", f"rows of {heads} heads")
        return replace(pair, b=unpermute(pair.b, heads)) if heads else pair

    return Module(module, form, read_module, factors.spell(module))


def _permuted_heads(arch: Arch, leaf: str, facts: ModelFacts | None) -> int:
    """Number of heads whose rows are permuted, 0 for none."""
    if not arch.permuted or leaf not in ("attn_q", "attn_k"):
        return 0
    count = facts and (facts.heads if leaf == "attn_q" else facts.kv_heads or facts.heads)
    if not count:
        raise InputError(
            leaf, "a model that is not known", "its number of heads, by which llama.cpp orders rows of q and k",
            "give --base-model-name-or-path DIR",
        )  # fmt: skip
    return count


def _permute_rows(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def write(adapter: Adapter, directory: Path) -> list[WrittenTensor]:
    facts = adapter.model
    if facts is None or facts.model_type not in ARCHITECTURES:
        raise InputError(
            "model", "not known" if facts is None else repr(facts.model_type), f"one of {', '.join(ARCHITECTURES)}",
            "give --base-model-name-or-path DIR: GGUF names the architecture" if facts is None else "",
        )  # fmt: skip
    if adapter.extras:
        raise InputError(adapter.extras[0].name, "a tensor that is no LoRA factor", "none in GGUF")
    arch = ARCHITECTURES[facts.model_type]
    alpha = max(form.alpha for form in adapter.forms())
    adapter = refit_adapter(adapter, lambda _, form: _form_with_alpha(form, alpha))
    return _write(adapter, arch, alpha, directory / GGUF_FILE)


def _form_with_alpha(form: PairForm, alpha: float) -> PairForm:
    """The form for the common alpha: B scaled by a power of two at the smallest rank that allows it, else B in f32."""
    for shift in range(-16, 17):
        rank = alpha / form.scaling * 2.0**shift
        if rank >= form.rank and rank.is_integer() and alpha / rank == form.scaling / 2.0**shift:
            return refit_form(form, int(rank), alpha / rank)
        if rank > 4 * form.rank:
            break
    return refit_form(form, form.rank, alpha / form.rank)


def _plan_tensors(adapter: Adapter, arch: Arch) -> list[tuple[list[tuple[str, PairForm]], int, Any]]:
    """(tensor names with forms, number of experts or 0, function that reads the pairs) in file order."""
    leaves = {path: leaf for leaf, path in arch.tensors.items()}
    sources: list[tuple[list[tuple[str, PairForm]], int, Any]] = []
    for layer in adapter.experts:
        if split_layer_name(layer.root)[0]:
            raise InputError(layer.root, "experts outside the main layers", "none")
        named = [(f"blk.{layer.layer}.ffn_{role}_exps", form) for role, form in layer.forms.items()]
        sources.append((named, layer.experts, lambda layer=layer: list(layer.read().values())))
    for module in adapter.modules:
        outer, number, path = split_layer_name(module.name)
        if number < 0 and path == "lm_head":
            name, heads = "output", 0
        elif not outer and path in leaves:
            name, heads = f"blk.{number}.{leaves[path]}", _permuted_heads(arch, leaves[path], adapter.model)
        else:
            raise InputError(module.name, f"a module that {arch.name} has no plain tensor for", ", ".join(leaves))
        sources.append(
            ([(name, module.form)], 0, lambda module=module, heads=heads: [_permute_pair(module.read(), heads)])
        )
    return sources


def _permute_pair(pair: LoraPair, heads: int) -> LoraPair:
    return replace(pair, b=_permute_rows(pair.b, heads)) if heads else pair


def _write(adapter: Adapter, arch: Arch, alpha: float, path: Path) -> list[WrittenTensor]:
    gguf = gguf_package()
    quant_types = gguf.GGMLQuantizationType
    types = {dtype: quant_types[kind.upper()] for kind, dtype in FLOATS.items()}
    writer = gguf.GGUFWriter(None, arch.name)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(alpha))
    writer.add_string(METADATA_KEY, json.dumps(_metadata(adapter)))
    sources = _plan_tensors(adapter, arch)
    # The dtype in the header keeps the writer from interpreting the shape as bytes.
    for named, experts, _ in sources:
        for name, form in named:
            leading = (experts,) if experts else ()
            for half, sizes in (("a", (form.rank, form.inputs)), ("b", (form.outputs, form.rank))):
                shape, tensor = (*leading, *sizes), f"{name}.weight.lora_{half}"
                size = form.dtype.itemsize * math.prod(shape)
                writer.add_tensor_info(tensor, shape, numpy.dtype("float32"), size, raw_dtype=types[form.dtype])
    writer.open_output_file(path)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    records: list[WrittenTensor] = []
    for named, _, read_pairs in sources:
        for (name, form), pair in zip(named, read_pairs(), strict=True):
            for half, tensor in (("a", pair.a), ("b", pair.b)):
                tensor = tensor.to(form.dtype).contiguous()
                writer.write_tensor_data(numpy.frombuffer(byte_view(tensor), dtype=numpy.uint8))
                records.append(record_tensor(f"{name}.weight.lora_{half}", path.name, tensor))
    os.fsync(writer.fout[0].fileno())
    writer.close()
    return records


def _metadata(adapter: Adapter) -> dict[str, Any]:
    roots = [layer.root for layer in adapter.experts]
    names = roots or [module.name for module in adapter.modules if layers_prefix(module.name)]
    return {
        "config": dict(adapter.config),
        "stem": layers_prefix(names[0]) if names else "model.layers",
        "block": split_layer_name(roots[0])[2] if roots else "mlp",
        "model": adapter.model.to_json() if adapter.model else None,
    }


ADAPTER_FORMAT = AdapterFormat("gguf", "llama.cpp's GGUF LoRA", matches, read, write, lambda layer: len(layer.forms))
