"""Writes wheels without code under the names kt-kernel and kt-kernel-cuda, which require this ktransformers.

Programs look the distribution up before they import it: LLaMA-Factory asks for `kt-kernel` by name, SGLang's guides
install `kt-kernel-cuda`. The package `kt_kernel` itself is in the wheel of ktransformers; these two give it its names,
at the version of the interface (`kt_kernel.__version__`). No wheel stands for transformers-kt or accelerate-kt: beside
one of them LLaMA-Factory takes the environment for that of the forks. Entries have a fixed date, so that equal metadata
is an equal file.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("kt-kernel", "kt-kernel-cuda")
DATE = (1980, 1, 1, 0, 0, 0)


def version_of(package: str) -> str:
    """`__version__` in the package's `__init__.py`, without an import."""
    match = re.search(r'(?m)^__version__ = "([^"]+)"$', (ROOT / "src" / package / "__init__.py").read_text())
    if match is None:
        raise SystemExit(f"src/{package}/__init__.py: no __version__")
    return match[1]


def metadata(name: str) -> str:
    return f"""Metadata-Version: 2.4
Name: {name}
Version: {version_of("kt_kernel")}
Summary: The name {name} for the package kt_kernel that ktransformers contains
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: ktransformers=={version_of("ktransformers")}
Description-Content-Type: text/markdown

This wheel contains no code. It records that the interface of {name} {version_of("kt_kernel")} is installed: the package
`kt_kernel` in ktransformers {version_of("ktransformers")}.
"""


def write_wheel(name: str, folder: Path) -> Path:
    """`folder/NAME-VERSION-py3-none-any.whl`."""
    stem = f"{name.replace('-', '_')}-{version_of('kt_kernel')}"
    files = {
        "METADATA": metadata(name),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: ktransformers\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    lines = []
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files.items():
            path = f"{stem}.dist-info/{file}"
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            lines.append(f"{path},sha256={digest},{len(text.encode())}\n")
            archive.writestr(zipfile.ZipInfo(path, DATE), text)
        archive.writestr(zipfile.ZipInfo(record, DATE), "".join(lines) + f"{record},,\n")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the wheels kt-kernel and kt-kernel-cuda, which hold no code.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        print(write_wheel(name, folder))


if __name__ == "__main__":
    main()
