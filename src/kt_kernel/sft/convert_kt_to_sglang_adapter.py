"""Converts kt-kernel's training output to adapters for SGLang, with the command line of earlier guides.

The merged adapter is written to OUTPUT_DIR; the two other options also write the experts and the rest separately, for
servers that load them separately. Equivalent to `kt convert --to sglang`; reads every format. Run it with
`python -m kt_kernel.sft.convert_kt_to_sglang_adapter`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ktransformers.adapters import convert
from ktransformers.ground.errors import KTError


def convert_kt_to_sglang_adapter(
    input_dir: str | Path,
    output_dir: str | Path,
    *,
    base_model_name_or_path: str,
    lora_alpha: float | None = None,
    overwrite: bool = False,
    expert_output_dir: str | Path | None = None,
    nonexpert_output_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Converts and returns a summary of what was written."""
    return convert(
        input_dir,
        output_dir,
        "sglang",
        expert_output_dir=expert_output_dir,
        nonexpert_output_dir=nonexpert_output_dir,
        base_model_name_or_path=base_model_name_or_path,
        lora_alpha=lora_alpha,
        overwrite=overwrite,
    ).to_json()


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a kt-kernel LoRA training output for SGLang.")
    parser.add_argument("input_dir", type=Path)
    parser.add_argument("output_dir", type=Path, help="the merged adapter")
    parser.add_argument("--base-model-name-or-path", required=True)
    parser.add_argument("--lora-alpha", type=float, help="used only if adapter_config.json has none")
    parser.add_argument("--expert-output-dir", type=Path)
    parser.add_argument("--nonexpert-output-dir", type=Path)
    parser.add_argument("--overwrite", action="store_true")
    try:
        summary = convert_kt_to_sglang_adapter(**vars(parser.parse_args()))
    except KTError as error:
        sys.exit(f"convert_kt_to_sglang_adapter: {error}")
    for label, name in (("merged", "merged"), ("expert-only", "expert_only"), ("non-expert-only", "nonexpert_only")):
        if summary[name]:
            targets = ", ".join(summary[name]["target_modules"])
            sys.stdout.write(f"{label}: {summary[name]['tensors']} tensors, target_modules {targets}\n")


if __name__ == "__main__":
    main()
