"""What works for a model family of transformers, found on a tiny random model: it loads, trains, takes packed rows and
is served with the numbers of the stock model, or is refused with an error of ours. The table on docs/models.md is made
of these results (scripts/model_table.py)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.graphs.step_graphs import uncaptured_family
from ktransformers.serve.scheduler.forward import Chunk, Forward, SequentialForward, make_forward
from ktransformers.train.model import build_lora_config, check_readable
from ktransformers.train.packing import packing_error, require_masked_layers, separate_rows
from ktransformers.train.reachable import trainable_targets
from ktransformers.train.settings import LoraSettings
from tests.support.tiny_models import FAMILIES, NESTED_FAMILIES, OTHER_FAMILIES, RECURRENT_LAYERS, build, save, tokens

ALL_FAMILIES = (*FAMILIES, *NESTED_FAMILIES, *OTHER_FAMILIES)
LOGIT_ERROR = 1e-4  # float32 on both sides
GRADIENT_ERROR = 1e-3
PROMPT, NEW_TOKENS = 40, 8
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE_HEAD = "| family | loads | trains | packing | served | graphs |\n|---|---|---|---|---|---|\n"
# Folders of transformers with experts that are no text generators of one decoder.
NOT_LANGUAGE_MODELS = {
    "nllb_moe": "an encoder and a decoder",
    "openai_privacy_filter": "classifies tokens",
    "switch_transformers": "an encoder and a decoder",
    "vitpose_backbone": "finds poses in images",
}


@dataclass(frozen=True)
class FamilyResult:
    family: str
    loads: str
    trains: str = "-"
    packing: str = "-"
    served: str = "-"
    graphs: str = "-"

    def row(self) -> str:
        return f"| {' | '.join(asdict(self).values())} |\n"


def _refusal(error: InputError) -> str:
    """What an error of ours says was given, without numbers and long names."""
    given = str(error).split(", expected")[0].split("given ")[1]
    given = re.sub(r"^\w+, (which|whose) ", "", given)
    return "no: " + re.sub(r" by [\d.e+-]+| \(it looks.*\)", "", given)


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


def _build(family: str) -> Any:
    """With layers of every kind that releases have."""
    return build(family, **RECURRENT_LAYERS.get(family, {}))


def _stock(directory: Path, family: str) -> Any:
    config = _build(family).config
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    return auto.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()


def _check_load(model: Any, stock: Any) -> str:
    with torch.no_grad():
        error = _relative(model(input_ids=tokens()).logits, stock(input_ids=tokens()).logits)
    return "yes" if error < LOGIT_ERROR else f"logits differ by {error:.1g}"


def _check_training(model: Any, stock: Any) -> str:
    """Gradients of LoRA on attention and experts, `lora_target: all`, against stock PEFT on the stock model."""
    settings = LoraSettings(lora_rank=4)
    targets, notes = trainable_targets(model, settings)
    gradients: list[dict[str, torch.Tensor]] = []
    factors: dict[str, torch.Tensor] = {}
    config: LoraConfig = build_lora_config(model, targets, settings)
    stock.config._is_quantized = True  # jamba calls one of its projections only then, as it does with our quantizer
    for one in (stock, model):
        adapted = get_peft_model(one, config)
        check_readable(adapted)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                fresh = torch.randn(parameter.shape, generator=generator) / 8
                parameter.data = factors.setdefault(name, fresh.bfloat16().float())
        adapted(input_ids=tokens(), labels=tokens()).loss.backward()
        found = {name: one.grad for name, one in adapted.named_parameters() if one.grad is not None}
        gradients.append(found)
    if gradients[0].keys() != gradients[1].keys() or not any("experts" in name for name in gradients[0]):
        return "other modules than stock"
    error = max(_relative(gradients[1][name], gradients[0][name]) for name in gradients[0])
    if not error < GRADIENT_ERROR:
        return f"gradients differ by {error:.1g}"
    left_out = re.findall(r"(\w+) \(\d+\)", " ".join(notes))
    return f"yes, without {', '.join(left_out)}" if left_out else "yes"


def _check_packing(model: Any) -> str:
    try:
        require_masked_layers(model)
    except InputError as error:
        return "no: " + re.split(r"which has |, expected", str(error))[1]
    separate_rows(model)
    return "yes" if packing_error(model) < LOGIT_ERROR else "rows see each other"


def served_tokens(forward: Forward | SequentialForward, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, the prompt in uneven chunks."""
    slot, chunk_size, sequence, done = KVSlot.alone(len(prompt) + count), 33, list(prompt), 0
    while len(sequence) < len(prompt) + count:
        piece = sequence[done : done + chunk_size]
        (result,) = forward.run([Chunk(slot, piece, done, None, greedy=True)])
        done += len(piece)
        if done == len(sequence):
            assert result is not None and result.token is not None
            sequence.append(result.token)
    return sequence[len(prompt) :]


def _check_serving(model: Any, stock: Any) -> tuple[str, str]:
    """How it is served, and whether its decode steps are captured in CUDA graphs."""
    try:
        forward = make_forward(model)
        forward.check_against_stock()
    except InputError as error:
        return _refusal(error), "-"
    reason = uncaptured_family(forward) if forward.batched else "-"
    graphs = f"no: {reason}" if reason.strip("-") else reason or "yes"
    prompt = tokens(1, PROMPT)
    with torch.no_grad():
        made = stock.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    if served_tokens(forward, prompt[0].tolist(), NEW_TOKENS) != made[0, PROMPT:].tolist():
        return "other tokens than stock", "-"
    return "batched" if isinstance(forward, Forward) else "one sequence at a time", graphs


def check_family(family: str, directory: Path) -> FamilyResult:
    """Only errors of ours are caught: any other is a failure of the test."""
    save(_build(family), directory)
    try:
        model: Any = load_model(directory, dtype=torch.float32)
    except InputError as error:
        return FamilyResult(family, _refusal(error))
    loads = _check_load(model, _stock(directory, family))
    packing = _check_packing(model)
    try:
        trains = _check_training(load_model(directory, dtype=torch.float32), _stock(directory, family))
    except InputError as error:
        trains = _refusal(error)
    served, graphs = _check_serving(load_model(directory, dtype=torch.float32), _stock(directory, family))
    return FamilyResult(family, loads, trains, packing, served, graphs)


def read_table() -> dict[str, str]:
    """Family -> its row on the page."""
    rows = PAGE.read_text().partition(TABLE_HEAD)[2].partition("\n\n")[0].splitlines(keepends=True)
    return {row.split(" | ")[0].removeprefix("| "): row if row.endswith("\n") else f"{row}\n" for row in rows}


def write_table(rows: dict[str, str]) -> None:
    before, _, rest = PAGE.read_text().partition(TABLE_HEAD)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(before + TABLE_HEAD + "".join(rows[family] for family in sorted(rows)) + "\n" + after)
