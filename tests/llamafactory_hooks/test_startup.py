"""The .pth file of `kt llamafactory on` and the import hooks behind it, on a made-up LLaMA-Factory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ktransformers.cli.main import app
from ktransformers.ground.errors import InputError
from ktransformers.train.llamafactory import switch

SOURCE = Path(__file__).resolve().parents[2] / "src"
MISC = """
import importlib.metadata
def check_version(requirement, mandatory=False): raise ImportError(requirement)
def check_dependencies(): pass
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a package `llamafactory` and the .pth file."""
    extras = tmp_path / "llamafactory" / "extras"
    extras.mkdir(parents=True)
    for package in (extras, extras.parent):
        (package / "__init__.py").touch()
    (extras / "env.py").write_text('VERSION = "0.9.5"\n')
    (extras / "misc.py").write_text(MISC)
    switch.turn_on(tmp_path)
    return tmp_path


def run(site: Path, code: str, use_kt: str | None) -> str:
    """Output of a Python that has this folder in its site-packages."""
    env = {name: value for name, value in os.environ.items() if name != "USE_KT"} | {"PYTHONPATH": str(SOURCE)}
    env |= {} if use_kt is None else {"USE_KT": use_kt}
    code = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.insert(0, {str(site)!r}); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("use_kt", "installed"), [(None, False), ("0", False), ("1", True), ("true", True)])
def test_hooks_are_installed_if_use_kt_is_set(use_kt: str | None, installed: bool, site: Path) -> None:
    printed = run(site, "print([name for name in sys.modules if name.startswith(('ktransformers', 'torch'))])", use_kt)
    assert ("ktransformers.train.llamafactory.startup" in printed) == installed and "'torch'" not in printed


PRINT = "import sys; print('ktransformers.train.llamafactory.startup' in sys.modules and "
PRINT += (
    "any(type(finder).__name__ == 'ImportHook' for finder in sys.meta_path), __import__('os').environ.get('USE_KT'))"
)


@pytest.mark.parametrize(
    ("words", "installed"),
    [
        (["train", "kt.yaml"], True),
        (["train", "plain.yaml"], False),
        (["train", "plain.yaml", "use_kt=true"], True),
        (["train", "plain.yaml", "--use_kt", "true"], True),
        (["train", "off.yaml"], False),
        (["chat", "kt.json"], True),
        (["train", "missing.yaml"], False),
        (["version"], False),
        (["-m", "missing.json"], False),
    ],
)
def test_a_file_with_use_kt_installs_the_hooks(words: list[str], installed: bool, site: Path) -> None:
    """`llamafactory-cli train X.yaml` as typed; children find USE_KT set."""
    (site / "kt.yaml").write_text("model_name_or_path: x\nuse_kt: true  # experts on the CPU\n")
    (site / "kt.json").write_text('{"model_name_or_path": "x", "use_kt": true}')
    (site / "plain.yaml").write_text("model_name_or_path: x\n# use_kt: true\n")
    (site / "off.yaml").write_text("use_kt: false\n")
    (site / "llamafactory-cli").write_text(f"import site; site.addsitedir({str(site)!r}); {PRINT}\n")
    env = {name: value for name, value in os.environ.items() if name != "USE_KT"} | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "llamafactory-cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=site, timeout=120)
    assert done.stdout.split() == [str(installed), "1" if installed else "None"], done.stderr
    off = subprocess.run(command, capture_output=True, text=True, env=env | {"USE_KT": "0"}, cwd=site, timeout=120)
    assert off.stdout.split()[0] == "False"


def test_line_costs_less_than_a_millisecond_without_use_kt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USE_KT", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "pass"])
    assert switch.PTH_TEXT.startswith("import ") and switch.PTH_TEXT.count("\n") == 1, "or Python takes it for a path"
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        exec(switch.PTH_TEXT)  # as the module site does it
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[10] < 1e-3


def test_hook_changes_the_module_before_others_import_from_it(site: Path) -> None:
    (site / "use.py").write_text(
        "from llamafactory.extras.misc import check_version\n"
        "for name in ('kt-kernel', 'deepspeed'):\n"
        "    try:\n        check_version(name)\n"
        "    except Exception as error:\n        print(type(error).__name__, error)\n"
    )
    without, hooked = run(site, "import use", None), run(site, "import use", "1")
    assert without.splitlines() == ["ImportError kt-kernel", "ImportError deepspeed"]
    assert hooked.splitlines()[0].startswith("InputError use_kt: given transformers"), hooked
    assert hooked.splitlines()[1] == "ImportError deepspeed"


def test_modules_of_the_fork_of_transformers_are_provided(site: Path) -> None:
    (site / "transformers" / "integrations").mkdir(parents=True)  # in place of the real one, which takes seconds
    for package in ("transformers", "transformers/integrations"):
        (site / package / "__init__.py").touch()
    (site / "use.py").write_text(
        "from transformers.integrations.kt import configure_kt\n"
        "from transformers.integrations.kt_artifacts import prepare_kt_pretrained_config\n"
        "print(dict(configure_kt({'kt_num_threads': 3, 'kt_lora_rank': 8})), prepare_kt_pretrained_config(None))\n"
    )
    assert "No module named" in run(site, "import use", None)
    assert run(site, "import use", "1").strip() == "{'kt_num_threads': 3} None"


def test_on_and_off(tmp_path: Path) -> None:
    assert not switch.read_state(tmp_path).on
    file = switch.turn_on(tmp_path)
    assert switch.turn_on(tmp_path) == file == tmp_path / switch.PTH_NAME and switch.read_state(tmp_path).on
    assert switch.turn_off(tmp_path) == file and not file.exists()
    assert switch.turn_off(tmp_path) is None and not switch.read_state(tmp_path).on


def test_on_needs_llamafactory_in_the_environment() -> None:
    """It is not in ours."""
    with pytest.raises(InputError, match="an environment without LLaMA-Factory"):
        switch.turn_on()
    assert switch.read_state().problem == "LLaMA-Factory is not installed"


def test_status_command() -> None:
    from typer.testing import CliRunner

    printed = CliRunner().invoke(app, ["llamafactory", "status"]).stdout
    assert printed.startswith("off: ") and "LLaMA-Factory is not installed" in printed
