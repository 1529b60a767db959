"""`register`, which SGLang calls early in each of its processes, before it parses arguments or loads a model.

The launching process gets two hooks on SGLang's argument parser, and only if its command line may contain `--kt-*`
flags. The parsed options travel to the scheduler processes in the environment, because SGLang passes its own fields
alone; there the hooks of `hooks.py` are registered. A process that is neither pays for reading `sys.argv`.

SGLang logs errors of plugins and goes on without them. A server that silently ignores its flags is worse than none, so
every failure here ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ktransformers.ground import env

SCHEDULER = "sglang.srt.managers.scheduler"  # imported in processes that build a model, before plugins are loaded


def may_have_kt_flags(words: Sequence[str]) -> bool:
    """Whether these arguments contain a `--kt-*` flag, or name a YAML file that may."""
    return any(word.startswith("--kt-") or word.partition("=")[0] == "--config" for word in words)


def register() -> None:
    builds_model = bool(env.text("KT_SGLANG_OPTIONS")) and SCHEDULER in sys.modules
    if not builds_model and not may_have_kt_flags(sys.argv):
        return
    from ktransformers.serve.sglang import hooks

    try:
        if builds_model:
            hooks.register_model_hooks()
        else:
            hooks.register_parser_hooks()
    except Exception as error:  # SGLang's loader would catch it
        reason = f"{type(error).__name__}: {error}"
        raise SystemExit(f"ktransformers: the plugin for SGLang cannot be used: {reason}") from error
