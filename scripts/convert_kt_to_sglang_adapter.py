"""Converts kt-kernel's training output to adapters for SGLang, under the path that earlier guides name; the program is
the module `kt_kernel.sft.convert_kt_to_sglang_adapter`."""

from __future__ import annotations

from kt_kernel.sft.convert_kt_to_sglang_adapter import convert_kt_to_sglang_adapter, main

__all__ = ["convert_kt_to_sglang_adapter"]

if __name__ == "__main__":
    main()
