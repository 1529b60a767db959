"""Which names may be asked for, and what they mean: `served` is the base and nothing else, `served:name` (or `name`) an
adapter on it.

Loading happens beside running requests: reading and packing take seconds and hold no lock; then one assignment makes
the name known. A name that is loaded again gets a new version. `always` is the exception that earlier guides define
(`--kt-expert-lora-path`): its experts are on for every request, the base's included.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.errors import InputError, KTError
from ktransformers.serve.engine.kv_cache import Owner
from ktransformers.serve.engine.lora import LoadedAdapter, LoraModules


class UnknownModel(KTError):
    """A name that is not served."""


@dataclass(frozen=True)
class RegisteredAdapter:
    resident: LoadedAdapter
    since: int


class Registry:
    def __init__(
        self, served: str, places: LoraModules, model: str, forget: Callable[[Owner], None], always: Path | None = None
    ) -> None:
        self.served, self.model = served, model
        self._places, self._forget = places, forget
        self._versions = itertools.count(1)
        self._loaded: dict[str, RegisteredAdapter] = {}
        self._lock = threading.Lock()
        self.since = int(time.time())
        self._always: LoadedAdapter | None = None
        if always is not None:
            self._always = self._open("", always)
            if self._always.linears:
                expected = "experts alone: what is on for every request has no attention"
                raise InputError("kt-expert-lora-path", str(always), expected, "split it with `kt convert`")

    @property
    def loaded(self) -> dict[str, RegisteredAdapter]:
        return dict(self._loaded)

    def find(self, name: str) -> LoadedAdapter | None:
        """None is the base."""
        if name == self.served:
            return self._always
        known = self._loaded.get(name.removeprefix(f"{self.served}:"))
        if known is None:
            names = [self.served, *(f"{self.served}:{one}" for one in self._loaded)]
            raise UnknownModel(f"model {name!r} is not served; there is {', '.join(names)}")
        return known.resident

    def load(self, name: str, source: str | Path, *, replacing: bool = False) -> LoadedAdapter:
        """Read, check and pack; known when it returns. An adapter that was replaced serves its requests to the end."""
        if name in ("", self.served) or ":" in name or "/" in name:
            raise InputError("lora_name", repr(name), "a short name that is not the model's")
        self._check_new(name, replacing)
        made = self._open(name, source)
        with self._lock:
            self._check_new(name, replacing)  # somebody else may have loaded it meanwhile
            before = self._loaded.get(name)
            self._loaded[name] = RegisteredAdapter(made, int(time.time()))
        if before is not None:
            self._forget(before.resident.owner)
        return made

    def _check_new(self, name: str, replacing: bool) -> None:
        if name in self._loaded and not replacing:
            remedy = "unload it first, or pass load_inplace"
            raise InputError("lora_name", repr(name), "a name that is not loaded yet", remedy)

    def unload(self, name: str) -> None:
        with self._lock:
            known = self._loaded.pop(name, None)
        if known is None:
            raise UnknownModel(f"adapter {name!r} is not loaded; there is {', '.join(self._loaded) or 'none'}")
        self._forget(known.resident.owner)

    def _open(self, name: str, source: str | Path) -> LoadedAdapter:
        made = self._places.open(source, name, next(self._versions), self.model)
        if self._always is None:
            return made
        if made.experts:
            expected = "an adapter without experts: those of --kt-expert-lora-path are on for every request"
            raise InputError(f"{source}", "LoRA on experts", expected)
        return replace(made, experts=self._always.experts, factors=self._always.factors)
