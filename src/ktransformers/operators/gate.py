"""Routers by rule: the stock module stays, with the numbers of the release: rounding could change its choices."""

from __future__ import annotations

from ktransformers.operators.base_operator import StockOperator


class KMoEGate(StockOperator):
    """The stock router."""
