"""The optional packages that a recipe needs, by the values of its keys, checked before the model is loaded.

The stock Trainer imports them late: a logger when training begins, an optimizer after the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ktransformers.ground.errors import InputError
from ktransformers.ground.packages import is_installed, require_extra, require_package
from ktransformers.train.settings import TrainSettings, split_names

# Value of `report_to` -> (modules of which one is needed, what pip installs).
REPORT_PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "azure_ml": (("azureml.core.run",), "azureml-sdk"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet_ml"),
    "dagshub": (("dagshub",), "dagshub mlflow"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit"),
    "kubeflow": ((), ""),
    "mlflow": (("mlflow",), "mlflow"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}
# Pattern of `optim` -> module, what pip installs. The first that matches counts.
OPTIMIZER_PACKAGES: tuple[tuple[str, str, str], ...] = (
    (r"galore_", "galore_torch", "galore-torch"),
    (r"apollo_", "apollo_torch", "apollo-torch"),
    (r"(ada)?lomo$", "lomo_optim", "lomo-optim"),
    (r"grokadamw$", "grokadamw", "grokadamw"),
    (r"schedule_free_", "schedulefree", "schedulefree"),
    (r"stable_adamw$", "optimi", "torch-optimi"),
    (r"adamw_torch_[48]bit$", "torchao", "torchao"),
    (r"adamw_torch_xla$", "torch_xla", "torch_xla"),
    (r"adamw_torch_npu_fused$", "torch_npu", "torch-npu"),
    (r"adamw_anyprecision$", "torchdistx", "torchdistx"),
    (r"adamw_apex_fused$", "apex", "apex"),
    (r"(paged_|lion_|ademamix|adamw_bnb_8bit$|adamw_8bit$|rmsprop_bnb)", "bitsandbytes", "bitsandbytes"),
)
# Value of `flash_attn` -> module, what pip installs.
ATTENTION_PACKAGES = {"fa2": ("flash_attn", "flash-attn"), "fa3": ("flash_attn_interface", "flash-attn-3")}


def report_names(settings: TrainSettings) -> list[str]:
    """The values of `report_to`; `all` stands for every logger that is installed."""
    value = settings.trainer.get("report_to")
    names: Iterable[str] = split_names(value)
    return [str(name) for name in names if str(name) not in ("none", "all")]


def require_packages(settings: TrainSettings) -> None:
    """Raises InputError for the first missing package, with the line that installs it."""
    require_extra("kt train", "train")
    for name in report_names(settings):
        if name not in REPORT_PACKAGES:
            raise InputError("report_to", name, f"none, all, or of {', '.join(sorted(REPORT_PACKAGES))}")
        modules, install = REPORT_PACKAGES[name]
        if modules:
            require_package("report_to", name, modules, install)
    optimizer = str(settings.trainer.get("optim", ""))
    for pattern, module, install in OPTIMIZER_PACKAGES:
        if re.match(pattern, optimizer):
            require_package("optim", optimizer, (module,), install)
            break
    attention = settings.model.flash_attn
    if attention in ATTENTION_PACKAGES:
        module, install = ATTENTION_PACKAGES[attention]
        if not is_installed("kernels"):  # transformers takes flash attention from it too
            require_package("flash_attn", attention, (module,), install)


def package_notes(settings: TrainSettings) -> list[str]:
    """Packages without which a run leaves something out."""
    if settings.run.plot_loss and not is_installed("matplotlib"):
        return ["plot_loss: there will be no picture without matplotlib; pip install matplotlib"]
    return []
