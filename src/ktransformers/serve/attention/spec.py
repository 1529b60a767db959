"""What the attention of one layer computes, as the stock module asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from ktransformers.serve.attention.latent import LatentProjection
from ktransformers.serve.attention.selection import Selection
from ktransformers.serve.attention.windows import CHUNK_ATTRIBUTE, WINDOW_ATTRIBUTE


@dataclass(frozen=True)
class AttentionSpec:
    layer: int
    scale: float
    window: int | None  # keys that a query attends to, its own included; None: all before it
    softcap: float | None
    sinks: Tensor | None  # [heads]
    latent: LatentProjection | None = None  # slots hold latents
    selection: Selection | None = None  # keys that an indexer has selected
    chunk: int | None = None  # a query attends to keys of its own chunk; chunks begin at multiples of their size

    def first_key(self, position: int) -> int:
        """That a query at `position` attends to."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position + 1 - self.window)

    @property
    def core_sinks(self) -> Tensor | None:
        """As the native core takes them."""
        return None if self.sinks is None else self.sinks.detach().float().contiguous()


def current_spec(module: nn.Module, spec: AttentionSpec) -> AttentionSpec:
    """A specification that was taken from an earlier call, with the window and chunk that the module has now: the check
    at start shortens them for a while (`reduce_windows`)."""
    window, chunk = getattr(module, WINDOW_ATTRIBUTE, spec.window), getattr(module, CHUNK_ATTRIBUTE, spec.chunk)
    return spec if (window, chunk) == (spec.window, spec.chunk) else replace(spec, window=window, chunk=chunk)
