"""A workload as far as memory and time depend on it: a training step of LoRA, or serving.

`Choice` is a configuration to run it with: the format of the experts, the number of GPUs, the placement policy and the
residents. What this version cannot execute is named in `Choice.missing`; such plans are shown only on request.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import DEFAULT_POLICY, POLICIES
from ktransformers.plan.formats import format_of, packed_expert_bytes
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.modes import SPLIT

TRAINING_POLICIES = tuple(policy for policy in POLICIES if policy != SPLIT)
PLANNED_POLICIES = ("auto", "cpu", "stream", "resident")  # policies that `kt plan` compares
GRAPH_MAX_TOKENS, GRAPH_MAX_SEQUENCE, GRAPH_PIECE_TOKENS = 4096, 2048, 1024  # limits of nn/attention_graphs


def check_training_policy(
    name: str, policy: str, remedy: str = "use auto or stream; split is a policy of serving"
) -> None:
    """`name`: where the policy was given."""
    if policy == SPLIT:
        expected = "in training one of " + ", ".join(TRAINING_POLICIES)
        raise InputError(name, policy, expected, remedy)


@dataclass(frozen=True)
class Training:
    """One optimiser step of LoRA training."""

    tokens: int = 2048  # T, of one pass through the model
    tokens_per_step: int = 2048  # of one optimiser step
    sequence: int = 2048  # tokens that attend to each other
    rank: int = 8
    adapts_experts: bool = True
    adapts_attention: bool = True
    checkpointing: bool = True  # activations are recomputed in backward
    retain: bool = False  # experts are not recomputed: gate and up are kept
    trained_bytes: int = 4  # per trained number; 2 with pure_bf16
    rest_bytes: int = 2  # per dense value in computation; weights of the checkpoint may have fewer
    saves: int = 1  # training checkpoints kept on disk
    touched: float = 1.0  # share of a layer's experts that the tokens of one sequence use; 1: uniform routing
    labelled: float = 1.0  # largest share of tokens with a label in a pass; 1: an upper bound if the data is unknown
    labelled_mean: float | None = None  # mean of that share over the passes, which the time follows; None: `labelled`
    loss_bytes: int | None = None  # of the loss on a GPU; None: TRL's chunked loss
    graphs: bool = True  # attention on a GPU uses CUDA graphs where possible (modeling/attention_graphs/replay.py)
    linear_format: str | None = None  # of dense linear layers; KEEP: as in the checkpoint; None: not quantized

    def __post_init__(self) -> None:
        if not self.adapts_experts and not self.adapts_attention:
            raise InputError("lora", "nothing to adapt", "experts, attention or both")
        for name in ("tokens", "tokens_per_step", "sequence", "rank"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "at least 1")
        for name in ("touched", "labelled", "labelled_mean"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise InputError(name, share, "more than 0 and at most 1")

    @property
    def batches(self) -> float:
        """Passes through the model in one step."""
        return max(1.0, self.tokens_per_step / self.tokens)

    def uses_attention_graphs(self, choice: Choice) -> bool:
        """Whether attention is replayed from CUDA graphs."""
        fits = self.tokens <= GRAPH_MAX_TOKENS and self.sequence <= GRAPH_MAX_SEQUENCE
        return self.graphs and self.checkpointing and choice.uses_engine and fits

    @property
    def labelled_tokens(self) -> int:
        """Tokens of one pass that have a label, at most."""
        return max(1, round(self.labelled * self.tokens))

    @property
    def mean_labelled_tokens(self) -> int:
        """Tokens of one pass that have a label, on average."""
        return max(1, round((self.labelled_mean or self.labelled) * self.tokens))


@dataclass(frozen=True)
class Serving:
    """Serving `sequences` requests at a time."""

    context: int = 8192  # maximal tokens of one sequence in the KV cache
    prompt: int = 1024  # tokens of a request
    sequences: int = 1
    rest_bytes: int = 2
    linear_format: str | None = None  # of dense linear layers; KEEP: as in the checkpoint; None: not quantized
    fp8_cache: bool = False  # keys and values in FP8

    def __post_init__(self) -> None:
        for name in ("context", "prompt", "sequences"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "at least 1")
        if self.prompt > self.context:
            raise InputError("prompt", self.prompt, f"at most the context, {self.context}")

    @property
    def tokens(self) -> int:
        """Maximal tokens of one pass."""
        return self.prompt


Work = Training | Serving


@dataclass(frozen=True)
class Choice:
    """A configuration to run a workload with."""

    format: str = "bf16"
    gpus: int = 0  # that hold everything but the experts; 0: everything is on the CPU
    residents: int = 0  # experts per layer that are resident on a GPU
    policy: str = DEFAULT_POLICY  # placement policy of the other experts (ground/options/placement.py)
    linear_format: str | None = None  # of dense linear layers; KEEP: as in the checkpoint; None: not quantized

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InputError("policy", self.policy, "one of " + ", ".join(POLICIES))
        if not self.gpus and (self.policy != "cpu" or self.residents):
            raise InputError("gpus", 0, f"a GPU for the policy {self.policy}")

    @property
    def uses_engine(self) -> bool:
        """Some experts or all are computed on the GPU."""
        return self.policy != "cpu" or self.residents > 0

    @property
    def missing(self) -> tuple[str, ...]:
        """What this version cannot execute of it."""
        return () if format_of(self.format).executable else (f"experts in {self.format}",)


def expert_bytes(model: ModelShape, choice: Choice) -> int:
    """Bytes of one packed expert."""
    return packed_expert_bytes(model.hidden, model.intermediate, model.gated, format_of(choice.format))
