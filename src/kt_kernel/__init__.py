"""The interface of kt-kernel 0.7.2, computed by ktransformers.

SGLang imports this package in every one of its processes, so importing it imports neither torch nor the native core:
names are resolved when they are first used. `__version__` is the version of the interface; the version of the code is
`ktransformers.__version__`.
"""

from __future__ import annotations

import os
import sys

from kt_kernel import kt_kernel_ext

TYPE_CHECKING = False  # as typing has it, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from kt_kernel.experts import KTMoEWrapper
    from kt_kernel.sft.amx import AMXSFTMoEWrapper
    from kt_kernel.weights import generate_gpu_experts_masks

__version__ = "0.7.2"
__all__ = ["AMXSFTMoEWrapper", "KTMoEWrapper", "__version__", "generate_gpu_experts_masks", "kt_kernel_ext"]

sys.modules.setdefault("kt_kernel_ext", kt_kernel_ext)  # programs import it by this name too

_MODULE_OF = {
    "KTMoEWrapper": "kt_kernel.experts",
    "generate_gpu_experts_masks": "kt_kernel.weights",
    "AMXSFTMoEWrapper": "kt_kernel.sft.amx",
}
_OF_EXTENSION = ("__cpu_variant__", "__int8_kernel__", "__int8_weight_layout__")


def __getattr__(name: str) -> Any:
    if name in _OF_EXTENSION:
        return getattr(kt_kernel_ext, name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kt_kernel' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_OF_EXTENSION})


if os.environ.get("KT_KERNEL_DEBUG") == "1":
    kt_kernel_ext.cpu_variant()  # the core says how it chose
