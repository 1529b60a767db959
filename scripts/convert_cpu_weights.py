"""Converts the experts of a checkpoint to kt-kernel's files, with the command line of its converter; an installed
wheel has the same program under the same name (`ktransformers.cli.guide_scripts`)."""

from __future__ import annotations

from ktransformers.cli.guide_scripts import convert_cpu_weights as main

if __name__ == "__main__":
    main()
