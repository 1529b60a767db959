"""The entries of /v1/models: base and adapters, with their context length under each name that clients read."""

from __future__ import annotations

from typing import Any

from ktransformers.serve.http.service import Service
from ktransformers.serve.scheduler.lora import LoadedAdapter


def list_models(service: Service) -> list[dict[str, Any]]:
    registry, max_tokens = service.registry, service.max_sequence_tokens
    shared: dict[str, Any] = {"object": "model", "owned_by": "ktransformers"}
    shared |= dict.fromkeys(("max_model_len", "context_length", "max_context_length"), max_tokens)
    shared["meta"] = {"n_ctx": max_tokens, "n_ctx_train": max_tokens, "n_vocab": service.vocabulary}
    if service.attention_backend:
        shared["attention_backend"] = service.attention_backend
    shared["cache"] = service.describe_cache()
    if service.approximations:
        shared["approximations"] = service.approximations
    base = {
        "id": registry.served,
        "created": registry.created,
        "root": registry.model,
        "parent": None,
        "capabilities": _capabilities(service, service.find(None)),
        **shared,
    }
    loaded = [
        {
            "id": f"{registry.served}:{name}",
            "created": entry.created,
            "root": entry.adapter.source,
            "parent": registry.served,
            "matrices": entry.adapter.matrices,
            "chat_template": service.template_origin(entry.adapter),
            "capabilities": _capabilities(service, entry.adapter),
            **shared,
        }
        for name, entry in registry.loaded.items()
    ]
    return [base, *loaded]


def _capabilities(service: Service, adapter: LoadedAdapter | None) -> list[str]:
    if not service.template_of(adapter):
        return ["completion"]
    thinks = service.answer_format(adapter).thinking is not None
    return ["completion", "chat", "tools", *(["thinking"] if thinks else [])]
