"""A plan as plain values, for `--json` and for manifests: sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ktransformers.plan.memory import MemoryPlan
from ktransformers.plan.modes import Decision
from ktransformers.plan.planner import Candidate, Plan
from ktransformers.plan.step_time import planned_modes


def candidate_document(candidate: Candidate) -> dict[str, Any]:
    memory, time = candidate.memory, candidate.time
    document: dict[str, Any] = {
        "work": asdict(candidate.work),
        "choice": asdict(candidate.choice),
        "fits": candidate.fits,
        "lacking": candidate.lacking,
        "executable": not candidate.missing,
        "missing": list(candidate.missing),
        **memory_document(memory),
        "nodes": list(memory.nodes),
        "pinned": memory.pinned,
        "disk": memory.disk,
        "seconds": time.seconds,
        "seconds_by_part": time.parts,
        "tokens": time.tokens,
        "tokens_per_second": time.tokens_per_second,
        "first_token_seconds": time.first_token,
    }
    if (hosts := candidate.hosts) is not None:
        document |= {
            "partition": {"by": hosts.form, "shares": list(hosts.shares)},
            "hosts": [memory_document(of_host) for of_host in hosts.memory],
            "wire": asdict(hosts.wire),
        }
    return document


def memory_document(memory: MemoryPlan) -> dict[str, Any]:
    return {
        "host": memory.host | {"total": memory.host_bytes},
        "gpus": [table | {"total": sum(table.values())} for table in memory.gpus],
        "mapped": memory.mapped,
    }


def modes_of(plan: Plan) -> dict[str, tuple[int, Decision]]:
    """The mode in which the dispatcher runs a layer of experts, by kind of pass, with the tokens of the pass."""
    return planned_modes(plan.model, plan.nearest.work, plan.nearest.choice, plan.machine)


def plan_document(plan: Plan) -> dict[str, Any]:
    hosts = plan.nearest.hosts
    return {
        **({} if hosts is None else {"network": asdict(hosts.network)}),
        "model": plan.model.name,
        "numbers": plan.model.numbers,
        "machine": {
            "name": plan.machine.name,
            "memory": plan.machine.memory,
            "gpus": [{"name": gpu.name, "memory": gpu.memory} for gpu in plan.machine.gpus],
            "measured": plan.machine.measured,
            "sources": list(plan.machine.sources),
        },
        "fits": plan.best is not None,
        "plan": candidate_document(plan.nearest),
        "modes": [
            {"pass": name, "tokens": tokens, "mode": decision.mode, "reason": decision.reason}
            for name, (tokens, decision) in modes_of(plan).items()
        ],
        "ways": [
            {
                "changes": list(remedy.changes),
                "same_results": remedy.same_results,
                "plan": candidate_document(remedy.candidate),
            }
            for remedy in plan.remedies
        ],
        "others": [candidate_document(other) for other in plan.others],
        "published": [dict(figure) for figure in plan.model.published],
        "notes": list(plan.notes),
    }
