"""LoRA of experts on the CPU, by request: SGLang names the adapter of every request, the core computes each row with
its own.

SGLang's LoRA manager gets an adapter without its experts, so that it wraps attention and leaves FusedMoE alone; the
experts are packed for the core at start. `rows` int32 on the device holds the adapter of every row of the running batch
and is written, in the order of the stream, whenever SGLang prepares a batch; the wrappers copy it to host memory with
the ids, so a captured graph serves any mixture. Adapters of experts that arrive while the server runs are refused,
because the graphs know those of the start.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters import Adapter, LoraPair, read_adapter, write_adapter
from ktransformers.adapters.pack import pack_expert_pairs
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.serve.sglang.options import ServerOptions

MAX_TOKENS = 1 << 17  # of a batch
MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}  # SGLang wraps FusedMoE for any of these
EXPERT_LAYERS: dict[int, Any] = {}  # KTEPWrapperMethod with a wrapper, by decoder layer

_log = logger(__name__)


class ExpertAdapters:
    """The adapters of this process and their order in every layer."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._sources: dict[str, str] = {}  # SGLang's adapter id -> directory with LoRA of experts
        self._index: dict[str, int] = {}
        self._rows: Tensor | None = None
        self._started = False

    # Hooks of LoRAManager.

    def load(self, original: Any, manager: Any, lora_ref: Any) -> Any:
        """Around `_load_lora_adapter`."""
        try:
            experts, rest = self._split(lora_ref)
        except InputError as error:
            return manager.create_lora_update_result(success=False, error_message=str(error))
        if experts is None:
            return original(manager, lora_ref)
        reference = type(lora_ref)(lora_ref.lora_id, lora_ref.lora_name, rest, lora_ref.pinned)
        result = original(manager, reference)
        if result.success:
            manager.lora_refs[lora_ref.lora_id] = lora_ref
            self._sources[lora_ref.lora_id] = experts
        return result

    def pack_after_start(self, result: Any, manager: Any, lora_paths: Any = None) -> None:
        """After `init_lora_adapters`: before CUDA graphs are captured."""
        self._started = True
        if not self._sources:
            return
        sources = ([self._options.expert_lora] if self._options.expert_lora else []) + list(self._sources.values())
        offset = len(sources) - len(self._sources)
        self._index = {name: offset + place for place, name in enumerate(self._sources)}
        self._rows = pack(sources, self._options.model_path, EXPERT_LAYERS, default=offset - 1)

    def write_rows(self, result: Any, manager: Any, forward_batch: Any) -> None:
        """After `prepare_lora_batch`: the adapter of every row of this batch."""
        if self._rows is None:
            return
        without = 0 if self._options.expert_lora else -1
        indices = [self._index.get(name, without) for name in forward_batch.lora_ids]
        rows = torch.tensor(indices, dtype=torch.int32)
        lengths = rows_of_requests(forward_batch)
        if lengths is not None:
            rows = rows.repeat_interleave(torch.tensor(lengths))
        if len(rows) > MAX_TOKENS:
            raise InputError("batch", f"{len(rows)} tokens", f"at most {MAX_TOKENS}", "set --chunked-prefill-size")
        if self._rows.is_cuda:
            rows = rows.pin_memory()
        self._rows[: len(rows)].copy_(rows, non_blocking=True)

    # One adapter.

    def _split(self, lora_ref: Any) -> tuple[str | None, str]:
        """(directory with LoRA of experts or None, directory for SGLang)."""
        name, path = lora_ref.lora_name, lora_ref.lora_path
        given = self._options.expert_lora_by_name.get(name)
        if given is None and not Path(path).is_dir():
            raise InputError(f"adapter {name}", path, "a directory", "download it first")
        adapter = None if given is not None else _read(path, self._options.model_path)
        if adapter is not None and not adapter.experts:
            return None, path
        if self._started:
            given_at = "LoRA of experts while the server runs"
            raise InputError(f"adapter {name}", given_at, "such adapters in --lora-paths", "start the server with it")
        if adapter is None:
            return given, path
        return path, str(write_rest(adapter, name))


@functools.lru_cache(maxsize=16)
def _read(source: str, model_path: str) -> Adapter:
    """Checked once; its numbers are read by layer."""
    return read_adapter(source, model=model_path)


def pack_for_every_request(options: ServerOptions, method: Any) -> None:
    """`--kt-expert-lora-path DIR`: one adapter for all rows of a layer that has loaded its weights."""
    if options.expert_lora:
        layers = {method.kt_config.layer_idx: method}
        pack([options.expert_lora], options.model_path, layers, default=0)


def pack(sources: list[str], model_path: str, layers: Mapping[int, Any], default: int) -> Tensor:
    """Pack every adapter for every layer; the table of rows, filled with `default`. An adapter that lacks a layer gets
    zeros there, so that an index means the same adapter in all layers."""
    by_layer = [{part.layer: part for part in _read(source, model_path).experts} for source in sources]
    for source, parts in zip(sources, by_layer, strict=True):
        if not parts:
            raise InputError("LoRA of experts", source, "an adapter with factors of experts")
    rows: Tensor | None = None
    for index, method in sorted(layers.items()):
        if method.num_gpu_experts:
            given = f"{method.num_gpu_experts} experts of layer {index} on the GPU"
            raise InputError("LoRA of experts", given, "all experts on the CPU", "use --kt-num-gpu-experts 0")
        device = method._slots.device
        if rows is None:
            rows = torch.full((MAX_TOKENS,), default, dtype=torch.int32, device=device)
        store: ExpertStore = method.wrapper.moe
        packed = [
            pack_expert_pairs(
                f"{source}: layer {index}", store, parts[index].read() if index in parts else zeros(store)
            )
            for source, parts in zip(sources, by_layer, strict=True)
        ]
        method.wrapper.use_adapters(packed, rows)
    if rows is None:
        raise InputError("LoRA of experts", "no layer with experts on the CPU", "at least one")
    _log.info("LoRA of experts: %s", ", ".join(sources))
    return rows


def zeros(store: ExpertStore) -> dict[str, LoraPair]:
    experts, hidden, inner = store.num_experts, store.hidden_size, store.intermediate_size
    a, b = torch.zeros(experts, 1, inner), torch.zeros(experts, hidden, 1)
    return {"down": LoraPair(a.bfloat16(), b.bfloat16(), 1.0)}


def rows_of_requests(forward_batch: Any) -> list[int] | None:
    """Tokens of each request in this batch; None: one each."""
    if forward_batch.forward_mode.is_extend() and forward_batch.extend_seq_lens_cpu is not None:
        return [int(length) for length in forward_batch.extend_seq_lens_cpu]
    tokens = forward_batch.input_ids.shape[0] // max(1, len(forward_batch.lora_ids))
    return None if tokens <= 1 else [tokens] * len(forward_batch.lora_ids)


_scratch: list[Path] = []


def write_rest(adapter: Adapter, name: str) -> Path:
    """What SGLang computes of an adapter with experts, in a directory that is removed at exit."""
    targets = {module.name.rpartition(".")[2] for module in adapter.modules}
    if blocked := sorted(targets & MLP_NAMES):
        expected = "LoRA on attention and routed experts: SGLang cannot tell these from experts"
        raise InputError(f"adapter {name}", f"LoRA on {blocked[0]} outside of routed experts", expected)
    if not _scratch:
        _scratch.append(Path(tempfile.mkdtemp(prefix="kt-sglang-")))
        atexit.register(shutil.rmtree, _scratch[0], ignore_errors=True)
    target = _scratch[0] / f"{len(os.listdir(_scratch[0]))}-{Path(name).name}"
    rest = adapter.without_experts()
    if rest.modules:
        write_adapter(rest, target, "sglang")
        return target
    # SGLang lets requests name only adapters that it has loaded, so an adapter of experts alone is one without tensors.
    from safetensors.torch import save_file

    target.mkdir()
    fields = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": []}
    (target / "adapter_config.json").write_text(json.dumps(fields))
    save_file({}, str(target / "adapter_model.safetensors"))
    return target
