"""Every key that `kt train` honours itself, as pydantic models: the field's name is the YAML key.

Keys have LLaMA-Factory's names and meanings. A section is a place in the program, not in the file: the file is flat but
for `kt_config`. Keys of the HF Trainer are not listed: `Settings.trainer` holds those that were given, checked against
the installed transformers (`resolve.py`). What is accepted without effect, mapped or refused stands in `keys.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Names = tuple[str, ...]


def split_names(value: Any) -> Any:
    """`"a, b"` and `["a", "b"]` are the same list."""
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
    trust_remote_code: bool = Field(False, description="run the tokenizer's own code, where it has some")
    use_fast_tokenizer: bool = Field(True, description="the fast tokenizer, where there is one")
    flash_attn: Literal["auto", "disabled", "sdpa", "fa2", "fa3"] = Field(
        "auto", description="attention: the model's choice, eager, sdpa, or flash attention"
    )
    moe_aux_loss_coef: float | None = Field(
        None, ge=0, description="weight of the router's balance loss; none by itself"
    )
    disable_gradient_checkpointing: bool = Field(False, description="keep activations instead of computing them again")
    use_reentrant_gc: bool = Field(False, description="the older kind of checkpointing")
    pure_bf16: bool = Field(False, description="bf16 without autocast, adapters included")


class LoraSettings(TrainSection):
    finetuning_type: Literal["lora"] = Field("lora", description="adapters; nothing else is trained")
    adapter_name_or_path: str | None = Field(None, description="an adapter to train further")
    lora_rank: int = Field(8, ge=1, description="rank of the adapter")
    lora_alpha: float | None = Field(None, gt=0, description="scale is alpha / rank; twice the rank by itself")
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
    template: str | None = Field(None, description="a chat template by name; the tokenizer's own by itself")
    default_system: str | None = Field(None, description="system message for rows that have none")
    enable_thinking: bool | None = Field(None, description="passed to the chat template")
    cutoff_len: int = Field(2048, ge=8, description="tokens of a row; what is longer is cut")
    train_on_prompt: bool = Field(False, description="loss on the whole row, not on the assistant alone")
    mask_history: bool = Field(False, description="loss on the last assistant turn only")
    packing: bool = Field(False, description="several rows in one sequence of cutoff_len, none seeing the other")
    neat_packing: bool = Field(False, description="the same as packing, which is always neat here")
    max_samples: int | None = Field(None, ge=1, description="rows taken of each dataset")
    val_size: float = Field(0.0, ge=0, description="rows for evaluation: a count, or a share below 1")
    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = Field(
        "concat", description="how several datasets become one"
    )
    interleave_probs: tuple[float, ...] = Field((), description="shares of the datasets when interleaved")
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
    pref_beta: float = Field(0.1, gt=0, description="how far from the reference")
    pref_ftx: float = Field(0.0, ge=0, description="weight of the supervised loss on the chosen answer")
    simpo_gamma: float = Field(0.5, description="margin of simpo")
    dpo_label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of pairs taken as flipped (sigmoid)")


class ExpertSettings(TrainSection):
    use_kt: bool = Field(True, description="experts computed by ktransformers; there is no other way here")
    kt_num_threads: int | None = Field(None, ge=1, description="threads for the experts, all NUMA nodes together")
    kt_threadpool_count: int | None = Field(None, ge=1, description="groups of threads, one per NUMA node by itself")
    kt_backend: str | None = Field(None, description="auto, or a CPU variant as in AMXBF16")
    kt_weight_path: str | None = Field(
        None,
        description="where the experts come from, if not from the model: a packed directory, GGUF, kt-kernel's files",
    )
    kt_expert_weight_format: Literal["auto", "bf16", "int8", "fp8", "rawint4", "mxfp4"] = Field(
        "auto", description="what the experts are expected to be stored in; they keep the format they have"
    )
    precision: Literal["bf16", "f32"] = Field(
        "bf16", description="of the experts' arithmetic; f32 computes with a float32 checkpoint's numbers unrounded"
    )
    kt_cpu_activation: Literal["retain", "recompute"] | None = Field(
        None, description="with checkpointing: keep what the experts computed, or compute it again"
    )
    kt_tokens_per_batch: int | Literal["auto", "off"] = Field(
        "auto",
        description="tokens of a step at once: a number, off, or what the plan chooses; gradients are accumulation's",
    )

    @field_validator("kt_tokens_per_batch", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        word = str(value).strip().lower()  # YAML reads `off` as false
        if word in ("auto", "off"):
            return word
        if word == "false":
            return "off"
        if not word.isascii() or not word.isdigit():
            raise ValueError("a number of tokens, auto or off")
        return int(word) or "off"

    @property
    def tokens_at_once(self) -> int | None:
        """None: batch by batch, which `auto` means until a plan has chosen."""
        return None if self.kt_tokens_per_batch in ("auto", "off") else int(self.kt_tokens_per_batch)


class PlacementSettings(TrainSection):
    """The words of `place.wish.Wish`."""

    kt_place: Literal["auto", "cpu", "stream", "resident"] | None = Field(
        None, description="where experts are computed, with a GPU; by itself KT_PLACE, then auto if it fits, else cpu"
    )
    kt_num_gpu_experts: int | None = Field(None, ge=0, description="experts of each layer that stay on the GPU")
    kt_gpu_experts_ratio: float | None = Field(None, ge=0, le=1, description="share of all experts that do; wins")
    kt_expert_placement_strategy: Literal["uniform", "frequency", "front-loading", "random"] | None = Field(
        None, description="which ones; uniform by itself, frequency with statistics"
    )
    init_expert_location: str | None = Field(None, description="statistics for frequency: .json, .safetensors or .pt")
    kt_gpu_prefill_token_threshold: int | None = Field(
        None, ge=1, description="batches of so many tokens are streamed to the GPU whole"
    )
    kt_enable_dynamic_expert_update: bool = Field(False, description="residents follow the routing")
    kt_expert_update_steps: int = Field(100, ge=1, description="steps between two such updates")
    kt_record_experts: str | None = Field(None, description="a file for counts of routed tokens, at the end")
    kt_optimize_rule: str | None = Field(None, description="placement rules, or a name that says how many GPUs")


class RunSettings(TrainSection):
    plot_loss: bool = Field(False, description="training_loss.png at the end")
    overwrite_output_dir: bool = Field(False, description="start anew where there are checkpoints, and remove them")
    resume_from_checkpoint: bool | str | None = Field(None, description="true: the last whole checkpoint; or a path")
    early_stopping_steps: int | None = Field(None, ge=1, description="evaluations without progress before it stops")


class TrainSettings(TrainSection):
    model: ModelSettings
    lora: LoraSettings
    data: DataSettings
    preference: PreferenceSettings
    experts: ExpertSettings
    place: PlacementSettings = Field(default_factory=lambda: PlacementSettings.model_validate({}))
    run: RunSettings
    trainer: dict[str, Any] = Field(default_factory=dict, description="keys of the HF Trainer that were given")
    notes: tuple[str, ...] = Field((), description="what was taken over, mapped, or has no effect")

    @property
    def output_dir(self) -> str:
        return str(self.trainer["output_dir"])


SECTIONS: dict[str, type[TrainSection]] = {
    "model": ModelSettings,
    "lora": LoraSettings,
    "data": DataSettings,
    "preference": PreferenceSettings,
    "experts": ExpertSettings,
    "place": PlacementSettings,
    "run": RunSettings,
}
# key -> the section that holds it
SECTION_OF_KEY = {key: section for section, model in SECTIONS.items() for key in model.model_fields}
