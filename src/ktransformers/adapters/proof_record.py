"""kt_proof.safetensors: log-probabilities of a few rows under the model in the trainer at the time of saving, for `kt
prove` to compare with, and a reload check that runs before the file is relied on.

Per row: `rows.N.tokens` int64 `[T]`, `rows.N.base` and `rows.N.adapter` float32 `[T - 1]`, and `marks.N.MODULE` `[T,
4]`, projections of module outputs with the adapter active. `routers.base/LAYER/...` and `routers.adapter/LAYER/...` are
the choices of the routers for the tokens of all rows (`router_choices.py`), which `kt prove` replays where two experts
tie. `prompts.N` int64 are the tokens before an answer, the first of a row and later ones, with the messages that they
were rendered from in the metadata, so that `kt prove` can ask a server as a client does.
The reload check fills every trained parameter with NaN and reads the saved file back, so that a tensor that is missing
in the file, or that matches no parameter, cannot be masked by the value in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.comparison import (
    LogprobDifference,
    LogprobsAndNorms,
    adapted_modules,
    difference,
    first_deviating_module,
    measure,
)
from ktransformers.adapters.router_choices import RouterChoices, compare_choices
from ktransformers.experts.lora_shards import factor_shards
from ktransformers.ground.errors import InputError, KTError
from ktransformers.parallel.distributed import broadcast_tensors
from ktransformers.parallel.exchange import any_rank, expert_group
from ktransformers.parallel.sharding import local_tensor, on_any_rank, sharding_of
from ktransformers.parallel.whole_state import scatter_experts

PROOF_FILE = "kt_proof.safetensors"
MAX_PROOF_ROWS, TOKENS = 4, 256  # at most that many rows of that many tokens
PROOF_FORMAT = "ktransformers-proof"


@dataclass(frozen=True)
class ProofPrompt:
    """The messages before an answer, and the tokens that training made of them."""

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None
    tokens: tuple[int, ...]

    @property
    def follows_answers(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)


@dataclass(frozen=True)
class ProofRecord:
    rows: tuple[tuple[int, ...], ...]
    base: LogprobsAndNorms
    adapter: LogprobsAndNorms
    dtype: str  # of all weights but experts and adapter, at the time of recording
    held_out: bool  # the rows were not trained on
    prompts: tuple[ProofPrompt, ...] = ()  # none in files of version 0.1
    other_turns: int = 0  # later turns whose prompt the template renders otherwise than the row was trained


def record(
    model: Any,
    rows: Sequence[Sequence[int]],
    *,
    held_out: bool,
    prompts: Sequence[ProofPrompt] = (),
    other_turns: int = 0,
) -> ProofRecord:
    """Records PEFT's model in its current state, on the last few rows of token ids, truncated: a run that ends early
    has trained on those least. `prompts` are of any rows."""
    chosen = [index for index, row in enumerate(rows) if len(row) > 1][-MAX_PROOF_ROWS:]
    samples = [list(rows[index][:TOKENS]) for index in chosen]
    if not samples:
        raise InputError("rows", "none of two tokens or more", "rows to prove the adapter with")
    with model.disable_adapter():
        base = measure(model, samples)
    adapter = measure(model, samples, adapted_modules(model))
    sharding = sharding_of(model)
    dtype = str(model.get_input_embeddings().weight.dtype if sharding is None else sharding.compute_dtype)
    token_rows = tuple(tuple(row) for row in samples)
    return ProofRecord(token_rows, base, adapter, dtype.removeprefix("torch."), held_out, tuple(prompts), other_turns)


def write_record(path: Path, proof: ProofRecord) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for index, row in enumerate(proof.rows):
        tensors[f"rows.{index}.tokens"] = torch.tensor(row)
        tensors[f"rows.{index}.base"] = proof.base.logprobs[index].contiguous()
        tensors[f"rows.{index}.adapter"] = proof.adapter.logprobs[index].contiguous()
        for name, projections in proof.adapter.projections.items():
            tensors[f"marks.{index}.{name}"] = projections[index].contiguous()
    for index, prompt in enumerate(proof.prompts):
        tensors[f"prompts.{index}"] = torch.tensor(prompt.tokens)
    routers = {"base": proof.base.routers, "adapter": proof.adapter.routers}
    layers = {name: list(choices.layers) for name, choices in routers.items() if choices is not None}
    for name, choices in routers.items():
        if choices is not None:
            tensors |= {f"routers.{name}/{field}": tensor for field, tensor in choices.to_tensors().items()}
    messages = json.dumps([{"messages": prompt.messages, "tools": prompt.tools} for prompt in proof.prompts])
    modules = "\n".join(proof.adapter.projections)  # safetensors does not preserve order
    metadata = {"format": PROOF_FORMAT, "dtype": proof.dtype, "held_out": str(int(proof.held_out)), "modules": modules}
    metadata |= {"prompts": messages, "other_turns": str(proof.other_turns), "routers": json.dumps(layers)}
    save_file(tensors, path, metadata=metadata)


def read_record(directory: Path) -> ProofRecord | None:
    from safetensors import SafetensorError, safe_open

    file = directory / PROOF_FILE
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            if metadata.get("format") != PROOF_FORMAT:
                raise InputError(str(file), f"format {metadata.get('format')!r}", PROOF_FORMAT, "delete it")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        count = sum(name.endswith(".tokens") for name in tensors)
        indices = range(count)
        projections = {
            name: [tensors[f"marks.{index}.{name}"] for index in indices] for name in metadata["modules"].split("\n")
        }
        rows = tuple(tuple(tensors[f"rows.{index}.tokens"].tolist()) for index in indices)
        base, adapter = (tuple(tensors[f"rows.{index}.{name}"] for index in indices) for name in ("base", "adapter"))
        layers = json.loads(metadata.get("routers", "{}"))
        return ProofRecord(
            rows,
            LogprobsAndNorms(base, routers=_read_routers(tensors, "base", layers, rows)),
            LogprobsAndNorms(adapter, projections, _read_routers(tensors, "adapter", layers, rows)),
            metadata["dtype"],
            metadata["held_out"] == "1",
            tuple(
                ProofPrompt(tuple(entry["messages"]), entry["tools"], tuple(tensors[f"prompts.{index}"].tolist()))
                for index, entry in enumerate(json.loads(metadata.get("prompts", "[]")))
            ),
            int(metadata.get("other_turns", "0")),
        )
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(str(file), f"what does not read ({error})", "what `kt train` wrote", "delete it") from error


def _read_routers(
    tensors: dict[str, Tensor], name: str, layers: dict[str, list[str]], rows: Sequence[Sequence[int]]
) -> RouterChoices | None:
    """None: files of earlier versions have no router choices."""
    if name not in layers:
        return None
    prefix = f"routers.{name}/"
    choices = {field.removeprefix(prefix): tensor for field, tensor in tensors.items() if field.startswith(prefix)}
    return RouterChoices.from_tensors(choices, layers[name], [len(row) for row in rows])


@dataclass(frozen=True)
class ReloadCheck:
    """Result of reading the saved adapter back."""

    tensors: int
    rows: int
    tokens: int
    difference: LogprobDifference
    held_out: bool

    def __str__(self) -> str:
        difference = self.difference
        same = "to the bit" if difference.is_zero else f"within {difference.max:.2g}"
        row = "row" if self.rows == 1 else "rows"
        rows_text = f"held-out {row}" if self.held_out else f"{row} (none held out)"
        return (
            f"reloaded: {self.tensors} tensors trained, saved and read back; {self.tokens} log-probabilities of "
            f"{self.rows} {rows_text} are the same {same}"
        )


def check_reload(model: Any, folder: Path, proof: ProofRecord, weights: dict[str, Tensor] | None = None) -> ReloadCheck:
    """Reads the adapter in `folder` back into the model that saved it, after overwriting its parameters with NaN. Where
    the ranks of a group divide the experts, all of them call it; the first reads, and sends the others their part. All
    ranks of a sharded model call it with `weights`, the tensors of the folder that each of them needs."""
    from peft import load_peft_weights, set_peft_model_state_dict

    trained = {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    group, shards = expert_group(model), factor_shards(model)
    is_first = group is None or group.rank == 0
    divided = {name.replace(".default.", "."): shard for name, shard in shards.items()}
    for name, parameter in trained.items():
        if is_first or name in divided or weights is not None:
            local_tensor(parameter).fill_(torch.nan)
    if weights is None:
        weights = load_peft_weights(str(folder), device="cpu") if is_first else {}
    parts = {name: trained[name].data for name in divided if name in trained}
    if group is not None and group.is_first_group:
        for name, part in parts.items():
            scatter_experts(weights.get(name), part, divided[name], group.members)
    set_peft_model_state_dict(model, weights)
    if sharding_of(model) is not None and group is not None and group.replicas is not None:
        broadcast_tensors(parts.values(), group.replicas)  # to the other groups
    for name, parameter in trained.items():
        if not bool(torch.isfinite(local_tensor(parameter)).all()):
            raise KTError(f"{name}: trained, and not read back from {folder}; the adapter was not saved whole")
    routers = proof.adapter.routers
    after = measure(model, proof.rows, list(proof.adapter.projections), routers)
    deviation = difference(after, proof.adapter)
    if _on_any_rank(model, not deviation.is_zero):
        _check_routers(after, proof.adapter)
        noise = difference(measure(model, proof.rows, replay=routers), after)
        if not deviation.is_zero and not deviation.within(noise):
            module = first_deviating_module(after.projections, proof.adapter.projections, {}) or "the output"
            raise KTError(
                f"{module}: after the saved adapter was read back, log-probabilities differ by {deviation.max:.3g}, "
                f"where computing twice makes {noise.max:.3g}; the file is not what was trained"
            )
    return ReloadCheck(len(trained), len(proof.rows), after.tokens, deviation, proof.held_out)


def _on_any_rank(model: Any, flag: bool) -> bool:
    """Whether the flag is set on any of the ranks that compute the model together. A collective call of these."""
    if sharding_of(model) is not None:
        return on_any_rank([flag])[0]
    return any_rank(flag, expert_group(model))


def _check_routers(after: LogprobsAndNorms, before: LogprobsAndNorms) -> None:
    """Two experts may tie; any other choice that has changed is an error."""
    routers = compare_choices(after.routers, before.routers)
    if routers is not None and routers.faults:
        fault = routers.faults[0]
        text = f"after the saved adapter was read back, {fault.describe()}; the file is not what was trained"
        raise KTError(f"{fault.layer}: {text}")
