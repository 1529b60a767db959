"""The plugin in stock SGLang's own plugin loader: `make test-sglang`.

The loader, its hook registry and `kt_ep_wrapper.py` are those of the releases; argument parser, FusedMoE and LoRA
manager are stubs with the signatures that the releases have, which another test reads from their source. What only the
running server shows (CUDA graphs of the whole model, its LoRA kernels) is in `bench/sglang`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sglang.fetch import RELEASES
from tests.support.sglang_adapters import Factors, with_lora, write_expert_adapter
from tests.support.sglang_files import (
    EXPERTS,
    LAYERS,
    Batch,
    Checkpoint,
    Release,
    ServerArgs,
    distance,
    module,
    random_batch,
)

FILES = Path(os.environ.get("KT_SGLANG_FILES", ""))
if not all((FILES / name / ".complete").exists() for name in RELEASES):
    pytest.skip("KT_SGLANG_FILES names no files of SGLang: make test-sglang", allow_module_level=True)

TOLERANCE = 0.01
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAINLINE = [name for name in RELEASES if not name.startswith("sglang-kt")]
# Parameters that our hooks rely on, by file, class and function.
SIGNATURES = {
    "sglang/srt/server_args.py": {"ServerArgs.add_cli_args": ["parser"], "ServerArgs.from_cli_args": ["cls", "args"]},
    "sglang/srt/layers/moe/fused_moe_triton/layer.py": {
        f"FusedMoE.{name}": ["self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id"]
        for name in ("_weight_loader_physical", "_weight_loader_impl")
    },
    "sglang/srt/lora/lora_manager.py": {
        "LoRAManager._load_lora_adapter": ["self", "lora_ref"],
        "LoRAManager.init_lora_adapters": ["self", "lora_paths"],
        "LoRAManager.prepare_lora_batch": ["self", "forward_batch"],
        "LoRAManager.create_lora_update_result": ["self", "success", "error_message"],
    },
    "sglang/srt/layers/moe/kt_ep_wrapper.py": {
        "KTEPWrapperMethod.__init__": ["self", "gpu_method", "kt_config"],
        "KTEPWrapperMethod.create_moe_runner": ["self", "layer", "moe_runner_config"],
        "KTEPWrapperMethod.apply": ["self", "layer", "dispatch_output"],
        "KTEPWrapperMethod.process_weights_after_loading": ["self", "layer"],
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.make(tmp_path_factory.mktemp("experts") / "model")


@pytest.mark.parametrize("release", MAINLINE)
def test_releases_have_the_functions_that_are_hooked(release: str) -> None:
    for file, signatures in SIGNATURES.items():
        tree = ast.parse((FILES / release / file).read_text())
        functions = {
            f"{owner.name}.{node.name}": [argument.arg for argument in node.args.args]
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            for node in owner.body
            if isinstance(node, ast.FunctionDef)
        }
        for name, parameters in signatures.items():
            assert functions.get(name) == parameters, f"{file}: {name}"


@pytest.mark.parametrize("release", MAINLINE)
def test_releases_load_plugins_before_they_parse_arguments(release: str) -> None:
    launch = (FILES / release / "sglang/launch_server.py").read_text()
    main = launch[launch.index('__name__ == "__main__"') :]
    assert main.index("load_plugins()") < main.index("prepare_server_args(")


@dataclass
class StubArgs:
    """SGLang's ServerArgs: a dataclass that makes its parser and drops what is no field."""

    model_path: str = ""
    kt_weight_path: str | None = None
    kt_num_gpu_experts: int | None = None
    kt_threadpool_count: int = 1
    init_expert_location: str = "trivial"

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for name in ("model-path", "kt-weight-path", "kt-method"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--kt-num-gpu-experts", type=int)
        parser.add_argument("--kt-threadpool-count", type=int, default=1)
        parser.add_argument("--init-expert-location", default="trivial")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> StubArgs:
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


class StubFusedMoE:
    """Weight loading as in the releases: experts beyond num_gpu_experts are left out by number."""

    def __init__(self, method: Any) -> None:
        self.quant_method = method
        self.loaded: dict[int, int] = {}

    def _weight_loader_physical(
        self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        if expert_id < self.quant_method.num_gpu_experts:
            self._weight_loader_impl(
                param=param,
                loaded_weight=loaded_weight,
                weight_name=weight_name,
                shard_id=shard_id,
                expert_id=expert_id,
            )

    def _weight_loader_impl(
        self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        self.loaded[expert_id] = loaded_weight


@dataclass(frozen=True)
class StubRef:
    lora_id: str
    lora_name: str
    lora_path: str
    pinned: bool = False


class StubLoRAManager:
    """The part of SGLang's manager that reads adapters and prepares batches."""

    def __init__(self) -> None:
        self.lora_refs: dict[str, StubRef] = {}
        self.targets: dict[str, list[str]] = {}
        self.tensors: dict[str, int] = {}

    def create_lora_update_result(self, success: bool, error_message: str = "") -> types.SimpleNamespace:
        return types.SimpleNamespace(success=success, error_message=error_message)

    def _load_lora_adapter(self, lora_ref: StubRef) -> types.SimpleNamespace:
        from safetensors.torch import load_file

        folder = Path(lora_ref.lora_path)
        self.targets[lora_ref.lora_id] = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
        self.tensors[lora_ref.lora_id] = len(load_file(folder / "adapter_model.safetensors"))
        self.lora_refs[lora_ref.lora_id] = lora_ref
        return self.create_lora_update_result(success=True)

    def init_lora_adapters(self, lora_paths: list[StubRef] | None = None) -> None:
        for reference in lora_paths or []:
            result = self._load_lora_adapter(reference)
            if not result.success:
                raise RuntimeError(result.error_message)

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        self.prepared = forward_batch


@dataclass
class Server:
    """SGLang's processes: stubs, and the release's own loader."""

    release: Release
    monkeypatch: pytest.MonkeyPatch
    args_class: type[StubArgs] = StubArgs
    manager: type[StubLoRAManager] = StubLoRAManager
    fused: type[StubFusedMoE] = StubFusedMoE
    loader: types.ModuleType = field(default_factory=lambda: types.ModuleType("none"))

    def start(self, scheduler: bool = False) -> None:
        """Execute the loader anew, as every process does, and load plugins."""
        patch = self.monkeypatch
        patch.setitem(sys.modules, "sglang.srt.environ", module("sglang.srt.environ", envs=Environment()))
        # Copies, because hooks are set on the classes.
        self.args_class = type("ServerArgs", (StubArgs,), dict(vars(StubArgs)))
        self.manager = type("LoRAManager", (StubLoRAManager,), dict(vars(StubLoRAManager)))
        self.fused = type("FusedMoE", (StubFusedMoE,), dict(vars(StubFusedMoE)))
        own = "sglang.srt."
        stubs = [
            module(f"{own}server_args", ServerArgs=self.args_class),
            module(f"{own}layers.moe.fused_moe_triton"),
            module(f"{own}layers.moe.fused_moe_triton.layer", FusedMoE=self.fused),
            module(f"{own}lora"),
            module(f"{own}lora.lora_manager", LoRAManager=self.manager),
        ]
        if scheduler:
            stubs += [module(f"{own}managers"), module(f"{own}managers.scheduler", Scheduler=None)]
        for stub in stubs:
            patch.setitem(sys.modules, stub.__name__, stub)
        for name, file in (("plugins.hook_registry", "hook_registry.py"), ("plugins", "__init__.py")):
            if name == "plugins.hook_registry":
                patch.setitem(sys.modules, f"{own}plugins", module(f"{own}plugins"))
            made = types.ModuleType(own + name)
            if name == "plugins":
                made.__path__ = []
            patch.setitem(sys.modules, own + name, made)
            source = self.release.files / "sglang" / "srt" / "plugins" / file
            exec(compile(source.read_text(), str(source), "exec"), made.__dict__)
        self.loader = sys.modules[f"{own}plugins"]
        self.loader.load_plugins()

    def parse(self, *words: str) -> StubArgs:
        parser = argparse.ArgumentParser()
        self.args_class.add_cli_args(parser)
        return self.args_class.from_cli_args(parser.parse_args(words))


class Environment:
    """`sglang.srt.environ.envs`: every variable is unset."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: None)


@pytest.fixture(params=MAINLINE)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    metadata = tmp_path / "plugin" / "ktransformers_plugin-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ktransformers-plugin\nVersion: 0\n")
    entry = "[sglang.srt.plugins]\nktransformers = ktransformers.serve.sglang.plugin:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    monkeypatch.setenv("KT_SGLANG_OPTIONS", "")
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    import ktransformers.serve.sglang.adapters as adapters

    monkeypatch.setattr(adapters, "EXPERT_LAYERS", {})
    return Server(Release(FILES, request.param, monkeypatch), monkeypatch)


def launch(server: Server, checkpoint: Checkpoint, *words: str) -> None:
    """The launching process parses `words`; then a scheduler process begins."""
    path = str(checkpoint.path)
    given = ["--model-path", path, "--kt-weight-path", path, *words]
    server.monkeypatch.setattr(sys, "argv", ["launch_server", *given])
    server.start()
    server.parse(*given)
    server.start(scheduler=True)


def build(server: Server, checkpoint: Checkpoint, gpu_experts: int | None, **fields: Any) -> list[tuple[Any, Any]]:
    args = ServerArgs(str(checkpoint.path), gpu_experts, model_path=str(checkpoint.path), **fields)
    return server.release.layers(checkpoint, args, DEVICE)


def apply(method: Any, layer: Any, batch: Batch) -> Tensor:
    out: Tensor = method.apply(layer, batch.dispatch()).hidden_states
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return out


def test_a_server_without_kt_flags_is_left_alone(server: Server) -> None:
    stock = server.release.module.KTEPWrapperMethod
    server.monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "x"])
    server.start()
    with pytest.raises(SystemExit):
        server.parse("--kt-gpu-experts-ratio", "0.5")
    assert server.release.module.KTEPWrapperMethod is stock and not os.environ["KT_SGLANG_OPTIONS"]


def test_flags_are_parsed_by_the_launcher_and_reach_the_scheduler(server: Server, checkpoint: Checkpoint) -> None:
    stock = server.release.module.KTEPWrapperMethod
    launch(server, checkpoint, "--kt-gpu-experts-ratio", "0.25", "--kt-expert-placement-strategy", "random")
    assert json.loads(os.environ["KT_SGLANG_OPTIONS"])["gpu_experts_ratio"] == 0.25
    ours = server.release.module.KTEPWrapperMethod
    assert issubclass(ours, stock) and ours is not stock
    assert ours.__name__ == "KTEPWrapperMethod"  # FusedMoE compares the name


def test_bad_options_end_the_launcher(server: Server, checkpoint: Checkpoint) -> None:
    with pytest.raises(SystemExit, match="0 to 1"):
        launch(server, checkpoint, "--kt-gpu-experts-ratio", "2")


def test_a_release_without_a_hooked_function_ends_the_scheduler(server: Server, checkpoint: Checkpoint) -> None:
    """SGLang's loader would log the missing target and start without it."""
    server.monkeypatch.delattr(StubFusedMoE, "_weight_loader_impl")
    with pytest.raises(SystemExit, match="_weight_loader_impl"):
        launch(server, checkpoint, "--kt-num-gpu-experts", "1")


@pytest.mark.parametrize(
    "words",
    [
        ("--kt-num-gpu-experts", "0"),
        ("--kt-num-gpu-experts", str(EXPERTS)),
        ("--kt-num-gpu-experts", "3"),
        ("--kt-num-gpu-experts", "3", "--kt-expert-placement-strategy", "random"),
        ("--kt-gpu-experts-ratio", "0.5", "--kt-expert-placement-strategy", "front-loading"),
    ],
)
def test_masked_layers_match_the_definition(server: Server, checkpoint: Checkpoint, words: tuple[str, ...]) -> None:
    launch(server, checkpoint, *words)
    for index, (method, layer) in enumerate(build(server, checkpoint, None)):
        for tokens in (1, 9):
            batch = random_batch(tokens, DEVICE, seed=tokens + index)
            batch.ids[0, 0] = -1  # padding
            ids = batch.ids.clone()
            out = apply(method, layer, batch)
            assert distance(out, checkpoint.forward(index, batch)) < TOLERANCE
            assert torch.equal(batch.ids, ids)


def test_without_gpu_experts_the_gpus_product_is_left_out(server: Server, checkpoint: Checkpoint) -> None:
    launch(server, checkpoint, "--kt-num-gpu-experts", "0")
    method, layer = build(server, checkpoint, None)[0]
    method.gpu_method.apply = lambda *args: pytest.fail("an empty product")
    apply(method, layer, random_batch(3, DEVICE))


def test_without_cpu_experts_there_is_no_wrapper(server: Server, checkpoint: Checkpoint) -> None:
    launch(server, checkpoint, "--kt-num-gpu-experts", str(EXPERTS))
    assert all(method.wrapper is None for method, _ in build(server, checkpoint, None))


def test_other_ranks_add_nothing(checkpoint: Checkpoint, server: Server) -> None:
    server.release.rank = 1
    launch(server, checkpoint, "--kt-num-gpu-experts", "0")
    method, layer = build(server, checkpoint, None)[0]
    assert method.wrapper is None and not apply(method, layer, random_batch(3, DEVICE)).any()


def test_experts_are_loaded_into_the_slots_of_the_mask(server: Server, checkpoint: Checkpoint) -> None:
    launch(server, checkpoint, "--kt-num-gpu-experts", "3", "--kt-expert-placement-strategy", "random")
    method, _ = build(server, checkpoint, None)[1]
    on_gpu = [expert for expert in range(EXPERTS) if method.slot_of[expert] >= 0]
    assert on_gpu != list(range(len(on_gpu)))
    for name in ("_weight_loader_physical", "_weight_loader_impl"):
        fused = server.fused(method)
        for expert in range(EXPERTS):
            getattr(fused, name)(param=None, loaded_weight=expert, weight_name="w", shard_id="w1", expert_id=expert)
        assert fused.loaded == dict(enumerate(on_gpu)), name


def test_weights_of_layers_without_kt_are_loaded_as_before(server: Server, checkpoint: Checkpoint) -> None:
    launch(server, checkpoint, "--kt-num-gpu-experts", "3")
    fused = server.fused(types.SimpleNamespace(num_gpu_experts=2))
    for expert in range(EXPERTS):
        fused._weight_loader_physical(None, expert, "w", "w1", expert)
    assert fused.loaded == {0: 0, 1: 1}


def test_the_last_layer_defers_nothing(server: Server, checkpoint: Checkpoint) -> None:
    launch(server, checkpoint, "--kt-num-gpu-experts", "0")
    layers = build(server, checkpoint, None, kt_max_deferred_experts_per_token=2)
    assert [method.wrapper.max_deferred_experts_per_token for method, _ in layers] == [2] * (LAYERS - 1) + [0]


def test_prefill_above_the_threshold_is_streamed(server: Server, checkpoint: Checkpoint) -> None:
    launch(server, checkpoint, "--kt-num-gpu-experts", "2", "--kt-gpu-prefill-token-threshold", "16")
    for index, (method, layer) in enumerate(build(server, checkpoint, None)):
        for tokens, streamed in ((15, False), (16, True), (70, True)):
            batch = random_batch(tokens, DEVICE, seed=tokens + index)
            submitted = spy(method.wrapper, "submit_forward")
            out = apply(method, layer, batch)
            assert bool(submitted) is not streamed
            assert distance(out, checkpoint.forward(index, batch)) < TOLERANCE


def spy(target: Any, name: str) -> list[Any]:
    """Calls of a method, counted for one test."""
    calls: list[Any] = []
    original = getattr(type(target), name)

    def counted(*args: Any, **words: Any) -> Any:
        calls.append(args)
        return original(target, *args, **words)

    setattr(target, name, counted)
    return calls


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [("moe_ep_size", 2, "--tp-size"), ("num_fused_shared_experts", 1, "--disable-shared-experts-fusion")],
)
def test_layers_that_cannot_be_split_are_refused(
    server: Server, checkpoint: Checkpoint, attribute: str, value: int, message: str
) -> None:
    from tests.support.sglang_files import Layer

    launch(server, checkpoint, "--kt-num-gpu-experts", "2")
    server.monkeypatch.setattr(Layer, attribute, value, raising=False)
    with pytest.raises(ValueError, match=message):
        build(server, checkpoint, None)


# LoRA of experts.


@dataclass
class ForwardBatch:
    lora_ids: list[str | None]
    lengths: list[int] | None = None  # prefill; None: decode

    @property
    def forward_mode(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(is_extend=lambda: self.lengths is not None)

    @property
    def extend_seq_lens_cpu(self) -> list[int] | None:
        return self.lengths

    @property
    def input_ids(self) -> Tensor:
        return torch.zeros(sum(self.lengths) if self.lengths is not None else len(self.lora_ids))


def expected_by_row(checkpoint: Checkpoint, index: int, batch: Batch, rows: list[Factors | None]) -> Tensor:
    """Each row with the experts of its adapter."""
    outs = []
    for row, factors in enumerate(rows):
        one = Batch(batch.hidden[row : row + 1], batch.ids[row : row + 1], batch.weights[row : row + 1])
        source = checkpoint if factors is None else with_lora(checkpoint, factors[index], index)
        outs.append(source.forward(index, one))
    return torch.cat(outs)


@pytest.fixture
def two_adapters(tmp_path: Path) -> Callable[..., tuple[list[StubRef], dict[str, Factors]]]:
    def write(**options: Any) -> tuple[list[StubRef], dict[str, Factors]]:
        references, factors = [], {}
        for seed, name in enumerate(("a", "b"), 1):
            factors[name] = write_expert_adapter(tmp_path / name, LAYERS, seed, **options)
            references.append(StubRef(f"id-{name}", name, str(tmp_path / name)))
        return references, factors

    return write


@pytest.mark.parametrize("attention", [True, False])
def test_every_request_has_the_experts_of_its_adapter(
    server: Server, checkpoint: Checkpoint, two_adapters: Callable[..., Any], attention: bool
) -> None:
    references, factors = two_adapters(attention=attention)
    launch(server, checkpoint, "--kt-num-gpu-experts", "0")
    layers = build(server, checkpoint, None)
    manager = server.manager()
    manager.init_lora_adapters(references)
    # SGLang gets what is left, and so wraps no experts.
    assert manager.targets["id-a"] == (["o_proj"] if attention else [])
    assert manager.tensors["id-a"] == (2 * LAYERS if attention else 0)
    assert manager.lora_refs["id-a"] == references[0]
    prefill = ForwardBatch(["id-b", None, "id-a"], [3, 2, 70])
    decode = ForwardBatch([None, "id-a", "id-b", "id-a"])
    for turn, running in enumerate((prefill, decode, ForwardBatch([None, None]), prefill)):
        manager.prepare_lora_batch(running)
        assert manager.prepared is running
        lengths = running.lengths or [1] * len(running.lora_ids)
        names = [name for name, length in zip(running.lora_ids, lengths, strict=True) for _ in range(length)]
        rows = [None if name is None else factors[name.removeprefix("id-")] for name in names]
        for index, (method, layer) in enumerate(layers):
            batch = random_batch(len(rows), DEVICE, seed=10 * turn + index)
            expected = expected_by_row(checkpoint, index, batch, rows)
            assert distance(apply(method, layer, batch), expected) < TOLERANCE
    assert distance(expected, checkpoint.forward(index, batch)) > 10 * TOLERANCE


def test_one_adapter_for_every_request(server: Server, checkpoint: Checkpoint, tmp_path: Path) -> None:
    factors = write_expert_adapter(tmp_path / "expert", LAYERS, seed=3)
    launch(server, checkpoint, "--kt-num-gpu-experts", "0", "--kt-expert-lora-path", str(tmp_path / "expert"))
    for index, (method, layer) in enumerate(build(server, checkpoint, None)):
        batch = random_batch(6, DEVICE, seed=index)
        assert (
            distance(apply(method, layer, batch), expected_by_row(checkpoint, index, batch, [factors] * 6)) < TOLERANCE
        )


def test_expert_half_by_name_beside_the_other_half(server: Server, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`--lora-paths mine=NONEXPERT --kt-expert-lora-path mine=EXPERT`, the two directories of `kt convert`."""
    factors = write_expert_adapter(tmp_path / "expert", LAYERS, seed=4)
    write_expert_adapter(tmp_path / "rest", LAYERS, seed=5, attention=True, experts=False)
    launch(server, checkpoint, "--kt-num-gpu-experts", "0", "--kt-expert-lora-path", f"mine={tmp_path / 'expert'}")
    layers, manager = build(server, checkpoint, None), server.manager()
    manager.init_lora_adapters([StubRef("id-mine", "mine", str(tmp_path / "rest"))])
    manager.prepare_lora_batch(ForwardBatch(["id-mine", None]))
    method, layer = layers[2]
    batch = random_batch(2, DEVICE, seed=9)
    assert distance(apply(method, layer, batch), expected_by_row(checkpoint, 2, batch, [factors, None])) < TOLERANCE


def test_adapters_that_cannot_be_served_are_refused(
    server: Server, checkpoint: Checkpoint, tmp_path: Path, two_adapters: Callable[..., Any]
) -> None:
    references, _ = two_adapters()
    launch(server, checkpoint, "--kt-num-gpu-experts", "0")
    build(server, checkpoint, None)
    manager = server.manager()
    write_expert_adapter(tmp_path / "mlp", LAYERS, seed=6, mlp=True)
    result = manager._load_lora_adapter(StubRef("id-mlp", "mlp", str(tmp_path / "mlp")))
    assert not result.success and "down_proj" in result.error_message
    result = manager._load_lora_adapter(StubRef("id-hub", "hub", "somebody/adapter"))
    assert not result.success and "download" in result.error_message
    manager.init_lora_adapters(references[:1])
    result = manager._load_lora_adapter(references[1])  # graphs are captured by now
    assert not result.success and "--lora-paths" in result.error_message
    write_expert_adapter(tmp_path / "rest", LAYERS, seed=7, attention=True, experts=False)
    assert manager._load_lora_adapter(StubRef("id-rest", "rest", str(tmp_path / "rest"))).success


def test_lora_of_experts_beside_experts_on_the_gpu_is_refused(
    server: Server, checkpoint: Checkpoint, two_adapters: Callable[..., Any]
) -> None:
    references, _ = two_adapters()
    launch(server, checkpoint, "--kt-num-gpu-experts", "2")
    build(server, checkpoint, None)
    with pytest.raises(ValueError, match="--kt-num-gpu-experts 0"):
        server.manager().init_lora_adapters(references)


@pytest.mark.gpu
def test_a_graph_serves_every_mixture_of_adapters(
    server: Server, checkpoint: Checkpoint, two_adapters: Callable[..., Any]
) -> None:
    references, factors = two_adapters(attention=True)
    launch(server, checkpoint, "--kt-num-gpu-experts", "0")
    layers, manager = build(server, checkpoint, None), server.manager()
    manager.init_lora_adapters(references)
    batch = random_batch(4, DEVICE)
    for method, layer in layers:
        apply(method, layer, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [method.apply(layer, batch.dispatch()).hidden_states for method, layer in layers]
    for turn, ids in enumerate((["id-a", None, "id-b", "id-a"], [None] * 4, ["id-b"] * 4)):
        manager.prepare_lora_batch(ForwardBatch(ids))
        fresh = random_batch(4, DEVICE, seed=50 + turn)
        for static, given in zip(vars(batch).values(), vars(fresh).values(), strict=True):
            static.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        rows = [None if name is None else factors[name.removeprefix("id-")] for name in ids]
        for index, out in enumerate(outs):
            assert distance(out, expected_by_row(checkpoint, index, fresh, rows)) < TOLERANCE


@pytest.mark.gpu
def test_masked_layers_in_a_graph(server: Server, checkpoint: Checkpoint) -> None:
    launch(server, checkpoint, "--kt-num-gpu-experts", "3", "--kt-expert-placement-strategy", "random")
    layers = build(server, checkpoint, None)
    batch = random_batch(5, DEVICE)
    for method, layer in layers:
        apply(method, layer, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [method.apply(layer, batch.dispatch()).hidden_states for method, layer in layers]
    for turn in range(4):
        fresh = random_batch(5, DEVICE, seed=60 + turn)
        for static, given in zip(vars(batch).values(), vars(fresh).values(), strict=True):
            static.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        for index, out in enumerate(outs):
            assert distance(out, checkpoint.forward(index, fresh)) < TOLERANCE
