"""From a launch line to a loaded service, without a socket: `kt serve`, `kt run`, `kt bench` and `kt prove` open it.

The order makes errors come early: words and files first, the model, the check of its family against the stock model,
then experts on GPUs, the KV cache and adapters. Everything but the experts is computed in bf16 if the processor or a
GPU has instructions for it, in float32 otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.checkpoint.packed import is_packed
from ktransformers.ground.errors import InputError
from ktransformers.ground.interrupt import remembered_interrupt
from ktransformers.ground.linear_storage import AS_RELEASED
from ktransformers.ground.log import logger
from ktransformers.ground.packages import require_compiler
from ktransformers.ground.pool import pool_for
from ktransformers.modeling.load import load_dense, open_model
from ktransformers.modeling.pretrained import read_tokenizer
from ktransformers.modeling.spec import ModelSpec, check_rest, dtype_name, parse_dtype
from ktransformers.operators.load import with_rules
from ktransformers.place.apply import ModelPlacement, as_planned
from ktransformers.place.device_map import run_on
from ktransformers.plan import Plan
from ktransformers.quantized.weight import describe_quantized
from ktransformers.serve.cache.kv_cache import CAPACITY_BLOCK
from ktransformers.serve.flags import Launch
from ktransformers.serve.forecast import choose_device, chunk_size, max_positions, memory_advice
from ktransformers.serve.graphs.decode_graphs import attach_graphs
from ktransformers.serve.http.limits import RequestLimits
from ktransformers.serve.http.registry import Registry
from ktransformers.serve.http.service import DoorOptions, PrepareOptions, Service
from ktransformers.serve.http.templates import ServedTemplates
from ktransformers.serve.kv_tiers import TierRequest, make_tiers, open_tiers
from ktransformers.serve.nodes.remote_layer import connect_group
from ktransformers.serve.placement import (
    attach_experts,
    cache_tokens,
    fill_gpus,
    gpus_of,
    gpus_of_layers,
    options_of,
    plan_operators,
    spreads_layers,
)
from ktransformers.serve.scheduler.engine import ServeEngine
from ktransformers.serve.scheduler.forward import Forward, SequentialForward, make_forward
from ktransformers.serve.scheduler.lora import LoraModules
from ktransformers.serve.scheduler.scheduler import Limits
from ktransformers.serve.target import Target, as_trained, differences_from_training

if TYPE_CHECKING:
    from ktransformers.operators.plan import OperatorPlan
    from ktransformers.serve.nodes.group import NodeGroup

LOG = logger(__name__)
LogLine = Callable[[str], None]
# Sequences in a batch, unless the line says otherwise: beyond the largest captured size a GPU computes eagerly, and
# families whose sequences are computed one at a time gain nothing from a larger batch.
MOST_RUNNING, MOST_RUNNING_ALONE = 256, 16
FULL_LENGTH = 16  # sequences of full length that the KV cache has room for, where memory allows
STATE_SHARE = 0.25  # of the memory for the KV cache, for states of sequences


def open_service(
    launch: Launch,
    target: Target,
    log: LogLine,
    plan: Plan | None = None,
    *,
    many_requests: bool = False,
    group: NodeGroup | None = None,
) -> Service:
    """Load the model and assemble the service; its engine is not started yet. `many_requests`: prefixes are worth
    keeping in host memory of a machine with a GPU, unless the line says otherwise. `group`: hosts that have the other
    experts."""
    with remembered_interrupt() as check_interrupt:

        def log_and_check(line: str) -> None:
            check_interrupt()
            log(line)

        return _open_service(as_trained(launch, target), target, log_and_check, plan, many_requests, group)


def _open_service(
    launch: Launch, target: Target, log: LogLine, plan: Plan | None, many_requests: bool, group: NodeGroup | None
) -> Service:
    # Prepare: whatever can be refused without the model.
    device = choose_device(launch, plan)
    on_gpu = device != "cpu"
    require_compiler(device, "--device cpu")
    if launch.deterministic and on_gpu:
        expected = "--device cpu: kernels of the GPU add in no fixed order"
        raise InputError("--deterministic", f"device {device}", expected)
    dtype = parse_dtype(launch.dtype, device)
    check_rest(launch.rest, dtype, device)
    tokenizer = read_tokenizer(target.model, trust_remote_code=launch.trust_remote_code)
    templates = ServedTemplates(tokenizer, launch, target, log)
    tier_request = open_tiers(launch, target, dtype, many_requests and on_gpu, log)
    options = as_planned(options_of(launch, target), plan)
    for line in differences_from_training(launch, target, options.kt_optimize_rule):
        log(f"warning: {line}")
    placement = ModelPlacement(options if group is None else replace(options, kt_place="cpu"))
    graphs = on_gpu and not launch.disable_cuda_graph and launch.attention_backend == "triton"
    graphs = graphs and group is None  # experts of other hosts are no part of a graph

    # Load.
    log(f"loading {target.model} ({dtype_name(dtype)}, {device})")
    operators = plan_operators(placement.options, launch, target, plan, device, log)
    gpus = gpus_of(launch, plan) if on_gpu and spreads_layers(placement.options, launch, plan) else 0
    spec = ModelSpec(
        target.model,
        dtype=dtype,
        device="cpu" if gpus else device,
        rest=launch.rest,
        shard=None if group is None else group.shard,
        later_gpus=gpus_of_layers(placement.options, target, gpus) if gpus else (),
    )
    spare = on_gpu and placement.options.policy != "cpu"
    model = load_served(spec, launch, target, log, operators, spare=spare)
    if group is not None:
        connect_group(model, group.pool, log)
    if gpus:
        log(placement.move_layers(model, gpus))
    else:
        run_on(model, device)
    coded = describe_quantized(model)
    if coded or launch.rest not in AS_RELEASED:
        log(coded or f"--rest {launch.rest}: without effect: no linear layer without an operator is large enough")

    # Compare with the stock model, then place: residents get what the KV cache leaves of each GPU.
    forward, kv_bytes_per_token = _checked_forward(model, launch, log)
    attach_experts(model, placement, log, graphs)
    engine, cache_bytes = _make_engine(launch, plan, forward, device, kv_bytes_per_token, tier_request, log)
    registry = _open_registry(launch, target, engine, templates, log)
    service = Service(
        engine,
        registry,
        tokenizer,
        timeout=launch.request_timeout or None,
        template=templates.base,
        kv_bytes_per_token=kv_bytes_per_token,
        request_limits=_request_limits(launch),
        prepare=PrepareOptions(launch.prepare_workers, launch.prepare_timeout),
        doors=DoorOptions(
            launch.tool_call_parser, launch.reasoning_parser, launch.strict_fields, launch.strict_model_names
        ),
    )
    if service.template_of(None) and (note := service.answer_format(None).note):
        log(note)
    service.approximations = fill_gpus(
        placement, cache_bytes, service.engine.limits.chunked_prefill_size, plan, graphs, log
    )
    service.approximations |= _encoded_on_load(launch, target, operators, options.kt_optimize_rule, coded=bool(coded))
    service.placement = placement
    if placement.placement is not None:
        engine.raise_launched = placement.placement.raise_launched
    if group is not None:
        service.nodes, engine.unavailable = group.pool, group.pool.unavailable
    if on_gpu and group is None:
        running = engine.limits.max_running_requests
        log(attach_graphs(forward, placement.placement, replace(launch, max_running_requests=running)))
    service.attention_backend = "core" if not on_gpu else "torch" if forward.graphs is None else "triton"
    return service


def load_served(
    spec: ModelSpec, launch: Launch, target: Target, log: LogLine, operators: OperatorPlan | None, *, spare: bool
) -> Any:
    """The model with the experts that the line asks for, or a dense model. `operators` is the plan of what rules make
    of it, None without rules; `spare`: a thread of the pool launches work on a GPU."""
    if not spec.has_experts:
        return load_dense(with_rules(spec, operators))
    experts = target.choose_experts(launch.experts)
    if experts is not None:
        log(f"experts from {experts}")
    if launch.pages != "lazy" and not is_packed(experts or spec.path):
        log(
            f"--{launch.pages}: without effect: these experts are read into memory; `kt quant` writes some to be mapped"
        )
    pool = pool_for(launch.threads, launch.groups, log, spare=spare)
    spec = replace(spec, experts=experts, pool=pool, isa=launch.isa, pages=launch.pages, verify=launch.verify)
    return open_model(with_rules(spec, operators, target.choose_expert_format(launch.expert_format, launch.experts)))


def _checked_forward(model: Any, launch: Launch, log: LogLine) -> tuple[Forward | SequentialForward, int]:
    """What computes batches, compared with the stock model, and the bytes of keys and values of a token."""
    forward = make_forward(model, fp8_cache=launch.fp8_cache)
    if forward.reason:
        log(f"sequences of {model.config.model_type} are computed one at a time: {forward.reason}")
    kv_bytes_per_token = forward.check_against_stock()
    if forward.fp8_cache:
        kept = "; keys of indexers and recurrent states keep their dtype" if forward.indexers or forward.states else ""
        log(f"keys and values in fp8 (e4m3): logits of a short text differ by {forward.fp8_error:.2g}{kept}")
    return forward, kv_bytes_per_token


def _make_engine(
    launch: Launch,
    plan: Plan | None,
    forward: Forward | SequentialForward,
    device: str,
    kv_bytes_per_token: int,
    tier_request: TierRequest | None,
    log: LogLine,
) -> tuple[ServeEngine, int]:
    """The engine with its KV cache and tiers, and the bytes of the cache when it is full."""
    context = launch.context_length or max_positions(forward.model.config)
    running = launch.max_running_requests or _most_running(launch, forward, device)
    if launch.max_running_requests is None and forward.bytes_per_sequence:
        free = cache_tokens(forward.model, launch, device, kv_bytes_per_token, 0) * kv_bytes_per_token
        fitting = int(STATE_SHARE * free) // (2 * forward.bytes_per_sequence)
        if launch.max_total_tokens is not None:
            fitting = min(fitting, launch.max_total_tokens // CAPACITY_BLOCK)
        running = max(FULL_LENGTH, min(running, fitting))
    state_bytes = 2 * running * forward.bytes_per_sequence  # of running ones, and copies
    capacity = cache_tokens(forward.model, launch, device, kv_bytes_per_token, state_bytes)
    full_length = launch.max_running_requests or FULL_LENGTH
    tokens = launch.max_total_tokens or max(256, min(capacity, full_length * context))
    if launch.max_running_requests is None:
        running = min(running, max(1, tokens // CAPACITY_BLOCK))
    launch = replace(launch, max_running_requests=running)
    cache_bytes = tokens * kv_bytes_per_token
    states = f", states of sequences up to {state_bytes / 2**30:.2f} GiB" if state_bytes else ""
    LOG.info("KV cache of %d tokens, %.2f GiB when full%s", tokens, cache_bytes / 2**30, states)
    limits = Limits(
        running,
        launch.max_queued_requests,
        chunk_size(launch, plan),
        tokens,
        min(context, tokens),
        launch.deterministic,
    )
    engine = ServeEngine(forward, limits)
    if (tiers := make_tiers(tier_request, forward, limits.context_length, log)) is not None:
        engine.attach_tiers(tiers)
    engine.memory_advice = memory_advice(launch, plan, tokens, cache_bytes)
    return engine, cache_bytes + state_bytes


def _most_running(launch: Launch, forward: Forward | SequentialForward, device: str) -> int:
    if launch.deterministic or not forward.batched:
        return MOST_RUNNING_ALONE
    return MOST_RUNNING if device == "cpu" or launch.disable_cuda_graph else launch.cuda_graph_max_bs


def _open_registry(
    launch: Launch, target: Target, engine: ServeEngine, templates: ServedTemplates, log: LogLine
) -> Registry:
    """The registry with the adapters of the launch line."""
    served = launch.served_model_name or target.name
    modules = LoraModules(engine.forward.model, hash_content=engine.tiers is not None and engine.tiers.disk is not None)
    registry = Registry(served, modules, str(target.model), engine.drop_adapter, launch.always_on, templates.read)
    for name, directory in (*target.adapters, *launch.lora_paths):
        adapter = registry.load(name, directory)
        log(f"adapter {served}:{name} from {directory}, {adapter.bytes() / 2**20:.1f} MiB")
        if (note := templates.describe(adapter.template)) is not None:
            log(f"requests to {served}:{name} are rendered with {note}; those to {served} with the base's own")
    return registry


def _encoded_on_load(
    launch: Launch, target: Target, operators: OperatorPlan | None, rules: str | None, *, coded: bool
) -> dict[str, str]:
    """Flag or key -> what it rounds while the model is loaded; `coded`: linear layers are quantized."""
    approximations = {"kv_cache_dtype": "fp8_e4m3"} if launch.fp8_cache else {}
    if coded and launch.rest not in AS_RELEASED:
        approximations["rest"] = launch.rest
    if (encoded := launch.expert_format or target.expert_format) is not None:
        approximations["kt_backend"] = encoded
    if operators is not None and operators.encodes:
        approximations["kt_optimize_rule"] = Path(str(rules)).name
    return approximations


def _request_limits(launch: Launch) -> RequestLimits:
    return RequestLimits(
        launch.max_body_bytes,
        launch.max_prompts,
        launch.max_messages,
        launch.max_tools,
        launch.max_schema_properties,
        launch.max_schema_depth,
    )
