"""Routed experts by rule. `KTransformersExperts` stays the stock experts module, whose experts are in a store from
loading on (`experts/interface.py`); its keywords choose the format of the store and where the placement engine computes
it.

| keyword | meaning |
|---|---|
| `generate_device` | cpu: experts are computed there; a GPU: all experts of the layer are resident on it |
| `prefill_device` | a GPU, with `generate_device: cpu`: the engine decides by the size of a batch |
| `out_device` | device of the layer around the experts |
| `generate_op`, `prefill_op` | checked against the devices; KExpertsMarlin stores experts in int4 |
| `backend` | AMXInt8, AMXInt4: experts are encoded while they are loaded; AMXBF16, llamafile: as released |

The MoE blocks of KTransformers replace a forward that loops over a list of experts. Stock transformers calls the
experts as one module, so its blocks stay.
"""

from __future__ import annotations

import difflib

from ktransformers.experts.contract import is_experts
from ktransformers.ground.errors import InputError
from ktransformers.operators.base_operator import Match, Outcome, StockOperator
from ktransformers.operators.linear import known_op

INT8, INT4 = "int8", "int4:32"
# Backends of KTransformers -> the format that experts are encoded in; None: as released.
BACKENDS: dict[str, str | None] = {"llamafile": None, "auto": None, "AMXBF16": None, "AMXInt8": INT8, "AMXInt4": INT4}
# Operators -> the devices that they compute on.
EXPERT_OPS: dict[str, tuple[str, ...]] = {
    "KExpertsCPU": ("cpu",),
    "KSFTExpertsCPU": ("cpu",),
    "MLPCPUExperts": ("cpu",),
    "KExpertsTorch": ("cpu", "cuda"),
    "KExpertsMarlin": ("cuda",),
    "MLPCUDAExperts": ("cuda",),
}
MARLIN = "KExpertsMarlin"


def backend_format(where: str, backend: str) -> str | None:
    """The format that a backend encodes experts in; None: as released."""
    known = {name.lower(): name for name in BACKENDS}
    if backend.lower() not in known:
        near = difflib.get_close_matches(backend.lower(), known, n=1)
        expected = f"`{known[near[0]]}`, perhaps" if near else "one of " + ", ".join(BACKENDS)
        raise InputError(where, f"backend {backend}", expected)
    return BACKENDS[known[backend.lower()]]


class KTransformersExperts(StockOperator):
    keywords = ("generate_op", "prefill_op", "out_device", "backend")

    @classmethod
    def check(cls, match: Match) -> Outcome:
        if not is_experts(match.module):
            given = f"{match.name}, a {type(match.module).__name__}"
            raise InputError(match.where, given, "routed experts", "match `experts$`, or as the model names them")
        keywords = match.arguments
        for word, device in (("generate_op", "generate_device"), ("prefill_op", "prefill_device")):
            known_op(match, word, EXPERT_OPS)
            op, place = keywords.get(word), keywords.get(device)
            if op is not None and place is not None and str(place).lower().partition(":")[0] not in EXPERT_OPS[op]:
                expected = f"{device}: {' or '.join(EXPERT_OPS[op])}"
                raise InputError(f"{match.where}: {word}", f"{op} on {place}", expected)
        encoded = backend_format(match.where, str(keywords.get("backend") or "llamafile"))
        return Outcome(format=INT4 if keywords.get("generate_op") == MARLIN else encoded, keeps_stock=True)


class _MoeBlock(StockOperator):
    @classmethod
    def check(cls, match: Match) -> Outcome:
        if not any(is_experts(child) for child in match.module.children()):
            given = f"{match.name}, a {type(match.module).__name__}"
            raise InputError(match.where, given, "a block with routed experts")
        return Outcome(keeps_stock=True)


class KDeepseekV2MoE(_MoeBlock):
    """The stock block."""


class KDeepseekV3MoE(_MoeBlock):
    """The stock block."""


class KQwen2MoeSparseMoeBlock(_MoeBlock):
    """The stock block."""


class KQwen3MoeSparseMoeBlock(_MoeBlock):
    """The stock block."""


class KMistralSparseMoEBlock(_MoeBlock):
    """The stock block."""
