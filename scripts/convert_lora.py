"""Converts an adapter for SGLang, with the command line of the guides; an installed
wheel has the same program under the same name (`ktransformers.cli.guide_scripts`)."""

from __future__ import annotations

from ktransformers.cli.guide_scripts import convert_lora as main

if __name__ == "__main__":
    main()
