"""The programs `convert_cpu_weights.py`, `fp8_cast_bf16.py` and `convert_lora.py` with the command lines of the guides.

An installed wheel has them under these names (`[project.scripts]` in pyproject.toml), and `scripts/` for calls of
`python scripts/NAME.py`. Each is a verb of `kt` with other flags: `kt quant --layout kt-kernel`, `kt quant --format
bf16 --plain` and `kt convert --to sglang`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ktransformers.cli.quant import LAYOUTS, TARGETS, QuantOptions, check_options, run_plain
from ktransformers.ground.errors import KTError


def weights_parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        "convert_cpu_weights.py", description="Convert the experts of a checkpoint to kt-kernel's files."
    )
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


def _convert_weights(given: argparse.Namespace) -> None:
    options = QuantOptions(
        out=given.output,
        word=given.quant_method,
        threads=given.cpuinfer_threads,
        numa_nodes=given.threadpool_count,
        no_merge=given.no_merge_safetensor,
        backward=given.save_backward_weights,
        resume_layer=given.resume_layer,
        gpu=given.gpu,
        profile=given.profile,
    )
    check_options(options, "--layout kt-kernel")
    TARGETS[f"--layout {given.layout}"](given.input_path, options)


def convert_cpu_weights() -> None:
    """INT4 or INT8, merged safetensors or a tree of `.kt` files, for `--threadpool-count` NUMA nodes. `--resume-layer`
    is checked, not trusted: an interrupted conversion resumes by its journal."""
    _run(weights_parser(), _convert_weights)


def fp8_cast_bf16() -> None:
    """An ordinary checkpoint in bf16 from one in FP8, INT4 or GGUF; the flags of DeepSeek's program."""
    parser = argparse.ArgumentParser("fp8_cast_bf16.py", description="Write a checkpoint in bf16 from a quantised one.")
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, help="FP8, INT4 or GGUF")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, help="the directory to write")
    _run(parser, lambda given: run_plain(given.input_fp8_hf_path, QuantOptions(out=given.output_bf16_hf_path)))


def _convert_lora(given: argparse.Namespace) -> None:
    from ktransformers.adapters import convert

    source: Path = given.adapter.absolute()
    target = given.output or source.with_name(f"{source.name}-sglang")
    done = convert(source, target, "sglang", base_model_name_or_path=given.base_model_name_or_path,
                   overwrite=given.overwrite)  # fmt: skip
    assert done.merged is not None
    print(f"{done.merged.tensors} tensors for SGLang, --lora-paths NAME={target}")


def convert_lora() -> None:
    """An adapter for SGLang, in a directory next to it."""
    parser = argparse.ArgumentParser("convert_lora.py", description="Convert an adapter for SGLang.")
    parser.add_argument("adapter", type=Path)
    parser.add_argument("output", type=Path, nargs="?", help="default: ADAPTER-sglang")
    parser.add_argument("--base-model-name-or-path", help="default: what the adapter names")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    _run(parser, _convert_lora)


def _run(parser: argparse.ArgumentParser, program: Callable[[argparse.Namespace], None]) -> None:
    given = parser.parse_args()
    try:
        program(given)
    except KTError as error:
        sys.exit(f"{parser.prog.removesuffix('.py')}: {error}")
