"""What serving will take, said before anything is loaded, and held against what it took.

The planner (`ktransformers.plan`) knows shapes and rates and no server; here stands what a launch line means to it.
The cache is the surprising part: it takes what is free and gives way to nobody, so a plan that counted all requests at
full length would refuse what runs well. Counted is the room that the line asks for, else room for one request; what is
kept beyond that is decided after loading, from the memory that is then free.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktransformers.errors import InputError
from ktransformers.plan import Plan, PlanComparison, Serving, make_plan, open_shape, with_gpus
from ktransformers.plan.meter import anonymous_bytes
from ktransformers.plan.workload import DEFAULT
from ktransformers.serve.flags import Launch
from ktransformers.serve.http.service import Service

DEFAULT_CONTEXT = 4096  # tokens of a request, where the line says nothing and the model allows more


def serving_workload(launch: Launch, rest_bytes: int, longest: int) -> Serving:
    """`longest`: the model's own limit of a sequence."""
    context = min(launch.context or DEFAULT_CONTEXT, longest)
    room = launch.tokens or context
    return Serving(context=room, prompt=min(launch.chunk, room), sequences=1, rest_bytes=rest_bytes)


def forecast(
    launch: Launch,
    directory: Path,
    device: str,
    rest_bytes: int,
    longest: int,
    policies: Sequence[str] = (DEFAULT,),
    needs_gpu: bool = False,
) -> tuple[Plan | None, str]:
    """For this machine, experts where the best of `policies` has them; a model whose config the planner cannot read is
    served all the same, and the note says why."""
    from ktransformers.plan.calibrate import this_machine

    try:
        shape = open_shape(str(directory))
        machine = this_machine()
        machine = with_gpus(machine, "none") if device == "cpu" else machine
        work = serving_workload(launch, rest_bytes, longest)
        return make_plan(shape, work, machine, policies=policies, needs_gpu=needs_gpu), ""
    except InputError as error:
        return None, f"no forecast of memory and time: {error}"


def compare_at_start(plan: Plan, service: Service) -> PlanComparison:
    """Predicted and measured host memory before the first request: no cache yet, nothing computed."""
    later = ("KV cache", "activations", "scores", "workspace", "transfers")
    expected = sum(size for name, size in plan.nearest.memory.host.items() if name not in later) + _adapter_bytes(
        service
    )
    return PlanComparison("host memory at start", expected / 1e9, anonymous_bytes() / 1e9, "GB")


def compare_at_end(plan: Plan, service: Service) -> PlanComparison:
    """And after the last one, with the cache as large as it became, and scores of prompts where they were asked for."""
    host, scored = plan.nearest.memory.host, service.engine.counts.scored_tokens > 0
    left = ("KV cache",) if scored else ("KV cache", "scores")
    expected = sum(size for name, size in host.items() if name not in left) + _adapter_bytes(service)
    if "KV cache" in host:
        expected += service.engine.kv_cache.peak_tokens * service.kv_bytes_per_token
    return PlanComparison("host memory at the end", expected / 1e9, anonymous_bytes() / 1e9, "GB")


def _adapter_bytes(service: Service) -> int:
    """Bytes of those that are loaded; a plan knows of none."""
    return sum(one.adapter.bytes() for one in service.registry.loaded.values())
