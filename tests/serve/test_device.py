"""Device of a server: the plan decides whether a visible GPU is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground.errors import InputError
from ktransformers.ground.system import Gpu
from ktransformers.plan import profile, with_gpus
from ktransformers.serve.flags import Launch, parse
from ktransformers.serve.forecast import choose_device, plan_server
from ktransformers.serve.target import resolve_target


def test_gpu_without_a_fitting_plan_is_left_out(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs where the plan puts it; a launch line that requires the GPU is refused."""
    monkeypatch.delenv("KT_PLACE", raising=False)
    monkeypatch.setattr("ktransformers.ground.system.all_gpus", lambda: [Gpu("RTX 4090", 24 << 30, (8, 9))])
    machine, target = replace(profile("amx16-h200"), memory=10**11), resolve_target(str(model_directory))

    def planned(gpu: str, *words: str) -> tuple[Launch, Any, list[str]]:
        monkeypatch.setattr("ktransformers.serve.forecast.this_machine", lambda: with_gpus(machine, gpu))
        launch, lines = parse([str(model_directory), *words]), []
        return launch, plan_server(launch, target, lines.append, lambda plan: None), lines

    launch, plan, lines = planned("80GB")
    assert (choose_device(launch, plan), plan.nearest.choice.gpus, lines) == ("cuda", 1, [])
    launch, plan, lines = planned("500MB")
    assert (choose_device(launch, plan), plan.nearest.choice.gpus, plan.machine.gpus) == ("cpu", 0, ())
    assert len(lines) == 1 and "everything on the CPU" in lines[0] and "gpu0 lacks" in lines[0]
    for words in (["--device", "cuda"], ["--kt-num-gpu-experts", "1"], ["--tp", "2"]):
        with pytest.raises(InputError, match="gpu0 lacks"):
            planned("500MB", *words)
    launch, plan, lines = planned("500MB", "--device", "cpu")
    assert (choose_device(launch, plan), lines) == ("cpu", [])


def test_old_gpu_is_left_out_and_refused_by_flag(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.ground.system.all_gpus", lambda: [Gpu("GTX 1080 Ti", 11 << 30, (6, 1))])
    assert choose_device(parse([str(model_directory)])) == "cpu"
    with pytest.raises(InputError, match=r"--device: .*GTX 1080 Ti"):
        choose_device(parse([str(model_directory), "--device", "cuda"]))
