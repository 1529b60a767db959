"""The tiers of the KV cache that a launch line asks for: sizes, the file, and why a model has none.

Without a GPU, slots lie in host memory already: a host tier would only hold copies, so it is off unless `--kv-host-gb`
asks for it. With `--kv-disk`, blocks pass through a buffer in host memory that holds one sequence of the longest
length, within bounds. `kt serve` on a GPU has a host tier by default: DEFAULT_SHARE of the host memory that is free
after loading, because experts on the CPU need the rest, and at most DEFAULT_BYTES, because it is pinned at the start,
which takes seconds. A model that is loaded for one answer has none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktransformers.ground import system
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.cache import CACHE_DTYPES
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import Target

if TYPE_CHECKING:
    from ktransformers.serve.cache.cache_blocks import BlockLayout
    from ktransformers.serve.cache.cache_tiers import CacheTiers
    from ktransformers.serve.cache.disk_tier import DiskFile

DEFAULT_SHARE = 0.1  # of free host memory, for the host tier of a machine with a GPU
DEFAULT_BYTES = 8 << 30
MAX_BUFFER_SHARE = 0.05  # of free host memory, for blocks on their way to and from disk
MIN_BUFFER_BLOCKS = 8

LogLine = Callable[[str], None]


@dataclass(frozen=True)
class TierRequest:
    """What is known before the model is loaded: the identity of the model, and the file, open and locked."""

    launch: Launch
    host_gb: float | None  # None: the default on a GPU
    identity: bytes
    file: DiskFile | None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def check_cache_dtype(launch: Launch, dtype: Any) -> None:
    """Refuse a dtype of keys and values that is not the model's."""
    asked, given = CACHE_DTYPES[launch.kv_cache_dtype], str(dtype).removeprefix("torch.")
    if asked not in (None, given):
        expected = f"auto, or --dtype {asked}: the model is computed in {given}"
        raise InputError("kv-cache-dtype", launch.kv_cache_dtype, expected)


def open_tiers(launch: Launch, target: Target, dtype: Any, by_default: bool, log: LogLine) -> TierRequest | None:
    """Open the file before the model is loaded; None: there are no tiers. `by_default`: there is a host tier if the
    line says nothing."""
    check_cache_dtype(launch, dtype)
    host_gb = 0.0 if launch.kv_host_gb is None and not by_default else launch.kv_host_gb
    if launch.deterministic and (launch.kv_disk is not None or launch.kv_host_gb):
        log("no lower tiers of the KV cache: with --deterministic no prefix is used again")
    if launch.deterministic or (launch.kv_disk is None and host_gb == 0):
        return None
    from ktransformers.operators.rules import operators_of, own_sources
    from ktransformers.serve.cache.disk_tier import DiskFile
    from ktransformers.serve.identity import model_identity
    from ktransformers.serve.placement import options_of

    experts, place = target.choose_experts(launch.experts), options_of(launch, target)
    options: dict[str, Any] = {"kt_w8a8": place.kt_w8a8, "dtype": str(dtype), "rest": launch.rest}
    if launch.fp8_cache:
        options["kv_cache_dtype"] = "fp8"
    options |= {"experts": launch.expert_format or target.expert_format}
    rules = place.kt_optimize_rule
    options |= {"operators": operators_of(rules), "sources": own_sources(rules)}
    identity = model_identity([target.model, *([] if experts is None else [experts])], options)
    file = None if launch.kv_disk is None else DiskFile(launch.kv_disk, identity)
    return TierRequest(launch, host_gb, identity, file)


def make_tiers(request: TierRequest | None, forward: Any, context_length: int, log: LogLine) -> CacheTiers | None:
    """The tiers of a loaded model; None, with a line in the log: it has none."""
    from ktransformers.serve.cache.cache_tiers import CacheTiers
    from ktransformers.serve.cache.disk_tier import DiskTier
    from ktransformers.serve.cache.host_tier import HostTier

    if request is None:
        return None
    layout, launch = forward.block_layout, request.launch
    if layout is None:
        if launch.kv_disk is not None or launch.kv_host_gb:
            log("no lower tiers of the KV cache: this family is computed one sequence at a time")
        request.close()
        return None
    on_gpu = any(device.type == "cuda" for device, _, _ in layout.segments)
    host_bytes = _host_bytes(request.host_gb)
    buffers = not host_bytes and request.file is not None
    if buffers:
        host_bytes = _buffer_bytes(layout, context_length)
    if host_bytes < layout.bytes:
        if request.file is not None or launch.kv_host_gb:
            size, given = layout.bytes / 2**20, host_bytes / 2**20
            log(f"no lower tiers of the KV cache: a block takes {size:.1f} MiB of host memory, {given:.1f} are given")
        request.close()
        return None
    host, disk = HostTier(layout.bytes, host_bytes, pinned=on_gpu), None
    if request.file is not None:
        queued = max(1, host.rows // 2, min(host.rows, layout.state_pieces))  # a copy of states is queued whole
        disk = DiskTier(request.file, layout.bytes, _disk_bytes(launch, request.file), queued)
        if not disk.writable:
            log(f"nothing is written to {disk.path}: {disk.note or 'a block does not fit into --kv-disk-gb'}")
    log(_describe(host, disk, buffers))
    return CacheTiers(layout, request.identity, host, disk, buffers=buffers)


def _host_bytes(asked: float | None) -> int:
    if asked is not None:
        return int(asked * 2**30)
    return min(DEFAULT_BYTES, int(system.memory().available * DEFAULT_SHARE))


def _buffer_bytes(layout: BlockLayout, context_length: int) -> int:
    """For all blocks of one sequence and its states, where memory allows it."""
    from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS

    wanted = (-(-context_length // BLOCK_TOKENS) + layout.state_pieces) * layout.bytes
    allowed = int(system.memory().available * MAX_BUFFER_SHARE)
    return max((MIN_BUFFER_BLOCKS + layout.state_pieces) * layout.bytes, min(wanted, allowed))


def _disk_bytes(launch: Launch, file: DiskFile) -> int:
    """`--kv-disk-gb`, or half of what is free on the file's disk and in it."""
    if launch.kv_disk_gb is not None:
        return int(launch.kv_disk_gb * 2**30)
    return (shutil.disk_usage(file.path.parent).free + file.path.stat().st_size) // 2


def _describe(host: Any, disk: Any, buffers: bool) -> str:
    from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS

    size, tokens = host.rows * host.block_bytes / 2**30, host.rows * BLOCK_TOKENS
    line = f"KV cache in host memory: {size:.2f} GiB, {tokens} tokens" + (", a buffer of the disk" if buffers else "")
    if disk is not None:
        state = disk.state
        line += (
            f"; on disk: {state.limit_bytes / 2**30:.2f} GiB in {disk.path}, {state.blocks * BLOCK_TOKENS} tokens held"
        )
    return line
