"""Writes the table of model families on docs/models.md.

    python scripts/model_table.py                # all families, some minutes
    python scripts/model_table.py phimoe gemma4  # these rows only

Each row is what a tiny random model of the family does beside the stock model, with the installed transformers
(tests/support/family_checks.py). tests/test_models_page.py holds the page to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests.support.family_checks import ALL_FAMILIES, check_family, read_table, write_table  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="all by default")
    families = parser.parse_args().families or list(ALL_FAMILIES)
    rows = read_table()
    for family in families:
        with tempfile.TemporaryDirectory() as directory:
            rows[family] = check_family(family, Path(directory)).row()
        print(rows[family], end="", flush=True)
    write_table({family: row for family, row in rows.items() if family in ALL_FAMILIES})


if __name__ == "__main__":
    main()
