"""One comparison of `kt prove`, and the error for a tensor that is wrong before anything was computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktransformers.adapters.comparison import LogprobDifference
from ktransformers.adapters.router_choices import ChoiceComparison
from ktransformers.ground.errors import KTError

SHOWN_TIES = 16  # in a document; all are counted


@dataclass(frozen=True)
class ProofCheck:
    what: str
    passed: bool | None  # None: not possible on this machine
    detail: str
    difference: LogprobDifference | None = None
    culprit: str = ""  # tensor or layer at fault
    routers: ChoiceComparison | None = None  # None: ties between experts were not looked for

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "passed": self.passed,
            "said": self.detail,
            "difference": self.difference and self.difference.to_json(),
            "culprit": self.culprit or None,
            "routers": None if self.routers is None else _routers_to_json(self.routers),
        }


def _routers_to_json(routers: ChoiceComparison) -> dict[str, Any]:
    return {
        "ties": len(routers.ties),
        "faults": len(routers.faults),
        "not_judged": routers.unjudged,
        "tied_tokens": [tie.to_json() for tie in routers.ties[:SHOWN_TIES]],
        "faulty_tokens": [fault.to_json() for fault in routers.faults[:SHOWN_TIES]],
    }


class ProofFailed(KTError):
    """A tensor is wrong, found before anything was computed."""

    def __init__(self, what: str, culprit: str, detail: str, difference: LogprobDifference | None = None) -> None:
        super().__init__(f"{culprit}: {detail}")
        self.check = ProofCheck(what, False, detail, difference, culprit)
