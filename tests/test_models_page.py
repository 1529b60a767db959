"""docs/models.md: its table is what the code does, for a few families here and for all under `make test-slow`, and
every Mixture-of-Experts model of the installed transformers is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig

from tests.support.family_checks import ALL_FAMILIES, NOT_LANGUAGE_MODELS, PAGE, check_family, read_table

MODELS = Path(transformers.__file__).parent / "models"
EXPERTS_INTERFACE = "@use_experts_implementation"
EXPERT_COUNT = re.compile(r"^    (num_experts|n_routed_experts|num_local_experts|moe_num_experts)\b", re.MULTILINE)
# A window in the mask only; masks that are not told the rows; a convolution; two groups of experts; no interface.
FEW = ("phimoe", "gpt_oss", "lfm2_moe", "ernie4_5_vl_moe", "jetmoe")

stated = re.search(r"transformers (\d+\.\d+)", PAGE.read_text().partition("## Families")[2])
assert stated is not None
needs_stated_version = pytest.mark.skipif(
    not transformers.__version__.startswith(f"{stated[1]}."), reason=f"the table is that of transformers {stated[1]}"
)


@needs_stated_version
@pytest.mark.parametrize(
    "family", [family if family in FEW else pytest.param(family, marks=pytest.mark.slow) for family in ALL_FAMILIES]
)
def test_row_of_the_table(family: str, tmp_path: Path) -> None:
    assert check_family(family, tmp_path).row() == read_table()[family]


@needs_stated_version
def test_every_moe_family_is_in_the_table() -> None:
    assert sorted(read_table()) == sorted(ALL_FAMILIES)
    folders = set()
    for folder in MODELS.iterdir():
        code = "".join(file.read_text() for file in folder.glob("modeling_*.py")) if folder.is_dir() else ""
        config = "".join(file.read_text() for file in folder.glob("configuration_*.py")) if code else ""
        if EXPERTS_INTERFACE in code or EXPERT_COUNT.search(config):
            folders.add(folder.name)
    tested = {type(AutoConfig.for_model(family)).__module__.split(".")[-2] for family in ALL_FAMILIES}
    assert len(folders) > 60
    assert folders - tested == set(NOT_LANGUAGE_MODELS)
    assert not tested & set(NOT_LANGUAGE_MODELS)


def test_nothing_on_the_page_computes_other_numbers() -> None:
    """A cell says yes or no, and never that the numbers are wrong."""
    wrong = ("differ by", "other modules", "other tokens", "see each other")
    assert [
        row for row in read_table().values() if any(text in row.replace("logits differ when", "") for text in wrong)
    ] == []
