"""A checkpoint into weights for the CPU: the command that earlier guides name, with the same flags.

It is `kt quant` under its old name and writes a packed directory. int4 has a scale for each 32 columns, where the old
files had one for a row. What the source is quantised with is read from its files, so `--input-type` says nothing new;
neither do the flags about NUMA parts, GPUs, merging and backward weights, which are taken and passed over.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ktransformers.cli.quant import run_quant, warn_ignored
from ktransformers.errors import KTError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Convert a checkpoint for experts on the CPU.")
    made.add_argument("--input-path", "-i", type=Path, required=True)
    made.add_argument("--input-type", choices=["awq", "fp8", "fp16", "bf16", "fp4"], help="read from the files anyway")
    made.add_argument("--output", "-o", type=Path, required=True)
    made.add_argument("--quant-method", default="int4", help="int4, int8, moe_int4, moe_int8, or a format of kt quant")
    made.add_argument("--cpuinfer-threads", type=int, help="all cores where it is left out")
    made.add_argument("--threadpool-count", type=int)
    made.add_argument("--resume-layer", type=int, default=0, help="a resumed conversion finds its place by itself")
    made.add_argument("--gpu", action="store_true")
    made.add_argument("--no-merge-safetensor", action="store_true")
    made.add_argument("--save-backward-weights", action="store_true")
    made.add_argument("--profile", action="store_true")
    return made


def main() -> None:
    given = parser().parse_args()
    warn_ignored(
        threadpool_count=given.threadpool_count,
        resume_layer=given.resume_layer,
        gpu=given.gpu,
        no_merge_safetensor=given.no_merge_safetensor,
        save_backward_weights=given.save_backward_weights,
        profile=given.profile,
    )
    try:
        run_quant(given.input_path, given.output, word=given.quant_method, threads=given.cpuinfer_threads)
    except KTError as error:
        sys.exit(f"convert_cpu_weights: {error}")


if __name__ == "__main__":
    main()
