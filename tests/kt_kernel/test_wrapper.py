"""`kt_kernel.KTMoEWrapper` on the CPU: both signatures, every method, sources, masks, deferral and pieces, compared
with the weights that the store itself decodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import kt_kernel
from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
from kt_kernel.kt_kernel_ext import CPUInfer
from kt_kernel.methods import METHODS
from ktransformers.checkpoint import encode
from ktransformers.ground.errors import InputError
from tests.support.kt_layers import CLOSE, INNER, E, H, K, batch, error, layer, loaded, reference, weights


def test_importing_it_imports_no_torch() -> None:
    program = (
        "import sys, time; start = time.process_time(); import kt_kernel; "
        "print(time.process_time() - start, 'torch' in sys.modules, 'kt_kernel_ext' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    seconds, with_torch, with_extension = zip(*(run.stdout.split() for run in runs), strict=True)
    assert min(map(float, seconds)) < 0.05
    assert set(with_torch) == {"False"} and set(with_extension) == {"True"}
    assert kt_kernel.__version__ == "0.7.2"


def test_names_that_are_missing_say_what_to_use() -> None:
    with pytest.raises(AttributeError, match="KTMoEWrapper"):
        _ = kt_kernel.kt_kernel_ext.moe
    assert not hasattr(kt_kernel.kt_kernel_ext, "FP8LayerwiseTransport")


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_from_tensors(method: str, tokens: int) -> None:
    wrapper = loaded(method)
    given = batch(tokens)
    out = wrapper.forward(*given, None)
    assert out.shape == given[0].shape and out.dtype == torch.bfloat16
    limit = 0.03 if METHODS[method].w8a8 else CLOSE
    assert error(out, reference(wrapper, *given)) < limit
    plain = reference(loaded("BF16"), *given)
    bits = METHODS[method].bits or {"RAW": 4, "GPT": 4, "SYC": 4, "MXF": 4, "NVF": 4}.get(method[:3], 8)
    assert error(out, plain) < (0.25 if bits == 4 else 0.06), "the weights are those that were given"


def test_older_arguments_count_experts_of_the_gpu() -> None:
    given = batch(4)
    by_count = KTMoEWrapper(
        layer_idx=0,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
        num_gpu_experts=3,
        cpuinfer_threads=2,
        threadpool_count=2,
        weight_path="",
        chunked_prefill_size=16,
        method="BF16",
        max_deferred_experts_per_token=0,
    )
    by_position = KTMoEWrapper(0, E, K, H, INNER, 3, 2, 1, "", 16, method="BF16")
    masked = layer(gpu_experts_mask=torch.arange(E) < 3, num_gpu_experts=7)
    outputs = []
    for wrapper in (by_count, by_position, masked):
        wrapper.load_weights_from_tensors(*weights(), torch.arange(E))
        assert wrapper.num_gpu_experts == 3
        outputs.append(wrapper.forward(*given, 0))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert error(outputs[0], reference(masked, *given)) < CLOSE


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4"])
def test_another_default_device_changes_nothing(tmp_path: Path, method: str) -> None:
    """SGLang builds its models with the GPU as the default device."""
    write_checkpoint(tmp_path / "model", "model.layers")
    given, order, tensors = batch(5), torch.arange(E), weights(1)
    with torch.device("meta"):
        wrapper = layer(method=method, weight_path=str(tmp_path / "model"), num_gpu_experts=2, layer_idx=1)
        wrapper.load_weights(order)
        wrapper.use_adapters((), torch.full((16,), -1, dtype=torch.int32, device="cpu"))
        out = wrapper.forward(*given, None)
        deferring = layer(method=method, weight_path=str(tmp_path / "model"), max_deferred_experts_per_token=1)
        deferring.load_weights(order)
        assert deferring.forward(*given, None).device.type == "cpu"
        trained = layer(mode="sft", method=f"{'AMX' if method == 'BF16' else ''}{method}_SFT", layer_idx=1)
        trained.load_weights_from_tensors(*tensors, order)
        assert trained.forward(*given, False).device.type == "cpu"
    assert error(out, reference(wrapper, *given)) < CLOSE


def test_a_mask_written_in_place_acts_on_the_next_call() -> None:
    wrapper, given = loaded(), batch(4)
    before = wrapper.forward(*given, None)
    wrapper.gpu_experts_mask.copy_(torch.arange(E) % 2 == 0)
    after = wrapper.forward(*given, None)
    assert error(after, reference(wrapper, *given)) < CLOSE and not torch.equal(before, after)


def test_ids_may_change_after_submit_and_others_are_skipped() -> None:
    wrapper, (hidden, ids, scores) = loaded(), batch(4)
    expected = wrapper.forward(hidden, ids, scores, None)
    changed = ids.clone()
    wrapper.submit_forward(hidden, changed, scores, None)
    changed.fill_(-1)
    assert torch.equal(wrapper.sync_forward(hidden, None), expected)
    odd = torch.tensor([[-1, E, 2]]).expand(4, 3).contiguous()
    out = wrapper.forward(hidden, odd.to(torch.int32), scores, None)
    assert error(out, reference(wrapper, hidden, odd, scores)) < CLOSE
    assert not wrapper.forward(hidden, torch.full_like(ids, -1), scores, None).any()


def test_leading_dimensions_and_dtypes() -> None:
    wrapper, (hidden, ids, scores) = loaded(), batch(6)
    expected = wrapper.forward(hidden, ids, scores, None)
    out = wrapper.forward(hidden.view(2, 3, H), ids.view(2, 3, K), scores.view(2, 3, K), None)
    assert out.shape == (2, 3, H) and torch.equal(out.view(6, H), expected)
    half = wrapper.forward(hidden.half(), ids, scores, None)
    assert half.dtype == torch.float16 and error(half, expected) < CLOSE
    exact = wrapper.forward(hidden.float(), ids, scores.double(), None)
    assert exact.dtype == torch.float32 and error(exact, expected) < CLOSE


@pytest.mark.parametrize("tokens", [17, 40])
def test_batches_above_the_chunk_are_computed_in_pieces(tokens: int) -> None:
    given = batch(tokens)
    whole = loaded(chunked_prefill_size=64).forward(*given, None)
    wrapper = loaded(chunked_prefill_size=16)
    hidden, ids, scores = given
    changed = ids.clone()
    wrapper.submit_forward(hidden, changed, scores, None)
    changed.fill_(-1)
    assert torch.equal(wrapper.sync_forward(hidden, None), whole)


def test_results_are_tensors_of_their_own() -> None:
    wrapper = loaded()
    first_batch, second_batch = batch(4), batch(4, seed=2)
    first = wrapper.forward(*first_batch, None)
    kept = first.clone()
    wrapper.forward(*second_batch, None)
    assert torch.equal(first, kept)


def test_deferred_experts_are_added_one_layer_later() -> None:
    hidden, ids, scores = batch(1)
    layers = [
        loaded(layer_idx=index, seed=index, max_deferred_experts_per_token=d) for index, d in enumerate((2, 1, 0))
    ]
    exact = [loaded(layer_idx=index, seed=index) for index in range(3)]
    outputs = [one.forward(hidden, ids, scores, None) for one in layers]
    expected = []
    carried = torch.zeros(1, H)
    for index, one in enumerate(exact):
        now, later = one.select_deferred_experts(ids, scores, K - (2, 1, 0)[index])
        assert int((later >= 0).sum()) == (2, 1, 0)[index]
        expected.append(one.forward(hidden, now, scores, None).float() + carried)
        carried = one.forward(hidden, later, scores, None).float()
    for given, wanted in zip(outputs, expected, strict=True):
        assert error(given, wanted) < CLOSE
    again = layers[0].forward(hidden, ids, scores, None)
    assert torch.equal(again, outputs[0]), "a new pass takes over nothing from the one before"


def test_experts_that_any_token_needs_are_not_deferred() -> None:
    wrapper = layer(max_deferred_experts_per_token=1)
    ids = torch.tensor([[0, 1, 2], [2, 3, 4]])
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]])
    now, later = wrapper.select_deferred_experts(ids, scores, 2)
    assert now.tolist() == [[0, 1, 2], [2, -1, 4]] and later.tolist() == [[-1, -1, -1], [-1, 3, -1]]
    odd = torch.tensor([[-1, 1, 2]])
    now, later = wrapper.select_deferred_experts(odd, torch.tensor([[0.9, 0.5, 0.1]]), 1)
    assert now.tolist() == [[-1, -1, -1]] and later.tolist() == [[-1, 1, 2]]


def write_checkpoint(path: Path, prefix: str, layers: int = 2) -> None:
    path.mkdir()
    tensors = {}
    for index in range(layers):
        gate, up, down = weights(index)
        for expert in range(E):
            for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                tensors[f"{prefix}.{index}.mlp.experts.{expert}.{name}.weight"] = tensor[expert].clone()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4"])
@pytest.mark.parametrize("prefix", ["model.layers", "model.language_model.layers"])
def test_experts_of_files_in_any_order(tmp_path: Path, prefix: str, method: str) -> None:
    write_checkpoint(tmp_path / "model", prefix)
    order = torch.randperm(E, generator=torch.Generator().manual_seed(3))
    wrapper = layer(layer_idx=1, weight_path=str(tmp_path / "model"), method=method)
    wrapper.load_weights(order)
    hidden, ids, scores = batch(5)
    expected = loaded(method, seed=1).forward(hidden, order[ids], scores, None)
    assert error(wrapper.forward(hidden, ids, scores, None), expected) < 1e-6


def test_a_method_refuses_files_in_another_format(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "model.layers")
    wrapper = layer(weight_path=str(tmp_path / "model"), method="FP8")
    with pytest.raises(InputError, match="use method BF16"):
        wrapper.load_weights(torch.arange(E))
    with pytest.raises(InputError, match="no expert tensors"):
        layer(layer_idx=7, weight_path=str(tmp_path / "model")).load_weights(torch.arange(E))
    with pytest.raises(InputError, match="physical_to_logical_map"):
        layer(weight_path=str(tmp_path / "model")).load_weights(torch.arange(E + 1))
    with pytest.raises(InputError, match="weight_path"):
        layer().load_weights(torch.arange(E))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", ["AMXINT8", "AMXINT4"])
def test_experts_are_saved_as_kt_files(tmp_path: Path, method: str, parts: int) -> None:
    saved = layer(method=method, weight_path=str(tmp_path), threadpool_count=parts, cpu_save=True, layer_idx=3)
    saved.load_weights_from_tensors(*weights(), torch.arange(E))
    opened = layer(method=method, weight_path=str(tmp_path), layer_idx=3)
    opened.load_weights(torch.arange(E))
    given = batch(5)
    limit = 1e-6 if parts == 1 else 0.25  # with more parts down has more scales
    assert error(opened.forward(*given, None), saved.forward(*given, None)) < limit
    with pytest.raises(InputError, match="cpu_save"):
        layer(method="BF16", weight_path=str(tmp_path), cpu_save=True).load_weights_from_tensors(*weights())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "AMXBF16_SFT"}, "method"),
        ({"method": "INT3"}, "method"),
        ({"mode": "serve"}, "mode"),
        ({"gpu_experts_mask": torch.zeros(E + 1, dtype=torch.bool)}, "gpu_experts_mask"),
        ({"num_gpu_experts": E + 1}, "num_gpu_experts"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size"),
        ({"max_deferred_experts_per_token": K + 1}, "max_deferred"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        layer(**changes)


def test_calls_out_of_order_are_errors() -> None:
    with pytest.raises(InputError, match="load_weights"):
        layer().forward(*batch(1), None)
    with pytest.raises(RuntimeError, match="without submit_forward"):
        loaded().sync_forward(batch(1)[0], None)
    hidden, ids, scores = batch(2)
    with pytest.raises(InputError, match="topk"):
        loaded().forward(hidden, ids[:1], scores, None)
    with pytest.raises(InputError, match="hidden_states"):
        loaded().forward(hidden[:, 1:], ids, scores, None)


def test_arguments_that_stock_sglang_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUInfer, "_shared", None)
    wrapper = loaded(cpuinfer_threads=None, chunked_prefill_size=-1)
    cpus = len(os.sched_getaffinity(0))
    assert wrapper.cpu_infer.backend_.threads == (cpus - 2 if cpus > 4 else cpus)
    given = batch(20)
    assert error(wrapper.forward(*given, None), reference(wrapper, *given)) < CLOSE


def test_clamped_activations() -> None:
    wrapper = loaded(swiglu_limit=0.5, swiglu_alpha=1.7)
    hidden, ids, scores = batch(3)
    expected = torch.zeros(3, H)
    for token in range(3):
        for slot in range(K):
            gate, up, down = (matrix[ids[token, slot]].float() for matrix in weights())
            g, u = (gate @ hidden[token].float()).clamp(max=0.5), (up @ hidden[token].float()).clamp(-0.5, 0.5)
            expected[token] += scores[token, slot] * (down @ (g * torch.sigmoid(1.7 * g) * (u + 1)))
    assert error(wrapper.forward(hidden, ids, scores, None), expected) < CLOSE


def test_an_expert_is_written_back_for_each_rank() -> None:
    wrapper = loaded()
    gate, up, down = (matrix[5] for matrix in weights())
    buffers = [torch.zeros(2, INNER, H, dtype=torch.bfloat16) for _ in range(2)]
    down_parts = [torch.zeros(H, INNER // 2, dtype=torch.bfloat16) for _ in range(2)]
    pointers = [[tensor.data_ptr() for tensor in group] for group in (buffers, down_parts)]
    wrapper.submit_write_weight_scale_to_buffer(2, 5, pointers[0], [0, 0], pointers[1], [0, 0])
    wrapper.sync_write_weight_scale_to_buffer()
    half = INNER // 2
    for rank in range(2):
        rows = slice(rank * half, (rank + 1) * half)
        assert torch.equal(buffers[rank].view(2 * INNER, H)[: 2 * half], torch.cat((gate[rows], up[rows])))
        assert torch.equal(down_parts[rank], down[:, rows])


def test_masks_by_frequency() -> None:
    counts = torch.tensor([[5.0, 1.0, 3.0], [2.0, 9.0, 0.0]])
    assert generate_gpu_experts_masks(counts, 3).tolist() == [[True, False, True], [False, True, False]]
    assert int(generate_gpu_experts_masks(counts, 99).sum()) == 6
    assert int(generate_gpu_experts_masks(counts, -1).sum()) == 0


def test_announced_sizes_are_remembered() -> None:
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4]
    KTMoEWrapper.clear_buffer_cache()
    assert KTMoEWrapper.get_capture_batch_sizes() == []


RELEASED = {  # method -> format, endings of codes and scales, their dtypes in the file
    "FP8": ("fp8:128x128", ("weight", torch.float8_e4m3fn), ("weight_scale_inv", torch.float32)),
    "RAWINT4": ("int4:32", ("weight_packed", torch.int32), ("weight_scale", torch.bfloat16)),
    "MXFP4": ("mxfp4", ("weight", torch.uint8), ("weight_scale", torch.uint8)),
    "MXFP8": ("mxfp8", ("weight", torch.float8_e4m3fn), ("weight_scale_inv", torch.uint8)),
}


@pytest.mark.parametrize("method", RELEASED)
def test_released_formats_are_read_and_written_back(tmp_path: Path, method: str) -> None:
    spec, (codes_ending, codes_dtype), (scales_ending, scales_dtype) = RELEASED[method]
    tensors, encoded = {}, {}
    for role, matrices in zip(("gate", "up", "down"), weights(), strict=True):
        encoded[role] = encode(matrices, spec)
        for expert in range(E):
            name = f"model.layers.0.mlp.experts.{expert}.{role}_proj"
            scales = encoded[role].scales
            assert scales is not None
            tensors[f"{name}.{codes_ending}"] = encoded[role].qweight[expert].view(codes_dtype).clone()
            tensors[f"{name}.{scales_ending}"] = scales[expert].to(scales_dtype).clone()
    save_file(tensors, tmp_path / "model.safetensors")
    order = torch.arange(E).flip(0)
    wrapper = layer(weight_path=str(tmp_path), method=method)
    wrapper.load_weights(order)
    given = batch(5)
    assert error(wrapper.forward(*given, None), reference(wrapper, *given)) < CLOSE
    expert, half = 2, INNER // 2
    w13 = [torch.zeros(INNER, encoded["gate"].qweight.shape[-1], dtype=torch.uint8) for _ in range(2)]
    per_row = encoded["down"].qweight.shape[-1] // 2
    w2 = [torch.zeros(H, per_row, dtype=torch.uint8) for _ in range(2)]
    scale_dtype = {"FP8": torch.float32, "MXFP8": torch.uint8}.get(method, torch.bfloat16)
    scales = encoded["gate"].scales
    assert scales is not None
    s13 = [torch.zeros(scales.shape[1], scales.shape[2], dtype=scale_dtype) for _ in range(2)]
    down_scales = encoded["down"].scales
    assert down_scales is not None
    s2 = [torch.zeros(down_scales.shape[1], down_scales.shape[2] // 2, dtype=scale_dtype) for _ in range(2)]
    addresses = [[tensor.data_ptr() for tensor in group] for group in (w13, s13, w2, s2)]
    wrapper.submit_write_weight_scale_to_buffer(2, expert, *addresses)
    wrapper.sync_write_weight_scale_to_buffer()
    logical = int(order[expert])

    def numbers(stored: Tensor) -> Tensor:
        return torch.ldexp(torch.ones(()), stored.float() - 127) if spec == "mxfp4" else stored

    for rank in range(2):
        rows = slice(rank * half, (rank + 1) * half)
        gate, up, down = (encoded[role].qweight[logical] for role in ("gate", "up", "down"))
        assert torch.equal(w13[rank].view(gate.dtype), torch.cat((gate[rows], up[rows])))
        assert torch.equal(w2[rank].view(down.dtype), down[:, rank * per_row : (rank + 1) * per_row])
        halves = [encoded[role].scales[logical].chunk(2)[rank] for role in ("gate", "up")]
        assert torch.equal(s13[rank].float(), numbers(torch.cat(halves)).float())
        assert torch.equal(s2[rank].float(), numbers(down_scales[logical].chunk(2, dim=1)[rank]).float())
