"""`cpu_save`: the wrapper writes what it quantised as kt-kernel's `.kt` files with a manifest, and loads them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kt_kernel import KTMoEWrapper
from ktransformers.checkpoint.kt_files import MANIFEST_FILE, validate_int8_tree
from ktransformers.ground.errors import InputError
from tests.support.kt_reference import reference_files

E, H, INNER = 2, 256, 256


def wrapper(path: Path | str, method: str, parts: int = 1, layer: int = 0, **more: Any) -> Any:
    sizes = (layer, E, 2, H, INNER, None, 2, parts)
    return KTMoEWrapper(*sizes, str(path), 16, method=method, **more)


def tensors(layer: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(layer)
    shapes = {"gate": (E, INNER, H), "up": (E, INNER, H), "down": (E, H, INNER)}
    return {role: (torch.randn(shape, generator=generator) / 16).bfloat16() for role, shape in shapes.items()}


@pytest.mark.parametrize(("method", "bits", "parts"), [("AMXINT8", 8, 1), ("AMXINT8", 8, 2), ("AMXINT4", 4, 2)])
def test_saved_layers_are_those_of_kt_kernel(method: str, bits: int, parts: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(9)
    given = (torch.randn(4, H, generator=generator).bfloat16(), torch.tensor([[0, 1]] * 4), torch.rand(4, 2))
    for layer in (3, 0, 3):  # the last one replaces the first
        made = wrapper(tmp_path, method, parts, layer, cpu_save=True)
        made.load_weights_from_tensors(*tensors(layer).values(), None)
    for layer in (0, 3):
        for role, matrices in tensors(layer).items():
            for expert in range(E):
                for name, data in reference_files(matrices[expert], layer, expert, role, bits, parts).items():
                    assert (tmp_path / name).read_bytes() == data, name
    again = wrapper(tmp_path, method, parts, 3)
    again.load_weights(None)
    if parts == 1:  # in memory a row of down has one scale, in the files of several parts it has several
        assert torch.equal(again.forward(*given, None), made.forward(*given, None))
    else:
        expected = made.forward(*given, None).float()
        assert (again.forward(*given, None).float() - expected).norm() / expected.norm() < (0.02 if bits == 8 else 0.2)
    if bits == 8:
        sizes: dict[str, Any] = {"expert_num": E, "hidden_size": H, "intermediate_size": INNER, "verify_hashes": True}
        validate_int8_tree(tmp_path, layer_indices=[0, 3], numa_count=parts, **sizes)
    with pytest.raises(InputError, match="one tree of one model"):
        wrapper(tmp_path, method, 4 if bits == 8 else 1, 5, cpu_save=True).load_weights_from_tensors(
            *tensors().values(), None
        )


def test_a_tree_without_manifest_stays_without(tmp_path: Path) -> None:
    wrapper(tmp_path, "AMXINT8", cpu_save=True).load_weights_from_tensors(*tensors().values(), None)
    (tmp_path / MANIFEST_FILE).unlink()
    wrapper(tmp_path, "AMXINT8", layer=1, cpu_save=True).load_weights_from_tensors(*tensors().values(), None)
    assert not (tmp_path / MANIFEST_FILE).exists() and (tmp_path / "_layer_1").is_dir()


def test_other_methods_are_not_saved(tmp_path: Path) -> None:
    for path, method in ((tmp_path, "BF16"), (tmp_path, "MOE_INT8"), ("", "AMXINT8")):
        with pytest.raises(InputError, match="cpu_save: given True with method"):
            wrapper(path, method, cpu_save=True).load_weights_from_tensors(*tensors().values(), None)
