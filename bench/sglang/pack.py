"""Stock SGLang for a machine without network (x86-64, CPython 3.12, torch 2.11 already there), as parts that can be
copied one after the other.

    python bench/sglang/pack.py build/carry_sglang

takes wheels by name from the package index for that platform (any processor can run this), leaves out what a text model
with Triton attention does not need, strips shared objects and writes `sglang.part.NN` of at most `--part-mb` each. Two
archives lie beside them: `kt-kernel.tar.xz`, the release of kt-kernel to measure beside, and what FlashInfer may
compile. SGLang 0.5.17 is the last release that pins torch 2.11. Its kernel wheel is 380 MB because of one
FlashAttention library; `--attention-backend triton` runs without.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNEL = "sglang-kernel==0.4.5"
PEER = ("kt-kernel==0.7.2", "typer", "rich", "pyyaml", "shellingham", "markdown-it-py", "mdurl", "pygments")
GLIBC = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_5")
PLATFORMS = (
    "any",
    "linux_x86_64",
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_{v}_x86_64" for v in GLIBC),
)
# Path prefixes that a server of text models never opens: image and video generation, tests, the Rust servers behind
# --grpc-port and SGLANG_RUST_SERVER, static libraries.
UNUSED = (
    "sglang/multimodal_gen",
    "sglang/test",
    "sglang/benchmark",
    "sglang/srt/server/_core",
    "sglang/srt/grpc/_core",
    "cuda/bindings/_v2",
    "pillow.libs/libavif",
    "xgrammar/lib/",
)
# Sources that FlashInfer compiles its kernels from. The bench asks for none of these kernels; they are an archive of
# their own, because nothing but a running server can show that.
SOURCES = ("flashinfer/data/cutlass", "flashinfer/data/csrc", "flashinfer/data/cccl", "flashinfer/data/spdlog")


def download(target: Path, *requirements: str) -> None:
    """Wheels for the other machine, without their dependencies: requirements.txt lists all that were needed."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version", "312", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    words += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*words, "-d", str(target), *requirements], check=True)


def extract(wheel: Path, target: Path, wanted: Callable[[str], bool]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if wanted(name)])


def is_used(name: str) -> bool:
    return not name.startswith((*UNUSED, *SOURCES))


def is_kernel_used(name: str) -> bool:
    """Of the compiled kernels those for Hopper."""
    return not name.endswith(".so") or "sm90/common_ops" in name or "spatial" in name


def is_peer_used(name: str) -> bool:
    """kt-kernel's wheel also has an sgl_kernel of its own, which would replace SGLang's, and five builds for CPUs
    without AMX."""
    return name.startswith("kt_kernel") and (not name.endswith(".so") or "_amx" in name or "kt_kernel.libs" in name)


def strip(directory: Path) -> None:
    tool = shutil.which("x86_64-linux-gnu-strip") or shutil.which("llvm-strip")
    if tool is None:
        print("no strip for x86-64 (package binutils-x86-64-linux-gnu): the parts will be larger")
        return
    for file in sorted(directory.rglob("*.so*")):
        if file.is_file():
            subprocess.run([tool, "--strip-unneeded", str(file)], check=False, stderr=subprocess.DEVNULL)


def add_stand_ins(site: Path) -> None:
    """SGLang imports IPython for notebooks; transformers refuses the newer tokenizers there by its version alone."""
    package = site / "IPython"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "display.py").write_text(
        "def display(*args, **words): pass\n\n\nclass HTML:\n    def __init__(self, *args, **words): pass\n"
    )
    table = site / "transformers" / "dependency_versions_table.py"
    table.write_text(table.read_text().replace("tokenizers>=0.22.0,<=0.23.0", "tokenizers>=0.22.0"))


def write_archive(source: Path, target: Path, level: int) -> None:
    """tar through xz: all cores, and large repeated headers compress across files."""
    with target.open("wb") as file:
        tar = subprocess.Popen(["tar", "-C", str(source), "--sort=name", "-cf", "-", "."], stdout=subprocess.PIPE)
        subprocess.run(["xz", "-T0", f"-{level}"], stdin=tar.stdout, stdout=file, check=True)
        if tar.wait():
            raise SystemExit(f"tar of {source} failed")


def split(archive: Path, target: Path, part_bytes: int) -> None:
    with archive.open("rb") as file:
        for number in range(1000):
            piece = file.read(part_bytes)
            if not piece:
                return
            (target / f"sglang.part.{number:02d}").write_bytes(piece)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the parts")
    parser.add_argument("--part-mb", type=float, default=44, help="largest part in 10^6 bytes; default 44")
    parser.add_argument("--level", type=int, default=6, help="of xz; default 6")
    parser.add_argument("--wheels", type=Path, help="keep downloaded wheels here and use those that are there")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wheels = args.wheels or scratch / "wheels"
        groups = {"site": ("-r", str(HERE / "requirements.txt")), "kernel": (KERNEL,), "peer": PEER}
        for group, requirements in groups.items():
            if not list((wheels / group).glob("*.whl")):
                print(f"downloading {group}", flush=True)
                download(wheels / group, *requirements)
        site, sources, peer = scratch / "site", scratch / "sources", scratch / "peer"
        for wheel in sorted((wheels / "site").glob("*.whl")):
            extract(wheel, site, is_used)
            extract(wheel, sources, lambda name: name.startswith(SOURCES))
        for wheel in (wheels / "kernel").glob("*.whl"):
            extract(wheel, site, is_kernel_used)
        for wheel in sorted((wheels / "peer").glob("*.whl")):
            extract(wheel, peer, is_peer_used if wheel.name.startswith("kt_kernel") else is_used)
        add_stand_ins(site)
        strip(site)
        strip(peer)
        for old in args.out.glob("sglang.part.*"):
            old.unlink()
        whole = scratch / "sglang.tar.xz"
        write_archive(site, whole, args.level)
        split(whole, args.out, round(args.part_mb * 1e6))
        write_archive(sources, args.out / "flashinfer-sources.tar.xz", args.level)
        write_archive(peer, args.out / "kt-kernel.tar.xz", args.level)
    for file in sorted(args.out.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.1f} MB  {file.name}")
    return 0


def join(parts: Path, target: Path) -> None:
    """The opposite of `split`, extracted into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    pieces = sorted(parts.glob("sglang.part.*"))
    if not pieces:
        raise SystemExit(f"{parts}: no sglang.part.*; make them with bench/sglang/pack.py")
    unpack = subprocess.Popen(["tar", "-xJf", "-", "-C", str(target)], stdin=subprocess.PIPE)
    assert unpack.stdin is not None
    for piece in pieces:
        with piece.open("rb") as file:
            shutil.copyfileobj(file, unpack.stdin)
    unpack.stdin.close()
    if unpack.wait():
        raise SystemExit(f"{parts}: the parts are no whole archive ({', '.join(piece.name for piece in pieces)})")


def extract_archive(archive: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(target, filter="data")


if __name__ == "__main__":
    sys.exit(main())
