"""TRL's SFT and DPO trainers, with each addition in one overridden method.

Checkpoints are written to a staging directory and renamed, with a manifest of their files (`checkpoints.py`). A loss,
gradient or weight that is not finite ends the run before it is used or saved (`finite.py`). A step may be split
by tokens (`batches.py`). B may have a higher learning rate than A (LoRA+). Pairs get LLaMA-Factory's losses
(`preference.py`), with the reference log-probabilities stored in the rows. TRL would copy an adapter that it is given
as the reference, so it gets a configuration and creates the adapter itself; the reference is the base. On a CPU the LM
head processes labelled rows only (`batches.py`). Several processes may hold parts of the model (`divided_trainer.py`).
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from trl import DPOTrainer, SFTTrainer  # type: ignore[attr-defined]

from ktransformers.ground.errors import KTError
from ktransformers.train import grouping
from ktransformers.train.arguments import step_shape
from ktransformers.train.batches import labelled_rows_only, split_pairs, split_step
from ktransformers.train.callbacks import GradientCheck
from ktransformers.train.checkpoints import find_problem, list_checkpoints, write_checkpoint_manifest
from ktransformers.train.data.render import IGNORE_INDEX
from ktransformers.train.divided_trainer import DividedModel
from ktransformers.train.expert_parallel import most_passes
from ktransformers.train.files import STAGING_DIR, reporting_full_disk, sync_tree, write_json
from ktransformers.train.finite import FiniteCheck
from ktransformers.train.preference import REFERENCE_FREE_LOSSES, AnswerLogprobs, implicit_rewards, pair_losses
from ktransformers.train.recipe import TrainRecipe
from ktransformers.train.settings import TrainSettings


class SavesCheckpoints:
    """Checkpoints are staged, checked and renamed."""

    settings: TrainSettings
    gradient_check: GradientCheck
    finite_check: FiniteCheck
    recipe: TrainRecipe
    _staging: Path | None = None

    def _get_output_dir(self: Any, trial: Any) -> str:
        return str(self._staging or self.args.output_dir)

    def _load_best_model(self: Any) -> None:
        best = Path(self.state.best_model_checkpoint)
        problem = find_problem(best, resumed=False)
        if problem is not None:
            raise KTError(f"{best}, the best checkpoint: {problem}; load_best_model_at_end cannot load it")
        super()._load_best_model()  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        self.finite_check.require_finite_weights(self.state.global_step)
        output = Path(self.args.output_dir)
        staging = output / STAGING_DIR
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._staging = staging
        self.gradient_check.share()
        try:
            with reporting_full_disk(output):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    self._publish(staging / name, output / name)
        finally:
            self._staging = None
            self.gradient_check.keep_own()
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _publish(self: Any, staged: Path, final: Path) -> None:
        best = self.state.best_model_checkpoint
        if best and Path(best).parent == staged.parent:
            self.state.best_model_checkpoint = str(final.parent / Path(best).name)
            self.state.save_to_json(str(staged / "trainer_state.json"))
        write_json(staged / "kt_gradients.json", self.gradient_check.state())
        write_json(staged / grouping.GROUPING_FILE, {"kt_tokens_per_batch": self.settings.experts.tokens_per_pass})
        write_checkpoint_manifest(staged, self.state.global_step, self.recipe)
        sync_tree(staged)
        shutil.rmtree(final, ignore_errors=True)
        staged.rename(final)
        limit = self.args.save_total_limit
        if limit and limit > 0:
            protected = {str(final), str(self.state.best_model_checkpoint)}
            removable = [path for path in list_checkpoints(final.parent) if str(path) not in protected]
            for path in removable[: max(0, len(removable) + len(protected - {"None"}) - limit)]:
                shutil.rmtree(path)


class Optimizes(DividedModel):
    """LoRA+, and a check of every gradient norm."""

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self.finite_check.record_norm(norm)
        return norm

    def build_optimizer(self: Any, model: Any) -> Any:
        ratio = self.settings.lora.loraplus_lr_ratio
        if self.optimizer is not None or (ratio is None and self.sharding is None):
            return super().build_optimizer(model)
        network = self.model if model is None else model
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, network)
        self.optimizer = optimizer_class(self._parameter_groups(network, options["lr"], ratio), **options)
        return self.optimizer

    def _parameter_groups(self: Any, network: Any, rate: float, ratio: float | None) -> list[dict[str, Any]]:
        """Without a ratio those of the HF Trainer for one process, which would split them by kinds of tensors: states
        in a checkpoint are numbered by groups."""
        decaying = set(self.get_decay_parameter_names(network))
        trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
        if ratio is None:
            parts = [[p for name, p in trained if (name in decaying) == decays] for decays in (True, False)]
            decays = (self.args.weight_decay, 0.0)
            return [{"params": part, "weight_decay": decay} for part, decay in zip(parts, decays, strict=True)]
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for name, parameter in trained:
            groups.setdefault(("lora_B" in name, name in decaying), []).append(parameter)
        return [
            {
                "params": parameters,
                "lr": rate * (ratio if is_b else 1.0),
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for (is_b, decays), parameters in groups.items()
        ]


class SplitsSteps:
    """A step in parts of a given number of tokens, whose losses are checked."""

    pairs = False

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        budget = self.settings.experts.tokens_per_pass
        step = self.state.global_step + 1
        if budget is None:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            self.finite_check.record_loss(loss, inputs, step)
            return loss
        if num_items_in_batch is None and not self.pairs:
            num_items_in_batch = inputs["labels"][:, 1:].ne(IGNORE_INDEX).sum()
        total: Tensor | float = 0.0
        parts = split_pairs(inputs, budget, step_shape(self.settings)[0]) if self.pairs else split_step(inputs, budget)
        passes = most_passes(self._network(), len(parts))
        for number in range(1, passes + 1):
            sync = self.accelerator.no_sync(model) if number < passes else contextlib.nullcontext()
            if number > len(parts):  # other ranks need this one's experts, and DDP its last pass
                with sync:
                    self._take_part(model, parts[0])
                continue
            part = parts[number - 1]
            with sync:
                loss = super().training_step(model, part, num_items_in_batch)  # type: ignore[misc]
            self.finite_check.record_loss(loss, part, step)
            total = total + loss
        return total

    def _take_part(self: Any, model: Any, part: dict[str, Any]) -> None:
        """A pass over a few tokens whose loss counts nothing, for the experts that this rank holds."""
        model.train()
        tokens = part["input_ids"][:1, :2]
        with self.compute_loss_context_manager():
            logits = model(input_ids=tokens, use_cache=False).logits
        self.accelerator.backward(logits.sum() * 0.0)


class OneRun(SavesCheckpoints, Optimizes, SplitsSteps):
    """What a trainer is told about its run, once after construction; it sends nothing and writes no card."""

    target_notes: tuple[str, ...]  # on modules that were left out of lora_target

    def begin_run(
        self: Any, settings: TrainSettings, gradient_check: GradientCheck, target_notes: tuple[str, ...] = ()
    ) -> None:
        self.settings, self.gradient_check, self.target_notes = settings, gradient_check, target_notes

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Disabled: output.py writes the card at the end."""

    def _send_telemetry(self) -> None:
        """Disabled: a run sends nothing to the network."""

    def guard(self: Any, finite_check: FiniteCheck, recipe: TrainRecipe) -> None:
        """Checks every step, and records the recipe in every checkpoint; called once after construction."""
        self.finite_check, self.recipe = finite_check, recipe
        finite_check.has_scaler = self.accelerator.scaler is not None
        self.add_callback(finite_check)


class SupervisedTrainer(OneRun, SFTTrainer):
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        full = self.label_smoother is not None or self.compute_loss_func is not None  # these need all logits
        if full or "labels" not in inputs or inputs["labels"].device.type != "cpu":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]
        with labelled_rows_only(self.accelerator.unwrap_model(self.model).get_base_model(), inputs) as chosen:
            return super().compute_loss(model, chosen, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]


class PreferenceTrainer(OneRun, DPOTrainer):
    pairs = True

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset  # rows are already tokenised

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        mode = "train" if self.model.training else "eval"
        settings = self.settings.preference
        mask = inputs["completion_mask"]
        outputs = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            labels=inputs["input_ids"].masked_fill(mask == 0, IGNORE_INDEX),
            use_cache=False,
            fused_lm_head=True,
            **({"output_router_logits": True} if self.aux_loss_enabled else {}),
        )
        sums = outputs.log_probs.float().sum(1)
        counts = mask[:, 1:].sum(1).clamp(min=1)
        policy = AnswerLogprobs(*sums.chunk(2), *counts.chunk(2))
        reference = None
        if settings.pref_loss not in REFERENCE_FREE_LOSSES:
            reference = inputs["ref_chosen_logps"].to(sums), inputs["ref_rejected_logps"].to(sums)
        losses = pair_losses(policy, reference, settings)
        loss = (losses * inputs["weights"].to(losses)).sum() if "weights" in inputs else losses.mean()
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        self._log_pair_metrics(mode, policy, reference, inputs)
        return (loss, outputs) if return_outputs else loss

    def _log_pair_metrics(self: Any, mode: str, policy: AnswerLogprobs, reference: Any, inputs: Any) -> None:
        chosen, rejected = implicit_rewards(policy, reference, self.settings.preference.pref_beta)
        gather = self.accelerator.gather_for_metrics
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": policy.chosen.detach(),
            "logps/rejected": policy.rejected.detach(),
        }
        for name, values in metrics.items():
            self._metrics[mode][name].append(gather(values).mean().item())
        if mode == "train":
            self._total_train_tokens += int(gather(inputs["attention_mask"].sum()).sum().item())
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
