"""Links a shared library against the symbols of an older glibc: a linker launcher of CMake (KT_GLIBC).

    python link_glibc.py 2.28 g++ -shared -o _core.so a.o b.a ...

Objects are compiled by g++ as always, because the kernels use vector extensions that clang lacks. The last command goes
to the linker of the package ziglang, which has the symbol versions of every glibc, for any machine. The C++ runtime
of g++ is linked statically. libgcc_s stays a shared library: the static unwinder of gcc 12 needs glibc 2.35, and every
distribution has the shared one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def runtime(compiler: str, name: str) -> str:
    """Path of a library of the compiler, which prints a bare name where it has none."""
    path = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout
    if not Path(path.strip()).is_absolute():
        raise SystemExit(f"{compiler} has no {name}; KT_GLIBC needs gcc with its static C++ runtime")
    return path.strip()


def command(glibc: str, compiler: str, words: list[str]) -> list[str]:
    machine = subprocess.run([compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout
    target = f"{machine.partition('-')[0]}-linux-gnu.{glibc}"
    libraries = [runtime(compiler, name) for name in ("libstdc++.a", "libgcc.a", "libgcc_s.so.1")]
    return [sys.executable, "-m", "ziglang", "cc", "-target", target, *words, *libraries]


def main() -> None:
    glibc, compiler, *words = sys.argv[1:]
    raise SystemExit(subprocess.run(command(glibc, compiler, words)).returncode)


if __name__ == "__main__":
    main()
