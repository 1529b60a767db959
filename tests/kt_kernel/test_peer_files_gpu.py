"""Our files beside those of kt-kernel 0.7.2 itself: the bytes that its wrapper writes from tensors, and its wrapper and
its manifest check on files that we wrote.

kt-kernel is x86-64 only and its inference wrapper needs a GPU driver. `KT_PEER_SITE` names a directory with it, made by
`pip install --target DIR --no-deps kt-kernel==0.7.2`; it runs in processes of its own, one for each number of NUMA
parts, because its thread pool is configured once in a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ktransformers.checkpoint.kt_codes import part_of, quantize_rows, tile, tile_format
from ktransformers.checkpoint.kt_files import KTHeader, KTManifestFile, build_manifest, stored_parts, write_manifest
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.ground.files import write_json
from ktransformers.quant.kt_layers import LayerWriter, MergedLayer, TreeLayer

SITE = os.environ.get("KT_PEER_SITE", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (Path(SITE) / "kt_kernel").is_dir() or not SITE, reason="KT_PEER_SITE has no kt_kernel"),
]
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 2, 4096, 1024, 6  # gate and up have more columns than a block of 3584

PEER = """
import json, sys
site, inputs, request = sys.argv[1:4]
sys.path.insert(0, site)
request = json.loads(request)
import torch
from safetensors.torch import load_file
import kt_kernel
assert kt_kernel.__file__.startswith(site), kt_kernel.__file__
tensors = load_file(inputs)
experts, parts = tensors["gate"].shape[0], request["parts"]
hidden, inner = tensors["gate"].shape[2], tensors["gate"].shape[1]
order = torch.arange(experts, dtype=torch.int64)


def wrapper(path, **more):
    from kt_kernel import KTMoEWrapper

    return KTMoEWrapper(layer_idx=0, num_experts=experts, num_experts_per_tok=2, hidden_size=hidden,
        moe_intermediate_size=inner, gpu_experts_mask=None, cpuinfer_threads=2 * parts, threadpool_count=parts,
        weight_path=path, chunked_prefill_size=64, method=request["method"], numa_nodes=[0] * parts, **more)


def forward(made):
    x, ids, weights = (tensors[name].cuda() for name in ("x", "ids", "weights"))
    y = made.forward(x, ids, weights, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return y.cpu().float().flatten().tolist()


if request["do"] == "write":
    made = wrapper(request["path"], cpu_save=True)
    made.load_weights_from_tensors(tensors["gate"], tensors["up"], tensors["down"], order)
    answer = forward(made)
elif request["do"] == "read":
    made = wrapper(request["path"])
    made.load_weights(order)
    answer = forward(made)
elif request["do"] == "manifest":
    from kt_kernel.sft import validate_persistent_int8_weights

    validate_persistent_int8_weights(request["path"], layer_indices=[0], numa_count=parts, expert_num=experts,
        hidden_size=hidden, intermediate_size=inner, verify_hashes=True)
    answer = "ready"
elif request["do"] == "backward":
    from kt_kernel import KTMoEWrapper

    made = KTMoEWrapper(layer_idx=0, num_experts=experts, num_experts_per_tok=2, hidden_size=hidden,
        moe_intermediate_size=inner, gpu_experts_mask=None, cpuinfer_threads=2 * parts, threadpool_count=parts,
        weight_path=request["weights"], chunked_prefill_size=64, method=request["method"], mode="sft", lora_rank=8)
    made.load_weights(order)
    made.save_backward_weights_from_tensors(tensors["gate"], tensors["up"], tensors["down"], order, request["path"])
    answer = "written"
print("ANSWER " + json.dumps(answer))
"""


def peer(inputs: Path, **request: Any) -> Any:
    words = [sys.executable, "-c", PEER, SITE, str(inputs), json.dumps(request)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0 and lines, f"kt-kernel: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[-1].removeprefix("ANSWER "))


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    made = {role: gaussian(EXPERTS, INTERMEDIATE, HIDDEN) for role in ("gate", "up")}
    made["down"] = gaussian(EXPERTS, HIDDEN, INTERMEDIATE)
    made["gate"][0, 0, 0] = 1.0  # rows whose largest number is a power of two have many exact halves
    made["x"] = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    made["ids"] = torch.tensor([[0, 1], [1, 0], [0, -1], [1, -1], [0, 1], [1, 0]])
    made["weights"] = torch.rand(TOKENS, 2, generator=generator)
    return made


@pytest.fixture(scope="module")
def inputs(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("peer") / "inputs.safetensors"
    save_file(tensors, file)
    return file


def write_ours(tensors: dict[str, Tensor], directory: Path, bits: int, parts: int, merged: bool) -> Path:
    header = KTHeader(bits, parts, EXPERTS, HIDDEN, INTERMEDIATE, "0" * 32, "a test")
    directory.mkdir()
    shard = "model-00001-of-00001.safetensors"
    writer: LayerWriter = MergedLayer(directory, shard, 0, header, False) if merged else TreeLayer(directory, 0, header)
    for part in stored_parts(EXPERTS, header.sizes(), parts):
        codes, scales = quantize_rows(part_of(tensors[part.role][part.expert], part.role, part.part, parts), bits)
        writer.write(part, tile(codes, bits), scales)
    _, details = writer.finish()
    if merged:
        every = stored_parts(EXPERTS, header.sizes(), parts)
        names = [part.tensor(0, kind) for part in every for kind in ("weight", "scale")]
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(names, shard)})
    else:
        files = [KTManifestFile.model_validate(entry) for entry in details["files"]]
        write_manifest(directory, build_manifest(header, {0: files}))
    return directory


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_equal_those_of_kt_kernel(
    bits: int, parts: int, tensors: dict[str, Tensor], inputs: Path, tmp_path: Path
) -> None:
    form = tile_format(bits)
    theirs = tmp_path / "peer"
    theirs.mkdir()
    before = peer(inputs, do="write", path=str(theirs), method=form.method, parts=parts)
    ours = write_ours(tensors, tmp_path / "ours", bits, parts, merged=False)
    written = {path.relative_to(theirs).as_posix(): path for path in theirs.rglob("*.kt")}
    expected = {path.relative_to(ours).as_posix(): path for path in ours.rglob("*.kt")}
    assert written.keys() == expected.keys()
    different = [name for name in sorted(written) if written[name].read_bytes() != expected[name].read_bytes()]
    assert not different, explain(different, written, tensors, bits, parts)
    for merged in (True, False):
        directory = ours if not merged else write_ours(tensors, tmp_path / "merged", bits, parts, merged=True)
        assert peer(inputs, do="read", path=str(directory), method=form.method, parts=parts) == before


def explain(different: list[str], written: dict[str, Path], tensors: dict[str, Tensor], bits: int, parts: int) -> str:
    """Rows whose scales differ, with the largest number that each scale stands for."""
    lines = [f"{len(different)} files differ, the first is {different[0]}"]
    form = tile_format(bits)
    for part in stored_parts(EXPERTS, KTHeader(bits, parts, EXPERTS, HIDDEN, INTERMEDIATE, "", "").sizes(), parts):
        matrix = part_of(tensors[part.role][part.expert], part.role, part.part, parts)
        name = f"_layer_0/{part.file(form, 'scale')}"
        if name == different[0]:
            scales = torch.frombuffer(bytearray(written[name].read_bytes()), dtype=torch.float32)
            largest = matrix.float().abs().amax(1)
            rows = (scales != quantize_rows(matrix, bits)[1]).nonzero().flatten().tolist()
            shown = [(row, float(largest[row]), float(scales[row]), float(largest[row] / scales[row])) for row in rows]
            lines.append(f"{len(rows)} of {len(scales)} scales; row, largest, scale, their ratio: {shown[:6]}")
    return "; ".join(lines)


@pytest.mark.parametrize("parts", [1, 2])
def test_manifest_is_accepted_by_kt_kernel(
    parts: int, tensors: dict[str, Tensor], inputs: Path, tmp_path: Path
) -> None:
    tree = write_ours(tensors, tmp_path / "tree", 8, parts, merged=False)
    assert peer(inputs, do="manifest", path=str(tree), method="AMXINT8", parts=parts) == "ready"


@pytest.mark.parametrize("bits", [8, 4])
def test_backward_bytes_equal_those_of_kt_kernel(
    bits: int, tensors: dict[str, Tensor], inputs: Path, tmp_path: Path
) -> None:
    form = tile_format(bits)
    theirs = tmp_path / "peer"
    theirs.mkdir()
    forward = write_ours(tensors, tmp_path / "ours", bits, 1, merged=False)
    peer(inputs, do="backward", path=str(theirs), weights=str(forward), method=f"{form.method}_SFT", parts=1)
    written = {path.name: path.read_bytes() for path in theirs.rglob("*_bwd_*.kt")}
    header = KTHeader(bits, 1, EXPERTS, HIDDEN, INTERMEDIATE, "", "")
    expected = {}
    for part in stored_parts(EXPERTS, header.sizes(), 1, backward=True):
        if part.backward:
            codes, scales = quantize_rows(tensors[part.role][part.expert].T, bits)
            expected[Path(part.file(form, "quant")).name] = tile(codes, bits).numpy().tobytes()
            expected[Path(part.file(form, "scale")).name] = scales.numpy().tobytes()
    assert written.keys() == expected.keys()
    assert [name for name in sorted(written) if written[name] != expected[name]] == []
