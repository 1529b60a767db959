"""`kt model check`: whether a release is read, computed and tokenized as stock transformers does it.

Files, names, shapes and scales are checked for the whole model, from headers and small tensors. Numbers are compared
on its first layers: a folder of links with a shorter config.json is opened by `load_model` and by stock transformers,
both in float32, and log-probabilities of the same text are subtracted. A quantized release, which stock transformers
does not read on a CPU, is dequantized here first, so that a wrong scale shows in the generated text alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.checkpoint import Shards
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.verify import verify
from ktransformers.ground import system
from ktransformers.ground.errors import KTError
from ktransformers.ground.files import read_json_object, write_json
from ktransformers.modeling.load import load_model
from ktransformers.modeling.pretrained import read_tokenizer
from ktransformers.plan import ModelShape, open_shape
from ktransformers.plan.model_shape import SCALE_ENDINGS
from ktransformers.quant.origin import Origin
from ktransformers.quant.plain import expert_tensors
from ktransformers.quant.random_model import cut_config

TEXT = (
    "The experts of a mixture are small networks, and a router sends each token to a few of them. 1 + 1 = 2; été, 你好."
)
NEW_TOKENS = 20
MEMORY_SHARE = 0.5  # of the free memory, for the layers in float32, twice
MOST_LAYERS = 6
MAX_DIFFERENCE = 0.02  # of log-probabilities, on average: float32 leaves 1e-4


@dataclass(frozen=True)
class CheckResult:
    name: str
    detail: str
    faults: tuple[str, ...] = ()
    seconds: float = 0.0


def check_model(folder: Path, layers: int | None = None) -> Iterator[CheckResult]:
    """Results in order; a part that raises is a fault, and later parts that need it are left out."""
    steps: list[tuple[str, Callable[[], tuple[str, list[str]]]]] = [
        ("files", lambda: _check_files(folder)),
        ("names and shapes", lambda: _check_names(folder)),
        ("scales", lambda: _check_scales(folder)),
        ("tokenizer", lambda: _check_tokenizer(folder)),
        ("template", lambda: _check_template(folder)),
        ("numbers", lambda: _check_numbers(folder, layers)),
    ]
    for name, step in steps:
        begun = time.perf_counter()
        try:
            detail, faults = step()
        except (KTError, OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            detail, faults = "", [" ".join(str(error).split()) or type(error).__name__]
        yield CheckResult(name, detail, tuple(faults), time.perf_counter() - begun)
        if faults and name in ("files", "names and shapes"):
            return


def _check_files(folder: Path) -> tuple[str, list[str]]:
    checked = verify(folder, hashes=False)
    errors = [f"{one.file}: {one.text}" for one in checked.findings if one.level == "error"]
    return f"{checked.files} files, {checked.tensors} tensors, {checked.bytes / 1e9:.2f} GB", errors


def _check_names(folder: Path) -> tuple[str, list[str]]:
    """Experts of every layer against the model's modules; the others where the release has the model's names."""
    if is_packed(folder):
        shape = open_shape(str(folder))
        return f"{shape.expert_layers} packed layers of {shape.experts} experts", []
    origin = Origin(folder)
    experts = {layer.module for layer in origin.layers}
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in origin.meta_model().named_parameters()
        if name.rpartition(".")[0] not in experts
    }
    stored = {tensor.name: tuple(tensor.shape) for tensor in origin.rest()}
    known = expected.keys() & stored.keys()
    faults = [f"{name}: shape {list(stored[name])}, not {list(expected[name])}" for name in sorted(known)
              if stored[name] != expected[name]]  # fmt: skip
    missing = sorted(expected.keys() - stored.keys())
    if len(missing) < 0.1 * len(expected):  # otherwise the release has other names, which transformers converts
        faults += [f"{name}: no such tensor" for name in missing]
    formats = sorted({spec for layer in origin.layers for spec in layer.formats.values()})
    origin.release()
    return f"{len(experts)} layers of experts in {', '.join(formats)}, {len(stored)} other tensors", faults


def _check_scales(folder: Path) -> tuple[str, list[str]]:
    if is_packed(folder):
        return "packed: experts are compared with their checksums when they are read", []
    shards, faults, count = Shards.of_directory(folder), list[str](), 0
    for name in shards.names:
        if name.rpartition(".")[2] not in SCALE_ENDINGS or shards.dtype(name) not in ("F32", "BF16", "F16"):
            continue
        scales, count = shards.read(name).float(), count + 1
        if not bool(scales.isfinite().all()):
            faults.append(f"{name}: a scale that is not finite")
        elif not bool(scales.any()):
            faults.append(f"{name}: all scales are 0")
    shards.release()
    return f"{count} tensors of scales" if count else "none: weights are dense", faults


def _check_tokenizer(folder: Path) -> tuple[str, list[str]]:
    tokenizer, vocabulary = read_tokenizer(folder), open_shape(str(folder)).vocabulary
    ids, faults = tokenizer.encode(TEXT, add_special_tokens=False), list[str]()
    if max(ids, default=0) >= vocabulary:
        faults.append(f"token {max(ids)}, and the model has {vocabulary}")
    if (text := tokenizer.decode(ids)).strip() != TEXT:
        faults.append(f"a text of {len(TEXT)} characters comes back as {text[:80]!r}")
    return f"{len(tokenizer)} tokens, {len(TEXT)} characters are {len(ids)}", faults


def _check_template(folder: Path) -> tuple[str, list[str]]:
    tokenizer = read_tokenizer(folder)
    if not tokenizer.chat_template:
        return "none: the model completes text", []
    message = {"role": "user", "content": "Say the word canary."}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return f"{len(text)} characters for one message", [] if "canary" in text else ["it leaves the message out"]


def layers_that_fit(shape: ModelShape, dense: int) -> int:
    """At most MOST_LAYERS, at least one with experts behind `dense` layers."""
    expert = shape.experts * shape.expert_numbers
    free = MEMORY_SHARE * system.memory().available - 16 * shape.embedding
    return max(dense + 1, min(shape.layers, MOST_LAYERS, int(free / (8 * (shape.rest_per_layer + expert)))))


@contextmanager
def first_layers(folder: Path, layers: int) -> Iterator[Path]:
    """The folder with so many layers: links, and a config.json of its own."""
    with tempfile.TemporaryDirectory(prefix="kt-check-") as temporary:
        view = Path(temporary) / folder.resolve().name
        view.mkdir()
        for entry in folder.iterdir():
            if entry.name != "config.json":
                (view / entry.name).symlink_to(entry.resolve())
        write_json(view / "config.json", cut_config(read_json_object(folder / "config.json"), layers)[0])
        yield view


def _check_numbers(folder: Path, layers: int | None) -> tuple[str, list[str]]:
    shape = open_shape(str(folder))
    count = min(shape.layers, layers or layers_that_fit(shape, shape.layers - shape.expert_layers))
    ids = torch.tensor([read_tokenizer(folder).encode(TEXT, add_special_tokens=False)]) % shape.vocabulary
    if count == shape.layers:
        return _compare(folder, folder, ids, f"all {count} layers")
    if is_packed(folder):
        return f"a packed model of {shape.layers} layers, of which {count} fit: check the release itself", []
    with first_layers(folder, count) as view:
        return _compare(view, folder, ids, f"the first {count} of {shape.layers} layers")


def _compare(view: Path, folder: Path, ids: Tensor, what: str) -> tuple[str, list[str]]:
    model: Any = load_model(view, dtype=torch.float32, precision="bf16" if is_packed(view) else "f32")
    with torch.no_grad():
        ours = model(ids).logits.float().log_softmax(-1)
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
    del model
    faults = [] if bool(ours.isfinite().all()) else ["log-probabilities that are not finite"]
    text = read_tokenizer(folder).decode(answer)
    detail = f"{what}; {len(answer)} new tokens: {text[:60]!r}"
    if is_packed(view):
        return f"{detail}; stock transformers reads no packed model", faults
    with torch.no_grad():
        stock = _stock_model(view)(ids).logits.float().log_softmax(-1)
    difference = (ours - stock).abs()
    mean, most = float(difference.mean()), float(difference.max())
    if not mean <= MAX_DIFFERENCE:
        faults.append(f"log-probabilities differ from stock transformers by {mean:.3g} on average, {most:.3g} at most")
    return f"{detail}; {mean:.1e} from stock transformers", faults


def _stock_model(view: Path) -> Any:
    """In float32: from the files, or from dequantized tensors where they are quantized."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from ktransformers.modeling.load import load_config

    config = load_config(view)
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING if causal else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    stock, origin = classes[type(config)], Origin(view)
    if origin.quantisation is None:
        return stock.from_pretrained(view, dtype=torch.float32)
    names = origin.meta_model().state_dict().keys()
    dense = [tensor for tensor in origin.rest() if tensor.name in names]
    tensors = [*dense, *(tensor for layer in origin.layers for tensor in expert_tensors(layer))]
    state = {tensor.name: tensor.read() for tensor in tensors}
    return stock.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)


def report_lines(results: list[CheckResult]) -> list[str]:
    """A line for each part, and one for each of its faults."""
    lines = []
    for result in results:
        state = "FAULT" if result.faults else "ok"
        lines.append(f"{state:<6} {result.name:<17} {result.detail} ({result.seconds:.0f} s)".replace("   (", " ("))
        lines += [f"       {result.name}: {fault}" for fault in result.faults]
    return lines
