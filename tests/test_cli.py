"""The `kt` command as a user runs it, and the base modules: environment, log, errors, memory."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kt_kernel
import ktransformers
from ktransformers.ground import env, log, system
from ktransformers.ground.errors import InputError, KTError
from tests.support.forked import Completed, python

ROOT = Path(__file__).resolve().parent.parent


def kt(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KT_")}
    program = [str(Path(sys.executable).with_name("kt"))]
    return subprocess.run([*program, *words], capture_output=True, text=True, env=clean | variables)


def forked(*words: str, **variables: str) -> Completed:
    """As `kt`, for verbs that import torch."""
    return python("from ktransformers.cli.main import main; main()", *words, **variables)


def test_version() -> None:
    done = kt("version")
    words = json.loads(kt("version", "--json").stdout)
    assert done.returncode == 0 and done.stdout.splitlines() == [
        f"KTransformers CLI v{ktransformers.__version__}",
        f"Python: {platform.python_version()}",
        f"Platform: {platform.system()} {platform.release()} {platform.machine()}",
        f"CUDA: {words['cuda'] or 'none'}",
        f"kt-kernel: {kt_kernel.__version__} ({words['cpu variant']})",
        f"sglang: {words['sglang'] or 'not installed'}",
    ]
    assert words["kt-kernel"] == kt_kernel.__version__ and words["cpu variant"] in done.stdout
    assert system.version_of("ktransformers") == ktransformers.__version__


def test_verbose_version_lists_packages() -> None:
    found = json.loads(kt("version", "--json").stdout)
    assert found["ktransformers"] == ktransformers.__version__ and found["torch"] == system.version_of("torch")
    assert found["cpu variant"] and found["platform"].startswith("Linux ")
    shown = kt("version", "-v").stdout
    assert re.search(r"^python +3\.", shown, re.MULTILINE) and shown.count("\n") == len(found)


def test_no_arguments_and_unknown_verb() -> None:
    alone = kt()
    assert (alone.returncode, alone.stdout) == (0, kt("--help").stdout) and "doctor" in alone.stdout
    assert kt("--version").stdout == f"ktransformers {ktransformers.__version__}\n"
    done = kt("doctr")
    assert done.returncode == 2
    assert "doctr" in done.stderr


def test_doctor_json() -> None:
    done = forked("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and "error" not in {finding["level"] for finding in report["findings"]}
    assert report["isa"] in [variant["name"] for variant in report["variants"] if variant["native"]]
    assert 1 <= report["threads"] <= report["machine"]["cpus"]
    assert 1 <= report["groups"] <= report["threads"]
    assert 0 < report["memory"]["available"] <= report["memory"]["total"]
    assert report["packages"]["torch"]
    assert report["disks"][0]["free"] > 0 and report["disks"][0]["kind"] != ""
    assert any(finding["about"] == "gpu" for finding in report["findings"]) or report["gpus"]


def test_doctor_text() -> None:
    done = forked("doctor", KT_ISA="generic")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^variant generic +in use: asked for by KT_ISA$", done.stdout, re.MULTILINE)
    assert re.search(r"^KT_ISA +generic$", done.stdout, re.MULTILINE)


def test_doctor_with_an_unknown_variant() -> None:
    done = forked("doctor", "--json", KT_ISA="sse9")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    (error,) = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert "sse9" in error["text"] and "generic" in error["text"] and error["fix"] and not report["ok"]


def test_environment_page_lists_every_variable() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    documented = re.findall(r"^\| `([A-Z_]+)`", page, re.MULTILINE)
    assert documented == [variable.name for variable in env.VARIABLES]


def test_core_reads_only_listed_variables() -> None:
    names = {variable.name for variable in env.VARIABLES}
    for source in (ROOT / "csrc").rglob("*.cpp"):
        read = set(re.findall(r'(?:getenv|environment)\("(KT_\w+)"\)', source.read_text()))
        assert read <= names, source


def test_undeclared_variable_is_refused() -> None:
    with pytest.raises(KeyError, match="KT_NOT_THERE"):
        env.text("KT_NOT_THERE")


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KT_LOG", "KT_KERNEL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    assert log.level() is None
    monkeypatch.setenv("KT_KERNEL_DEBUG", "1")
    assert log.level() == log.LEVELS["debug"]
    monkeypatch.setenv("KT_LOG", "Warning")
    assert log.level() == log.LEVELS["warning"]
    monkeypatch.setenv("KT_LOG", "loud")
    with pytest.raises(InputError, match=r"KT_LOG: given 'loud', expected one of debug, info"):
        log.level()


def test_input_error_is_both_ours_and_a_value_error() -> None:
    error = InputError("top_k", 0, "at least 1", "leave it out to use the model's own")
    assert isinstance(error, KTError) and isinstance(error, ValueError)
    assert str(error) == "top_k: given 0, expected at least 1; leave it out to use the model's own"


def made_up_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"


def test_memory_without_limit(tmp_path: Path) -> None:
    root = made_up_machine(tmp_path, {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max\n"})
    assert system.memory(root) == system.Memory(1000 * 1024, 800 * 1024, "unknown")


def test_memory_in_a_cgroup(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/memory.max": "500000\n",
        "sys/fs/cgroup/memory.current": "100000\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    assert system.memory(made_up_machine(tmp_path, files)) == system.Memory(500000, 400000, "madvise")
