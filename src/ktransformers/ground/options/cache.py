"""Options of the server's KV cache: its size, its blocks in host memory and on disk, its dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from ktransformers.ground.errors import InputError
from ktransformers.ground.options.field import CLOSED, option

# Words of --kv-cache-dtype -> the dtype of the model that they ask for; None: any.
CACHE_DTYPES: dict[str, str | None] = {"auto": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}
FP8_WORDS = ("fp8", "fp8_e4m3")  # the second is SGLang's
CACHE_DTYPES |= dict.fromkeys(FP8_WORDS)


@dataclass(frozen=True, config=CLOSED)
class CacheOptions:
    max_total_tokens: int | None = option(
        None, "--max-total-tokens", "capacity of the KV cache in tokens; default: by --mem-fraction-static", ge=64
    )
    memory: float = option(
        0.5, "--mem-fraction-static", "share of the memory that is free after loading for the KV cache", gt=0, le=1
    )
    kv_host_gb: float | None = option(
        None,
        "--kv-host-gb",
        "GiB of host memory for blocks of the KV cache that leave its slots; default: of kt serve with a GPU a tenth "
        "of what is free, at most 8, else 0",
        ge=0,
        allow_inf_nan=False,
    )
    kv_disk: Path | None = option(
        None, "--kv-disk", "a file, or a folder for it, that keeps blocks of the KV cache over restarts"
    )
    kv_disk_gb: float | None = option(
        None, "--kv-disk-gb", "GiB of that file; default: half of what is free on its disk", gt=0, allow_inf_nan=False
    )
    kv_cache_dtype: str = option(
        "auto",
        "--kv-cache-dtype",
        "dtype of keys and values: auto, the dtype of the model, bf16 for a model in bf16, or fp8, e4m3 with a scale "
        "for each token and head",
    )

    @field_validator("kv_disk", mode="before")
    @classmethod
    def _names_a_file(cls, path: Any) -> Any:
        if path == "":
            raise InputError("kv-disk", "an empty path", "a file or a folder")
        return path

    @field_validator("kv_cache_dtype")
    @classmethod
    def _is_known(cls, word: str) -> str:
        if word not in CACHE_DTYPES:
            raise InputError("kv-cache-dtype", word, "auto, bf16 or fp8 (e4m3)")
        return word

    def __post_init__(self) -> None:
        if self.kv_disk_gb is not None and self.kv_disk is None:
            raise InputError("kv-disk-gb", self.kv_disk_gb, "--kv-disk PATH with it")

    @property
    def fp8_cache(self) -> bool:
        """Keys and values are stored in 8 bits."""
        return self.kv_cache_dtype in FP8_WORDS
