"""`kt with`: a program that knows nothing of us opens a prepared model with packed experts, and so do its children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.cli.with_ import environment, startup_folder
from ktransformers.modeling.prepare import prepare

# The program: stock transformers and PEFT, the experts named as a user of LLaMA-Factory names them.
PROGRAM = """
import sys
import peft
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
stores = sum(hasattr(module, "kt") for module in model.modules())
names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names))
experts = [parameter for name, parameter in lora.named_parameters() if "experts" in name and parameter.requires_grad]
batch = model.dummy_inputs["input_ids"]
lora(input_ids=batch, labels=batch).loss.backward()
print(stores, len(experts), sum(bool(parameter.grad.any()) for parameter in experts))
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
ASK = "import sys; print([name for name in ('torch', 'transformers', 'ktransformers') if name in sys.modules])"


def kt_with(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("kt")
    return subprocess.run(
        [str(script), "with", "--", *command], capture_output=True, text=True, env={**os.environ, **env}, timeout=300
    )


def test_foreign_script_trains_packed_experts(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    prepare(model_of("qwen3_moe"), tmp_path / "prepared")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = kt_with(sys.executable, "-c", PARENT, str(program), str(tmp_path / "prepared"))
    assert done.returncode == 0, done.stderr
    # Two layers; A and B of gate_up and of down in each. A has no gradient yet: B begins as zero.
    assert done.stdout.split() == ["2", "8", "4"]


def test_startup_hook_imports_lazily_and_keeps_other_hooks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; print('theirs', file=sys.stderr)")
    done = kt_with(sys.executable, "-c", ASK, "--an-option", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n" and "theirs" in done.stderr


def test_python_without_the_package_is_reported(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    for name in ("__init__", "modeling_utils"):
        (tmp_path / "transformers" / f"{name}.py").write_text("")
    python = str(getattr(sys, "_base_executable", ""))
    probe = [python, "-c", "import ktransformers"]
    if python == sys.executable or subprocess.run(probe, capture_output=True).returncode == 0:
        pytest.skip("no Python without ktransformers at hand")
    done = kt_with(python, "-c", "import transformers.modeling_utils", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "has no ktransformers" in done.stderr and python in done.stderr


def test_environment_and_exit_codes_are_passed_on() -> None:
    ours = str(startup_folder())
    once = environment({"PYTHONPATH": "/a:/b", "HOME": "/h"})
    assert once == {"PYTHONPATH": f"{ours}:/a:/b", "HOME": "/h"} and environment(once) == once
    done = CliRunner().invoke(app, ["with", "--", "no-such-program", "train"])
    assert done.exit_code == 1 and "no-such-program" in str(done.exception)
