"""The layer rule of ARCHITECTURE.md, read off the source: Python imports by ast, C++ includes by line.

Both checks are functions from source text to a list of complaints, so that the tests at the end can show that they
catch what they are for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "ktransformers"
CSRC = ROOT / "csrc"

# A part may import its own rank, lower ranks and the ground; the ground imports nothing but the ground.
GROUND = {"env", "errors", "files", "log", "model_registry", "openmp", "settings", "system", "triton_modules"}
RANK = {
    "_core": 0,
    "checkpoint": 1,
    "nn": 2,
    "plan": 3,
    "quant": 3,
    "place": 4,
    "adapters": 4,
    "train": 5,
    "serve": 5,
    "evaluate": 5,
    "loop": 5,
    "prove": 6,
    "cli": 7,
}
APART = {"train", "serve", "evaluate"}  # do not import each other
ALONE = {"loop"}  # runs the verbs as commands and imports nobody
# Insides of a foreign package (its submodules, not what it offers at the top) and the one part that may know them.
INSIDES = {"transformers": "nn", "peft": "nn"}
ONLY = {"trl": "train"}


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in the file, wherever it stands; relative ones are made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*above, module] if module else above)
            if module == "ktransformers":
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def python_complaints(path: str, source: str) -> list[str]:
    """`path` is relative to the package: "nn/store.py"."""
    parts = path.removesuffix(".py").split("/")
    part = parts[0]
    if part == "__init__":
        return []
    if part not in GROUND and part not in RANK:
        return [f"{path}: {part} has no place in the layers; give it one in tests/test_layers.py"]
    complaints = []
    package = ".".join(["ktransformers", *parts[:-1]])
    for line, module in imported(ast.parse(source), package):
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        where = f"{path}:{line}: imports {module}"
        if top != "ktransformers":
            if ONLY.get(top, part) != part or (rest and INSIDES.get(top, part) != part):
                complaints.append(f"{where}, which only {ONLY.get(top) or INSIDES[top]} may know")
        elif target in GROUND or target == part or (target not in RANK and part not in GROUND):
            continue
        elif part in GROUND:
            complaints.append(f"{where}, but {part} is for all and uses nobody")
        elif RANK[target] > RANK[part]:
            complaints.append(f"{where}, which lies above {part}")
        elif part in ALONE:
            complaints.append(f"{where}, but {part} runs commands and imports nobody")
        elif {part, target} <= APART:
            complaints.append(f"{where}, but {', '.join(sorted(APART))} stay apart")
    return complaints


FOREIGN = re.compile(r"^(torch|ATen|c10|cuda|nanobind|pybind11|omp|hwloc|numa)(/|\.h|_|$)|^Python\.h$")
# An ISA file sees declarations of the C library and intrinsics only: a template instantiated there may be kept by the
# linker for every CPU.
ISA_SYSTEM = {"cstddef", "cstdint", "cstring", "immintrin.h", "time.h"}


def includes(source: str) -> Iterator[tuple[int, bool, str]]:
    """(line, is a system header, name)."""
    for number, line in enumerate(source.splitlines(), 1):
        found = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if found:
            yield number, found[1] == "<", found[2]


def resolve(path: str, name: str) -> str:
    """An include of our own as a path from csrc/, whether it was written from there or from the file's folder."""
    beside = Path(path).parent / name
    parts: list[str] = []
    for word in beside.parts:
        if word == "..":
            parts.pop()
        else:
            parts.append(word)
    near = "/".join(parts)
    return near if (CSRC / near).exists() else name


def cpp_complaints(path: str, source: str) -> list[str]:
    """`path` is relative to csrc/: "moe/plan.cpp"."""
    if path.startswith("emulate/"):
        return []
    in_kernels, in_moe, in_bindings = (path.startswith(f"{folder}/") for folder in ("kernels", "moe", "bindings"))
    isa = in_kernels and path not in ("kernels/dispatch.cpp", "kernels/table.h")
    complaints = []
    for line, is_system, name in includes(source):
        where = f"{path}:{line}: includes {name}"
        target = name if is_system else resolve(path, name)
        if FOREIGN.match(target) and not in_bindings:
            complaints.append(f"{where}: the core knows no torch, CUDA, Python, OpenMP, hwloc or libnuma")
        elif is_system:
            if isa and target not in ISA_SYSTEM:
                complaints.append(f"{where}: ISA code takes system headers from {sorted(ISA_SYSTEM)} only")
        elif target.endswith(".cpp"):
            complaints.append(f"{where}: source files are compiled, not included")
        elif target.startswith("kernels/") and target != "kernels/table.h" and not in_kernels:
            complaints.append(f"{where}: kernels/table.h is the only door to ISA code")
        elif target.startswith("moe/") and not (in_moe or in_bindings):
            complaints.append(f"{where}: only bindings/ lies above moe")
        elif target.startswith("bindings/") and not in_bindings:
            complaints.append(f"{where}: nothing lies above bindings/")
        elif isa and not target.startswith("kernels/") and target != "types.h":
            complaints.append(f"{where}: ISA code sees types.h and its own folder only")
    return complaints


def test_python_layers() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    complaints = [
        c for file in files for c in python_complaints(file.relative_to(PACKAGE).as_posix(), file.read_text())
    ]
    assert not complaints, "\n".join(complaints)


def test_cpp_layers() -> None:
    files = sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")])
    assert files
    complaints = [c for file in files for c in cpp_complaints(file.relative_to(CSRC).as_posix(), file.read_text())]
    assert not complaints, "\n".join(complaints)


def test_every_variant_is_in_the_one_list() -> None:
    listed = re.findall(r"^kt_isa\((\w+)\s+(\w+\.cpp)", (ROOT / "cmake" / "isas.cmake").read_text(), re.MULTILINE)
    assert {file for _, file in listed} == {file.name for file in (CSRC / "kernels").glob("isa_*.cpp")}
    assert all(file == f"isa_{name}.cpp" for name, file in listed)


def test_python_rule_catches() -> None:
    bad = {
        "nn/store.py": "from ktransformers.train import loop",
        "nn/lora.py": "import ktransformers.cli.main",
        "train/loop.py": "from ..serve import api",
        "checkpoint/read.py": "def f():\n    from ktransformers import nn",
        "env.py": "import ktransformers.nn",
        "serve/http/api.py": "from transformers.models.qwen3_moe import modeling_qwen3_moe",
        "evaluate/score.py": "import trl",
        "loop/stages.py": "from ktransformers.checkpoint import find_experts",
        "misc.py": "",
    }
    for path, source in bad.items():
        assert python_complaints(path, source), path
    good = {
        "cli/main.py": "import typer\nfrom ktransformers import __version__\nfrom ktransformers.train import loop",
        "nn/store.py": "from ktransformers import _core, errors\nfrom .plain import f\nimport transformers.activations",
        "serve/http/api.py": "from transformers import AutoTokenizer",
        "log.py": "from ktransformers import env",
    }
    for path, source in good.items():
        assert not python_complaints(path, source), path


def test_cpp_rule_catches() -> None:
    bad = {
        "moe/plan.cpp": '#include "kernels/gemm.h"',
        "threads.cpp": '#include "moe/plan.h"',
        "kernels/gemm.h": "#include <vector>",
        "kernels/isa_avx2.cpp": '#include "../threads.h"',
        "kernels/dispatch.cpp": '#include "isa_avx2.cpp"',
        "memory.cpp": "#include <numa.h>",
        "moe/forward.cpp": "#include <torch/torch.h>",
        "cpu.h": "#  include <Python.h>",
        "bindings.cpp": "#include <nanobind/nanobind.h>",
        "measure.cpp": '#include "bindings/tensors.h"',
    }
    for path, source in bad.items():
        assert cpp_complaints(path, source), path
    good = {
        "bindings/module.cpp": '#include <nanobind/nanobind.h>\n#include "moe/moe.h"\n#include "kernels/table.h"',
        "kernels/dispatch.cpp": '#include <vector>\n#include "../cpu.h"\n#include "isas.h"',
        "kernels/isa_amx.cpp": '#include <immintrin.h>\n#include "kernels/gemm.h"',
        "moe/forward.cpp": '#include <vector>\n#include "kernels/table.h"\n#include "plan.h"\n#include "../threads.h"',
    }
    for path, source in good.items():
        assert not cpp_complaints(path, source), path
