"""Where the experts of a local directory are and how its weights are quantised, by config.json. Nothing of transformers
is imported, so that programs that only compute experts (`kt_kernel`) do without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.checkpoint.quantisation import accept
from ktransformers.checkpoint.sources import Source, open_source
from ktransformers.modeling.prepare import QUANT_METHOD, config_file, read_config, split_quantisation


@dataclass(frozen=True)
class CheckpointFacts:
    """How config.json describes the weights."""

    rest: dict[str, Any] | None = None  # quantisation of the weights in its directory
    experts: Path | None = None  # path of the experts, if they are elsewhere
    experts_quantised: dict[str, Any] | None = None  # quantisation of those


def read_checkpoint_facts(path: Path) -> CheckpointFacts:
    """From config.json; empty if there is none. A quantisation method that cannot be read is refused."""
    file = config_file(path)
    if file is None:
        return CheckpointFacts()
    _, quantisation = split_quantisation(read_config(file.parent))
    if quantisation is None or quantisation.get("quant_method") != QUANT_METHOD:
        accept(str(file), quantisation)
        return CheckpointFacts(quantisation)
    if quantisation.get("experts") is None:  # a directory that was prepared without copies, or a packed one
        accept(str(file), quantisation.get("source"))
        return CheckpointFacts(quantisation.get("source"))
    return CheckpointFacts(None, Path(quantisation["experts"]), quantisation.get("source"))


def open_expert_source(facts: CheckpointFacts, experts: Path | None) -> Source | None:
    """The source of the experts: `experts` if the caller names one, else the path in config.json; None: they are in the
    model's own directory."""
    if experts is not None:
        expert_facts = read_checkpoint_facts(experts)
        return open_expert_source(expert_facts, None) or open_source(experts, expert_facts.rest)
    return None if facts.experts is None else open_source(facts.experts, facts.experts_quantised)
