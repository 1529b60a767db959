"""Writes a checkpoint in bf16 from one in FP8, INT4 or GGUF, with the command line of DeepSeek's program; an installed
wheel has the same program under the same name (`ktransformers.cli.guide_scripts`)."""

from __future__ import annotations

from ktransformers.cli.guide_scripts import fp8_cast_bf16 as main

if __name__ == "__main__":
    main()
