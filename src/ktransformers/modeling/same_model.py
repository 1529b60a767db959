"""Whether the experts of one release belong to the model of another.

Experts may come from other files than the rest of a model: routed experts from a GGUF in one or four bits with the
directory of the FP8 release, for example. Shapes do not tell two models of one family apart (DeepSeek-V3 and R1 have
the same), and mixed weights compute wrong results without an error. Releases of one model share tensors that are
quantised little or not at all, norms and routers: some of them are read from both and compared. Files with experts
alone (those of kt-kernel's converter) have none, and are not compared.
"""

from __future__ import annotations

import torch

from ktransformers.checkpoint.layout import PLACE
from ktransformers.checkpoint.sources import PlainTensor, Source
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger

COMPARED = 12  # tensors at most, spread over the layers
MAX_NUMBERS = 1 << 24  # of a compared tensor
# Of the difference to the tensor, by Frobenius norm: rounding to bf16 makes 0.002 and to Q8_0 0.005.
TOLERANCE = 0.01
SHARED_ENDINGS = ("norm.weight", "layernorm.weight", ".gate.weight", ".router.weight")

log = logger(__name__)


def check_same_model(model: Source, experts: Source) -> int:
    """Raises if tensors that both have differ, or if the experts have other layers; returns how many were compared."""
    _check_layers(model, experts)
    theirs = {
        tensor.name: tensor
        for tensor in experts.rest()
        if tensor.name.endswith(SHARED_ENDINGS) and torch.Size(tensor.shape).numel() <= MAX_NUMBERS
    }
    ours = [tensor for tensor in model.rest() if tensor.name in theirs]
    step = max(1, -(-len(ours) // COMPARED))
    for tensor in ours[::step]:
        _compare(tensor, theirs[tensor.name], experts)
    if not ours:
        log.warning("%s: has no tensor of the model in %s to compare", experts.path, model.path)
    model.release()
    experts.release()
    return len(ours[::step])


def _check_layers(model: Source, experts: Source) -> None:
    """If the model's own files have experts too, layers must be the same; one may lack the MTP layers at the end."""
    ours, theirs = (_layers(source) for source in (model, experts))
    common = min(max(ours, default=-1), max(theirs, default=-1))
    different = {number for number in ours ^ theirs if number <= common}
    if ours and different:
        given = f"experts in layer {min(different)} of one of {model.path} and {experts.path} alone"
        raise InputError(str(experts.path), given, "experts of this very model")


def _layers(source: Source) -> set[int]:
    matches = (PLACE.fullmatch(f"{root}.experts") for root in source.expert_roots)
    return {int(match["layer"]) for match in matches if match is not None}


def _compare(ours: PlainTensor, theirs: PlainTensor, experts: Source) -> None:
    if ours.shape != theirs.shape:
        given = f"{ours.name} of shape {list(theirs.shape)}"
        raise InputError(str(experts.path), given, f"{list(ours.shape)}, as the model has it")
    numbers = ours.numbers().double()
    distance = float((numbers - theirs.numbers().double()).norm() / numbers.norm().clamp_min(1e-30))
    if not distance <= TOLERANCE:
        given = f"{ours.name} that differs from the model's by {distance:.2g} of its size"
        raise InputError(
            str(experts.path), given, "experts of this very model", "take both from releases of the same model"
        )
