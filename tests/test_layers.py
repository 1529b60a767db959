"""The layer rule of ARCHITECTURE.md, read from the source: Python imports by ast, C++ includes by line; and import
cycles between Python files.

Every check is a function from source text to a list of violations, so that the tests at the end can show that it
catches what it is for. A module named by a string (`import_module("ktransformers...")`, a table of lazily imported
names) counts as imported where the string is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "ktransformers"
CSRC = ROOT / "csrc"

# A part may import its own rank, lower ranks and the ground; the ground imports nothing but the ground. A part is a
# folder of the package, or a room of one ("evaluate/loop") that has a rank of its own.
GROUND = "ground"
RANK = {
    "_core": 0,
    "checkpoint": 1,
    "quantized": 2,
    "experts": 3,
    "parallel": 4,
    "modeling": 5,
    "nn": 6,
    "plan": 6,
    "quant": 6,
    "operators": 7,
    "place": 7,
    "adapters": 7,
    "train": 8,
    "serve": 8,
    "serve/sglang": 8,
    "evaluate": 8,
    "evaluate/loop": 8,
    "train/llamafactory": 9,
    "evaluate/prove": 9,
    "cli": 10,
}
APART = {"train", "serve", "evaluate"}  # do not import each other
ALONE = {"evaluate/loop"}  # runs the verbs as commands and imports no other part
# The second package, an interface to what lies at or below this rank; of ours only these parts may import it.
DOOR, DOOR_RANK, DOOR_USERS = "kt_kernel", RANK["place"], {"cli", "train/llamafactory", "serve/sglang"}
# Cycles of files that are tolerated, each with its reason.
TOLERATED_CYCLES: list[set[str]] = []
# Submodules of a foreign package, as opposed to what it exports at the top, and the parts that may import them.
INSIDES = {
    "transformers": {"experts", "modeling", "parallel", "quantized"},
    "peft": {"experts", "modeling", "parallel"},
}
ONLY = {"trl": "train"}
# The entries of the top folder: packages, and `nn.py`, the facade of public names.
MOST_ENTRIES = 16


def part_of(names: list[str]) -> str:
    """The part of a path or dotted name below the package: a room with a rank of its own, otherwise the folder."""
    room = "/".join(names[:2])
    return room if room in RANK else names[0]


MODULE = re.compile(r"ktransformers(\.\w+)+")


def absolute_module(node: ast.ImportFrom, package: str) -> str:
    module = node.module or ""
    if not node.level:
        return module
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, module] if module else parents)


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in the file, at module level or in a function, by statement or string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute_module(node, package)
            if module == "ktransformers":
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield node.lineno, node.value


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`, whose imports never run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def dependencies(module: str, source: str, modules: Mapping[str, str]) -> set[str]:
    """Modules of `modules` that a module imports, at module level or in a function. Strings count too, except in an
    `__init__`, whose tables of lazily imported names are for users of the package, and except names of packages, which
    `importlib.resources` takes."""
    is_package = f"{module}.__init__" in modules
    package = module if is_package else module.rpartition(".")[0]
    names: set[str] = set()
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = absolute_module(node, package)
            names |= {
                f"{parent}.{alias.name}" if f"{parent}.{alias.name}" in modules else parent for alias in node.names
            }
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_package:
            names |= set() if f"{node.value}.__init__" in modules else {node.value}
    return (names & set(modules)) - {module}


def cycles(sources: Mapping[str, str]) -> list[set[str]]:
    """Groups of modules that import each other, directly or not. `sources` by dotted module; a package is listed under
    its own name and as `package.__init__`."""
    graph = {name: dependencies(name, source, sources) for name, source in sources.items()}
    reachable: dict[str, set[str]] = {}
    for start in graph:
        reached, pending = set(), [start]
        while pending:
            for target in graph[pending.pop()] - reached:
                reached.add(target)
                pending.append(target)
        reachable[start] = reached
    groups = {
        frozenset(other for other in reachable[name] if name in reachable[other])
        for name in graph
        if name in reachable[name]
    }
    return sorted((set(group) for group in groups), key=sorted)


def package_sources() -> dict[str, str]:
    """Dotted module -> source, of all files under src/ktransformers."""
    sources = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(["ktransformers", *file.relative_to(PACKAGE).with_suffix("").parts])
        sources[name] = sources[name.removesuffix(".__init__")] = file.read_text()
    return sources


def python_violations(path: str, source: str) -> list[str]:
    """`path` is relative to the package: "experts/store.py"."""
    names = path.removesuffix(".py").split("/")
    part = part_of(names)
    if part == "__init__":
        return []
    if part != GROUND and part not in RANK:
        return [f"{path}: {part} has no place in the layers; give it one in tests/test_layers.py"]
    violations = []
    package = ".".join(["ktransformers", *names[:-1]])
    for line, module in imported(ast.parse(source), package):
        top, _, rest = module.partition(".")
        target = part_of(rest.split("."))
        where = f"{path}:{line}: imports {module}"
        if top == DOOR and part not in DOOR_USERS:
            violations.append(f"{where}, which only {', '.join(sorted(DOOR_USERS))} may know")
        if top != "ktransformers":
            if ONLY.get(top, part) != part or (rest and part not in INSIDES.get(top, {part})):
                known = ONLY.get(top) or ", ".join(sorted(INSIDES[top]))
                violations.append(f"{where}, which only {known} may know")
        elif target in (GROUND, part, "_core") or (target not in RANK and part != GROUND):
            continue
        elif part == GROUND:
            violations.append(f"{where}, but {part} is used by every part and imports none")
        elif RANK[target] > RANK[part]:
            violations.append(f"{where}, which lies above {part}")
        elif part in ALONE:
            violations.append(f"{where}, but {part} runs commands and imports no other part")
        elif {part, target} <= APART:
            violations.append(f"{where}, but {', '.join(sorted(APART))} stay apart")
    return violations


def door_violations(path: str, source: str) -> list[str]:
    """`path` is relative to src/: "kt_kernel/weights.py"."""
    violations = []
    package = ".".join(path.split("/")[:-1])
    for line, module in imported(ast.parse(source), package):
        top, _, rest = module.partition(".")
        target = part_of(rest.split("."))
        if top == "ktransformers" and RANK.get(target, 0) > DOOR_RANK:
            violations.append(f"{path}:{line}: imports {module}, which lies above {DOOR}")
    return violations


FOREIGN = re.compile(r"^(torch|ATen|c10|cuda|nanobind|pybind11|omp|hwloc|numa)(/|\.h|_|$)|^Python\.h$")
# An ISA file sees declarations of the C library and intrinsics only: a template instantiated there may be kept by the
# linker for every CPU.
ISA_SYSTEM = {"arm_neon.h", "cstddef", "cstdint", "cstring", "immintrin.h", "time.h"}


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


def cpp_violations(path: str, source: str) -> list[str]:
    """`path` is relative to csrc/: "moe/plan.cpp"."""
    if path.startswith("emulate/"):
        return []
    in_kernels, in_moe, in_bindings = (path.startswith(f"{folder}/") for folder in ("kernels", "moe", "bindings"))
    isa = in_kernels and path not in ("kernels/dispatch.cpp", "kernels/table.h")
    violations = []
    for line, is_system, name in includes(source):
        where = f"{path}:{line}: includes {name}"
        target = name if is_system else resolve(path, name)
        if FOREIGN.match(target) and not in_bindings:
            violations.append(f"{where}: the core knows no torch, CUDA, Python, OpenMP, hwloc or libnuma")
        elif is_system:
            if isa and target not in ISA_SYSTEM:
                violations.append(f"{where}: ISA code takes system headers from {sorted(ISA_SYSTEM)} only")
        elif target.endswith(".cpp"):
            violations.append(f"{where}: source files are compiled, not included")
        elif target.startswith("kernels/") and target != "kernels/table.h" and not in_kernels:
            violations.append(f"{where}: kernels/table.h is the only door to ISA code")
        elif target.startswith("moe/") and not (in_moe or in_bindings):
            violations.append(f"{where}: only bindings/ lies above moe")
        elif target.startswith("bindings/") and not in_bindings:
            violations.append(f"{where}: nothing lies above bindings/")
        elif isa and not target.startswith("kernels/") and target != "types.h":
            violations.append(f"{where}: ISA code sees types.h and its own folder only")
    return violations


def test_python_layers() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    violations = [
        c for file in files for c in python_violations(file.relative_to(PACKAGE).as_posix(), file.read_text())
    ]
    assert not violations, "\n".join(violations)


def test_top_folder_is_short() -> None:
    entries = [e for e in PACKAGE.iterdir() if (e.is_dir() and e.name != "__pycache__") or e.suffix == ".py"]
    assert len(entries) - 1 <= MOST_ENTRIES, sorted(e.name for e in entries)  # besides __init__.py


def test_the_second_package() -> None:
    files = sorted((ROOT / "src" / DOOR).rglob("*.py"))
    assert files
    violations = [
        c for file in files for c in door_violations(file.relative_to(ROOT / "src").as_posix(), file.read_text())
    ]
    assert not violations, "\n".join(violations)
    assert door_violations("kt_kernel/a.py", "from ktransformers.serve.http import api")
    assert not door_violations("kt_kernel/a.py", "from ktransformers.nn import ExpertStore\nimport kt_kernel.weights")


def test_no_import_cycles() -> None:
    found = [{name.removeprefix("ktransformers.") for name in group} for group in cycles(package_sources())]
    assert [group for group in found if group not in TOLERATED_CYCLES] == []
    assert [group for group in TOLERATED_CYCLES if group not in found] == [], "no longer a cycle: shorten the list"


def test_cpp_layers() -> None:
    files = sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")])
    assert files
    violations = [c for file in files for c in cpp_violations(file.relative_to(CSRC).as_posix(), file.read_text())]
    assert not violations, "\n".join(violations)


def test_every_variant_is_in_the_one_list() -> None:
    listed = re.findall(r"^kt_isa\((\w+)\s+\w+\s+(\w+\.cpp)", (ROOT / "cmake" / "isas.cmake").read_text(), re.MULTILINE)
    assert {file for _, file in listed} == {file.name for file in (CSRC / "kernels").glob("isa_*.cpp")}
    assert all(file == f"isa_{name}.cpp" for name, file in listed)


def test_python_rule_catches() -> None:
    bad = {
        "experts/store.py": "from ktransformers.train import run",
        "experts/lora.py": "import ktransformers.cli.main",
        "train/loop.py": "from ..serve import api",
        "checkpoint/read.py": "def f():\n    from ktransformers import nn",
        "ground/env.py": "import ktransformers.experts",
        "serve/http/api.py": "from transformers.models.qwen3_moe import modeling_qwen3_moe",
        "evaluate/score.py": "import trl",
        "evaluate/loop/stages.py": "from ktransformers.checkpoint import find_experts",
        "misc.py": "",
        "experts/doors.py": "from kt_kernel import KTMoEWrapper",
        "experts/lazy.py": 'import importlib\nimportlib.import_module("ktransformers.place.placement")',
        "place/kernels.py": 'TRITON = "ktransformers.serve.graphs.paged_attention_triton"',
        "checkpoint/__init__.py": '_HOME = {"ExpertStore": "ktransformers.nn"}',
        "train/kernels.py": 'kernels = import_triton_module("ktransformers.serve.graphs.paged_attention_triton")',
    }
    for path, source in bad.items():
        assert python_violations(path, source), path
    good = {
        "cli/main.py": "import typer\nfrom ktransformers import __version__\nfrom ktransformers.train import run",
        "modeling/load.py": "from ktransformers import _core\nfrom .plain import f\nimport transformers.activations",
        "modeling/pool.py": "from ktransformers.ground import errors",
        "serve/http/api.py": "from transformers import AutoTokenizer",
        "ground/log.py": "from ktransformers.ground import env",
        "place/gpu/fused.py": 'TRITON = "ktransformers.place.gpu.fused_triton"',
        "experts/words.py": 'NAME = "ktransformers::experts"\nTEXT = "see ktransformers.train for more"',
    }
    for path, source in good.items():
        assert not python_violations(path, source), path


def test_cycle_rule_catches() -> None:
    def found(**sources: str) -> list[set[str]]:
        modules = {name.replace("__", "."): source for name, source in sources.items()}
        return [{name.removeprefix("k.") for name in group} for group in cycles(modules)]

    assert found(k__a="import k.b", k__b="from k import c", k__c="from k.a import f") == [{"a", "b", "c"}]
    assert found(k__a="def f():\n    from k import b", k__b="import k.a") == [{"a", "b"}]
    assert found(k__a="from . import b", k__b="from .a import f") == [{"a", "b"}]
    assert found(k__a="try:\n    import k.b\nexcept ImportError:\n    pass", k__b="import k.a") == [{"a", "b"}]
    assert found(k__a="import k.b", k__b="import k.c", k__c="") == []
    assert found(k__a="if TYPE_CHECKING:\n    import k.b", k__b="import k.a") == []
    by_string = {"ktransformers.a": 'import_module("ktransformers.b")', "ktransformers.b": "import ktransformers.a"}
    assert cycles(by_string) == [{"ktransformers.a", "ktransformers.b"}]


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
        assert cpp_violations(path, source), path
    good = {
        "bindings/module.cpp": '#include <nanobind/nanobind.h>\n#include "moe/moe.h"\n#include "kernels/table.h"',
        "kernels/dispatch.cpp": '#include <vector>\n#include "../cpu.h"\n#include "isas.h"',
        "kernels/isa_amx.cpp": '#include <immintrin.h>\n#include "kernels/gemm.h"',
        "moe/forward.cpp": '#include <vector>\n#include "kernels/table.h"\n#include "plan.h"\n#include "../threads.h"',
    }
    for path, source in good.items():
        assert not cpp_violations(path, source), path
