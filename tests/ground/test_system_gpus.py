"""GPUs that are older than every kernel: left out with one line, refused where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ktransformers.ground import system
from ktransformers.ground.errors import InputError
from ktransformers.ground.system import Gpu

NEW, OLD = Gpu("RTX 4090", 24 << 30, (8, 9)), Gpu("GTX 1080 Ti", 11 << 30, (6, 1))


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def devices(*gpus: Gpu) -> None:
        system._supported.cache_clear()
        monkeypatch.setattr(system, "all_gpus", lambda: list(gpus))

    yield devices
    system._supported.cache_clear()


def test_supported_gpus_are_all_used(see: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    see(NEW, NEW)
    assert system.gpus() == [NEW, NEW] and system.has_gpu() and not caplog.records


def test_an_old_gpu_is_left_out_with_one_line(see: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    see(OLD)
    assert system.gpus() == [] and not system.has_gpu() and system.gpus() == []
    assert [record.message for record in caplog.records] == [
        "GTX 1080 Ti is left out: compute capability 6.1, where 8.0 is the oldest"
    ]


def test_gpus_behind_an_old_one_are_left_out_and_the_line_says_how_to_use_them(
    see: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    see(NEW, OLD, NEW)
    assert system.gpus() == [NEW]
    assert "GTX 1080 Ti and the GPUs behind it are left out" in caplog.text
    assert "CUDA_VISIBLE_DEVICES=0,2 shows the others alone" in caplog.text


def test_an_old_gpu_that_is_asked_for_is_refused_by_name(see: Callable[..., None]) -> None:
    see(OLD, NEW)
    for device in ("cuda", "cuda:0"):
        with pytest.raises(InputError, match=r"GTX 1080 Ti.*8\.0 or later"):
            system.require_supported(device, "--device", "--device cpu")
    system.require_supported("cuda:1", "--device", "--device cpu")
    system.require_supported("cpu", "--device", "--device cpu")
