"""Preference losses with LLaMA-Factory's definitions.

Log-probabilities are sums over an answer's tokens `[pairs]`; orpo, simpo and ipo use means. orpo and simpo need no
reference. `pref_ftx` adds the mean negative log-probability of the chosen answer. Every loss has one value per pair, so
that a batch can be split into parts and weighted.

The reference is the base: the model with its adapter disabled, so no copy is needed. Its log-probabilities are computed
once and cached in the output directory under a hash of what they depend on (base and experts, dtype, tokens): a resumed
run reads them, another dataset or base computes its own. Rows are batched by length, so that the experts get large
batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ktransformers.ground.files import sync
from ktransformers.parallel.sharding import on_any_rank
from ktransformers.train.batches import split_by_budget
from ktransformers.train.data.render import IGNORE_INDEX
from ktransformers.train.files import reporting_full_disk
from ktransformers.train.finite import NotFiniteError
from ktransformers.train.settings import PreferenceSettings

REFERENCE_FREE_LOSSES = ("orpo", "simpo")
REFERENCE_FILE = "kt_reference.safetensors"
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


@dataclass(frozen=True)
class AnswerLogprobs:
    """Summed log-probabilities and token counts of the chosen and the rejected answers, each `[pairs]`."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    def mean(self) -> tuple[Tensor, Tensor]:
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def pair_losses(
    policy: AnswerLogprobs, reference: tuple[Tensor, Tensor] | None, settings: PreferenceSettings
) -> Tensor:
    """`reference` holds the same sums under the base, None for losses without a reference."""
    beta, loss = settings.pref_beta, settings.pref_loss
    chosen, rejected = policy.mean()
    if loss == "orpo":
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        losses = -chosen - beta * F.logsigmoid(odds)
    elif loss == "simpo":
        losses = -F.logsigmoid(beta * (chosen - rejected) - settings.simpo_gamma)
    else:
        assert reference is not None
        base_chosen, base_rejected = reference
        if loss == "ipo":
            base_chosen, base_rejected = base_chosen / policy.chosen_tokens, base_rejected / policy.rejected_tokens
            margin = (chosen - rejected) - (base_chosen - base_rejected)
            losses = (margin - 1 / (2 * beta)) ** 2
        else:
            margin = (policy.chosen - policy.rejected) - (base_chosen - base_rejected)
            if loss == "hinge":
                losses = torch.relu(1 - beta * margin)
            else:
                flipped = settings.dpo_label_smoothing
                losses = -F.logsigmoid(beta * margin) * (1 - flipped) - F.logsigmoid(-beta * margin) * flipped
    return losses - settings.pref_ftx * chosen if settings.pref_ftx else losses


def implicit_rewards(
    policy: AnswerLogprobs, reference: tuple[Tensor, Tensor] | None, beta: float
) -> tuple[Tensor, Tensor]:
    """The implicit rewards of the chosen and rejected answers, for the log."""
    if reference is None:
        chosen, rejected = policy.mean()
        return beta * chosen.detach(), beta * rejected.detach()
    return beta * (policy.chosen - reference[0]).detach(), beta * (policy.rejected - reference[1]).detach()


@torch.no_grad()
def reference_logprobs(trainer: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of the (chosen, rejected) answers of a collated batch, with the adapter disabled."""
    device = trainer.accelerator.device
    batch = {key: value.to(device) for key, value in batch.items()}
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORE_INDEX)
    with trainer.model.disable_adapter(), trainer.accelerator.autocast():
        outputs = trainer.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=labels,
            use_cache=False,
            fused_lm_head=True,
        )
    chosen, rejected = outputs.log_probs.float().sum(1).cpu().chunk(2)
    return chosen, rejected


def _cache_key(base: str, dtype: str, datasets: dict[str, Any]) -> str:
    digest = hashlib.sha256(f"{base} {dtype}".encode())
    for name, dataset in datasets.items():
        digest.update(name.encode())
        for row in dataset:
            for column in ("prompt_ids", "chosen_ids", "rejected_ids"):
                digest.update(torch.tensor(row[column], dtype=torch.int32).numpy().tobytes())
                digest.update(b"|")
    return digest.hexdigest()


def _read(path: Path, key: str) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("key") != key:
            return None
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _compute(trainer: Any, dataset: Any, budget: int, report: Callable[[int, int], None]) -> list[Tensor]:
    rows = list(dataset)
    lengths = [len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]
    columns = [torch.zeros(len(rows)) for _ in REFERENCE_COLUMNS]
    done = 0
    for part in split_by_budget([2 * length for length in lengths], budget):
        batch = trainer.data_collator([rows[index] for index in part])
        for column, values in zip(columns, reference_logprobs(trainer, batch), strict=True):
            column[torch.tensor(part)] = values
        done += len(part)
        report(done, len(rows))
    return columns


def _check_finite(logprobs: dict[str, Tensor]) -> None:
    """Raises before a reference that is not finite is cached: the loss of its pairs would be NaN in every run."""
    for name, values in logprobs.items():
        bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        if bad:
            part, column = name.split(".")
            rows = ", ".join(str(row) for row in bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
            raise NotFiniteError(
                f"reference: {column} of {len(bad)} {part} rows is not finite, rows {rows}; the base gives NaN or "
                "infinite log-probabilities for them: look at these rows and at the weights of the base"
            )


def add_reference(trainer: Any, base: str, budget: int, report: Callable[[int, int], None]) -> bool:
    """Adds the reference columns to the trainer's datasets; True if they had to be computed."""
    datasets = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
    datasets = {name: dataset for name, dataset in datasets.items() if dataset is not None}
    path = Path(trainer.args.output_dir) / REFERENCE_FILE
    dtype = next(trainer.model.parameters()).dtype if trainer.sharding is None else trainer.sharding.compute_dtype
    key = _cache_key(base, str(dtype), datasets)
    logprobs = _read(path, key)
    if trainer.args.world_size > 1 and on_any_rank([logprobs is None])[0]:
        logprobs = None  # all ranks compute it, because a sharded model is gathered by all
    computed = logprobs is None
    if logprobs is None:
        was_training = trainer.model.training
        trainer.model.eval()
        logprobs = {
            f"{name}.{column}": values
            for name, dataset in datasets.items()
            for column, values in zip(REFERENCE_COLUMNS, _compute(trainer, dataset, budget, report), strict=True)
        }
        trainer.model.train(was_training)
        _check_finite(logprobs)
        if trainer.args.should_save:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            with reporting_full_disk(path.parent):
                save_file(logprobs, temporary, metadata={"key": key})
                sync(temporary)
                temporary.replace(path)
        trainer.accelerator.wait_for_everyone()
    for name, dataset in datasets.items():
        for column in REFERENCE_COLUMNS:
            dataset = dataset.add_column(column, logprobs[f"{name}.{column}"].tolist())
        if name == "train":
            trainer.train_dataset = dataset
        else:
            trainer.eval_dataset = dataset
    return computed
