"""Programs of the guides under their names: what the wheel installs, and the scripts of the source tree."""

from __future__ import annotations

import configparser
import runpy
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ktransformers.adapters import read_adapter, write_adapter
from ktransformers.cli import guide_scripts
from tests.support.adapter_samples import Recipe, same_deltas, sample, write_model_config

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "convert_cpu_weights.py": ["--input-path", "--input-type", "--output", "--quant-method", "--threadpool-count"],
    "fp8_cast_bf16.py": ["--input-fp8-hf-path", "--output-bf16-hf-path"],
    "convert_lora.py": ["adapter", "--overwrite"],
}


def test_the_wheel_installs_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the metadata that the build backend writes, without a build."""
    backend = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    metadata = tmp_path / backend.prepare_metadata_for_build_wheel(str(tmp_path))
    entries = configparser.RawConfigParser(delimiters="=")
    entries.read(metadata / "entry_points.txt")
    scripts = dict(entries["console_scripts"])
    assert scripts.keys() == {"kt", *FLAGS}
    for name in FLAGS:
        program = EntryPoint(name, scripts[name], "console_scripts").load()
        assert program is getattr(guide_scripts, name.removesuffix(".py"))


@pytest.mark.parametrize("name", FLAGS)
def test_scripts_of_the_source_tree_have_the_flags_of_the_guides(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: {name} " in shown and all(flag in shown for flag in FLAGS[name])


def test_convert_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model_config(Recipe(), tmp_path / "model")
    adapter = sample(Recipe())
    write_adapter(adapter, tmp_path / "lora", "peft")

    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["convert_lora.py", *map(str, words)])
        guide_scripts.convert_lora()

    given = (tmp_path / "lora", "--base-model-name-or-path", model)
    run(*given)
    assert capsys.readouterr().out.endswith(f"for SGLang, --lora-paths NAME={tmp_path / 'lora-sglang'}\n")
    same_deltas(read_adapter(tmp_path / "lora-sglang", model=model), adapter)
    with pytest.raises(SystemExit, match=r"convert_lora: .*lora-sglang: given a directory that is not empty"):
        run(*given)
    run(*given, "--overwrite")
    run(tmp_path / "lora", tmp_path / "other", "--base-model-name-or-path", model)
    assert (tmp_path / "other" / "adapter_model.safetensors").is_file()
