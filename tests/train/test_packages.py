"""Optional packages that a recipe names: the error comes before a model is loaded and has the pip line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers.training_args import OptimizerNames
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.ground import packages
from ktransformers.ground.errors import InputError
from ktransformers.ground.packages import require_extra, require_package
from ktransformers.train.packages import OPTIMIZER_PACKAGES, REPORT_PACKAGES, package_notes, require_packages
from ktransformers.train.resolve import read_settings
from ktransformers.train.settings import TrainSettings

pytest.importorskip("trl")


def settings(**keys: Any) -> TrainSettings:
    return read_settings({"model_name_or_path": "no/model", "dataset": "identity", "output_dir": "out"} | keys)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with ktransformers[train] and nothing else."""
    train = packages.EXTRAS["train"]
    monkeypatch.setattr(packages, "is_installed", lambda module: module in train)
    monkeypatch.setattr("ktransformers.train.packages.is_installed", lambda module: module in train)


@pytest.mark.parametrize("name", [name for name, (modules, _) in REPORT_PACKAGES.items() if modules])
@pytest.mark.usefixtures("nothing_installed")
def test_missing_logger_is_named_with_its_pip_line(name: str) -> None:
    modules, install = REPORT_PACKAGES[name]
    for value in (name, [name], f"none, {name}"):
        with pytest.raises(InputError) as error:
            require_packages(settings(report_to=value))
        said = str(error.value)
        assert said == (
            f"report_to: given {name}, without the package {modules[0]}, expected it installed; pip install {install}"
        )


def test_every_logger_of_transformers_is_listed() -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(INTEGRATION_TO_CALLBACK) == set(REPORT_PACKAGES)
    with pytest.raises(InputError, match="report_to: given tensorbord"):
        require_packages(settings(report_to="tensorbord"))
    for value in ("none", "all", [], ["none"]):
        require_packages(settings(report_to=value))


@pytest.mark.usefixtures("nothing_installed")
def test_missing_optimizers_are_named() -> None:
    """Every optimizer of the Trainer either comes with torch and transformers or has its package listed."""
    stock = {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"}
    names, missing = {member.value for member in OptimizerNames}, set()
    for name in names:
        try:
            require_packages(settings(optim=name))
        except InputError as error:
            assert re.search(rf"optim: given {name}, without the package \w+, .*; pip install \S+$", str(error))
            missing.add(name)
    assert names - missing == stock
    assert len(OPTIMIZER_PACKAGES) == len({module for _, module, _ in OPTIMIZER_PACKAGES})


@pytest.mark.usefixtures("nothing_installed")
def test_missing_attention_and_picture_packages() -> None:
    with pytest.raises(InputError, match=r"given fa2, without the package flash_attn, .*pip install flash-attn$"):
        require_packages(settings(flash_attn="fa2"))
    (note,) = package_notes(settings(plot_loss=True))
    assert note.endswith("pip install matplotlib") and package_notes(settings()) == []


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.EXTRAS, "train", ("trl", "no_such_package", "nor_this"))
    said = r"kt train: given without the packages no_such_package, nor_this.*pip install 'ktransformers\[train\]'"
    with pytest.raises(InputError, match=said):
        require_packages(settings())
    monkeypatch.setitem(packages.EXTRAS, "train", ("no.such.module",))
    with pytest.raises(InputError, match=r"the package no\.such\.module,"):
        require_extra("kt train", "train")
    require_package("key", "value", ("no_such_package", "json"))


def test_command_reports_it_before_the_model_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of this recipe does not exist: the package is reported first, in one line, and nothing is written."""
    monkeypatch.setattr(packages, "is_installed", lambda module: "tensorboard" not in module)
    keys = {"model_name_or_path": "/no/model", "dataset": "identity", "report_to": "tensorboard"}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(keys | {"output_dir": str(tmp_path / "out")}))
    ended = CliRunner().invoke(app, ["train", str(file)])
    assert isinstance(ended.exception, InputError)
    assert str(ended.exception).endswith("pip install tensorboard") and not (tmp_path / "out").exists()
