"""From a launch line to a running server: bind the socket, make the plan, load (`loading.py`), serve.

The order makes errors come early: paths and packages first, the port and the plan before the model is loaded.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.ground import env, model_registry, settings, system
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.modeling.pretrained import run_code_note
from ktransformers.plan import Plan
from ktransformers.serve.agents import connection_lines
from ktransformers.serve.flags import Launch
from ktransformers.serve.forecast import choose_device, compare_at_end, compare_at_start, plan_server, workload_of
from ktransformers.serve.nodes.options import NodeOptions, read_nodes
from ktransformers.serve.running import RunningServer, forget_server, record_server
from ktransformers.serve.target import Target, check_adapters, resolve_target
from ktransformers.serve.yaml_keys import with_yaml_keys

if TYPE_CHECKING:
    from ktransformers.serve.nodes.group import NodeGroup

LOG = logger(__name__)
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
        api_key=launch.api_key or env.secret("API_KEY"),
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


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded, so that a port in use is an error at once. asyncio disables Nagle's algorithm,
    which makes every answer on a kept-alive connection wait 40 ms, only on sockets that name TCP."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
    check_adapters(launch, target)
    launch = with_yaml_keys(launch, target.keys)
    if launch.engine == "sglang":
        from ktransformers.serve.sglang.command import run_sglang

        run_sglang(launch, target, log, show, on_ready)
        return
    nodes = read_nodes(launch)
    if nodes is not None and nodes.rank:
        serve_experts(launch, target, nodes, log)
        return
    assert launch.host is not None and launch.port is not None
    with bind_socket(launch.host, launch.port) as listener:
        if launch.trust_remote_code:
            log(_describe_code(target))
        group = None if nodes is None else serve_experts(launch, target, nodes, log)
        try:
            _serve_http(launch, target, group, listener, log, show, on_ready)
        finally:
            if group is not None:
                group.close()


def serve_experts(launch: Launch, target: Target, nodes: NodeOptions, log: LogLine) -> NodeGroup | None:
    """Rank 0: the group, once all nodes agree. Other ranks: None, when rank 0 has ended."""
    from ktransformers.serve.nodes.group import start_group

    device = "cpu" if nodes.rank else choose_device(launch)
    work = workload_of(launch, target, device)
    return start_group(launch, target, nodes, work, int(device != "cpu"), log)


def _serve_http(
    launch: Launch,
    target: Target,
    group: NodeGroup | None,
    listener: socket.socket,
    log: LogLine,
    show: ShowPlan,
    on_ready: OnReady,
) -> None:
    assert launch.host is not None
    plan = plan_server(launch, target, log, show) if group is None else None
    import uvicorn  # type: ignore[import-not-found,unused-ignore]

    from ktransformers.serve.http.api import create_app
    from ktransformers.serve.http.boundary import rules_for
    from ktransformers.serve.http.listener import make_config
    from ktransformers.serve.http.training import CheckpointWatch, TrainingRuns
    from ktransformers.serve.loading import open_service

    service = open_service(launch, target, log, plan, many_requests=True, group=group)
    watch = CheckpointWatch(launch.watch, service.registry) if launch.watch else None
    training = TrainingRuns(launch.watch, partial(training_roots, service))

    def ended() -> None:  # not after run(): uvicorn re-raises the signal when it is done
        forget_server()
        if group is not None:
            group.close()
        if plan is not None:
            log(str(compare_at_end(plan, service)))
        if (line := service.placement.save_counts()) is not None:
            log(line)

    def ready() -> None:
        if plan is not None:
            LOG.info("%s", compare_at_start(plan, service))
        assert launch.host is not None
        port = int(listener.getsockname()[1])
        listener.listen()  # uvicorn does so after this; a client of the printed address would be refused until then
        running = record_server(launch.host, port, service.registry.served)
        on_ready(running)
        log(f"{service.registry.served} is served at http://{launch.host}:{port}/v1")
        for line in connection_lines(running.url):
            log(line)

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
