"""One comparison of `kt prove`, and the error for a tensor that is wrong before anything was computed."""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.adapters.comparison import LogprobDifference
from ktransformers.errors import KTError


@dataclass(frozen=True)
class ProofCheck:
    what: str
    passed: bool | None  # None: not possible on this machine
    detail: str
    difference: LogprobDifference | None = None
    culprit: str = ""  # tensor or layer at fault


class ProofFailed(KTError):
    """A tensor is wrong, found before anything was computed."""

    def __init__(self, check: ProofCheck) -> None:
        super().__init__(f"{check.culprit}: {check.detail}")
        self.check = check
