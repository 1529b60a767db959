"""The bench of grouped products runs on a GPU and says so where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import grouped_product

    assert grouped_product.main([]) == 1
    assert capsys.readouterr().err == "grouped_product.py: no CUDA device\n"


@pytest.mark.gpu
def test_all_products_are_measured(tmp_path: Path) -> None:
    import grouped_product

    file = tmp_path / "grouped.json"
    assert grouped_product.main(["--shapes", "tiny", "--tokens", "32", "--json", str(file)]) == 0
    cells = json.loads(file.read_text())["cells"]
    assert [cell["product"] for cell in cells] == ["first", "down", "grad_h", "grad_x"]
    assert all(cell["seconds"] > 0 and cell["ratio"] > 0 for cell in cells)
