"""Keeps rows that are packed into one sequence apart, and proves it before training.

Packing concatenates rows into one sequence `[1, T]` whose positions begin again with each row. Attention needs a mask
that says so; transformers makes one if the model's code passes the positions to it, which not every family does. So
while the model runs on packed rows, the mask functions get the rows from its call (`modeling/packed_rows.py`). Layers
that mix tokens without a mask (a recurrent state, a convolution, compressed keys) cannot be told:
`require_masked_layers` refuses them by the model's layer types, without weights. `separate_rows` computes two rows
packed and each alone, in the loaded model, and refuses if their logits differ."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktransformers.adapters.comparison import evaluating
from ktransformers.adapters.logit_error import ForwardPass, logit_error
from ktransformers.adapters.router_choices import token_numbers
from ktransformers.ground.errors import InputError
from ktransformers.modeling.packed_rows import tell_masks_the_rows, uses_row_positions
from ktransformers.train.packed_attention import PACKED_ROWS, restore_sdpa
from ktransformers.train.targets import VISION_BLOCKS

MASKED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention"}
TOKENWISE_LAYER_TYPES = {"moe", "mlp", "dense", "sparse"}  # that mix no tokens
LINEAR_LAYER_TYPES = {"linear_attention"}  # told the rows by the kernels of causal_conv1d, where these are installed
REMEDY = "kt_tokens_per_batch fills batches without packing"
ROW_LENGTHS = (13, 17)
MAX_LOGIT_ERROR = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative, between packed rows and rows alone
MAX_LOGIT_ERROR_16_BIT = 0.1


def unmasked_layers(model: PreTrainedModel) -> str | None:
    """What mixes tokens without a mask in this model, which may be on the meta device; None: nothing known."""
    config: Any = model.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or ())
    unmasked = types - MASKED_LAYER_TYPES - TOKENWISE_LAYER_TYPES
    if unmasked:
        kernels = unmasked <= LINEAR_LAYER_TYPES and importlib.util.find_spec("causal_conv1d") is not None
        return None if kernels else f"layers of type {', '.join(sorted(unmasked))}"
    if types:
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and not set(name.split(".")) & VISION_BLOCKS:
            return f"the convolution {name}"
    return "a recurrent state" if getattr(model, "_is_stateful", False) else None


def require_masked_layers(model: PreTrainedModel) -> None:
    """Raises if a layer would see the rows before its own whatever the mask is, or take a token's index for its
    position."""
    found = unmasked_layers(model) or uses_row_positions(model)
    if found is not None:
        kind = model.config.model_type
        raise InputError("packing", f"true for {kind}, which has {found}", "false for such a model", REMEDY)


def _test_rows(model: Any) -> list[list[int]]:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    # Which keys an index selects among equal scores depends on their number, so rows must not need a selection.
    longest = getattr(model.config.get_text_config(decoder=True), "index_topk", None) or max(ROW_LENGTHS)
    lengths = [min(length, longest) for length in ROW_LENGTHS]
    return [[((5 + 2 * row) * at + 3) % vocabulary for at in range(length)] for row, length in enumerate(lengths)]


def _packed_logits(model: Any, rows: list[list[int]], forward_pass: ForwardPass) -> Sequence[Tensor]:
    lengths = [len(row) for row in rows]
    device = next(model.parameters()).device
    borders = torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = {
        "input_ids": torch.tensor([[token for row in rows for token in row]], device=device),
        "position_ids": torch.tensor([[at for length in lengths for at in range(length)]], device=device),
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    with evaluating(model), forward_pass(torch.arange(sum(lengths))):
        logits = model(**packed, use_cache=False).logits[0].float()
    return torch.split(logits, lengths)


def _separate_logits(model: Any, rows: list[list[int]], forward_pass: ForwardPass) -> Sequence[Tensor]:
    """Of each row alone."""
    device, logits = next(model.parameters()).device, []
    for row, tokens in zip(rows, token_numbers([len(row) for row in rows]), strict=True):
        with evaluating(model), forward_pass(tokens):
            logits.append(model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0].float())
    return logits


def max_logit_error(dtype: torch.dtype) -> float:
    return MAX_LOGIT_ERROR.get(dtype, MAX_LOGIT_ERROR_16_BIT)


def packing_error(model: Any) -> float:
    """Largest relative difference of the logits of two rows between packed and alone; experts that tie in a router are
    no difference."""
    rows = _test_rows(model)
    return logit_error(
        model,
        rows,
        lambda forward_pass: _separate_logits(model, rows, forward_pass),
        lambda forward_pass: _packed_logits(model, rows, forward_pass),
        max_logit_error(model.dtype),
    )


def separate_rows(model: PreTrainedModel) -> None:
    """Makes the model keep packed rows apart, by its masks if its attention alone does not; raises if it cannot."""
    limit = max_logit_error(model.dtype)
    tell_masks_the_rows(model)
    try:
        error = packing_error(model)
        if not error <= limit and model.config._attn_implementation == PACKED_ROWS:
            restore_sdpa(model)
            error = packing_error(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as problem:
        given = f"true for {model.config.model_type}, which cannot compute packed rows ({problem})"
        raise InputError("packing", given, "false for such a model", REMEDY) from problem
    if not error <= limit:
        kind = model.config.model_type
        given = f"true for {kind}, where the logits of packed rows differ by {error:.2g} from the rows alone"
        raise InputError("packing", given, f"at most {limit:g}", REMEDY)
