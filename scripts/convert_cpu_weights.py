"""Converts the experts of a checkpoint to kt-kernel's files, with the command line of its converter.

Equivalent to `kt quant --layout kt-kernel`: INT4 or INT8, merged safetensors or a tree of `.kt` files, for
`--threadpool-count` NUMA nodes; `--layout packed` writes the directory that ktransformers maps instead. The
quantisation of the source is read from its files, so `--input-type` is ignored, and so is `--gpu`: neither CUDA nor
Triton is needed for FP8. `--resume-layer` is checked, not trusted: an interrupted conversion resumes by its journal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ktransformers.cli.quant import LAYOUTS, run_quant, run_quant_kt, warn_ignored
from ktransformers.errors import KTError


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description="Convert the experts of a checkpoint to kt-kernel's files.")
    result.add_argument("--input-path", "-i", type=Path, required=True)
    result.add_argument(
        "--input-type", choices=["awq", "fp8", "fp16", "bf16", "fp4"], help="ignored, read from the files"
    )
    result.add_argument("--output", "-o", type=Path, required=True)
    result.add_argument("--quant-method", default="int4", help="int4 or int8; with --layout packed any of kt quant")
    result.add_argument("--cpuinfer-threads", type=int, help="default: all cores")
    result.add_argument("--threadpool-count", type=int, default=2, help="NUMA nodes of the target machine")
    result.add_argument("--resume-layer", type=int, default=0, help="refuse if a layer below it is missing")
    result.add_argument("--gpu", action="store_true", help="ignored, none is needed")
    result.add_argument("--no-merge-safetensor", action="store_true", help="a tree of .kt files")
    result.add_argument("--save-backward-weights", action="store_true", help="the transposed matrices too")
    result.add_argument("--profile", action="store_true", help="print the time of each layer")
    result.add_argument("--layout", choices=LAYOUTS, default="kt-kernel")
    return result


def main() -> None:
    given = parser().parse_args()
    warn_ignored(gpu=given.gpu)
    try:
        if given.layout == "packed":
            run_quant(given.input_path, given.output, word=given.quant_method, threads=given.cpuinfer_threads)
            return
        run_quant_kt(
            given.input_path,
            given.output,
            word=given.quant_method,
            numa_nodes=given.threadpool_count,
            merged=not given.no_merge_safetensor,
            backward=given.save_backward_weights,
            threads=given.cpuinfer_threads,
            resume_layer=given.resume_layer,
            profile=given.profile,
        )
    except KTError as error:
        sys.exit(f"convert_cpu_weights: {error}")


if __name__ == "__main__":
    main()
