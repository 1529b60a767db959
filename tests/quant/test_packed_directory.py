"""Packed directories in use: conversions killed and resumed, altered files, two processes that share a directory."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktransformers.checkpoint.packed import MANIFEST_FILE, content_hash
from ktransformers.experts.store import LAYOUT_VERSION
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.quant import convert as run
from tests.support.forked import Forked, python
from tests.support.packing import contents, edit, mapped_pages, pack, repack, tiny
from tests.support.tiny_models import build, logits, save, tokens

LAYER = "packed-00001.safetensors"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("packed")
    pack(tiny(base / "model"), base / "out", "int8")
    return base / "out"


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


KILLED = """
import json, os, random, signal, sys, time
import torch
from pathlib import Path
from ktransformers.quant.convert import convert
from ktransformers.quant.plan import make_plan, parse_formats
source, out, generator, seen = Path(sys.argv[1]), Path(sys.argv[2]), random.Random(7), []
def attempt(slow):
    child = os.fork()
    if child == 0:
        def progress(done, total, word):
            time.sleep(slow)
        convert(make_plan(source, parse_formats("int4"), 2), out, progress=progress if slow else None)
        os._exit(0)
    return child
journal = out.with_name(out.name + ".partial") / "journal.jsonl"
def lines():
    return len(journal.read_text().splitlines()) if journal.exists() else 0
for entered in (0, 2, 3, 5):  # at some moment after so many lines: the plan, what is not experts, layers
    child = attempt(0.03)
    while lines() < entered:
        time.sleep(0.005)
    time.sleep(generator.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    seen.append([os.waitstatus_to_exitcode(status), out.exists(), lines()])
_, status = os.waitpid(attempt(0), 0)
print(json.dumps({"seen": seen, "last": os.waitstatus_to_exitcode(status)}))
"""


def test_killed_conversion_is_resumed(tmp_path: Path) -> None:
    origin, out = tiny(tmp_path / "model", num_hidden_layers=6), tmp_path / "out"
    done = python(KILLED, origin, out)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout)
    assert [code for code, _, _ in actual["seen"]] == [-signal.SIGKILL] * 4
    assert not any(finished for _, finished, _ in actual["seen"])
    entered = [lines for _, _, lines in actual["seen"]]
    assert entered == sorted(entered) and 5 <= entered[-1] < 8  # what was finished stayed so, and more was to do
    assert actual["last"] == 0 and out.is_dir() and not (tmp_path / "out.partial").exists()
    pack(origin, tmp_path / "whole", "int4")
    one, other = contents(out), contents(tmp_path / "whole")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in (tmp_path / "whole").iterdir())
    load_model(out, verify=True)


def test_damaged_layer_is_converted_again(tmp_path: Path) -> None:
    origin, out = tiny(tmp_path / "model", num_hidden_layers=3), tmp_path / "out"
    pack(origin, out, "int8", layers={0, 1})
    file = tmp_path / "out.partial" / LAYER
    data = bytearray(file.read_bytes())
    data[-1] ^= 255
    file.write_bytes(data)
    done = pack(origin, out, "int8")
    assert done.redone == [LAYER] and done.kept_layers == 1
    load_model(out, verify=True)


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def test_truncated_or_missing_files_are_refused(copy: Path) -> None:
    whole = (copy / LAYER).read_bytes()
    for open_it in (load_model, AutoModelForCausalLM.from_pretrained):
        (copy / LAYER).write_bytes(whole[:-4096])
        with pytest.raises(
            InputError, match=r"packed-00001\.safetensors: given .*(truncated|does not open|header says)"
        ):
            open_it(copy)
        (copy / LAYER).write_bytes(whole + bytes(64))
        with pytest.raises(
            InputError, match=r"packed-00001\.safetensors: given .*(too long|does not open|header says)"
        ):
            open_it(copy)
        (copy / LAYER).unlink()
        with pytest.raises((InputError, FileNotFoundError, OSError), match=r"packed-00001\.safetensors"):
            open_it(copy)


def test_altered_contents_are_refused_with_verify(copy: Path) -> None:
    whole = (copy / LAYER).read_bytes()
    text = whole.index(b'"conversion":"') + len('"conversion":"')
    flip(copy / LAYER, text)
    with pytest.raises(InputError, match="a header that is not its own: altered, or of another conversion"):
        load_model(copy)
    (copy / LAYER).write_bytes(whole)
    flip(copy / LAYER, -5000)
    load_model(copy)  # contents are hashed when that is asked for
    with pytest.raises(InputError, match=r"packed-00001\.safetensors: given contents that do not fit their checksum"):
        load_model(copy, verify=True)


def test_files_of_another_conversion_are_refused(copy: Path, packed: Path, tmp_path: Path) -> None:
    """A layer with the same names and sizes, a manifest, or a configuration of another conversion."""
    pack(packed.parent / "model", tmp_path / "other", "int8")
    own = (copy / LAYER).read_bytes()
    shutil.copyfile(tmp_path / "other" / LAYER, copy / LAYER)
    with pytest.raises(InputError, match="altered, or of another conversion"):
        load_model(copy)
    (copy / LAYER).write_bytes(own)
    shutil.copyfile(tmp_path / "other" / MANIFEST_FILE, copy / MANIFEST_FILE)
    with pytest.raises(InputError, match="the directory has files of two conversions"):
        load_model(copy)
    (copy / MANIFEST_FILE).unlink()
    with pytest.raises(InputError, match=r"given no kt_packed\.json, expected a packed directory"):
        load_model(copy)


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """As a program would that knows the hashes."""
    words = json.loads((directory / MANIFEST_FILE).read_text()) | changes
    words.pop("sha256")
    digest = content_hash(words)
    (directory / MANIFEST_FILE).write_text(json.dumps(words | {"sha256": digest}))
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    config["packed"]["sha256"] = digest
    edit(directory, quantization_config=config)


def test_another_layout_version_is_refused(copy: Path) -> None:
    rewrite_manifest(copy, layout=LAYOUT_VERSION + 1)
    for open_it in (load_model, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match=f"layout {LAYOUT_VERSION + 1}, expected layout .*; run kt quant again"):
            open_it(copy)


def test_packed_directory_of_another_model_is_refused(copy: Path) -> None:
    edit(copy, moe_intermediate_size=32)
    with pytest.raises(InputError, match=r"intermediate 64, .*expected .*intermediate 32, .*as config\.json says"):
        load_model(copy)


def expert_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Of LoRA on attention and experts, for one batch."""
    torch.manual_seed(0)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 8
    adapted(tokens(), labels=tokens()).loss.backward()
    return {name: p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}


def test_training_on_mapped_experts(packed: Path) -> None:
    """Gradients equal those of the same experts packed in memory."""
    mapped = expert_gradients(load_model(packed, dtype=torch.float32))
    model = load_model(packed.parent / "model", dtype=torch.float32)
    repack(model, dict.fromkeys(("gate", "up", "down"), "int8"))
    in_memory = expert_gradients(model)
    assert len([name for name in mapped if "experts" in name]) == 8
    assert mapped.keys() == in_memory.keys()
    assert all(torch.equal(mapped[name], in_memory[name]) for name in mapped)


SHARED = """
import sys, time
import torch
from pathlib import Path
from ktransformers.nn import load_model
torch.set_num_threads(1)
model = load_model(sys.argv[1])
store = next(module.kt.store for module in model.modules() if hasattr(module, "kt"))
tokens = torch.arange(96)[None] % model.config.vocab_size
with torch.no_grad():
    model(tokens)
sign = Path(sys.argv[2])
sign.touch()
while sign.exists():
    time.sleep(0.01)
"""


def test_two_processes_share_mapped_pages(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_hidden_layers": 2}
    pack(tiny(tmp_path / "model", **sizes), tmp_path / "out", "bf16")
    packed = sum(file.stat().st_size for file in (tmp_path / "out").glob("packed-*"))
    signs = [tmp_path / f"sign-{number}" for number in range(2)]
    both = [Forked(SHARED, tmp_path / "out", sign) for sign in signs]
    try:
        deadline = time.monotonic() + 120
        while not all(sign.exists() for sign in signs) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in both:
            whole, share = mapped_pages(process.pid, tmp_path / "out")
            # Every expert was visited, so nearly all pages are here; each belongs to both.
            assert 0.7 * packed < whole <= 1.01 * packed
            assert share < 0.55 * whole
    finally:
        for sign in signs:
            sign.unlink(missing_ok=True)
        ended = [process.wait(30) for process in both]
    assert [end.returncode for end in ended] == [0, 0], ended


def test_locked_pages(packed: Path) -> None:
    try:
        model = load_model(packed, pages="lock")
    except InputError as error:
        assert "ulimit -l" in str(error)  # a container may forbid it; then it is said
        return
    locked = [line for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("Locked:")]
    assert sum(int(line.split()[1]) for line in locked) * 1024 >= sum(
        module.kt.store.packed_bytes for module in model.modules() if hasattr(module, "kt")
    )
    assert torch.equal(logits(model), logits(load_model(packed)))


MEMORY = """
import sys, threading
import torch
from pathlib import Path
import ktransformers.quant.convert as run
from ktransformers.quant.plan import make_plan, parse_formats
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
run.STORE_BYTES = 8 << 20
run.convert(make_plan(sys.argv[1], parse_formats(sys.argv[4]), 2), sys.argv[2] + ".first")  # imports, threads, caches
highest, over = [0], threading.Event()
def watch():
    while not over.wait(0.002):
        highest[0] = max(highest[0], anonymous())
start = anonymous()
thread = threading.Thread(target=watch)
thread.start()
run.convert(make_plan(sys.argv[3], parse_formats(sys.argv[4]), 2), sys.argv[2])
over.set()
thread.join()
print(highest[0] - start)
"""


def test_memory_of_a_conversion_is_bounded(tmp_path: Path) -> None:
    """With two threads: matrices in flight, the staging store and intermediates need less than half of the layer."""
    small = tiny(tmp_path / "small")
    sizes = {"hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 48, "num_hidden_layers": 1}
    large = save(build("qwen3_moe", **sizes).half(), tmp_path / "large")
    done = python(MEMORY, small, tmp_path / "out", large, "int8")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 * 3 * 512 * 1024 * 2 // 2


@pytest.mark.slow
def test_memory_of_a_conversion_of_large_layers_is_bounded(tmp_path: Path) -> None:
    """At most one matrix per thread and 1 GiB, with two layers of 1.2 GB."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 2048, "num_experts": 48, "num_hidden_layers": 2}
    small = tiny(tmp_path / "small")
    large = save(build("qwen3_moe", **sizes).bfloat16(), tmp_path / "large")
    code = MEMORY.replace("8 << 20", str(run.STORE_BYTES))
    done = python(code, small, tmp_path / "out", large, "int8")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 2048 * 2048 * 2 + (1 << 30), f"{int(done.stdout) / 1e6:.0f} MB"


@pytest.mark.slow
def test_transformers_without_ktransformers_refuses_a_packed_directory(packed: Path, tmp_path: Path) -> None:
    """In a virtual environment with every package of this one except ktransformers."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    ours = Path(torch.__file__).parents[1]
    for entry in ours.iterdir():
        if "ktransformers" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    code = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
    python = environment / "bin" / "python"
    absent = subprocess.run([python, "-c", "import ktransformers"], capture_output=True, text=True, cwd=tmp_path)
    assert "ModuleNotFoundError" in absent.stderr
    done = subprocess.run([python, "-c", code, packed], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "RuntimeError" in done.stderr and "size" in done.stderr
