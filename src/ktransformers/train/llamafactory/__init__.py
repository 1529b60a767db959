"""Stock LLaMA-Factory with `use_kt: true`: what its releases expect of kt-kernel and of the forks of transformers,
accelerate, PEFT and TRL, given to the unmodified program by import hooks.

`kt llamafactory on` (`switch.py`) writes a `.pth` file into site-packages. In LLaMA-Factory's processes it imports
`startup.py`, which installs the hooks: LLaMA-Factory's modules are changed right after they were imported, in its own
process and in no file. Nothing here is imported by the rest of ktransformers but the command.
"""
