"""A GPU without a C compiler, with which Triton builds launchers, is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground import packages, system
from ktransformers.ground.errors import InputError
from ktransformers.ground.packages import c_compiler, require_compiler
from ktransformers.serve import loading
from ktransformers.serve.target import resolve_target
from ktransformers.train import run
from ktransformers.train.resolve import read_settings
from tests.support.cli import write_model
from tests.support.training import RunRecorder, recipe

REFUSED = r"device: given cuda, without a C compiler .*apt install gcc python3-dev, or set CC; or "


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without compilers on a machine with a GPU and Triton."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(packages, "is_installed", lambda module: True)
    monkeypatch.setattr(system, "all_gpus", lambda: [system.Gpu("H200", 141 << 30)])
    return tmp_path


def test_compiler_is_searched_as_triton_does(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=REFUSED + "--device cpu$"):
        require_compiler("cuda", "--device cpu")
    require_compiler("cpu", "--device cpu")
    (bare / "cc").touch(0o755)  # a name that Triton does not try
    assert c_compiler() is None
    (bare / "clang").touch(0o755)
    require_compiler("cuda", "--device cpu")
    (bare / "clang").unlink()
    monkeypatch.setenv("CC", "/opt/gcc-14")
    require_compiler("cuda", "--device cpu")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(packages, "is_installed", lambda module: False)  # paths in torch are used
    require_compiler("cuda", "--device cpu")


def test_server_is_refused_before_loading(bare: Path) -> None:
    options = loading.Launch(target=str(write_model(bare / "model")))
    with pytest.raises(InputError, match=REFUSED + "--device cpu$"):
        loading.open_service(options, resolve_target(options.target), print)


def test_training_is_refused_before_loading(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Prepared:
        class plan:
            forecast = None
            settings = read_settings(recipe(bare / "model", bare / "output"))

    loaded: list[Any] = []
    monkeypatch.setattr(run, "open_trained", lambda *arguments: loaded.append(arguments))
    with pytest.raises(InputError, match=REFUSED + "use_cpu=true$"):
        run._train(Prepared, RunRecorder(), False)  # type: ignore[arg-type]
    assert not loaded and not (bare / "output").exists()
