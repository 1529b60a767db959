"""Prefixes from each tier for every kind of cache: keys and values, windows, latents, keys of indexers, states."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ktransformers.serve.cache.cache_blocks import (
    BlockLayout,
    block_hashes,
    copy_from_memory,
    copy_to_memory,
    root_hash,
    state_names,
)
from ktransformers.serve.cache.cache_copies import _adjacent_rows
from ktransformers.serve.cache.cache_kinds import bytes_by_kind
from ktransformers.serve.cache.host_tier import HostTier
from ktransformers.serve.cache.kv_cache import BlockMemory, KVSlot
from ktransformers.serve.sampling.sampling import Sampling
from ktransformers.serve.scheduler.engine import FETCH_POLL_SECONDS, ServeEngine
from ktransformers.serve.scheduler.forward import Forward
from ktransformers.serve.scheduler.scheduler import Limits
from ktransformers.serve.scheduler.sequence import GenerationRequest, Sequence
from tests.support.cache_tiers import evict_slots, tiered_engine
from tests.support.serving import RecordedEvents, random_prompt, same_completion
from tests.support.slow_cases import others_slow
from tests.support.tiny_models import VOCABULARY, build

PROMPT = [token % (VOCABULARY - 3) + 3 for token in random_prompt(21, 150)]
FAMILIES = {  # with the kinds of cache that they keep
    "deepseek_v3": {"latent"},
    "glm4_moe_lite": {"latent"},
    "gpt_oss": {"keys_and_values", "sliding_window"},
    "mixtral": {"sliding_window"},
    "phimoe": {"sliding_window"},
    "qwen3_moe": {"keys_and_values"},
    "deepseek_v32": {"latent", "index_keys"},
}
OPTIONS: dict[str, dict[str, Any]] = {name: {"sliding_window": 70} for name in ("mixtral", "gpt_oss", "phimoe")}


class Words:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "." * len(tokens)


class Family:
    """A tiny model in place of the `EngineHarness` of a served one."""

    def __init__(
        self,
        family: str,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        positions: int = 512,
        *,
        fp8: bool = False,
    ) -> None:
        self._positions = positions
        model: Any = build(family, max_position_embeddings=positions, **OPTIONS.get(family, {}))
        self.forward = Forward(model.to(device, dtype), fp8_cache=fp8)
        self.bytes_per_token = self.forward.check_against_stock()

    def engine(self, **limits: int) -> Any:
        return ServeEngine(
            self.forward,
            Limits(**({"chunked_prefill_size": self._positions // 4, "context_length": self._positions} | limits)),
        )

    def ask(self, engine: Any, prompt: list[int] = PROMPT) -> RecordedEvents:
        recorded = RecordedEvents()
        request = GenerationRequest(tuple(prompt), 6, Sampling(temperature=0), logprobs=2)
        engine.submit([Sequence(request, Words(), recorded)])
        while engine.busy:
            if not engine.step():  # as the engine's own thread waits: without a pause the readers would not get on
                time.sleep(FETCH_POLL_SECONDS)
        assert recorded.finish == "length", recorded.events
        return recorded


def check_tiers(family: Family, path: Path) -> None:
    """A prefix from host memory, then from disk after a restart, against the computed answer."""
    harness: Any = family
    expected = family.ask(family.engine())
    with tiered_engine(harness, disk=path) as engine:
        family.ask(engine)
        evict_slots(engine)
        from_host = family.ask(engine)
        assert engine.tiers.host.counts.hit_tokens == 128
    with tiered_engine(harness, disk=path) as engine:
        from_disk = family.ask(engine)
        assert engine.tiers.disk.counts.hit_tokens == 128
    for answer in (from_host, from_disk):
        assert answer.events[-1].cached == 128
        assert same_completion(expected, answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefixes_of_every_kind_of_cache(name: str, tmp_path: Path) -> None:
    family = Family(name)
    layout = family.forward.block_layout
    assert layout is not None
    kinds = bytes_by_kind(family.forward.model, layout)
    assert set(kinds) == FAMILIES[name]
    assert sum(kinds.values()) == family.bytes_per_token
    check_tiers(family, tmp_path / "kv")


@pytest.mark.parametrize("name", others_slow(["qwen3_next", "lfm2_moe", "jamba"], ["qwen3_next"]))
def test_prefixes_of_families_with_states(name: str, tmp_path: Path) -> None:
    """Continued at the copy of the states at the last multiple of 64 before the prompt's end, or at 512."""
    family = Family(name, positions=1024)
    layout, harness = family.forward.block_layout, cast(Any, family)
    assert layout is not None and layout.state_pieces > 0
    prompt = [token % (VOCABULARY - 3) + 3 for token in random_prompt(22, 600)]
    other = [*prompt[:550], *PROMPT[:60]]
    expected, diverged = (family.ask(family.engine(), tokens) for tokens in (prompt, other))
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        family.ask(engine, prompt)
        evict_slots(engine)
        from_host = family.ask(engine, prompt)
        assert engine.tiers.host.counts.hit_tokens == 576
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        from_disk = family.ask(engine, prompt)
        assert engine.tiers.disk.counts.hit_tokens == 576
        engine.kv_cache.clear()
        engine.tiers.forget_all()
        branch = family.ask(engine, other)
        assert branch.events[-1].cached == 512
        assert all(not block.references for block in engine.tiers.host._blocks.values())
    for answer in (from_host, from_disk):
        assert answer.events[-1].cached == 576
        assert same_completion(expected, answer)
    assert same_completion(diverged, branch)


def test_a_prefix_without_all_of_its_states_is_computed(tmp_path: Path) -> None:
    family = Family("qwen3_next", positions=1024)
    harness = cast(Any, family)
    prompt = [token % (VOCABULARY - 3) + 3 for token in random_prompt(22, 600)]
    expected = family.ask(family.engine(), prompt)
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        family.ask(engine, prompt)
        evict_slots(engine)
        root, pieces = engine.tiers.root_of(None), engine.tiers.layout.state_pieces
        name = state_names(block_hashes(root, prompt)[8], pieces)[-1]  # of the states after 576 tokens
        index, record = engine.tiers.disk._records[name].index, engine.tiers.disk.record_bytes
    with (tmp_path / "kv").open("r+b") as stream:
        stream.seek(4096 + index * record + 128 + 5)
        stream.write(b"damage")
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        again = family.ask(engine, prompt)
        assert again.events[-1].cached == 0 and engine.tiers.disk.counts.errors == 1
        engine.kv_cache.clear()
        engine.tiers.forget_all()
        assert family.ask(engine, prompt).events[-1].cached == 512
    assert same_completion(expected, again)


def test_prefixes_in_16_bits_are_the_same_bits(tmp_path: Path) -> None:
    family = Family("qwen3_moe", torch.bfloat16)
    harness: Any = family
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        family.ask(engine)
        (slot,) = engine.kv_cache.slots
        kept = {
            (part, layer): slot.read(part, layer, 0, 128, torch.bfloat16).clone()
            for part, held in slot.memory.parts.items()
            for layer in held
        }
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        family.ask(engine)
        (slot,) = engine.kv_cache.slots
        for (part, layer), buffer in kept.items():
            assert torch.equal(slot.read(part, layer, 0, 128, torch.bfloat16), buffer)
        assert engine.tiers.disk.counts.hit_tokens == 128


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_prefixes_through_pinned_memory(name: str, tmp_path: Path) -> None:
    """Copies on a side stream; other kernels run between."""
    family = Family(name, torch.float32, "cuda")
    harness: Any = family
    prompts = [[(token + shift) % (VOCABULARY - 3) + 3 for token in PROMPT] for shift in range(6)]
    expected = [family.ask(family.engine(), prompt) for prompt in prompts]
    with tiered_engine(harness, disk=tmp_path / "kv", host_blocks=8, max_total_tokens=512) as engine:
        for _ in range(3):
            for prompt, answer in zip(prompts, expected, strict=True):
                again = family.ask(engine, prompt)
                assert again.tokens == answer.tokens
                assert torch.allclose(torch.tensor(again.logprobs), torch.tensor(answer.logprobs), atol=1e-3)
        assert engine.tiers.host.counts.hit_tokens + engine.tiers.disk.counts.hit_tokens >= 6 * 128
        assert engine.tiers.flush()
        assert all(not block.references for block in engine.tiers.host._blocks.values())


def test_blocks_are_copied_out_of_the_cache_and_back() -> None:
    torch.manual_seed(0)
    slot = KVSlot.alone(256)
    for layer in (0, 3):
        slot.write("keys", layer, 0, torch.randn(3, 200, 7))
        slot.write("values", layer, 0, torch.randn(3, 200, 5).bfloat16())
    slot.write("index_keys", 3, 0, torch.randn(1, 200, 4).half())
    layout = BlockLayout.of_memory(slot.memory, slot.states)
    assert layout is not None and layout.matches(slot.memory)
    blocks = torch.zeros(2, layout.bytes, dtype=torch.uint8)
    copy_from_memory(slot.memory, iter(layout.places), [1, 2], blocks)
    other = BlockMemory(5)
    copy_to_memory(other, iter(layout.places), [4, 0], blocks)  # not in order
    for part, buffers in slot.memory.parts.items():
        for layer, buffer in buffers.items():
            assert torch.equal(other.parts[part][layer][:, [4, 0]], buffer[:, [1, 2]])
    assert layout.matches(other) and not layout.matches(BlockMemory(5))


def test_adjacent_rows_are_one_copy() -> None:
    tier = HostTier(8, 6 * 8, pinned=False)
    blocks = [block for number in range(6) if (block := tier.reserve(bytes([number]), b"")) is not None]
    for number, block in enumerate(blocks):
        block.row.fill_(number)
    runs = [(start, rows.clone()) for start, rows in _adjacent_rows([*blocks[:3], *blocks[4:6], blocks[3]], 0, 8)]
    assert [(start, rows[:, 0].tolist()) for start, rows in runs] == [(0, [0, 1, 2]), (3, [4, 5]), (5, [3])]
    parts = list(_adjacent_rows(blocks, 2, 8))  # of one of two devices
    assert [(start, tuple(rows.shape), rows[0].tolist()) for start, rows in parts] == [
        (number, (1, 6), [number] * 6) for number in range(6)
    ]


def test_names_of_blocks_depend_on_everything_before_them() -> None:
    slot = KVSlot.alone(64)
    slot.write("keys", 0, 0, torch.zeros(1, 64, 8))
    layout = BlockLayout.of_memory(slot.memory, slot.states)
    assert layout is not None
    root = root_hash(b"model", b"", layout)
    tokens = list(range(200))
    names = block_hashes(root, tokens)
    assert len(names) == 3 == len(set(names))
    assert block_hashes(root, tokens[:130]) == names[:2]
    changed = block_hashes(root, [*tokens[:70], 9, *tokens[71:]])
    assert changed[0] == names[0] and not set(changed[1:]) & set(names)
    slot.write("values", 0, 0, torch.zeros(1, 64, 8))
    wider = BlockLayout.of_memory(slot.memory, slot.states)
    assert wider is not None
    others = [root_hash(b"model", b"a", layout), root_hash(b"modela", b"", layout), root_hash(b"model", b"", wider)]
    assert len({root, *others}) == 4
