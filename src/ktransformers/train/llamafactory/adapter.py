"""LoRA on packed experts in LLaMA-Factory: what `lora_target` selects, and dropout.

LLaMA-Factory takes modules of class Linear for `all` and lets PEFT find the rest, but the experts of transformers 5 are
parameters. Here `all` adds the matrices of the routed experts, and `gate_proj`, `up_proj` and `down_proj` name them.
PEFT's own conversion of these names gives `gate_up_proj` twice the rank and drops linear modules of the same names
(shared experts, dense layers); here they stay, named by their weights. A target without experts is refused, because
such a run would train nothing that `use_kt` is for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ktransformers.experts.backend import packed_experts
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger

if TYPE_CHECKING:
    from torch import nn

    from ktransformers.train.targets import Targets

log = logger(__name__)

GATE_UP = "gate_up_proj"
GATE_UP_PATTERN = rf".*\.{GATE_UP}"  # as PEFT writes it
EXPERT_TARGETS = {"experts", GATE_UP, "down_proj"}  # in addition to gate_proj and up_proj, of which both are needed
GATE_UP_HALVES = {"gate_proj", "up_proj"}


def has_packed_experts(model: nn.Module) -> bool:
    return any(packed_experts(module) is not None for module in model.modules())


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


def select_targets(model: nn.Module, names: Iterable[str], *, experts: bool) -> Targets:
    """Linear modules whose name is one of `names` or ends with it, and matrices of the routed experts: all if
    `experts`, else those that are named."""
    from ktransformers.train.targets import Targets, expert_matrices, linear_modules

    targets = tuple(names)
    modules = tuple(
        name for name, _ in linear_modules(model) if any(f".{name}".endswith(f".{target}") for target in targets)
    )
    matrices = expert_matrices(model)
    named = {_last_name(target) for target in targets}
    if named & GATE_UP_HALVES and not named >= GATE_UP_HALVES and GATE_UP in {_last_name(name) for name in matrices}:
        (given,) = named & GATE_UP_HALVES
        raise InputError("lora_target", given, "gate_proj and up_proj together", "experts have both in one matrix")
    wanted = named | ({GATE_UP} if named >= GATE_UP_HALVES else set())
    selected = [name for name in matrices if experts or "experts" in named or _last_name(name) in wanted]
    if not selected:
        given = ", ".join(sorted(targets))
        remedy = "or leave use_kt out to train attention alone"
        raise InputError("lora_target", given, "`all`, or gate_proj,up_proj,down_proj among the names", remedy)
    return Targets(modules, tuple(selected))


def adapt_experts(module: Any) -> None:
    """In `llamafactory.model.adapter`."""
    stock_setup, stock_get_peft_model = module._setup_lora_tuning, module.get_peft_model
    requested: dict[str, bool] = {"all": False}  # from one function of LLaMA-Factory to another

    def setup_lora_tuning(config: Any, model: Any, model_args: Any, finetuning_args: Any, *args: Any) -> Any:
        requested["all"] = list(finetuning_args.lora_target) == ["all"]
        return stock_setup(config, model, model_args, finetuning_args, *args)

    def get_peft_model(model: Any, peft_config: Any, **options: Any) -> Any:
        if not has_packed_experts(model):
            return stock_get_peft_model(model, peft_config, **options)
        rate = set_expert_targets(model, peft_config, experts=requested["all"])
        adapted = stock_get_peft_model(model, peft_config, **options)
        return finish_adapter(adapted, rate)

    def load_artifacts(model: Any, adapter_path: str) -> None:
        """PEFT has loaded the experts too: kt-kernel's files were converted for it (`stored_as_peft`)."""
        require_expert_adapters(model)

    module._setup_lora_tuning, module.get_peft_model = setup_lora_tuning, get_peft_model
    if hasattr(module, "_load_kt_inference_adapter_artifacts"):  # since 0.9.6
        module._load_kt_inference_adapter_artifacts = load_artifacts


def set_expert_targets(model: nn.Module, config: Any, *, experts: bool) -> float:
    """Fill in the targets of a LoraConfig; returns the dropout, which PEFT refuses with target_parameters."""
    targets = select_targets(model, config.target_modules, experts=experts)
    config.target_modules = set(targets.module_names(model))
    config.target_parameters = targets.parameter_names(model)
    if any(_last_name(name) == GATE_UP for name in targets.parameters):
        config.rank_pattern = {**config.rank_pattern, GATE_UP_PATTERN: 2 * config.r}
        config.alpha_pattern = {**config.alpha_pattern, GATE_UP_PATTERN: 2 * config.lora_alpha}
    rate, config.lora_dropout = float(config.lora_dropout), 0.0
    log.info("LoRA on %d linear modules and %d expert matrices", len(targets.modules), len(targets.parameters))
    return rate


def finish_adapter(model: Any, dropout: float) -> Any:
    from ktransformers.train.model import set_adapter_dropout

    require_expert_adapters(model)
    if dropout:
        set_adapter_dropout(model, dropout)
    return model


def require_expert_adapters(model: Any) -> None:
    from ktransformers.experts.peft_lora import expert_adapters

    if not expert_adapters(model):
        raise InputError("adapter", "no LoRA on experts", "one with it", "lora_target: all trains one")
