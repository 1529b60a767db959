"""Names that requests may use: `served` is the base only, `served:name` (or `name`) an adapter on it.

Adapters are loaded while requests run: reading and packing take seconds and hold no lock; then one assignment makes the
name known. Loading a name again makes a new version. `always_on` is the adapter of `--kt-expert-lora-path`, a flag of
earlier guides: its experts apply to every request, those for the base included.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.adapters.adapter_template import AdapterTemplate, read_adapter_template
from ktransformers.ground.errors import InputError, KTError
from ktransformers.serve.cache.kv_cache import Owner
from ktransformers.serve.scheduler.lora import LoadedAdapter, LoraModules


class UnknownModel(KTError):
    """A name that is not served."""


@dataclass(frozen=True)
class RegisteredAdapter:
    adapter: LoadedAdapter
    created: int


class Registry:
    def __init__(
        self,
        served: str,
        modules: LoraModules,
        model: str,
        on_unload: Callable[[Owner], None],
        always_on: Path | None = None,
        read_template: Callable[[str | Path], AdapterTemplate | None] = read_adapter_template,
    ) -> None:
        self.served, self.model, self._read_template = served, model, read_template
        self._modules, self._on_unload = modules, on_unload
        self._versions = itertools.count(1)
        self._loaded: dict[str, RegisteredAdapter] = {}
        self._lock = threading.Lock()
        self.created = int(time.time())
        self._always_on: LoadedAdapter | None = None
        if always_on is not None:
            self._always_on = self._open("", always_on)
            if self._always_on.linears:
                expected = "LoRA on experts only, because it applies to every request"
                raise InputError("kt-expert-lora-path", str(always_on), expected, "split it with `kt convert`")

    @property
    def loaded(self) -> dict[str, RegisteredAdapter]:
        return dict(self._loaded)

    def find(self, name: str) -> LoadedAdapter | None:
        """The adapter of that name; None: the base."""
        if name == self.served:
            return self._always_on
        entry = self._loaded.get(name.removeprefix(f"{self.served}:"))
        if entry is None:
            names = [self.served, *(f"{self.served}:{adapter_name}" for adapter_name in self._loaded)]
            raise UnknownModel(f"model {name!r} is not served; expected one of {', '.join(names)}")
        return entry.adapter

    def load(self, name: str, source: str | Path, *, replacing: bool = False) -> LoadedAdapter:
        """Read, check and pack an adapter; its name is known on return. Running requests keep a replaced version."""
        if name in ("", self.served) or ":" in name or "/" in name:
            raise InputError("lora_name", repr(name), "a short name that is not the model's")
        self._check_new(name, replacing)
        adapter = self._open(name, source)
        with self._lock:
            self._check_new(name, replacing)  # another thread may have loaded it meanwhile
            replaced = self._loaded.get(name)
            self._loaded[name] = RegisteredAdapter(adapter, int(time.time()))
        if replaced is not None:
            self._on_unload(replaced.adapter.owner)
        return adapter

    def _check_new(self, name: str, replacing: bool) -> None:
        if name in self._loaded and not replacing:
            remedy = "unload it first, or pass load_inplace"
            raise InputError("lora_name", repr(name), "a name that is not loaded yet", remedy)

    def unload(self, name: str) -> None:
        with self._lock:
            entry = self._loaded.pop(name, None)
        if entry is None:
            raise UnknownModel(f"adapter {name!r} is not loaded; loaded are: {', '.join(self._loaded) or 'none'}")
        self._on_unload(entry.adapter.owner)

    def _open(self, name: str, source: str | Path) -> LoadedAdapter:
        template = self._read_template(source)
        opened = self._modules.open(source, name, next(self._versions), self.model)
        adapter = replace(opened, template=template)
        if self._always_on is None:
            return adapter
        if adapter.experts:
            expected = "an adapter without experts: those of --kt-expert-lora-path apply to every request"
            raise InputError(f"{source}", "LoRA on experts", expected)
        content = adapter.content and hashlib.blake2b(adapter.content + self._always_on.content).digest()
        return replace(adapter, experts=self._always_on.experts, factors=self._always_on.factors, content=content)
