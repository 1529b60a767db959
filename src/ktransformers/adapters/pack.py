"""LoRA factors of the experts of one layer, packed for the native core."""

from __future__ import annotations

from collections.abc import Mapping

from ktransformers import _core
from ktransformers.experts.lora import LoraPair
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError


def pack_expert_pairs(what: str, store: ExpertStore, pairs: Mapping[str, LoraPair]) -> _core.Adapter:
    """`pairs` of gate, up and down, a `[E, r, in]`, b `[E, out, r]`; `what` names them in an error."""
    sizes = dict.fromkeys(("gate", "up"), (store.hidden_size, store.intermediate_size))
    sizes["down"] = (store.intermediate_size, store.hidden_size)
    for role, pair in pairs.items():
        given = (pair.a.shape[0], pair.a.shape[2], pair.b.shape[1])
        if given != (store.num_experts, *sizes[role]) or (role == "gate" and not store.gated):
            raise InputError(
                f"{what}: {role}", f"experts, inputs, outputs {given}", f"{(store.num_experts, *sizes[role])}"
            )
    gate, up, down = (pairs.get(role) for role in ("gate", "up", "down"))
    shared = gate is not None and up is not None and gate.a is up.a
    packed = store.new_adapter(*(0 if pair is None else pair.rank for pair in (gate, up, down)), shared=shared)
    packed.pack(
        None if gate is None else gate.a,
        None if gate is None else gate.b,
        None if up is None or shared else up.a,
        None if up is None else up.b,
        None if down is None else down.a,
        None if down is None else down.b,
        gate_scale=1.0 if gate is None else gate.scaling,
        up_scale=1.0 if up is None else up.scaling,
        down_scale=1.0 if down is None else down.scaling,
    )
    return packed
