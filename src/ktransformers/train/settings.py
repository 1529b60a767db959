"""The keys that `kt train` handles itself, as pydantic models: a field's name is the YAML key.

Keys have LLaMA-Factory's names and meanings. Sections group keys in the program; the file is flat except for
`kt_config`. Keys of the HF Trainer are not listed: `TrainSettings.trainer` holds the given ones, validated against the
installed transformers (`resolve.py`). Keys without effect, translated and refused keys are listed in `keys.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from ktransformers.ground.linear_storage import rest_word
from ktransformers.ground.options.field import CLOSED, option, options_of
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.train.keys import UNSUPPORTED_KEYS

Names = tuple[str, ...]


def split_names(value: Any) -> Any:
    """`"a, b"` and `["a", "b"]` give the same tuple."""
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


class TrainSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSettings(TrainSection):
    model_name_or_path: str = Field(description="a local Hugging Face directory, or a hub id")
    model_revision: str = Field("main", description="branch, tag or commit of a hub id")
    cache_dir: str | None = Field(None, description="where hub downloads go")
    trust_remote_code: bool = Field(False, description="run custom code of the tokenizer, if it has any")
    use_fast_tokenizer: bool = Field(True, description="the fast tokenizer, if available")
    flash_attn: Literal["auto", "disabled", "sdpa", "fa2", "fa3"] = Field(
        "auto", description="attention: the model's choice, eager, sdpa, or flash attention"
    )
    moe_aux_loss_coef: float | None = Field(
        None, ge=0, description="weight of the router's load-balancing loss; off by default"
    )
    disable_gradient_checkpointing: bool = Field(False, description="keep activations instead of recomputing them")
    use_reentrant_gc: bool = Field(False, description="reentrant gradient checkpointing")
    pure_bf16: bool = Field(False, description="bf16 without autocast, adapters included")


class LoraSettings(TrainSection):
    finetuning_type: Literal["lora"] = Field("lora", description="only adapters are trained")
    adapter_name_or_path: str | None = Field(None, description="an adapter to train further")
    lora_rank: int = Field(8, ge=1, description="rank of the adapter")
    lora_alpha: float | None = Field(None, gt=0, description="scale is alpha / rank; default twice the rank")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapter")
    lora_target: Names = Field(
        ("all",), description="`all` (attention, linear attention, routed experts) or names of modules"
    )
    use_rslora: bool = Field(False, description="scale by alpha / sqrt(rank)")
    loraplus_lr_ratio: float | None = Field(None, gt=0, description="learning rate of B over that of A")

    _names = field_validator("lora_target", mode="before")(split_names)


class DataSettings(TrainSection):
    stage: Literal["sft", "dpo"] = Field("sft", description="supervised, or preference pairs")
    dataset: Names = Field((), description="names of dataset_info.json, or files; several are mixed")
    eval_dataset: Names = Field((), description="the same, for evaluation")
    dataset_dir: str | None = Field(None, description="folder with dataset_info.json; `data`, then the shipped one")
    template: str | None = Field(None, description="chat template: a name or a Jinja file; default the tokenizer's own")
    default_system: str | None = Field(None, description="system message for rows that have none")
    enable_thinking: bool | None = Field(None, description="passed to the chat template")
    cutoff_len: int = Field(2048, ge=8, description="maximum tokens of a row; longer rows are truncated")
    train_on_prompt: bool = Field(False, description="loss on all tokens, not only on the assistant's")
    mask_history: bool = Field(False, description="loss on the last assistant turn only")
    packing: bool = Field(
        False, description="several rows in one sequence of cutoff_len, without attention between them"
    )
    neat_packing: bool = Field(False, description="same as packing, which always isolates rows")
    max_samples: int | None = Field(None, ge=1, description="maximum rows of each dataset")
    val_size: float = Field(0.0, ge=0, description="rows for evaluation: a count, or a fraction below 1")
    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = Field(
        "concat", description="how several datasets are combined"
    )
    interleave_probs: tuple[float, ...] = Field(
        (), description="sampling probabilities of the datasets when interleaved"
    )
    disable_shuffling: bool = Field(False, description="rows in the order of the files")
    identity_name: str | None = Field(None, description="fills {{name}} in the shipped `identity` data")
    identity_author: str | None = Field(None, description="fills {{author}} there")

    _names = field_validator("dataset", "eval_dataset", mode="before")(split_names)

    @field_validator("interleave_probs", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> Any:
        return tuple(float(word) for word in split_names(value))


class PreferenceSettings(TrainSection):
    pref_loss: Literal["sigmoid", "orpo", "simpo", "ipo", "hinge"] = Field("sigmoid", description="the loss on a pair")
    pref_beta: float = Field(0.1, gt=0, description="strength of the preference term (beta)")
    pref_ftx: float = Field(0.0, ge=0, description="weight of the supervised loss on the chosen answer")
    simpo_gamma: float = Field(0.5, description="margin of simpo")
    dpo_label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="assumed share of flipped labels (sigmoid)")


class ExpertSettings(TrainSection):
    use_kt: bool = Field(True, description="experts computed by ktransformers; must be true")
    kt_num_threads: int | None = Field(None, ge=1, description="threads for the experts, all NUMA nodes together")
    kt_threadpool_count: int | None = Field(None, ge=1, description="thread groups; default one per NUMA node")
    kt_backend: str | None = Field(
        None, description="auto, a CPU variant as in AMXBF16, or AMXInt8 or AMXInt4: experts are encoded on load"
    )
    kt_weight_path: str | None = Field(
        None,
        description="where the experts come from, if not from the model: a packed directory, GGUF, kt-kernel's files",
    )
    kt_expert_weight_format: Literal["auto", "bf16", "int8", "fp8", "rawint4", "mxfp4"] = Field(
        "auto", description="expected storage format of the experts; they are never converted"
    )
    precision: Literal["bf16", "f32"] = Field(
        "bf16", description="precision of expert arithmetic; f32 uses a float32 checkpoint without rounding"
    )
    kt_expert_parallel: int | None = Field(
        None, ge=1, description="ranks of a group that divide the experts, under torchrun; default all on every rank"
    )
    kt_expert_partition: Literal["experts", "layers", "frequency"] = Field(
        "experts", description="what a rank gets: ranges of ids, of layers, or even work by init_expert_location"
    )
    rest: str = Field("keep", description="dense (non-expert) linear layers: keep (as released), bf16, or a format")
    kt_cpu_activation: Literal["retain", "recompute"] | None = Field(
        None, description="with checkpointing: keep the experts' results, or recompute them"
    )
    kt_tokens_per_batch: int | Literal["auto", "off"] = Field(
        "auto",
        description="tokens of a step per pass: a number, off, or auto (planned); gradients as with accumulation",
    )

    @field_validator("rest")
    @classmethod
    def _rest(cls, value: str) -> str:
        return rest_word(value)

    @field_validator("kt_tokens_per_batch", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        text = str(value).strip().lower()  # YAML reads `off` as false
        if text in ("auto", "off"):
            return text
        if text == "false":
            return "off"
        if not text.isascii() or not text.isdigit():
            raise ValueError("a number of tokens, auto or off")
        return int(text) or "off"

    @property
    def tokens_per_pass(self) -> int | None:
        """None means batch by batch, also for `auto` until the planner has chosen."""
        return None if self.kt_tokens_per_batch in ("auto", "off") else int(self.kt_tokens_per_batch)


@dataclass(frozen=True, config=CLOSED)
class TrainPlacementOptions(PlacementOptions):
    kt_place: Literal["auto", "cpu", "stream", "resident"] | None = option(
        None, "", "where experts are computed with a GPU; default KT_PLACE, then auto if it fits, else cpu"
    )


class RunSettings(TrainSection):
    plot_loss: bool = Field(False, description="training_loss.png at the end")
    overwrite_output_dir: bool = Field(False, description="remove existing checkpoints and start over")
    resume_from_checkpoint: bool | str | None = Field(None, description="true: the last checkpoint; or a path")
    early_stopping_steps: int | None = Field(
        None, ge=1, description="evaluations without improvement before training stops"
    )


class ShardSettings(TrainSection):
    """FSDP2 of several processes (`train/sharding.py`)."""

    fsdp: bool | str | tuple[str, ...] | None = Field(
        None, description="shard everything but the experts over the processes (FSDP2): true, full_shard, offload"
    )
    fsdp_config: dict[str, Any] | str | None = Field(
        None, description="its options, or a file with them: reshard_after_forward, offload_params, ..."
    )


class TrainSettings(TrainSection):
    model: ModelSettings
    lora: LoraSettings
    data: DataSettings
    preference: PreferenceSettings
    experts: ExpertSettings
    place: TrainPlacementOptions = TrainPlacementOptions()
    run: RunSettings
    shard: ShardSettings = Field(default_factory=lambda: ShardSettings.model_validate({}))
    trainer: dict[str, Any] = Field(default_factory=dict, description="given keys of the HF Trainer")
    notes: tuple[str, ...] = Field((), description="keys that were translated or have no effect")

    @property
    def output_dir(self) -> str:
        return str(self.trainer["output_dir"])


SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "lora": LoraSettings,
    "data": DataSettings,
    "preference": PreferenceSettings,
    "experts": ExpertSettings,
    "place": TrainPlacementOptions,
    "run": RunSettings,
    "shard": ShardSettings,
}
# key -> section
SECTION_OF_KEY = {
    key: section for section, model in SECTIONS.items() for key in options_of(model) if key not in UNSUPPORTED_KEYS
}
