"""The plan of a launch line before anything is loaded, and its comparison with the memory that was used.

The planner (`ktransformers.plan`) knows model shapes and machine rates, not servers; this module translates launch
options into its workload. The KV cache takes whatever memory is free, so a plan with all requests at full length would
refuse configurations that run well. The plan counts the capacity that the line asks for, otherwise that of one request;
what the cache gets beyond that is decided after loading, from the memory that is then free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import AS_RELEASED
from ktransformers.modeling.pretrained import read_pretrained_config
from ktransformers.modeling.spec import device_for, parse_dtype
from ktransformers.place.backends import encoded_format, rest_by_rules
from ktransformers.plan import Plan, PlanComparison, Serving, make_plan, open_shape, require_fit, stored_as, with_gpus
from ktransformers.plan.calibrate import this_machine
from ktransformers.plan.meter import AT_END, anonymous_bytes
from ktransformers.quantized.weight import rest_format
from ktransformers.serve.flags import Launch
from ktransformers.serve.placement import options_of
from ktransformers.serve.target import Target, as_trained

if TYPE_CHECKING:
    from ktransformers.serve.http.service import Service

# Prompt tokens of a step, at most: the largest that changes nothing else in the plan is taken. The first on a GPU only.
CHUNK_SIZES = (8192, 4096, 2048, 1024)
# Without a plan, with --deterministic, and where no larger one fits.
DEFAULT_CHUNK = 512
DEFAULT_CONTEXT = 4096  # tokens of a request, if the line sets none and the model allows more


def serving_workload(launch: Launch, rest_bytes: int, max_positions: int, rest: str | None = None) -> Serving:
    """`max_positions`: the model's own limit of a sequence; `rest`: how rules have linear layers stored, None: as the
    launch line says."""
    rest = rest or launch.rest
    context = min(launch.context_length or DEFAULT_CONTEXT, max_positions)
    cache_tokens = launch.max_total_tokens or context
    return Serving(
        context=cache_tokens,
        prompt=min(launch.chunked_prefill_size or DEFAULT_CHUNK, cache_tokens),
        sequences=1,
        rest_bytes=rest_bytes,
        linear_format=None if rest == "bf16" else rest,
        fp8_cache=launch.fp8_cache,
    )


def workload_of(launch: Launch, target: Target, device: str, rest: str | None = None) -> Serving:
    positions = max_positions(read_pretrained_config(target.model))
    return serving_workload(launch, parse_dtype(launch.dtype, device).itemsize, positions, rest)


def max_positions(config: Any) -> int:
    """The longest sequence that the model supports."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(positions) if positions and math.isfinite(positions) else 4096


def chunk_size(launch: Launch, plan: Plan | None) -> int:
    """Prompt tokens of a step, at most."""
    planned = DEFAULT_CHUNK if plan is None or launch.deterministic else plan.nearest.work.tokens
    return launch.chunked_prefill_size or max(DEFAULT_CHUNK, planned)


def choose_device(launch: Launch, plan: Plan | None = None) -> str:
    """The line's device, otherwise a visible GPU unless the plan leaves it out."""
    return device_for(launch.device, uses_gpu=plan is None or bool(plan.nearest.choice.gpus))


def plan_server(
    launch: Launch, target: Target, log: Callable[[str], None], show: Callable[[Plan], None]
) -> Plan | None:
    """Make and show the plan; one that does not fit is refused without --force. If nothing fits with the GPU, and the
    line does not require it, everything is on the CPU (`choose_device`). A model whose config the planner cannot read
    is served without a plan."""
    launch = as_trained(launch, target)
    if launch.rest not in AS_RELEASED:
        rest_format(launch.rest)
    options = options_of(launch, target)
    needs_gpu = options.needs_gpu or launch.device is not None or (launch.gpus or 1) > 1

    def plan_for(device: str) -> Plan | None:
        work = workload_of(launch, target, device, rest_by_rules(options, launch.rest))
        fixed = launch.chunked_prefill_size is not None or launch.deterministic
        expert_format = launch.expert_format or encoded_format(options) or target.expert_format
        try:
            shape = stored_as(open_shape(str(target.model)), expert_format)
            machine = with_gpus(this_machine(), "none") if device == "cpu" else this_machine()
            plan = make_plan(shape, work, machine, policies=options.policies, needs_gpu=needs_gpu)
            # On a GPU, prompts of latents and of selected keys go through torch, whose memory for them is not planned.
            fixed = fixed or (device != "cpu" and bool(shape.latent_width or shape.index_width))
            sizes = () if fixed else CHUNK_SIZES[device == "cpu" :]
            for tokens in sizes if plan.best is not None else ():
                larger_work = replace(work, prompt=min(tokens, work.context))
                larger = make_plan(shape, larger_work, machine, policies=options.policies, needs_gpu=needs_gpu)
                if larger.best is not None and larger.best.choice == plan.nearest.choice:
                    return larger
            return plan
        except InputError as error:
            log(f"no plan of memory and time: {error}")
            return None

    plan = plan_for(choose_device(launch))
    if plan is not None and plan.gpu_unused_reason:
        log(f"everything on the CPU: {plan.gpu_unused_reason}; --device cuda requires it")
        plan = plan_for("cpu")
    if plan is not None:
        show(plan)
        require_fit(plan, force=launch.force)
    return plan


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
    return PlanComparison(AT_END, expected / 1e9, anonymous_bytes() / 1e9, "GB")


def _unplanned_bytes(service: Service) -> int:
    """Size of what a plan does not count: loaded adapters, and the host tier of the KV cache, whose memory is all in
    use from the start where it is pinned, and else as far as it was filled."""
    tiers = service.engine.tiers
    adapters = sum(entry.adapter.bytes() for entry in service.registry.loaded.values())
    return adapters + (0 if tiers is None else tiers.host.resident_bytes)


def memory_advice(launch: Launch, plan: Plan | None, cache_tokens: int, cache_bytes: int) -> str:
    """What to change when memory runs out while requests are computed: the flags in the order of the guides, each with
    its present value and what the plan counts for it."""
    tables = [] if plan is None else [plan.nearest.memory.host, *plan.nearest.memory.gpus]

    def planned(*names: str) -> str:
        size = sum(table.get(name, 0) for table in tables for name in names)
        return f", planned {size / 2**30:.2f} GiB" if size else ""

    chunk = chunk_size(launch, plan)
    prefill = "no limit" if chunk >= 2**31 else str(chunk)
    steps = [
        f"a smaller --chunked-prefill-size (now {prefill}{planned('activations', 'scores', 'workspace', 'groups')})",
        f"fewer --max-running-requests (now {launch.max_running_requests})",
    ]
    if plan is not None and plan.nearest.choice.residents:
        residents = plan.nearest.choice.residents
        steps.append(f"fewer --kt-num-gpu-experts (now {residents} a layer{planned('residents', 'slots')})")
    if plan is not None and plan.nearest.choice.format not in ("int8", "int4"):
        experts = f"{plan.nearest.choice.format}{planned('experts')}"
        steps.append(f"int8 experts by --kt-method int8 (now {experts})")
    cache = f"{cache_tokens} tokens, {cache_bytes / 2**30:.2f} GiB when full"
    if launch.max_total_tokens is None:
        steps.append(f"a smaller --mem-fraction-static (now {launch.memory:g}: a KV cache of {cache})")
    else:
        steps.append(f"fewer --max-total-tokens (now a KV cache of {cache})")
    return ", ".join(steps)
