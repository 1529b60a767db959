"""The sliding window or chunk of every attention layer, read from the masks that the stock model makes.

The server calls a model without masks, so it must know the window of each layer. Some families pass it to their
attention function, others have it in the mask only, and configurations name it in several ways. So the model itself is
asked: it is called once with two tokens and a mask function that evaluates the mask's rule far beyond any real length
and returns the window it finds in the place of a mask; the attention function of each layer receives what that layer
would be masked with. Chunks (Llama 4) begin at multiples of their size, and a token attends within its own. A rule that
is neither causal nor a causal window or chunk is refused.

`reduce_windows` makes long windows short for a while, so that a text of a few tokens reaches across their edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ktransformers.ground.errors import InputError
from ktransformers.modeling.substitute import Restore, call_with_two_tokens

PROBE_NAME = "kt_window_probe"
WINDOW_ATTRIBUTE = "kt_mask_window"  # of an attention module: int, or None without a window
CHUNK_ATTRIBUTE = "kt_mask_chunk"  # the same of chunks
MAX_WINDOW = 2**21  # a rule that allows so many keys is no window
PROBED_QUERIES = (2**22, 2**22 + 12_345)  # far apart, so that windows at fixed borders are not taken for sliding ones
FUTURE_KEYS = 64  # that must be masked
DENSE_KEYS = 2**14  # every one of the nearest keys is looked at,
SAMPLED_STEP = 127  # and of those before them one in so many, a prime, which patterns of other periods cannot evade
REDUCED_WINDOW = 8
# The last: tokens after which queries are scaled more (`query_scales.py`).
REDUCED_NAMES = ("sliding_window", "attention_chunk_size", "floor_scale")
MAX_UNREDUCED_WINDOW = 16  # a text of 24 tokens reaches across the edge of these

UNKNOWN_RULE = -1  # in the place of a window: a rule that matters only if a layer uses it; a chunk is negative too

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> allowed


def rule_window(rule: MaskRule, device: torch.device) -> int | None:
    """The window of a mask's rule; None: every earlier key is allowed. Raises ValueError for another rule."""
    windows = [_allowed_keys(rule, position, device) for position in PROBED_QUERIES]
    if windows[0] != windows[1]:
        raise ValueError("a mask whose window does not slide")
    return None if windows[0] == MAX_WINDOW else windows[0]


def rule_chunk(rule: MaskRule, device: torch.device) -> int:
    """The size of the chunks within which a mask's rule allows keys. Raises ValueError for another rule."""
    position = PROBED_QUERIES[0]
    last_of_chunk = position - _allowed_keys(rule, position, device)
    chunk = _allowed_keys(rule, last_of_chunk, device)
    probed = (*PROBED_QUERIES, last_of_chunk, last_of_chunk + 1, last_of_chunk + chunk, last_of_chunk + chunk + 1)
    if chunk < 2 or any(_allowed_keys(rule, query, device) != query % chunk + 1 for query in probed):
        raise ValueError("a mask that is neither causal nor a sliding window")
    return chunk


def _allowed_keys(rule: MaskRule, position: int, device: torch.device) -> int:
    """How many keys a query may see, itself and those just before it; at most MAX_WINDOW."""
    zero, query = torch.zeros((), dtype=torch.long, device=device), torch.tensor(position, device=device)

    def allowed(distances: Tensor) -> Tensor:
        return rule(zero, zero, query, query - distances).expand(distances.shape)

    def count_allowed(distances: Tensor) -> int:
        """Of these ascending distances; all of them must be before the first one that is masked."""
        found = allowed(distances)
        count = int(found.sum())
        if not bool(found[:count].all()):
            raise ValueError("a mask that is neither causal nor a sliding window")
        return count

    dense = torch.arange(DENSE_KEYS, device=device)
    sampled = torch.cat([dense, torch.arange(DENSE_KEYS, MAX_WINDOW, SAMPLED_STEP, device=device)])
    count = count_allowed(sampled)
    if bool(allowed(torch.arange(-FUTURE_KEYS, 0, device=device)).any()) or not count:
        raise ValueError("a mask that is neither causal nor a sliding window")
    last_seen = int(sampled[count - 1])
    first_masked = int(sampled[count]) if count < len(sampled) else MAX_WINDOW
    return last_seen + 1 + count_allowed(torch.arange(last_seen + 1, first_masked, device=device))


def _probe_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskRule, device: Any = "cpu", **_: Any
) -> Tensor:
    try:
        window = rule_window(mask_function, torch.device(device)) or 0
    except ValueError:
        try:
            window = -rule_chunk(mask_function, torch.device(device))
        except ValueError:
            window = UNKNOWN_RULE
    # float64 holds every window, and models that slice a mask leave the values in it.
    return torch.full((batch_size, 1, q_length, kv_length), window, dtype=torch.float64, device=device)


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    if rest.get("position_bias") is not None:
        raise ValueError("attention with a bias of positions")
    window, chunk = None, None
    if attention_mask is None:
        pass
    elif attention_mask.dtype is not torch.float64:
        raise ValueError("a mask that the model changes before it is used")
    else:
        found = set(attention_mask.flatten().tolist())
        if len(found) != 1:
            raise ValueError("a mask that the model changes before it is used")
        if UNKNOWN_RULE in found:
            raise ValueError("a mask that is neither causal nor a sliding window")
        size = int(found.pop())
        window, chunk = (size or None, None) if size >= 0 else (None, -size)
    setattr(module, WINDOW_ATTRIBUTE, window)
    setattr(module, CHUNK_ATTRIBUTE, chunk)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def read_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Sets the window and chunk of every attention module, and returns them by the module's name."""
    with Restore() as restore:
        restore.put_attention(model, PROBE_NAME)
        call_with_two_tokens(model, "causal attention, with or without a sliding window")
    return {
        name: getattr(module, WINDOW_ATTRIBUTE) or getattr(module, CHUNK_ATTRIBUTE)
        for name, module in model.named_modules()
        if hasattr(module, WINDOW_ATTRIBUTE)
    }


def reduce_windows(model: PreTrainedModel, restore: Restore) -> None:
    """Until the end of a check, the windows and chunks in the model's configuration and modules are a few tokens
    long."""
    config: Any = model.config
    places: list[Any] = list({id(part): part for part in (config, config.get_text_config(decoder=True))}.values())
    places += [module for module in model.modules() if any(hasattr(module, name) for name in REDUCED_NAMES)]
    found = [(place, name, getattr(place, name, None)) for place in places for name in REDUCED_NAMES]
    for place, name, window in found:
        if type(window) is int and window > MAX_UNREDUCED_WINDOW:
            restore.put(place, name, REDUCED_WINDOW)


def require_reduced(kind: str, windows: dict[str, int | None]) -> None:
    """Raises unless the check, whose texts are short, reaches across the edge of every window."""
    long = {name: window for name, window in windows.items() if window and window > MAX_UNREDUCED_WINDOW}
    if long:
        name, window = next(iter(long.items()))
        given = f"{kind}, where {name} has a window of {window} tokens that its configuration does not name"
        raise InputError("model", given, "`sliding_window`", "this family cannot be served")


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(PROBE_NAME, _probe_mask)
