"""SGLang's unmodified `kt_ep_wrapper.py` drives our `kt_kernel`: `make test-sglang`.

The file of each release is executed with stubs (`tests/support/sglang_files.py`); KT_SGLANG_FILES names the directory
that `tests/sglang/fetch.py` filled. On a machine with a GPU the same tests run with real streams, and those marked gpu
capture and replay CUDA graphs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ktransformers.ground.options.field import options_of
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.serve.flags import Launch
from ktransformers.serve.formats.families import CALLS, THINKING
from ktransformers.serve.sglang.command import CALL_WORDS, REASONING_OF_CALLS, SWITCHES, VALUES
from tests.sglang.fetch import RELEASES
from tests.support.sglang_files import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    Batch,
    Checkpoint,
    Release,
    ServerArgs,
    distance,
    random_batch,
)
from tests.support.sglang_places import PLACES

FILES = Path(os.environ.get("KT_SGLANG_FILES", ""))
if not all((FILES / name / ".complete").exists() for name in RELEASES):
    pytest.skip("KT_SGLANG_FILES names no files of SGLang: make test-sglang", allow_module_level=True)
pytest.importorskip("kt_kernel")

TOLERANCE = 0.01  # of bf16 outputs and activations against float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.make(tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture(params=list(RELEASES))
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Release:
    return Release(FILES, request.param, monkeypatch)


@pytest.fixture(params=[name for name in RELEASES if not name.startswith("sglang-kt")])
def mainline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Release:
    return Release(FILES, request.param, monkeypatch)


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Release:
    return Release(FILES, "sglang-kt-0.7.2", monkeypatch)


def arguments(checkpoint: Checkpoint, gpu_experts: int, **fields: Any) -> ServerArgs:
    return ServerArgs(str(checkpoint.path), gpu_experts, model_path=str(checkpoint.path), **fields)


def apply(method: Any, layer: Any, batch: Batch) -> Tensor:
    """One layer. Mainline writes -1 into the ids, so it gets its own copy."""
    given = Batch(batch.hidden.clone(), batch.ids.clone(), batch.weights.clone())
    out: Tensor = method.apply(layer, given.dispatch()).hidden_states
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("gpu_experts", [1, 3, EXPERTS])
def test_layers_match_the_definition(release: Release, checkpoint: Checkpoint, gpu_experts: int) -> None:
    layers = release.layers(checkpoint, arguments(checkpoint, gpu_experts), DEVICE)
    for tokens in (1, 7, 64):
        for index, (method, layer) in enumerate(layers):
            batch = random_batch(tokens, DEVICE, seed=10 * tokens + index)
            out = apply(method, layer, batch)
            assert out.dtype == torch.bfloat16 and out.shape == batch.hidden.shape
            assert distance(out, checkpoint.forward(index, batch)) < TOLERANCE


def test_flags_and_parsers_of_kt_serve_are_those_of_the_release(mainline: Release) -> None:
    """What `kt serve --engine sglang` may write into a command line; 0.5.23 declares its flags in many files."""
    options = {**options_of(Launch), **options_of(PlacementOptions)}
    flags = {options[name].flags[0] for name in (*VALUES, *SWITCHES)}
    flags |= {"--model-path", "--served-model-name", "--tp-size", "--mem-fraction-static", "--tool-call-parser"}
    flags |= {"--reasoning-parser", "--enable-lora", "--lora-backend", "--lora-paths", "--kt-weight-path"}
    flags |= {"--kt-method", "--kt-cpuinfer", "--kt-threadpool-count", "--kt-num-gpu-experts"}
    if mainline.name == "sglang-0.5.17":
        source = (mainline.files / "sglang/srt/server_args.py").read_text()
        missing = [flag for flag in flags if f"    {flag[2:].replace('-', '_')}: A[" not in source]
        assert missing == []
    for file, ours in (
        ("function_call/function_call_parser.py", {CALL_WORDS.get(name, name) for name in CALLS}),
        ("parser/reasoning_parser.py", {*THINKING, *REASONING_OF_CALLS.values()}),
    ):
        source = (mainline.files / "sglang/srt" / file).read_text()
        assert [name for name in ours if f'"{name}": ' not in source] == []


@pytest.mark.parametrize("place", PLACES)
def test_experts_of_every_place_and_format(mainline: Release, tmp_path: Path, place: str) -> None:
    kind = PLACES[place]
    checkpoint = kind.write(tmp_path)
    for index, (method, layer) in enumerate(
        mainline.layers(checkpoint, arguments(checkpoint, 3, kt_method=kind.method), DEVICE)
    ):
        batch = random_batch(6, DEVICE, seed=index)
        assert distance(apply(method, layer, batch), checkpoint.forward(index, batch)) < kind.tolerance


def test_layers_without_gpu_experts_match_the_definition(release: Release, checkpoint: Checkpoint) -> None:
    """With the stub for the GPU's method mainline survives this; the plugin avoids the empty product."""
    layers = release.layers(checkpoint, arguments(checkpoint, 0), DEVICE)
    for index, (method, layer) in enumerate(layers):
        batch = random_batch(5, DEVICE, seed=index)
        assert distance(apply(method, layer, batch), checkpoint.forward(index, batch)) < TOLERANCE


def test_the_constructor_receives_what_the_release_passes(release: Release, checkpoint: Checkpoint) -> None:
    (method, _), *_ = release.layers(checkpoint, arguments(checkpoint, 3), DEVICE, count=1)
    wrapper = method.wrapper
    assert wrapper.gpu_experts_mask.tolist() == [expert < 3 for expert in range(EXPERTS)]
    assert (wrapper.num_experts, wrapper.num_experts_per_tok, wrapper.hidden_size) == (EXPERTS, TOP_K, HIDDEN)
    assert wrapper.num_gpu_experts == 3 and wrapper.method == "BF16"


def test_ids_are_read_before_the_caller_overwrites_them(mainline: Release, checkpoint: Checkpoint) -> None:
    """`mask_cpu_expert_ids` sets ids of CPU experts to -1 in place as soon as `submit_forward` has returned."""
    ((method, layer),) = mainline.layers(checkpoint, arguments(checkpoint, 2), DEVICE, count=1)
    batch = random_batch(9, DEVICE, seed=3)
    expected, ids = checkpoint.forward(0, batch), batch.ids.clone()
    out = method.apply(layer, batch.dispatch()).hidden_states
    assert bool((batch.ids == -1).any()) and not torch.equal(batch.ids, ids)
    assert distance(out, expected) < TOLERANCE


def test_padding_rows_with_ids_of_minus_one_are_zero(mainline: Release, checkpoint: Checkpoint) -> None:
    ((method, layer),) = mainline.layers(checkpoint, arguments(checkpoint, 2), DEVICE, count=1)
    batch = random_batch(6, DEVICE, seed=4)
    batch.ids[4:] = -1
    batch.ids[1, 2] = -1
    out = apply(method, layer, batch)
    assert not out[4:].any()
    assert distance(out, checkpoint.forward(0, batch)) < TOLERANCE


def test_runtime_experts_follow_the_physical_to_logical_map(release: Release, checkpoint: Checkpoint) -> None:
    release.order = torch.tensor([3, 0, 1, 2, 7, 6, 5, 4])
    ((method, layer),) = release.layers(checkpoint, arguments(checkpoint, 2), DEVICE, count=1)
    batch = random_batch(8, DEVICE, seed=5)
    logical = Batch(batch.hidden, release.order.to(DEVICE)[batch.ids.long()].int(), batch.weights)
    assert distance(apply(method, layer, batch), checkpoint.forward(0, logical)) < TOLERANCE


def test_batches_above_the_chunk_size_are_computed(mainline: Release, checkpoint: Checkpoint) -> None:
    ((method, layer),) = mainline.layers(checkpoint, arguments(checkpoint, 2), DEVICE, count=1)
    batch = random_batch(150, DEVICE, seed=6)  # chunked_prefill_size is 64
    assert distance(apply(method, layer, batch), checkpoint.forward(0, batch)) < TOLERANCE


def test_a_batch_without_tokens_is_computed(mainline: Release, checkpoint: Checkpoint) -> None:
    ((method, layer),) = mainline.layers(checkpoint, arguments(checkpoint, 2), DEVICE, count=1)
    empty = Batch(*(tensor[:0] for tensor in vars(random_batch(1, DEVICE)).values()))
    assert apply(method, layer, empty).shape == (0, HIDDEN)


def test_masks_changed_in_place_act_on_the_next_call(fork: Release, checkpoint: Checkpoint) -> None:
    """sglang-kt's dynamic expert update: other experts are copied into the GPU's slots and the masks rewritten."""
    ((method, layer),) = fork.layers(checkpoint, arguments(checkpoint, 3), DEVICE, count=1)
    batch = random_batch(16, DEVICE, seed=7)
    first = apply(method, layer, batch)
    chosen = torch.tensor([1, 4, 6], device=DEVICE)
    mask, slots, names = fork.module.update_gpu_expert_mappings(chosen, EXPERTS, DEVICE)
    method.gpu_experts_mask, method.logical_to_gpu_index = mask, slots.cpu()
    method.gpu_experts_mask_cuda.copy_(mask)
    method.logical_to_gpu_index_cuda.copy_(slots)
    fork.module.update_kt_wrapper_masks(method.wrapper, mask)
    fork.load_gpu_experts(checkpoint, method, layer)
    second, expected = apply(method, layer, batch), checkpoint.forward(0, batch)
    assert names.tolist() == [1, 4, 6]
    assert distance(first, expected) < TOLERANCE and distance(second, expected) < TOLERANCE


@pytest.mark.parametrize("strategy", ["uniform", "front-loading", "random", "frequency"])
def test_the_forks_placement_strategies(fork: Release, checkpoint: Checkpoint, tmp_path: Path, strategy: str) -> None:
    counts = torch.randint(0, 100, (2, LAYERS, EXPERTS), generator=torch.Generator().manual_seed(1))
    torch.save({"logical_count": counts}, tmp_path / "counts.pt")
    args = arguments(
        checkpoint, 3, kt_expert_placement_strategy=strategy, init_expert_location=str(tmp_path / "counts.pt")
    )
    layers = fork.layers(checkpoint, args, DEVICE)
    assert sum(method.num_gpu_experts for method, _ in layers) == 3 * LAYERS
    for index, (method, layer) in enumerate(layers):
        batch = random_batch(4, DEVICE, seed=index)
        assert distance(apply(method, layer, batch), checkpoint.forward(index, batch)) < TOLERANCE


def test_deferred_experts_are_added_one_layer_later(release: Release, checkpoint: Checkpoint) -> None:
    """At one token exactly the experts of lowest weight are late; the last layer defers nothing, except in 0.5.17,
    which asks its arguments for the number of layers by a name that they no longer have."""
    layers = release.layers(checkpoint, arguments(checkpoint, 1, kt_max_deferred_experts_per_token=2), DEVICE)
    knows_last = release.name != "sglang-0.5.17"
    assert layers[-1][0].wrapper.max_deferred_experts_per_token == (0 if knows_last else 2)
    late = torch.zeros(1, HIDDEN, dtype=torch.float64)
    for index, (method, layer) in enumerate(layers):
        batch = random_batch(1, DEVICE, seed=20 + index)
        on_cpu = batch.ids.cpu() >= 1
        order = batch.weights.cpu().argsort(dim=1, descending=True)
        deferred = torch.zeros_like(on_cpu)
        if index < LAYERS - 1 or not knows_last:
            deferred.scatter_(1, order[:, TOP_K - 2 :], True)
            deferred &= on_cpu
        now = Batch(batch.hidden, torch.where(deferred.to(DEVICE), -1, batch.ids), batch.weights)
        later = Batch(batch.hidden, torch.where(deferred.to(DEVICE), batch.ids, -1), batch.weights)
        out = apply(method, layer, batch)
        assert distance(out, checkpoint.forward(index, now) + late) < TOLERANCE
        late = checkpoint.forward(index, later)


def test_other_tensor_parallel_ranks_have_no_wrapper(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RELEASES:
        release = Release(FILES, name, monkeypatch, rank=1)
        if release.is_fork:  # rank 0 broadcasts the masks
            release.module._KT_GPU_EXPERTS_MASKS = (torch.arange(EXPERTS) < 2).expand(LAYERS, EXPERTS)
        ((method, layer),) = release.layers(checkpoint, arguments(checkpoint, 2), DEVICE, count=1)
        assert method.wrapper is None
        batch = random_batch(4, DEVICE, seed=8)
        on_gpu = Batch(batch.hidden, torch.where(batch.ids < 2, batch.ids, -1), batch.weights)
        assert distance(apply(method, layer, batch), checkpoint.forward(0, on_gpu)) < TOLERANCE


def test_capture_batch_sizes_may_be_announced(release: Release, checkpoint: Checkpoint) -> None:
    """Every SGLang server calls this, with and without --kt-* flags."""
    wrapper = release.module.KTMoEWrapper
    wrapper.set_capture_batch_sizes([1, 2, 4])
    assert wrapper.get_capture_batch_sizes() == [1, 2, 4]
    wrapper.clear_buffer_cache()


def test_expert_lora_of_the_fork(fork: Release, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """--kt-expert-lora-path: the wrapper of mode "sft" with six LoRA tensors."""
    pytest.importorskip("kt_kernel.sft")
    from tests.support.sglang_adapters import with_lora, write_expert_adapter

    factors = write_expert_adapter(tmp_path / "expert", LAYERS, seed=1)
    layers = fork.layers(checkpoint, arguments(checkpoint, 0, kt_expert_lora_path=str(tmp_path / "expert")), DEVICE)
    for index, (method, layer) in enumerate(layers):
        batch = random_batch(5, DEVICE, seed=40 + index)
        expected = with_lora(checkpoint, factors[index], index).forward(index, batch)
        plain = checkpoint.forward(index, batch)
        out = apply(method, layer, batch)
        assert distance(out, expected) < TOLERANCE < distance(out, plain)


# With a GPU: streams and graphs.


@pytest.mark.gpu
@pytest.mark.parametrize("gpu_experts", [1, 4])
def test_captured_graphs_follow_changed_inputs_and_routing(
    release: Release, checkpoint: Checkpoint, gpu_experts: int
) -> None:
    """All layers in one graph for each batch size, sizes that were never announced among them; replayed in any order
    with other hidden states, ids and weights."""
    layers = release.layers(checkpoint, arguments(checkpoint, gpu_experts), DEVICE)
    release.module.KTMoEWrapper.set_capture_batch_sizes([1, 4])
    graphs = {tokens: Captured(layers, tokens) for tokens in (1, 4, 12, 48)}
    for turn in range(12):
        tokens = (1, 4, 12, 48)[turn % 4]
        batch = random_batch(tokens, DEVICE, seed=100 + turn)
        outs = graphs[tokens].replay(batch)
        for index, out in enumerate(outs):
            assert distance(out, checkpoint.forward(index, batch)) < TOLERANCE


@pytest.mark.gpu
def test_captured_graphs_follow_changed_masks(fork: Release, checkpoint: Checkpoint) -> None:
    layers = fork.layers(checkpoint, arguments(checkpoint, 3), DEVICE)
    graph = Captured(layers, 4)
    for turn, chosen in enumerate(([0, 1, 2], [5, 6, 7], [0, 3, 6])):
        for method, layer in layers:
            mask, slots, _ = fork.module.update_gpu_expert_mappings(torch.tensor(chosen), EXPERTS, DEVICE)
            method.gpu_experts_mask, method.logical_to_gpu_index = mask, slots.cpu()
            method.gpu_experts_mask_cuda.copy_(mask)
            method.logical_to_gpu_index_cuda.copy_(slots)
            fork.module.update_kt_wrapper_masks(method.wrapper, mask)
            fork.load_gpu_experts(checkpoint, method, layer)
        batch = random_batch(4, DEVICE, seed=200 + turn)
        for index, out in enumerate(graph.replay(batch)):
            assert distance(out, checkpoint.forward(index, batch)) < TOLERANCE


@pytest.mark.gpu
def test_replays_of_a_graph_leave_eager_calls_correct(mainline: Release, checkpoint: Checkpoint) -> None:
    """Prefill runs between decode steps, of sizes below and above the chunk size."""
    layers = mainline.layers(checkpoint, arguments(checkpoint, 2), DEVICE)
    graph = Captured(layers, 2)
    for turn, tokens in enumerate((3, 200, 2, 64, 65, 1)):
        decode, prefill = random_batch(2, DEVICE, seed=300 + turn), random_batch(tokens, DEVICE, seed=400 + turn)
        outs = graph.replay(decode)
        for index, (method, layer) in enumerate(layers):
            assert distance(outs[index], checkpoint.forward(index, decode)) < TOLERANCE
            assert distance(apply(method, layer, prefill), checkpoint.forward(index, prefill)) < TOLERANCE


@pytest.mark.gpu
def test_deferred_experts_in_a_graph(mainline: Release, checkpoint: Checkpoint) -> None:
    args = arguments(checkpoint, 1, kt_max_deferred_experts_per_token=1)
    layers, same = mainline.layers(checkpoint, args, DEVICE), mainline.layers(checkpoint, args, DEVICE)
    graph = Captured(layers, 1)
    for turn in range(4):
        batch = random_batch(1, DEVICE, seed=500 + turn)
        expected = [apply(method, layer, batch) for method, layer in same]
        for out, eager in zip(graph.replay(batch), expected, strict=True):
            assert distance(out, eager.double().cpu()) < TOLERANCE


@pytest.mark.gpu
def test_outputs_beside_kt_kernel(tmp_path: Path) -> None:
    """The same layers in two processes, ours and with the release of kt-kernel in KT_PEER_KERNEL: not further from the
    definition than it is."""
    peer = os.environ.get("KT_PEER_KERNEL")
    if not peer:
        pytest.skip("KT_PEER_KERNEL names no directory with kt-kernel")
    root = Path(__file__).resolve().parents[2]
    outs = {}
    for name, first in (("ours", str(root / "src")), ("peer", peer)):
        paths = [first, str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
        words = [str(root / "tests/support/sglang_peer.py"), str(FILES), str(tmp_path / "model"), str(tmp_path / name)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "KT_KERNEL_CPU_VARIANT": "amx"}
        subprocess.run([sys.executable, *words], check=True, env=environment, timeout=200)
        outs[name] = load_file(tmp_path / name)
    checkpoint = Checkpoint.make(tmp_path / "model")
    for key, ours in outs["ours"].items():
        index, tokens = map(int, key.split("."))
        expected = checkpoint.forward(index, random_batch(tokens, DEVICE, seed=tokens + index))
        assert distance(ours, expected) <= max(1.1 * distance(outs["peer"][key], expected), 0.003)


class Captured:
    """All layers on the same input, captured in one CUDA graph."""

    def __init__(self, layers: list[tuple[Any, Any]], tokens: int) -> None:
        self.batch = random_batch(tokens, DEVICE)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(layers)  # warm up
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outs = self._run(layers)

    def _run(self, layers: list[tuple[Any, Any]]) -> list[Tensor]:
        outs = []
        for method, layer in layers:
            given = Batch(self.batch.hidden.clone(), self.batch.ids.clone(), self.batch.weights.clone())
            outs.append(method.apply(layer, given.dispatch()).hidden_states.clone())
        return outs

    def replay(self, batch: Batch) -> list[Tensor]:
        for static, given in zip(vars(self.batch).values(), vars(batch).values(), strict=True):
            static.copy_(given)
        self.graph.replay()
        torch.cuda.synchronize()
        return [out.clone() for out in self.outs]
