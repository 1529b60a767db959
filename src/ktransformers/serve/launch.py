"""From a launch line to a running server: the model opened and checked, room measured, adapters loaded, the socket
bound.

The order is chosen so that what can fail fails early: paths and packages first, the port and the plan before the hours
of loading, the family's check before adapters. Everything but the experts is computed in bf16 where the processor or a
GPU has instructions for it, in float32 elsewhere.
"""

from __future__ import annotations

import importlib.util
import math
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ktransformers import env, settings, system
from ktransformers.errors import InputError
from ktransformers.plan import Plan, refuse
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import Target, resolve

HOST_SHARE = 0.8  # of free host memory at most, whatever the line says: lines are written for GPUs
PATIENCE = 30  # seconds for running answers when the server is asked to end

Say = Callable[[str], None]
Show = Callable[[Plan], None]


def with_environment(launch: Launch) -> Launch:
    """API_HOST, API_PORT and API_KEY where the line says nothing, as LLaMA-Factory reads them; then config.yaml."""
    port = env.text("API_PORT")
    if port and not port.isdigit():
        raise InputError("API_PORT", repr(port), "a port's number")
    chosen = settings.read().server
    return replace(
        launch,
        host=launch.host or env.text("API_HOST") or chosen.host,
        port=launch.port if launch.port is not None else int(port) if port else chosen.port,
        api_key=launch.api_key or env.text("API_KEY") or None,
    )


def check_packages() -> None:
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise InputError(package, "no such package", "it installed", "pip install 'ktransformers[serve]'")


def dtype_of(word: str, device: str) -> Any:
    import torch

    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    known |= {"half": torch.float16, "float": torch.float32, "bf16": torch.bfloat16}
    if word == "auto":
        return torch.bfloat16 if system.bf16_is_fast(device) else torch.float32
    if word not in known:
        raise InputError("dtype", word, f"auto or one of {', '.join(known)}")
    return known[word]


def make_plan(launch: Launch, target: Target, say: Say, show: Show) -> Plan | None:
    """Shown first; what cannot fit is refused unless the line says --force. Where nothing fits with the GPU, and nobody
    has asked for it, everything is on the CPU (`device_of`)."""
    from transformers import AutoConfig

    from ktransformers.place.options import read_options
    from ktransformers.serve.forecast import forecast

    longest, wish = _longest(AutoConfig.from_pretrained(target.model)), read_options(launch.place, target.keys)
    needs_gpu = wish.needs_gpu or launch.device is not None or (launch.gpus or 1) > 1

    def planned(device: str) -> tuple[Plan | None, str]:
        size = dtype_of(launch.dtype, device).itemsize
        return forecast(launch, target.model, device, size, longest, wish.policies, needs_gpu)

    found, note = planned(device_of(launch))
    if found is not None and found.left_out:
        say(f"everything on the CPU: {found.left_out}; --device cuda insists on it")
        found, note = planned("cpu")
    if found is None:
        say(note)
        return None
    show(found)
    refuse(found, force=launch.force)
    return found


def device_of(launch: Launch, plan: Plan | None = None) -> str:
    """As the line says; else a GPU where there is one and the plan has not left it out."""
    import torch

    left_out = plan is not None and not plan.nearest.choice.gpus
    return launch.device or ("cuda" if torch.cuda.is_available() and not left_out else "cpu")


def host_room(launch: Launch, per_token: int) -> int:
    return int(system.memory().available * min(launch.memory, HOST_SHARE)) // per_token


def open_service(launch: Launch, target: Target, say: Say, plan: Plan | None = None) -> Any:
    """The service with its engine, not started yet."""
    from transformers import AutoTokenizer

    from ktransformers.place.apply import ModelPlacement
    from ktransformers.serve.engine.engine import Limits, ServeEngine
    from ktransformers.serve.engine.forward import open_forward
    from ktransformers.serve.engine.lora import LoraModules
    from ktransformers.serve.http.registry import Registry
    from ktransformers.serve.http.service import Service
    from ktransformers.serve.placement import (
        attach_experts,
        cache_tokens,
        fill_gpus,
        gpus_of,
        options_of,
        spreads_layers,
    )

    device = device_of(launch, plan)
    dtype = dtype_of(launch.dtype, device)
    tokenizer: Any = AutoTokenizer.from_pretrained(target.model)
    template = launch.chat_template.read_text() if launch.chat_template else ""
    say(f"loading {target.model} ({str(dtype).removeprefix('torch.')}, {device})")
    placement = ModelPlacement(options_of(launch, target).as_planned(plan))
    spreads = device != "cpu" and spreads_layers(placement.options, launch, plan)
    places = device != "cpu" and placement.options.policy != "cpu"
    graphs = device != "cpu" and not launch.no_graphs
    model = _open_model(launch, target, dtype, "cpu" if spreads else device, places, say)
    if spreads:
        say(placement.move_layers(model, gpus_of(launch, plan)))
    forward = open_forward(model)
    per_token = forward.check()
    attach_experts(model, placement, say, graphs)
    context = launch.context or _longest(model.config)
    room = cache_tokens(model, launch, per_token) if device != "cpu" else host_room(launch, per_token)
    tokens = launch.tokens or max(256, min(room, launch.running * context))
    limits = Limits(launch.running, launch.queued, launch.chunk, tokens, min(context, tokens))
    say(f"room for {tokens} tokens, {tokens * per_token / 2**30:.2f} GiB of keys and values when full")
    engine = ServeEngine(forward, limits)
    served = launch.served or target.name
    registry = Registry(served, LoraModules(model), str(target.model), engine.forget, launch.always)
    for name, place in (*target.adapters, *launch.lora_paths):
        made = registry.load(name, place)
        say(f"adapter {served}:{name} from {place}, {made.bytes() / 2**20:.1f} MiB")
    service = Service(
        engine, registry, tokenizer, timeout=launch.timeout or None, template=template, per_token=per_token
    )
    service.approximations = fill_gpus(placement, tokens * per_token, launch.chunk, plan, graphs, say)
    service.placement = placement
    if device != "cpu":
        say(_decode_in_graphs(forward, placement.placement, launch))
    return service


def _decode_in_graphs(forward: Any, placement: Any, launch: Launch) -> str:
    """What became of it."""
    from ktransformers.serve.graphs.decode_graphs import DecodeGraphs, why_not

    why = "--disable-cuda-graph" if launch.no_graphs else why_not(forward, placement)
    if why:
        return f"new tokens are computed kernel by kernel: {why}"
    forward.graphs = DecodeGraphs(forward.model, placement, max_rows=launch.graph_rows)
    return f"new tokens are computed in CUDA graphs, up to {forward.graphs.max_rows} sequences at once"


def _open_model(launch: Launch, target: Target, dtype: Any, device: str, spare: bool, say: Say) -> Any:
    from ktransformers.checkpoint import find_experts
    from ktransformers.checkpoint.packed import is_packed
    from ktransformers.checkpoint.shards import Shards

    directory = target.model
    if not find_experts(Shards.of_directory(directory).names):  # a dense model: nothing of it is ours
        from transformers import AutoModelForCausalLM

        stock: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return stock.to(device)
    from ktransformers.nn import load_model
    from ktransformers.nn.pool import set_default_pool

    wanted = launch.threads or 0, launch.groups or 0, spare
    pool = set_default_pool(*wanted) if any(wanted) else None
    experts = target.experts_of(launch.experts)
    if experts is not None:
        say(f"experts from {experts}")
    if launch.pages != "lazy" and not is_packed(experts or directory):
        say(
            f"--{launch.pages}: without effect: these experts are read into memory; `kt quant` writes some to be mapped"
        )
    where = None if device == "cpu" else device
    return load_model(directory, experts=experts, dtype=dtype, device=where, pool=pool, pages=launch.pages)


def _longest(config: Any) -> int:
    """Tokens that a sequence of this model may have."""
    found = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(found) if found and math.isfinite(found) else 4096


def bind(host: str, port: int) -> socket.socket:
    """The socket, before anything is loaded: a port in use is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        raise InputError("port", f"{host}:{port} ({error})", "a free port of this machine", "pass --port") from error
    return made


def serve(launch: Launch, say: Say, show: Show) -> None:
    """Until it is told to end (Ctrl-C, SIGTERM): then nothing new is taken and running answers have 30 seconds."""
    check_packages()
    for note in launch.notes:
        say(f"accepted without effect: {note}")
    launch = with_environment(launch)
    target = resolve(launch.target)
    assert launch.host is not None and launch.port is not None
    door = bind(launch.host, launch.port)
    plan = make_plan(launch, target, say, show)
    import uvicorn  # type: ignore[import-not-found,unused-ignore]

    from ktransformers.serve import forecast
    from ktransformers.serve.http.api import create_app
    from ktransformers.serve.http.training import TrainingLog, Watch

    service = open_service(launch, target, say, plan)
    watch = Watch(launch.watch, service.registry) if launch.watch else None
    training = TrainingLog(launch.watch) if launch.watch else None

    def ended() -> None:  # here, because uvicorn lets a signal end the process when it is done
        if plan is not None:
            say(str(forecast.at_end(plan, service)))
        if (line := service.placement.save_counts()) is not None:
            say(line)

    app = create_app(service, api_key=launch.api_key, training=training, ended=ended)
    config = uvicorn.Config(app, log_level=launch.log_level, timeout_graceful_shutdown=PATIENCE)
    server = uvicorn.Server(config)
    if watch is not None:
        watch.start()
    port = door.getsockname()[1]
    if plan is not None:
        say(str(forecast.at_start(plan, service)))
    say(f"{service.registry.served} is served at http://{launch.host}:{port}/v1")
    try:
        with system.frozen_gc():
            server.run(sockets=[door])
    finally:
        if watch is not None:
            watch.stop()
        door.close()
