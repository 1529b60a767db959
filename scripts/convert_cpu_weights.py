"""Converts a checkpoint for experts on the CPU, with the command line of earlier guides.

Equivalent to `kt quant`; writes a packed directory. int4 has a scale per 32 columns, where the old files had one per
row. The quantisation of the source is read from its files, so `--input-type` is ignored, as are the flags for NUMA
parts, GPUs, merging and backward weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ktransformers.cli.quant import run_quant, warn_ignored
from ktransformers.errors import KTError


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description="Convert a checkpoint for experts on the CPU.")
    result.add_argument("--input-path", "-i", type=Path, required=True)
    result.add_argument(
        "--input-type", choices=["awq", "fp8", "fp16", "bf16", "fp4"], help="ignored, read from the files"
    )
    result.add_argument("--output", "-o", type=Path, required=True)
    result.add_argument(
        "--quant-method", default="int4", help="int4, int8, moe_int4, moe_int8, or a format of kt quant"
    )
    result.add_argument("--cpuinfer-threads", type=int, help="default: all cores")
    result.add_argument("--threadpool-count", type=int)
    result.add_argument("--resume-layer", type=int, default=0, help="ignored, conversions resume automatically")
    result.add_argument("--gpu", action="store_true")
    result.add_argument("--no-merge-safetensor", action="store_true")
    result.add_argument("--save-backward-weights", action="store_true")
    result.add_argument("--profile", action="store_true")
    return result


def main() -> None:
    arguments = parser().parse_args()
    warn_ignored(
        threadpool_count=arguments.threadpool_count,
        resume_layer=arguments.resume_layer,
        gpu=arguments.gpu,
        no_merge_safetensor=arguments.no_merge_safetensor,
        save_backward_weights=arguments.save_backward_weights,
        profile=arguments.profile,
    )
    try:
        run_quant(
            arguments.input_path, arguments.output, word=arguments.quant_method, threads=arguments.cpuinfer_threads
        )
    except KTError as error:
        sys.exit(f"convert_cpu_weights: {error}")


if __name__ == "__main__":
    main()
