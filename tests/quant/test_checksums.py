"""Checksums of packed experts: a changed byte is found when its expert is first read, by the CPU or for a GPU.

Also what becomes of a packed file that is truncated while it is mapped, and of writes to its memory.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers import _core
from ktransformers.checkpoint.encoder import encode
from ktransformers.checkpoint.packed import checksums_name, read_manifest
from ktransformers.checkpoint.tensorfile import read_layout
from ktransformers.ground.errors import DamagedFileError
from ktransformers.nn import ExpertStore, load_model
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.placement import attach, geometry_of, new_layer
from tests.support.packing import expert_modules_with_stores, pack, tiny
from tests.support.tiny_models import logits

OLD = Path(__file__).parent.parent / "data" / "v0.1.0" / "packed"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checksums")
    tiny(directory / "model")
    pack(directory / "model", directory / "out", "int8")
    return directory / "out"


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed, tmp_path / "copy")
    return tmp_path / "copy"


def flip(directory: Path, layer: int, role: str, expert: int) -> Path:
    """Change one bit in the middle of an expert's matrix."""
    entry = read_manifest(directory).layers[layer]
    slot = read_layout(directory / entry.file).slots[entry.tensors[role]]
    size = slot.bytes // entry.experts
    with (directory / entry.file).open("r+b") as stream:
        stream.seek(slot.offset + expert * size + size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 16]))
    return directory / entry.file


def stores_of(directory: Path, **options: Any) -> list[ExpertStore]:
    model = load_model(directory, dtype=torch.float32, **options)
    return [module.kt.store for module in expert_modules_with_stores(model)]


def compute(store: ExpertStore, experts: Sequence[int]) -> torch.Tensor:
    hidden = torch.ones(len(experts), store.hidden_size)
    return store.forward(hidden, torch.tensor(experts)[:, None], torch.ones(len(experts), 1))


def test_checksums_are_those_of_the_bytes_in_the_file(packed: Path) -> None:
    for layer in read_manifest(packed).layers:
        data = torch.frombuffer(bytearray((packed / layer.file).read_bytes()), dtype=torch.uint8)
        slots = read_layout(packed / layer.file).slots
        parts = [slots[layer.tensors[role]] for role in ("gate_up", "down")]
        stored = slots[checksums_name(layer.module)]
        expected = data[stored.offset : stored.offset + stored.bytes].view(torch.int64).tolist()
        for expert in range(layer.experts):
            crc = 0
            for slot in parts:
                size = slot.bytes // layer.experts
                crc = _core.crc32c(data[slot.offset + expert * size : slot.offset + (expert + 1) * size], crc)
            assert crc == expected[expert]


@pytest.mark.parametrize("role", ["gate_up", "down"])
def test_a_flipped_bit_is_found_when_its_expert_is_first_computed(role: str, copy: Path) -> None:
    file = flip(copy, 1, role, 2)
    store = stores_of(copy)[1]
    others = [expert for expert in range(store.num_experts) if expert != 2]
    compute(store, others)  # the damaged expert is not read
    module = read_manifest(copy).layers[1].module
    message = rf"{file}, layer {module}, expert 2: given contents with checksum \w+, expected \w+"
    for _ in range(2):
        with pytest.raises(DamagedFileError, match=message):
            compute(store, [0, 2])
    call = store.prepare(torch.ones(1, store.hidden_size), torch.tensor([[2]]), torch.ones(1, 1))
    with pytest.raises(DamagedFileError, match=message):
        call.submit()
    with pytest.raises(DamagedFileError, match=message):
        store.decode("down", 2)
    with pytest.raises(DamagedFileError, match=message):
        store.backward(*(torch.ones(1, store.hidden_size),) * 2, torch.tensor([[2]]), torch.ones(1, 1))
    compute(store, others)


def test_a_flipped_bit_does_not_reach_a_gpu(copy: Path) -> None:
    flip(copy, 0, "down", 1)
    store = stores_of(copy)[0]
    geometry = geometry_of(store)
    cache = ExpertCache(geometry, 4, torch.device("cpu"), None)

    class Engine:
        device = torch.device("cpu")

        class dispatcher:
            costs: dict[str, Any] | None = None

    source = new_layer(Engine, 0, store, None, geometry).packed.source  # type: ignore[arg-type]
    assert cache.fetch(0, source, [0, 2])
    with pytest.raises(DamagedFileError, match="expert 1"):
        cache.fetch(0, source, [1])
    assert cache.present(0) == {0, 2}


@pytest.mark.parametrize("policy", ["stream", "stream_all", "split", "resident"])
def test_a_flipped_bit_is_found_wherever_its_expert_is_computed(policy: str, copy: Path) -> None:
    """The placement engine on torch's CPU device copies experts into a cache before it computes with them."""
    flip(copy, 0, "down", 1)
    model = load_model(copy, dtype=torch.float32)
    placement = None
    with pytest.raises(DamagedFileError, match=r"layers\.0\.mlp\.experts, expert 1"):
        placement = attach(model, policy=policy, device="cpu")  # `split` may measure copies of the first layer
        assert placement is not None and len(placement.layers) == 2
        if policy == "resident":
            placement.place_residents(count=2)  # experts 0 and 1 of every layer
        logits(model)
    if placement is not None:
        assert 1 not in placement.engines[0].cache.present(0)
        placement.detach()


def test_no_verify(copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    flip(copy, 0, "down", 1)
    with pytest.raises(DamagedFileError):
        compute(stores_of(copy)[0], [1])
    with caplog.at_level(logging.WARNING, "ktransformers"):
        compute(stores_of(copy, verify=False)[0], [1])
        assert caplog.text.count("not verified") == 1
        monkeypatch.setenv("KT_VERIFY", "0")
        compute(stores_of(copy)[0], [1])


def test_files_without_checksums_open_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ktransformers"):
        for store in stores_of(OLD):
            compute(store, [0])
    assert caplog.text.count("not verified, they have no checksums") == 1


def test_first_use_by_many_threads(packed: Path) -> None:
    store = stores_of(packed)[0]
    want = compute(stores_of(packed, verify=False)[0], [0, 1])
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(compute(store, [0, 1]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(result, want) for result in results)


@pytest.mark.parametrize("verify", [None, False])
def test_a_file_truncated_under_us_is_an_error(verify: bool | None, copy: Path) -> None:
    """Where SIGBUS would end the process; other layers go on."""
    model = load_model(copy, dtype=torch.float32, verify=verify)
    want = logits(model)
    first, second = [module.kt.store for module in expert_modules_with_stores(model)]
    file = copy / read_manifest(copy).layers[0].file
    os.truncate(file, 4096)
    for _ in range(2):
        with pytest.raises(DamagedFileError, match=str(file)):
            compute(first, [0])
    with pytest.raises(DamagedFileError, match=str(file)):
        logits(model)
    assert compute(second, [0]).isfinite().all() and want.isfinite().all()


def test_writes_to_mapped_experts_are_errors(copy: Path) -> None:
    """They reach neither the file nor a result, and do not end the process."""
    store = stores_of(copy)[0]
    matrices = other_matrices(store)
    with pytest.raises(RuntimeError, match="memory of their own"):
        store.pack(**matrices)
    want = compute(store, [0])
    store.memory()["down"][5] += 1
    file = copy / read_manifest(copy).layers[0].file
    with pytest.raises(DamagedFileError, match=f"{file}: given mapped memory that this process has changed"):
        compute(store, [0])
    assert torch.equal(compute(stores_of(copy)[0], [0]), want)


def other_matrices(store: ExpertStore) -> dict[str, Any]:
    experts, hidden, inner = store.num_experts, store.hidden_size, store.intermediate_size
    shapes = {"gate": (experts, inner, hidden), "up": (experts, inner, hidden), "down": (experts, hidden, inner)}
    return {role: encode(torch.ones(shape), store.formats[role]) for role, shape in shapes.items()}
