"""The end of `serve.py`: for every test and number of streams our base beside each peer, with the experts' share of our
time and the bars that serving is held to.

Bars: from 8 streams up twice transformers and no slower than llama.cpp; a single stream at least 0.7 of llama.cpp. A
peer in Q4_K is held against our row with the same experts where there is one. Its attention and its output matrix are
in few bits, too; ours stay in bf16.
"""

from __future__ import annotations

from typing import Any

from timing import Table

MANY = 8  # streams from which on a server is a server
SINGLE = 0.7


def bar(peer: str, streams: int) -> float | None:
    """What our rate over the peer's has to be at least; None: nothing is asked."""
    if peer.startswith("llama"):
        return 1.0 if streams >= MANY else SINGLE if streams == 1 else None
    return 2.0 if streams >= MANY else None


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ours = [cell for cell in cells if cell["contender"].startswith("kt") and not cell["adapters"]]
    rows: list[dict[str, Any]] = []
    for cell in cells:
        if cell["contender"].startswith("kt"):
            continue
        same = [one for one in ours if (one["test"], one["streams"]) == (cell["test"], cell["streams"])]
        bits = [one for one in same if ("Q4_K" in one["contender"]) == ("Q4_K" in cell["contender"])]
        for own in bits or same:
            asked = bar(cell["contender"], cell["streams"])
            ratio = own["tokens_per_second"] / cell["tokens_per_second"]
            words = {key: cell[key] for key in ("test", "streams")}
            words |= {"ours": own["contender"], "peer": cell["contender"], "expert_share": own["expert_share"]}
            words |= {"tokens_per_second": own["tokens_per_second"], "peer_rate": cell["tokens_per_second"]}
            rows.append(words | {"ratio": ratio, "bar": asked, "met": None if asked is None else ratio >= asked})
    return rows


def print_ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = ratios(cells)
    if not rows:
        return rows
    print(flush=True)
    heads = ("ours", "test", "streams", "t/s", "experts", "peer", "peer t/s", "ratio", "bar")
    table = Table(heads, (16, 7, 7, 9, 7, 22, 9, 6, 9))
    for row in rows:
        verdict = "-" if row["bar"] is None else f"{row['bar']:.1f} {'met' if row['met'] else 'missed'}"
        table.row(
            (
                row["ours"],
                row["test"],
                str(row["streams"]),
                f"{row['tokens_per_second']:.2f}",
                f"{row['expert_share']:.0%}",
                row["peer"],
                f"{row['peer_rate']:.2f}",
                f"{row['ratio']:.2f}",
                verdict,
            )
        )
    return rows
