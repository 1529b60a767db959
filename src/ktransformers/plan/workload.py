"""What is to be done with a model, as far as memory and time depend on it: one training step, or serving.

`Choice` is how it is done: the format of the experts, which of them lie on a GPU, how many GPUs are used. What this
version cannot execute says so in `missing`, and a plan that needs it is shown only when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.errors import InputError
from ktransformers.plan.formats import format_of, packed_expert_bytes
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.modes import MODES

POLICIES = ("auto", *MODES)  # of `kt_place`, `--kt-place` and KT_PLACE: one mode for every pass, or auto
PLANNED = ("auto", "cpu", "stream", "resident")  # policies that a plan compares by itself
DEFAULT = "cpu"  # policy of `place.attach` and of a plan where none is given
REPLAYED_TOKENS, REPLAYED_SEQUENCE, PIECE = 4096, 2048, 1024  # limits of nn/attention_graphs


@dataclass(frozen=True)
class Training:
    """A step of LoRA."""

    tokens: int = 2048  # T, that pass through the model at once
    tokens_per_step: int = 2048  # of one optimiser step
    sequence: int = 2048  # tokens that see each other
    rank: int = 8
    adapts_experts: bool = True
    adapts_attention: bool = True
    checkpointing: bool = True  # activations are computed again in backward
    retain: bool = False  # but not the experts': gate and up are kept
    trained_bytes: int = 4  # of a trained number; 2 with pure_bf16
    rest_bytes: int = 2  # of a number that is not trained and no expert's
    saves: int = 1  # checkpoints that stay on disk
    touched: float = 1.0  # share of a layer's experts that one sequence's tokens go to; 1: routes are uniform
    labelled: float = 1.0  # share of the tokens that meet the vocabulary; 1: all, which is safe where data is not known
    loss_bytes: int | None = None  # on a GPU, at once; None: TRL's loss in tiles
    graphs: bool = True  # attention on a GPU is replayed where it can be (nn/attention_graphs/replay.py)

    def __post_init__(self) -> None:
        if not self.adapts_experts and not self.adapts_attention:
            raise InputError("lora", "nothing to adapt", "experts, attention or both")
        for name in ("tokens", "tokens_per_step", "sequence", "rank"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "at least 1")
        for name in ("touched", "labelled"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(name, getattr(self, name), "more than 0 and at most 1")

    @property
    def batches(self) -> float:
        """Passes through the model in one step."""
        return max(1.0, self.tokens_per_step / self.tokens)

    def replays(self, choice: Choice) -> bool:
        """Whether Python launches attention once, not in every pass."""
        fits = self.tokens <= REPLAYED_TOKENS and self.sequence <= REPLAYED_SEQUENCE
        return self.graphs and self.checkpointing and choice.uses_engine and fits

    @property
    def scored(self) -> int:
        """Of the tokens at once those that meet the vocabulary."""
        return max(1, round(self.labelled * self.tokens))


@dataclass(frozen=True)
class Serving:
    """Answers to `sequences` requests at a time."""

    context: int = 8192  # tokens of one sequence in the cache, at most
    prompt: int = 1024  # tokens before the first answer
    sequences: int = 1
    rest_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("context", "prompt", "sequences"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "at least 1")
        if self.prompt > self.context:
            raise InputError("prompt", self.prompt, f"at most the context, {self.context}")

    @property
    def tokens(self) -> int:
        """That pass through the model at once, at most."""
        return self.prompt


Work = Training | Serving


@dataclass(frozen=True)
class Choice:
    format: str = "bf16"
    gpus: int = 0  # that hold everything but the experts; 0: the CPU does
    residents: int = 0  # experts of each layer that have a copy on a GPU
    policy: str = "cpu"  # where the others are computed (place/options.py)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InputError("policy", self.policy, "one of " + ", ".join(POLICIES))
        if not self.gpus and (self.policy != "cpu" or self.residents):
            raise InputError("gpus", 0, f"a GPU for the policy {self.policy}")

    @property
    def uses_engine(self) -> bool:
        """Experts are computed on the GPU, some of them or all."""
        return self.policy != "cpu" or self.residents > 0

    @property
    def missing(self) -> tuple[str, ...]:
        """What this version lacks for it."""
        found = []
        if not format_of(self.format).executable:
            found.append(f"experts in {self.format}")
        return tuple(found)


def expert_bytes(model: ModelShape, choice: Choice) -> int:
    """One expert, packed."""
    return packed_expert_bytes(model.hidden, model.intermediate, model.gated, format_of(choice.format))
