"""Experts in kt-kernel's files, as a tree and merged, written by the tests and read back: the source's values bit for
bit, or an error that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.checkpoint import ExpertShape
from ktransformers.checkpoint.kt_codes import untile
from ktransformers.checkpoint.sources import open_source
from ktransformers.ground.errors import InputError
from tests.support.expert_sources import MODULE, numbers, same, save
from tests.support.releases import kt_parts, kt_tiles, write_kt_tree

KT_SHAPE = ExpertShape(2, 256, 512)
KT_SIZES = {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}


@pytest.mark.parametrize("method", ["INT8", "INT4"])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (160, 256), (96, 3840)])
def test_untile_inverts_tiling(method: str, n: int, k: int) -> None:
    limit = 127 if method == "INT8" else 7
    codes = torch.randint(-limit, limit + 1, (n, k), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(untile(kt_tiles(codes, method), n, k, int(method[3:])), codes)


@pytest.mark.parametrize("form", ["tree", "merged"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", ["INT8", "INT4"])
def test_tree_and_merged_files_are_read(method: str, parts: int, form: str, tmp_path: Path) -> None:
    merged, expected = {}, {}
    for role, (n, k) in KT_SIZES.items():
        experts = [kt_parts(n, k, role, method, parts, expert + n) for expert in range(2)]
        expected[role] = torch.stack([value for _, value in experts])
        for expert, (cut, _) in enumerate(experts):
            write_kt_tree(tmp_path / "tree", 0, expert, role, method, cut)
            for part, (codes, scale) in enumerate(cut):
                name = f"blk.0.ffn_{role}_exps.{expert}.numa.{part}"
                merged |= {f"{name}.weight": codes.view(torch.int8), f"{name}.scale": scale}
    others = {"blk.0.self_attn.q_proj.weight": torch.ones(2, 2), "embed_tokens.weight": torch.ones(2, 2)}
    save(tmp_path / "merged", merged | others | {"lm_head.weight": torch.ones(2, 2)})
    source = open_source(tmp_path / form)
    layer = source.layer(MODULE, KT_SHAPE)
    inner = "int8" if method == "INT8" else "int4:0:f32"
    down = inner if parts == 1 else f"{'uint8' if method == 'INT8' else 'int4'}:{512 // parts}:f32"
    assert layer.formats == {"gate": inner, "up": inner, "down": down}
    same(numbers(layer), expected)
    names = {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"}
    assert {tensor.name for tensor in source.rest()} == (names if form == "merged" else set())
    with pytest.raises(InputError, match="INT4"):
        open_source(tmp_path / form).layer(MODULE, ExpertShape(2, 256, 768))
    with pytest.raises(InputError, match=r"expected 1 experts"):
        open_source(tmp_path / form).layer(MODULE, ExpertShape(1, 256, 512))
    with pytest.raises(InputError, match=r"given no layer 5 in"):
        open_source(tmp_path / form).layer("model.layers.5.mlp.experts", KT_SHAPE)


@pytest.mark.parametrize("form", ["tree", "merged"])
def test_scales_that_are_no_numbers_are_refused(form: str, tmp_path: Path) -> None:
    merged = {}
    for role, (n, k) in KT_SIZES.items():
        for expert in range(2):
            cut, _ = kt_parts(n, k, role, "INT8", 1, expert + n)
            codes, scale = cut[0]
            if (role, expert) == ("up", 1):
                scale = scale.clone()
                scale[3] = float("nan")
            write_kt_tree(tmp_path / "tree", 0, expert, role, "INT8", [(codes, scale)])
            name = f"blk.0.ffn_{role}_exps.{expert}.numa.0"
            merged |= {f"{name}.weight": codes.view(torch.int8), f"{name}.scale": scale}
    save(tmp_path / "merged", merged)
    where = r"INT8_up_1_\d+Byte_scale_\.kt" if form == "tree" else r"ffn_up_exps\.1\.numa\.0\.scale"
    with pytest.raises(InputError, match=rf"{tmp_path}.*{where}: given NaN or infinite numbers"):
        numbers(open_source(tmp_path / form).layer(MODULE, KT_SHAPE))


def test_incomplete_tree_is_refused(tmp_path: Path) -> None:
    for role, (n, k) in KT_SIZES.items():
        for expert in range(2):
            write_kt_tree(tmp_path, 0, expert, role, "INT8", kt_parts(n, k, role, "INT8", 2, 1)[0])
    file = next((tmp_path / "_layer_0" / "_numa_1").glob("INT8_up_1_*_quant_.kt"))
    intact = file.read_bytes()
    file.write_bytes(intact[:-5])
    with pytest.raises(InputError, match=r"_quant_\.kt: given 65531 bytes, expected 65536, as its name says"):
        open_source(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match=r"up of expert 1, NUMA part 1, quant: given nothing in"):
        open_source(tmp_path).layer(MODULE, KT_SHAPE)
