"""Files of ours that one operation enters, in the order of the first call: how far a reader has to follow it.

    python bench/trace_path.py [batch step token adapter] [--json FILE]

`batch`: one batch through the expert layers of a stock model on the CPU, forward and backward, with PEFT's LoRA;
`step`: the same with attention and experts on a GPU; `token`: a streamed chat completion with an adapter, from the HTTP
request to the last event; `adapter`: `kt train`, from the recipe to the adapter on disk. A file counts if one of its
functions is entered, in any thread, under `sys.settrace`. Code that runs while a module is imported does not count, nor
does the ground, which every package uses. The first three are run before they are traced, so that loading, packing and
capturing are not part of them. Each operation runs in a process of its own, whose child processes (tokenising, data
workers) are not followed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "ktransformers"
sys.path.insert(0, str(ROOT / "scripts"))
RECIPE = {
    "stage": "sft", "dataset": "identity", "max_samples": 8, "cutoff_len": 96, "max_steps": 2, "lora_rank": 4,
    "logging_steps": 1, "report_to": "none", "cpu_infer": 2, "per_device_train_batch_size": 2,
}  # fmt: skip


def in_import(frame: FrameType | None) -> bool:
    """Whether a module of ours is being imported, whose class bodies and comprehensions are calls too."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        frame = frame.f_back
    return False


class EnteredFiles:
    """A trace function: files below the package with the first function entered in each, while `armed`."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.armed = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if not (self.armed and event == "call" and name.startswith(str(PACKAGE))):
            return
        path = str(Path(name).relative_to(PACKAGE))
        if path not in self.files and "/" in path and not path.startswith("ground/") and not in_import(frame):
            self.files[path] = frame.f_code.co_name

    def install(self) -> None:
        """In this thread and those to come; in all there are from Python 3.12 on."""
        threading.settrace(self)
        sys.settrace(self)
        if sys.version_info >= (3, 12):
            threading.settrace_all_threads(self)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.files))


def make_model(folder: Path) -> Path:
    from fingerprint_inputs import tiny_model

    return tiny_model(folder / "model")


def trace_training(entered: EnteredFiles, device: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    from ktransformers.nn import load_model

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(make_model(Path(folder)), dtype=torch.bfloat16, device=device)
    if device == "cuda":
        from ktransformers.place import attach

        attach(model, policy="stream")
    names = ["gate_up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.randint(0, 90, (1, 24), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # CUDA graphs are captured at the third occurrence of a pass.
    for _ in range(4):
        step()
    entered.install()
    entered.armed = True
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    entered.armed = False


def trace_command(entered: EnteredFiles, out: Path, words: list[str]) -> None:
    """A command of `kt` in this process. SIGUSR1 begins the trace, SIGUSR2 writes it; `kt train` is traced whole."""
    entered.install()
    signal.signal(signal.SIGUSR1, lambda *_: setattr(entered, "armed", True))
    signal.signal(signal.SIGUSR2, lambda *_: entered.write(out))
    entered.armed = words[0] == "train"
    from ktransformers.cli.main import main

    sys.argv = ["kt", *words]
    main()


def child(operation: str, out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", operation, "--out", str(out), "--", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def run_token(out: Path, folder: Path) -> None:
    from fingerprint_inputs import adapt
    from transformers import AutoModelForCausalLM

    model = make_model(folder)
    names = ["gate_up_proj", "down_proj"]
    adapted = adapt(AutoModelForCausalLM.from_pretrained(model), target_modules=["q_proj"], target_parameters=names)
    adapted.save_pretrained(folder / "adapter")
    server = child(
        "token", out, "serve", str(model), "--port", "0", "--json", "--lora-paths", f"one={folder / 'adapter'}"
    )
    assert server.stdout is not None
    address = json.loads(server.stdout.readline())
    body = {
        "model": "one", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True,
    }  # fmt: skip
    for round_ in range(3):
        if round_ == 2:
            os.kill(address["pid"], signal.SIGUSR1)
            time.sleep(0.5)
        request = urllib.request.Request(
            f"{address['url']}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
    os.kill(address["pid"], signal.SIGUSR2)
    while not (out.is_file() and out.read_text().endswith("}")):
        time.sleep(0.1)
    server.terminate()
    server.wait()


def run_adapter(out: Path, folder: Path) -> None:
    recipe = folder / "recipe.json"
    settings = RECIPE | {"model_name_or_path": str(make_model(folder)), "output_dir": str(folder / "run")}
    recipe.write_text(json.dumps(settings))
    if child("adapter", out, "train", str(recipe)).wait():
        raise SystemExit("kt train failed")


def measure(operation: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "files.json"
        if operation == "token":
            run_token(out, folder)
        elif operation == "adapter":
            run_adapter(out, folder)
        elif child(operation, out).wait():
            raise SystemExit(f"{operation} failed")
        files: dict[str, str] = json.loads(out.read_text())
        return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("operations", nargs="*", default=["batch", "token", "adapter"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given, words = parser.parse_known_args()
    if given.child:
        entered = EnteredFiles()
        if given.child in ("batch", "step"):
            trace_training(entered, "cpu" if given.child == "batch" else "cuda")
            entered.write(given.out)
            return
        try:
            trace_command(entered, given.out, [word for word in [*given.operations, *words] if word != "--"])
        finally:
            if given.child == "adapter":
                entered.write(given.out)
        return
    document: dict[str, Any] = {"bench": "trace_path", "command": " ".join(sys.argv)}
    for operation in given.operations:
        files = measure(operation)
        lines = {path: len((PACKAGE / path).read_text().splitlines()) for path in files}
        print(f"{operation}: {len(files)} files, {sum(lines.values())} lines")
        for path, function in files.items():
            print(f"  {path:<44} {lines[path]:>5}  {function}")
        document[operation] = {"files": files, "lines": sum(lines.values())}
    print(json.dumps(document))
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
