"""The bench of grouped products runs on a GPU and says so where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Main = Callable[[str], Callable[[list[str]], int]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_ends_with_one_line(main_of: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of("grouped_product")([]) == 1
    assert capsys.readouterr().err == "grouped_product.py: no CUDA device\n"


@pytest.mark.gpu
def test_all_products_are_measured(run_bench: Callable[..., tuple[list[str], dict[str, Any]]]) -> None:
    _, document = run_bench("grouped_product", "--shapes", "tiny", "--tokens", "32")
    assert [cell["product"] for cell in document["cells"]] == ["first", "down", "grad_h", "grad_x"]
    assert all(cell["seconds"] > 0 and cell["ratio"] > 0 for cell in document["cells"])
