"""Files of SGLang releases for the contract tests, taken from the wheels of the package index; `make test-sglang` runs
this. Nothing of them is committed.

    python tests/sglang/fetch.py build/sglang

Only the wrapper around `kt_kernel`, the plugin loader and the files whose functions our plugin hooks are extracted:
`build/sglang/RELEASE/sglang/srt/...`. A wheel is removed once it has been read.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = {"sglang-0.5.17": "sglang==0.5.17", "sglang-0.5.23": "sglang==0.5.23", "sglang-kt-0.7.2": "sglang-kt==0.7.2"}
WRAPPER = "sglang/srt/layers/moe/kt_ep_wrapper.py"
FILES = (
    WRAPPER,
    "sglang/srt/plugins/__init__.py",
    "sglang/srt/plugins/hook_registry.py",
    "sglang/srt/server_args.py",
    "sglang/srt/layers/moe/fused_moe_triton/layer.py",
    "sglang/srt/lora/lora_manager.py",
    "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
    "sglang/srt/function_call/function_call_parser.py",
    "sglang/srt/parser/reasoning_parser.py",
    "sglang/launch_server.py",
    "sglang/cli/main.py",
)
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_34_x86_64", "manylinux2014_x86_64", "any")


def fetch(release: str, requirement: str, target: Path) -> None:
    done = target / ".complete"
    if done.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        words += ["--python-version", "312", "--implementation", "cp", "--abi", "cp312", "--abi", "none"]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*words, "-d", scratch, requirement], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            present = set(archive.namelist())
            if WRAPPER not in present:
                raise SystemExit(f"{wheel.name}: no {WRAPPER}")
            archive.extractall(target, [name for name in FILES if name in present])
    done.touch()
    sys.stdout.write(f"{release}: {target}\n")


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "build/sglang")
    for release, requirement in RELEASES.items():
        fetch(release, requirement, root / release)
    return 0


if __name__ == "__main__":
    sys.exit(main())
