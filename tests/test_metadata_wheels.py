"""The wheels kt-kernel and kt-kernel-cuda: metadata that requires this ktransformers, no code; what programs look up
before they import `kt_kernel`; and, slowly, all three wheels in a fresh environment."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

import kt_kernel
import ktransformers

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("kt-kernel", "kt-kernel-cuda")
# LLaMA-Factory calls transformers' require_version, which asks importlib.metadata.
LOOKUP = """
import importlib.metadata, json, sys
from transformers.utils.versions import require_version
for name in sys.argv[1:]:
    require_version(f"{name}>=0.6.1", "pip install it")
print(json.dumps([importlib.metadata.version(name) for name in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metadata_wheels", ROOT / "scripts" / "metadata_wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheels(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return [script.write_wheel(name, folder) for name in script.NAMES]


def test_wheels_hold_metadata_alone(script: ModuleType, wheels: list[Path], tmp_path: Path) -> None:
    assert script.NAMES == NAMES
    for name, wheel in zip(NAMES, wheels, strict=True):
        normal, version, _, tags = parse_wheel_filename(wheel.name)
        assert (normal, str(version)) == (name, kt_kernel.__version__) and str(version) == "0.7.2"
        assert [str(tag) for tag in tags] == ["py3-none-any"]
        folder = f"{name.replace('-', '_')}-0.7.2.dist-info"
        with zipfile.ZipFile(wheel) as archive:
            files = {entry: archive.read(entry) for entry in archive.namelist()}
        assert sorted(files) == [f"{folder}/{file}" for file in ("METADATA", "RECORD", "WHEEL")]
        fields = HeaderParser().parsestr(files[f"{folder}/METADATA"].decode())
        assert (fields["Name"], fields["Version"]) == (name, "0.7.2")
        required = [Requirement(text) for text in fields.get_all("Requires-Dist") or []]
        assert [str(requirement) for requirement in required] == [f"ktransformers=={ktransformers.__version__}"]
        record = dict(line.split(",", 1) for line in files[f"{folder}/RECORD"].decode().splitlines())
        assert record.keys() == files.keys()
        for file in ("METADATA", "WHEEL"):
            data = files[f"{folder}/{file}"]
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert record[f"{folder}/{file}"] == f"sha256={digest},{len(data)}"
        assert script.write_wheel(name, tmp_path).read_bytes() == wheel.read_bytes()


def test_names_of_the_forks_are_not_given() -> None:
    """Beside one of them LLaMA-Factory 0.9.6 refuses every run."""
    text = (ROOT / "scripts" / "metadata_wheels.py").read_text() + (ROOT / "pyproject.toml").read_text()
    code = re.sub(r'""".*?"""', "", text, count=1, flags=re.DOTALL)
    assert not re.search(r"(transformers|accelerate|peft|trl)-kt", code)


def test_programs_find_the_version(wheels: list[Path], tmp_path: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", LOOKUP, *NAMES]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == ["0.7.2", "0.7.2"]


def test_make_wheel_writes_them() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\nwheel:")[1].split("\n\n")[0]
    assert "scripts/metadata_wheels.py --out dist" in recipe


INSPECT = """
import importlib.metadata, json, sys
import kt_kernel, ktransformers
assert "torch" not in sys.modules
installed = {dist.metadata["Name"]: [dist.version, dist.requires or []] for dist in importlib.metadata.distributions()}
print(json.dumps({"installed": installed, "kt_kernel": [kt_kernel.__version__, kt_kernel.__file__],
                  "ktransformers": [ktransformers.__version__, ktransformers.__file__]}))
"""


@pytest.mark.slow
def test_wheels_in_a_fresh_environment(tmp_path: Path) -> None:
    """`pip install --no-deps dist/*.whl` without an index, then both packages are imported from there."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    build += ["-C", f"build-dir={tmp_path / 'native'}", str(ROOT)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run(build, check=True, timeout=3600, capture_output=True, env=clean)
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "metadata_wheels.py"), "--out", str(tmp_path / "dist")],
        check=True,
        capture_output=True,
    )
    files = sorted((tmp_path / "dist").glob("*.whl"))
    assert [file.name.partition("-")[0] for file in files] == ["kt_kernel", "kt_kernel_cuda", "ktransformers"]
    with zipfile.ZipFile(files[2]) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert tops == {"kt_kernel", "ktransformers", f"ktransformers-{ktransformers.__version__}.dist-info"}

    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, capture_output=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", *map(str, files)], check=True, capture_output=True)
    done = subprocess.run(
        [str(python), "-I", "-c", INSPECT], cwd=tmp_path, check=True, capture_output=True, text=True, env=clean
    )
    facts = json.loads(done.stdout)
    assert facts["kt_kernel"][0] == "0.7.2" and str(tmp_path / "venv") in facts["kt_kernel"][1]
    assert (
        facts["ktransformers"][0] == ktransformers.__version__ and str(tmp_path / "venv") in facts["ktransformers"][1]
    )
    for name in NAMES:
        version, requires = facts["installed"][name]
        assert version == "0.7.2" and requires
        for requirement in map(Requirement, requires):
            assert requirement.specifier.contains(facts["installed"][requirement.name][0], prereleases=True)
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True)
    assert not [line for line in checked.stdout.splitlines() if line.startswith("kt-kernel")]
