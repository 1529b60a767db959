"""The sections of `fingerprint.py` about the placement engine: on torch's CPU device, on a GPU under its fixed
policies, and served decoding in CUDA graphs. Each yields keys and values. Every import of an internal module is at the
top of its function.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fingerprint_cpu import MIXTURE, Served
from fingerprint_inputs import Keys, Skip, adapt, batch, lora_gradients, normal, tiny_model


def carrier(device: str) -> Any:
    """A stock model on the GPU whose experts are packed."""
    import torch

    from ktransformers.nn import load_model

    with tempfile.TemporaryDirectory() as folder:
        return load_model(tiny_model(Path(folder)), dtype=torch.bfloat16, device=device)


def placed_experts(
    spec: str, policy: str, residents: int, tokens: tuple[int, ...], rounds: int, device: str = "cuda"
) -> Keys:
    """Layers of a model that the placement engine computes: the same batch several times, since later passes find
    experts that are there already, and from the third on graphs that were recorded."""
    import torch

    from ktransformers.checkpoint.encoder import encode
    from ktransformers.experts.contract import expert_modules
    from ktransformers.experts.interface import attach_store
    from ktransformers.experts.lora import ExpertLora, LoraPair
    from ktransformers.experts.operator import apply_experts
    from ktransformers.nn import ExpertStore
    from ktransformers.place import attach

    e, h, i, r = 8, 128, 64, 8
    model, layers = carrier(device), []
    for seed, module in enumerate(expert_modules(model).values()):
        draw = normal(seed)
        parts = {
            "gate": draw(e, i, h, scale=h**-0.5),
            "up": draw(e, i, h, scale=h**-0.5),
            "down": draw(e, h, i, scale=0.1),
        }
        store = ExpertStore(e, h, i, formats=spec)
        store.pack(**(parts if spec == "bf16" else {name: encode(one, spec) for name, one in parts.items()}))
        layers.append(attach_store(module, module.kt.contract, store, {}))
    placement = attach(model, policy=policy, device=device)
    if placement is not None and residents:
        placement.place_residents(count=residents)
    draw = normal(9)
    wide = LoraPair(draw(e, r, h, scale=0.1), draw(2 * i, r, e, scale=0.3).permute(2, 0, 1), 0.5)
    down = LoraPair(draw(e, r, i, scale=0.1), draw(h, r, e, scale=0.3).permute(2, 0, 1), 2.0)
    leaves = [one.requires_grad_() for one in (wide.a, wide.b, down.a, down.b)]
    for count in tokens:
        hidden, ids, weights, grad = (one.to(device) for one in batch(count, e, h))
        ids[:, 1] = torch.arange(count, device=device) % e  # every expert, so that `stream` need not ask for the ids
        given = hidden.requires_grad_(), weights.requires_grad_(), *leaves
        for at in range(rounds):
            with torch.no_grad():
                outs = [apply_experts(layer.backend, hidden, ids, weights) for layer in layers]
                yield f"{count}/round{at}/infer", outs
            for name, lora in (("plain", None), ("lora", ExpertLora(gate_up=wide, down=down))):
                out = hidden
                for layer in layers:
                    out = apply_experts(layer.backend, out, ids, weights, lora=lora)
                found = torch.autograd.grad(out, given[: None if lora else 2], grad)
                yield f"{count}/round{at}/{name}/forward", out
                yield f"{count}/round{at}/{name}/backward", list(found)
    if placement is not None:
        yield "recordings", [len(engine.executor._graphs.graphs.captured) for engine in placement.engines]
        placement.detach()


def need_gpu() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise Skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


PLACES = (("cpu", 0), ("stream", 0), ("resident", 0), ("resident", 3), ("resident", 8))


def place() -> Keys:
    """The same engine with torch's CPU device in the place of a GPU: everything but streams and Triton."""
    for spec in ("bf16", "int4:32"):
        for policy, residents in PLACES[1:]:
            for key, value in placed_experts(spec, policy, residents, (1, 5, 40), 2, device="cpu"):
                yield f"{spec}/{policy}-{residents}/{key}", value


def gpu() -> Keys:
    torch = need_gpu()
    torch.use_deterministic_algorithms(True, warn_only=True)
    for spec in ("bf16", "int4:32", "mxfp4"):
        for policy, residents in PLACES:
            for key, value in placed_experts(spec, policy, residents, (1, 5, 40, 300), 2):
                yield f"{spec}/{policy}-{residents}/{key}", value
    from ktransformers.place import attach

    tokens = torch.randint(3, 6400, (2, 40), generator=torch.Generator().manual_seed(3)).cuda()
    for policy, residents in PLACES:
        model = adapt(carrier("cuda"))
        placement = attach(model, policy=policy)
        if placement is not None and residents:
            placement.place_residents(count=residents)
        for key, value in lora_gradients(model, tokens):
            yield f"model/{policy}-{residents}/{key}", value
        if placement is None or residents != 3:
            continue
        with torch.no_grad():
            yield "model/logits", model(input_ids=tokens).logits
            placement.stream_from(50)
            yield "model/threshold/logits", model(input_ids=tokens).logits


def gpu_graphs() -> Keys:
    """Sums of two terms do not depend on their order, so passes of two experts a token are exact with atomics too."""
    torch = need_gpu()
    for spec in ("bf16", "int4:32"):
        for policy, residents in (("stream", 0), ("resident", 8)):
            for key, value in placed_experts(spec, policy, residents, (64, 300), 6):
                yield f"{spec}/{policy}-{residents}/{key}", value
    from ktransformers.place import attach
    from ktransformers.serve.graphs.decode_graphs import DecodeGraphs

    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), dtype=torch.float32, device="cuda")
        for residents in (0, 2, 8):
            placement = attach(served.model, policy="resident")
            placement.place_residents(count=residents)
            served.forward.graphs = DecodeGraphs(served.model, placement)
            for name, mixture in (("base", [None] * 4), ("adapters", MIXTURE)):
                heard = served.decode(mixture, new=24)
                yield f"decode/resident-{residents}/{name}/tokens", [[token for token, _ in one] for one in heard]
            yield f"decode/resident-{residents}/replayed", served.forward.graphs.replayed
            served.forward.graphs = None
            placement.detach()
