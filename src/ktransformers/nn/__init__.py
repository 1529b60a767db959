"""Expert layers as PyTorch sees them: `ExpertStore` holds the packed experts of one layer and computes them."""

from __future__ import annotations

from ktransformers.nn.store import ExpertCall, ExpertStore, default_pool

__all__ = ["ExpertCall", "ExpertStore", "default_pool"]
