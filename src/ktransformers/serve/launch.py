"""From a launch line to a running server: open and check the model, size the KV cache, load adapters, bind the socket.

The order makes errors come early: paths and packages first, the port and the plan before the model is loaded, the check
of the model family before adapters. Everything but the experts is computed in bf16 if the processor or a GPU has
instructions for it, in float32 otherwise.
"""

from __future__ import annotations

import importlib.util
import math
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.ground import env, model_registry, settings, system
from ktransformers.ground.errors import InputError
from ktransformers.ground.interrupt import remembered_interrupt
from ktransformers.ground.linear_storage import AS_RELEASED
from ktransformers.ground.triton_modules import require_compiler
from ktransformers.plan import Plan, require_fit
from ktransformers.serve.flags import Launch
from ktransformers.serve.hosts.options import HostOptions, read_hosts
from ktransformers.serve.running import RunningServer, forget_server, record_server
from ktransformers.serve.target import Target, resolve_target
from ktransformers.serve.training_numbers import as_trained, differences_from_training
from ktransformers.serve.yaml_keys import with_yaml_keys

if TYPE_CHECKING:
    from ktransformers.experts.partition import ExpertShard
    from ktransformers.ground.options.placement import PlacementOptions
    from ktransformers.operators.plan import OperatorPlan
    from ktransformers.serve.hosts.group import HostGroup
    from ktransformers.serve.kv_tiers import TierRequest
    from ktransformers.serve.scheduler.engine import ServeEngine
    from ktransformers.serve.scheduler.forward import Forward, SequentialForward

MAX_HOST_SHARE = 0.8  # of free host memory for the KV cache: --mem-fraction-static is chosen for GPUs
SHUTDOWN_SECONDS = 30  # for running requests after SIGTERM or Ctrl-C

LogLine = Callable[[str], None]
ShowPlan = Callable[[Plan], None]
OnReady = Callable[[RunningServer], None]


def with_environment(launch: Launch) -> Launch:
    """Fill host, port and key from API_HOST, API_PORT and API_KEY, as LLaMA-Factory does; then from config.yaml."""
    port = env.text("API_PORT")
    if port and not port.isdigit():
        raise InputError("API_PORT", repr(port), "a port's number")
    configured = settings.read().server
    return replace(
        launch,
        host=launch.host or env.text("API_HOST") or configured.host,
        port=launch.port if launch.port is not None else int(port) if port else configured.port,
        api_key=launch.api_key or env.text("API_KEY") or None,
    )


def layers_note(gpus: int) -> str:
    """The first line of a server with --tensor-parallel-size."""
    return (
        f"--tensor-parallel-size {gpus}: whole layers are spread over the GPUs, heads are not split; "
        "SGLang has tensor parallel attention (docs/sglang.md)"
    )


def check_packages() -> None:
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise InputError(package, "no such package", "it installed", "pip install 'ktransformers[serve]'")


def parse_dtype(name: str, device: str) -> Any:
    import torch

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    dtypes |= {"half": torch.float16, "float": torch.float32, "bf16": torch.bfloat16}
    if name == "auto":
        return torch.bfloat16 if system.bf16_is_fast(device) else torch.float32
    if name not in dtypes:
        raise InputError("dtype", name, f"auto or one of {', '.join(dtypes)}")
    return dtypes[name]


def make_plan(launch: Launch, target: Target, log: LogLine, show: ShowPlan) -> Plan | None:
    """Make and show the plan; one that does not fit is refused without --force. If nothing fits with the GPU, and the
    line does not require it, everything is on the CPU (`choose_device`)."""
    from ktransformers.modeling.pretrained import read_pretrained_config
    from ktransformers.place.backends import encoded_format, rest_by_rules
    from ktransformers.serve.forecast import forecast
    from ktransformers.serve.placement import options_of

    launch = as_trained(launch, target)
    _check_rest(launch)
    max_positions = _max_positions(read_pretrained_config(target.model))
    options = options_of(launch, target)
    needs_gpu = options.needs_gpu or launch.device is not None or (launch.gpus or 1) > 1

    def plan_for(device: str) -> tuple[Plan | None, str]:
        dtype_bytes = parse_dtype(launch.dtype, device).itemsize
        wanted = launch.expert_format or encoded_format(options) or target.expert_format
        rest = rest_by_rules(options, launch.rest)
        return forecast(
            launch, target.model, device, dtype_bytes, max_positions, options.policies, needs_gpu, wanted, rest
        )

    plan, note = plan_for(choose_device(launch))
    if plan is not None and plan.gpu_unused_reason:
        log(f"everything on the CPU: {plan.gpu_unused_reason}; --device cuda requires it")
        plan, note = plan_for("cpu")
    if plan is None:
        log(note)
        return None
    show(plan)
    require_fit(plan, force=launch.force)
    return plan


def choose_device(launch: Launch, plan: Plan | None = None) -> str:
    """The line's device, otherwise a visible GPU unless the plan leaves it out."""
    if launch.device is not None:
        system.require_supported(launch.device, "--device", "--device cpu, or CUDA_VISIBLE_DEVICES with another GPU")
        return launch.device
    left_out = plan is not None and not plan.nearest.choice.gpus
    return "cuda" if system.has_gpu() and not left_out else "cpu"


def host_cache_tokens(launch: Launch, kv_bytes_per_token: int, state_bytes: int) -> int:
    available = system.memory().available * min(launch.memory, MAX_HOST_SHARE)
    return max(0, int(available) - state_bytes) // kv_bytes_per_token


def open_service(
    launch: Launch,
    target: Target,
    log: LogLine,
    plan: Plan | None = None,
    *,
    many_requests: bool = False,
    group: HostGroup | None = None,
) -> Any:
    """Load the model and assemble the service; its engine is not started yet. `many_requests`: prefixes are worth
    keeping in host memory beside a GPU, unless the line says otherwise. `group`: hosts that have the other experts."""
    with remembered_interrupt() as check_interrupt:

        def log_and_check(line: str) -> None:
            check_interrupt()
            log(line)

        return _load_service(as_trained(launch, target), target, log_and_check, plan, many_requests, group)


def _load_service(
    launch: Launch, target: Target, log: LogLine, plan: Plan | None, many_requests: bool, group: HostGroup | None
) -> Any:
    from ktransformers.modeling.pretrained import read_tokenizer
    from ktransformers.place.apply import ModelPlacement, as_planned
    from ktransformers.place.device_map import run_on
    from ktransformers.quantized.weight import describe_quantized
    from ktransformers.serve.http.service import PrepareOptions, Service
    from ktransformers.serve.http.templates import ServedTemplates
    from ktransformers.serve.kv_tiers import open_tiers
    from ktransformers.serve.placement import (
        attach_experts,
        fill_gpus,
        gpus_of,
        gpus_of_layers,
        options_of,
        plan_operators,
        spreads_layers,
    )

    device = choose_device(launch, plan)
    require_compiler(device, "--device cpu")
    _check_deterministic(launch, device)
    dtype = parse_dtype(launch.dtype, device)
    _check_rest(launch)
    _check_rest_device(launch, device, dtype)
    tokenizer = read_tokenizer(target.model, trust_remote_code=launch.trust_remote_code)
    templates = ServedTemplates(tokenizer, launch, target, log)
    tier_request = open_tiers(launch, target, dtype, many_requests and device != "cpu", log)
    log(f"loading {target.model} ({str(dtype).removeprefix('torch.')}, {device})")
    options = as_planned(options_of(launch, target), plan)
    for line in differences_from_training(launch, target, options.kt_optimize_rule):
        log(f"warning: {line}")
    placement = ModelPlacement(options if group is None else replace(options, kt_place="cpu"))
    multi_gpu = device != "cpu" and spreads_layers(placement.options, launch, plan)
    uses_gpu_experts = device != "cpu" and placement.options.policy != "cpu"
    graphs = device != "cpu" and not launch.disable_cuda_graph and launch.attention_backend == "triton"
    graphs = graphs and group is None  # experts of other hosts are no part of a graph
    load_device = "cpu" if multi_gpu else device
    operators = plan_operators(placement.options, launch, target, plan, device, log)
    shard = None if group is None else group.shard
    gpus = gpus_of(launch, plan) if multi_gpu else 0
    later = gpus_of_layers(placement.options, target, gpus) if multi_gpu else ()
    model = _load_model(
        launch, target, dtype, load_device, uses_gpu_experts, log, operators, later_gpus=later, shard=shard
    )
    if group is not None:
        connect_group(model, group, log)
    if multi_gpu:
        log(placement.move_layers(model, gpus))
    else:
        run_on(model, device)
    coded = describe_quantized(model)
    if coded or launch.rest not in AS_RELEASED:
        log(coded or f"--rest {launch.rest}: without effect: no linear layer without an operator is large enough")
    forward, kv_bytes_per_token = _checked_forward(model, launch, log)
    attach_experts(model, placement, log, graphs)
    engine, cache_bytes = _make_engine(launch, plan, forward, device, kv_bytes_per_token, tier_request, log)
    service = Service(
        engine,
        _open_registry(launch, target, engine, templates, log),
        tokenizer,
        timeout=launch.request_timeout or None,
        template=templates.base,
        kv_bytes_per_token=kv_bytes_per_token,
        request_limits=_request_limits(launch),
        prepare=PrepareOptions(launch.prepare_workers, launch.prepare_timeout),
    )
    service.approximations = fill_gpus(placement, cache_bytes, launch.chunked_prefill_size, plan, graphs, log)
    service.approximations |= _encoded_on_load(launch, target, placement.options, operators, coded=bool(coded))
    service.placement = placement
    if placement.placement is not None:
        engine.raise_launched = placement.placement.raise_launched
    if group is not None:
        service.hosts, engine.unavailable = group.pool, group.pool.unavailable
    if device != "cpu" and group is None:
        log(_attach_decode_graphs(forward, placement.placement, launch))
    service.attention_backend = "core" if device == "cpu" else "torch" if forward.graphs is None else "triton"
    return service


def _checked_forward(model: Any, launch: Launch, log: LogLine) -> tuple[Forward | SequentialForward, int]:
    """What computes batches, compared with the stock model, and the bytes of keys and values of a token."""
    from ktransformers.serve.scheduler.forward import make_forward

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
    from ktransformers.serve.kv_tiers import make_tiers
    from ktransformers.serve.memory_advice import memory_advice
    from ktransformers.serve.placement import cache_tokens
    from ktransformers.serve.scheduler.engine import ServeEngine

    model = forward.model
    context = launch.context_length or _max_positions(model.config)
    state_bytes = 2 * launch.max_running_requests * forward.bytes_per_sequence  # of running ones, and copies
    capacity = (
        host_cache_tokens(launch, kv_bytes_per_token, state_bytes)
        if device == "cpu"
        else cache_tokens(model, launch, kv_bytes_per_token, state_bytes)
    )
    tokens = launch.max_total_tokens or max(256, min(capacity, launch.max_running_requests * context))
    limits = _engine_limits(launch, tokens, context)
    states = f", states of sequences up to {state_bytes / 2**30:.2f} GiB" if state_bytes else ""
    log(f"KV cache of {tokens} tokens, {tokens * kv_bytes_per_token / 2**30:.2f} GiB when full{states}")
    engine = ServeEngine(forward, limits)
    if (tiers := make_tiers(tier_request, forward, limits.context_length, log)) is not None:
        engine.attach_tiers(tiers)
    engine.memory_advice = memory_advice(launch, plan, tokens, tokens * kv_bytes_per_token)
    return engine, tokens * kv_bytes_per_token + state_bytes


def _encoded_on_load(
    launch: Launch, target: Target, options: PlacementOptions, operators: OperatorPlan | None, *, coded: bool
) -> dict[str, str]:
    """Flag or key -> what it rounds while the model is loaded; `coded`: linear layers have codes."""
    approximations = {"kv_cache_dtype": "fp8_e4m3"} if launch.fp8_cache else {}
    if coded and launch.rest not in AS_RELEASED:
        approximations["rest"] = launch.rest
    if (encoded := launch.expert_format or target.expert_format) is not None:
        approximations["kt_backend"] = encoded
    if operators is not None and operators.encodes:
        approximations["kt_optimize_rule"] = Path(str(options.kt_optimize_rule)).name
    return approximations


def _engine_limits(launch: Launch, tokens: int, context: int) -> Any:
    from ktransformers.serve.scheduler.engine import Limits

    return Limits(
        launch.max_running_requests,
        launch.max_queued_requests,
        launch.chunked_prefill_size,
        tokens,
        min(context, tokens),
        launch.deterministic,
    )


def _open_registry(launch: Launch, target: Target, engine: Any, templates: Any, log: LogLine) -> Any:
    """The registry with the adapters of the launch line."""
    from ktransformers.serve.http.registry import Registry
    from ktransformers.serve.scheduler.lora import LoraModules

    served, model = launch.served_model_name or target.name, engine.forward.model
    modules = LoraModules(model, hash_content=engine.tiers is not None and engine.tiers.disk is not None)
    registry = Registry(served, modules, str(target.model), engine.drop_adapter, launch.always_on, templates.read)
    for name, directory in (*target.adapters, *launch.lora_paths):
        adapter = registry.load(name, directory)
        log(f"adapter {served}:{name} from {directory}, {adapter.bytes() / 2**20:.1f} MiB")
        if (note := templates.describe(adapter.template)) is not None:
            log(f"requests to {served}:{name} are rendered with {note}; those to {served} with the base's own")
    return registry


def _request_limits(launch: Launch) -> Any:
    from ktransformers.serve.http.limits import RequestLimits

    return RequestLimits(
        launch.max_body_bytes,
        launch.max_prompts,
        launch.max_messages,
        launch.max_tools,
        launch.max_schema_properties,
        launch.max_schema_depth,
    )


def _check_deterministic(launch: Launch, device: str) -> None:
    if launch.deterministic and device != "cpu":
        expected = "--device cpu: kernels of the GPU add in no fixed order"
        raise InputError("--deterministic", f"device {device}", expected)


def _check_rest(launch: Launch) -> None:
    from ktransformers.quantized.weight import rest_format

    if launch.rest not in AS_RELEASED:
        rest_format(launch.rest)


def _check_rest_device(launch: Launch, device: str, dtype: Any) -> None:
    from ktransformers.quantized.weight import DTYPES

    if launch.rest in AS_RELEASED:
        return
    import torch

    allowed = DTYPES if device == "cpu" else (torch.bfloat16,)
    if dtype not in allowed:
        names = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        raise InputError("rest", f"{launch.rest} with --dtype {launch.dtype} on {device}", f"--dtype {names}")


def _attach_decode_graphs(forward: Any, placement: Any, launch: Launch) -> str:
    """Returns the line to log: graphs are used, or why not."""
    from ktransformers.serve.graphs.decode_graphs import DecodeGraphs, why_not

    off = "--disable-cuda-graph" if launch.disable_cuda_graph else ""
    off = off or ("--attention-backend torch" if launch.attention_backend == "torch" else "")
    reason = off or why_not(forward, placement)
    if reason:
        return f"decode without CUDA graphs: {reason}"
    max_rows = min(launch.cuda_graph_max_bs, launch.max_running_requests)
    overlap = not launch.disable_overlap_schedule
    forward.graphs = DecodeGraphs(forward.model, placement, max_rows=max_rows, overlap=overlap)
    return f"decode in CUDA graphs, batches of up to {forward.graphs.max_rows} sequences"


def _load_model(
    launch: Launch,
    target: Target,
    dtype: Any,
    device: str,
    spare: bool,
    log: LogLine,
    operators: Any,
    *,
    later_gpus: Sequence[str] = (),
    shard: ExpertShard | None = None,
) -> Any:
    """`operators` is the plan of what rules make of it, None without rules; `later_gpus` those that layers are moved to
    afterwards."""
    from ktransformers.checkpoint import find_experts
    from ktransformers.checkpoint.gguf_directory import is_gguf_directory
    from ktransformers.checkpoint.packed import is_packed
    from ktransformers.checkpoint.shards import Shards

    def on_loaded(loaded: Any) -> Collection[str]:
        from ktransformers.operators.apply import apply_operators
        from ktransformers.operators.loader import Loader

        return () if operators is None else apply_operators(loaded, operators, Loader(directory))

    directory = target.model
    stock_reads_it = not is_gguf_directory(directory)
    if stock_reads_it and not find_experts(Shards.of_directory(directory).names):  # a dense model
        from ktransformers.modeling.load import load_dense

        return load_dense(directory, dtype, device, launch.rest, on_loaded)
    from ktransformers.ground.pool import set_default_pool
    from ktransformers.modeling.load import load_model

    pool_options = (*_pool_size(launch, log), spare)
    pool = set_default_pool(*pool_options) if any(pool_options) else None
    experts = target.choose_experts(launch.experts)
    if experts is not None:
        log(f"experts from {experts}")
    if launch.pages != "lazy" and not is_packed(experts or directory):
        log(
            f"--{launch.pages}: without effect: these experts are read into memory; `kt quant` writes some to be mapped"
        )
    gpu = None if device == "cpu" else device
    return load_model(
        directory,
        experts=experts,
        dtype=dtype,
        device=gpu,
        pool=pool,
        isa=launch.isa,
        pages=launch.pages,
        verify=launch.verify,
        widen=not later_gpus,
        rest=launch.rest,
        formats=_expert_formats(launch, target, operators),
        on_loaded=None if operators is None else on_loaded,
        shard=shard,
        later_gpus=later_gpus,
    )


def _expert_formats(launch: Launch, target: Target, operators: Any) -> dict[str, str]:
    """By rules, for the other layers by `kt_backend` or as in the training of the adapter that is served; without any
    of these the formats of the files."""
    by_rule = {} if operators is None else operators.expert_formats
    given = target.choose_expert_format(launch.expert_format, launch.experts)
    return by_rule if given is None else {"": given, **by_rule}


def _pool_size(launch: Launch, log: LogLine) -> tuple[int, int]:
    """Threads and groups of the experts, 0 where the pool chooses; a file may come from a larger machine."""
    from ktransformers import _core
    from ktransformers.ground import system

    machine = _core.machine()
    threads, groups = launch.threads or 0, launch.groups or 0
    if threads > machine["cpus"]:
        log(f"{threads} threads of experts are asked for, {machine['cpus']} CPUs are here: the pool chooses")
        threads = 0
    if text := system.hyperthreads_asked_for(threads, machine["cores"], machine["cpus"]):
        log(f"--kt-cpuinfer: {text}; without the flag the pool measures whether they help")
    if groups > machine["nodes"]:
        log(f"{groups} groups of threads are asked for, {machine['nodes']} NUMA nodes are here: one each")
        groups = 0
    return threads, groups


def _max_positions(config: Any) -> int:
    """The longest sequence that the model supports."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(positions) if positions and math.isfinite(positions) else 4096


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded, so that a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise InputError("port", f"{host}:{port} ({error})", "a free port of this machine", "pass --port") from error
    return sock


def training_roots(service: Any) -> list[Path]:
    """Folders in which the page looks for trainings: the working directory, those of models, and around adapters."""
    adapters = [Path(entry.adapter.source) for entry in service.registry.loaded.values()]
    folders = [Path.cwd(), *model_registry.search_folders(), *(adapter.parent for adapter in adapters)]
    return [folder for folder in folders if folder.is_dir()]


def _describe_code(target: Target) -> str:
    """The line on --trust-remote-code, before anything is run."""
    from ktransformers.modeling.pretrained import run_code_note

    none = "--trust-remote-code: the release brings no code for its tokenizer, and models are those of transformers"
    return run_code_note(target.model) or none


def serve(launch: Launch, log: LogLine, show: ShowPlan, on_ready: OnReady = lambda _: None) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests then have SHUTDOWN_SECONDS to end."""
    check_packages()
    if (launch.gpus or 1) > 1:
        log(layers_note(launch.gpus or 1))
    for note in launch.notes:
        log(f"accepted without effect: {note}")
    launch = with_environment(launch)
    target = resolve_target(launch.target)
    launch = with_yaml_keys(launch, target.keys)
    hosts = read_hosts(launch)
    if hosts is not None and hosts.rank:
        serve_experts(launch, target, hosts, log)
        return
    assert launch.host is not None and launch.port is not None
    with bind_socket(launch.host, launch.port) as listener:
        if launch.trust_remote_code:
            log(_describe_code(target))
        group = None if hosts is None else serve_experts(launch, target, hosts, log)
        try:
            _serve_http(launch, target, group, listener, log, show, on_ready)
        finally:
            if group is not None:
                group.pool.close()


def serve_experts(launch: Launch, target: Target, hosts: HostOptions, log: LogLine) -> HostGroup | None:
    """Rank 0: the group, once all hosts agree. Other ranks: None, when rank 0 has ended."""
    from ktransformers.modeling.pretrained import read_pretrained_config
    from ktransformers.serve.forecast import serving_workload
    from ktransformers.serve.hosts.group import start_group

    device = "cpu" if hosts.rank else choose_device(launch)
    max_positions = _max_positions(read_pretrained_config(target.model))
    work = serving_workload(launch, parse_dtype(launch.dtype, device).itemsize, max_positions)
    return start_group(launch, target, hosts, work, int(device != "cpu"), log)


def connect_group(model: Any, group: HostGroup, log: LogLine) -> None:
    from ktransformers.serve.hosts.remote_layer import attach_hosts

    log("waiting for the expert hosts to load")
    group.pool.wait_until_ready()
    layers = attach_hosts(model, group.pool)
    log(f"{layers} layers of experts over {len(group.pool.hosts) + 1} hosts")


def _serve_http(
    launch: Launch,
    target: Target,
    group: HostGroup | None,
    listener: socket.socket,
    log: LogLine,
    show: ShowPlan,
    on_ready: OnReady,
) -> None:
    assert launch.host is not None
    plan = make_plan(launch, target, log, show) if group is None else None
    import uvicorn  # type: ignore[import-not-found,unused-ignore]

    from ktransformers.serve import forecast
    from ktransformers.serve.http.access import rules_for
    from ktransformers.serve.http.api import create_app
    from ktransformers.serve.http.listener import make_config
    from ktransformers.serve.http.training import CheckpointWatch, TrainingRuns

    service = open_service(launch, target, log, plan, many_requests=True, group=group)
    watch = CheckpointWatch(launch.watch, service.registry) if launch.watch else None
    training = TrainingRuns(launch.watch, partial(training_roots, service))

    def ended() -> None:  # not after run(): uvicorn re-raises the signal when it is done
        forget_server()
        if group is not None:
            group.pool.close()
        if plan is not None:
            log(str(forecast.compare_at_end(plan, service)))
        if (line := service.placement.save_counts()) is not None:
            log(line)

    def ready() -> None:
        if plan is not None:
            log(str(forecast.compare_at_start(plan, service)))
        assert launch.host is not None
        port = int(listener.getsockname()[1])
        listener.listen()  # uvicorn does so after this; a client of the printed address would be refused until then
        on_ready(record_server(launch.host, port, service.registry.served))
        log(f"{service.registry.served} is served at http://{launch.host}:{port}/v1")

    rules = rules_for(
        launch.host, api_key=launch.api_key, allowed_hosts=launch.allowed_hosts, origins=launch.cors_origins
    )
    app = create_app(service, rules=rules, training=training, ready=ready, ended=ended)
    config = make_config(app, log_level=launch.log_level, timeout_graceful_shutdown=SHUTDOWN_SECONDS)
    server = uvicorn.Server(config)
    if watch is not None:
        watch.start()
    try:
        with system.frozen_gc():
            server.run(sockets=[listener])
    finally:
        if watch is not None:
            watch.stop()
