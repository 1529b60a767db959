"""The plan of a launch line before anything is loaded, and its comparison with the memory that was used.

The planner (`ktransformers.plan`) knows model shapes and machine rates, not servers; this module translates launch
options into its workload. The KV cache takes whatever memory is free, so a plan with all requests at full length would
refuse configurations that run well. The plan counts the capacity that the line asks for, otherwise that of one request;
what the cache gets beyond that is decided after loading, from the memory that is then free.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import DEFAULT_POLICY
from ktransformers.plan import Plan, PlanComparison, Serving, make_plan, open_shape, stored_as, with_gpus
from ktransformers.plan.meter import anonymous_bytes
from ktransformers.serve.flags import Launch
from ktransformers.serve.http.service import Service

DEFAULT_CONTEXT = 4096  # tokens of a request, if the line sets none and the model allows more


def serving_workload(launch: Launch, rest_bytes: int, max_positions: int, rest: str | None = None) -> Serving:
    """`max_positions`: the model's own limit of a sequence; `rest`: how rules have linear layers stored, None: as the
    launch line says."""
    rest = rest or launch.rest
    context = min(launch.context_length or DEFAULT_CONTEXT, max_positions)
    cache_tokens = launch.max_total_tokens or context
    return Serving(
        context=cache_tokens,
        prompt=min(launch.chunked_prefill_size, cache_tokens),
        sequences=1,
        rest_bytes=rest_bytes,
        linear_format=None if rest == "bf16" else rest,
        fp8_cache=launch.fp8_cache,
    )


def forecast(
    launch: Launch,
    directory: Path,
    device: str,
    rest_bytes: int,
    max_positions: int,
    policies: Sequence[str] = (DEFAULT_POLICY,),
    needs_gpu: bool = False,
    expert_format: str | None = None,
    rest: str | None = None,
) -> tuple[Plan | None, str]:
    """The plan for this machine with the best of `policies`. A model whose config the planner cannot read is served
    without one: (None, the reason). `expert_format`: that experts are encoded in while they are loaded;
    `rest` as for `serving_workload`."""
    from ktransformers.plan.calibrate import this_machine

    try:
        shape = stored_as(open_shape(str(directory)), expert_format)
        machine = this_machine()
        machine = with_gpus(machine, "none") if device == "cpu" else machine
        work = serving_workload(launch, rest_bytes, max_positions, rest)
        return make_plan(shape, work, machine, policies=policies, needs_gpu=needs_gpu), ""
    except InputError as error:
        return None, f"no plan of memory and time: {error}"


def compare_at_start(plan: Plan, service: Service) -> PlanComparison:
    """Predicted and measured host memory before the first request, without KV cache and activations."""
    not_yet_allocated = ("KV cache", "states", "activations", "scores", "workspace", "transfers")
    expected = sum(
        size for name, size in plan.nearest.memory.host.items() if name not in not_yet_allocated
    ) + _unplanned_bytes(service)
    return PlanComparison("host memory at start", expected / 1e9, anonymous_bytes() / 1e9, "GB")


def compare_at_end(plan: Plan, service: Service) -> PlanComparison:
    """Predicted and measured host memory after the last request, with the KV cache at its peak, and with prompt scores
    if any were requested."""
    host, scored = plan.nearest.memory.host, service.engine.counts.scored_tokens > 0
    excluded = ("KV cache", "states") if scored else ("KV cache", "states", "scores")
    expected = sum(size for name, size in host.items() if name not in excluded) + _unplanned_bytes(service)
    if "KV cache" in host:
        cache = service.engine.kv_cache
        expected += cache.peak_tokens * service.kv_bytes_per_token
        expected += cache.peak_states * service.engine.forward.bytes_per_sequence
    return PlanComparison("host memory at the end", expected / 1e9, anonymous_bytes() / 1e9, "GB")


def _unplanned_bytes(service: Service) -> int:
    """Size of what a plan does not count: loaded adapters, and the host tier of the KV cache, whose memory is all in
    use from the start where it is pinned, and else as far as it was filled."""
    tiers = service.engine.tiers
    adapters = sum(entry.adapter.bytes() for entry in service.registry.loaded.values())
    return adapters + (0 if tiers is None else tiers.host.resident_bytes)
