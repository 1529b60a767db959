"""The sections of `fingerprint.py` that need no GPU: `core`, `model`, `train` and `serve`. Each yields keys and values.
Every import of an internal module is at the top of the function of its section.
"""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from typing import Any

from fingerprint_inputs import (
    FAMILIES,
    LORA,
    THREADS,
    Keys,
    adapt,
    batch,
    gguf_blocks,
    lora_gradients,
    need,
    normal,
    tiny_model,
)

PLAIN = ["bf16", "int8", "int4:32", "int4:64:f16", "int4:128:f32", "int4:0", "fp8:128x128", "fp8:1x128", "fp8:row"]
PLAIN += ["mxfp8", "mxfp4", "nvfp4"]
EXACT = ["bf16", "int4:32", "mxfp4", "q4_k", "iq2_xs"]  # formats that are also computed in precision f32 and f64
FEATURES: dict[str, dict[str, Any]] = {  # of a layer: sizes, and options of ExpertStore
    "odd": {"sizes": (3, 200, 72), "biased": True},
    "no-gate": {"sizes": (2, 37, 100), "gated": False, "activation": "relu2", "biased": True},
    "swiglu-oai": {"sizes": (3, 96, 33), "activation": "swiglu_oai", "alpha": 1.702, "limit": 2.0, "biased": True},
    "gelu-tanh": {"sizes": (2, 65, 64), "activation": "gelu_tanh"},
    "gelu": {"sizes": (2, 64, 32), "activation": "gelu", "limit": 0.5},
}


def core() -> Keys:
    import torch

    from ktransformers import _core
    from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded
    from ktransformers.checkpoint.encoder import encode
    from ktransformers.experts.store import Dropout
    from ktransformers.nn import ExpertStore

    pool, isa = _core.Pool(THREADS), _core.isa()
    able = next(variant["precisions"] for variant in _core.variants() if variant["name"] == isa)

    def matrix(spec: str, experts: int, rows: int, columns: int, seed: int) -> Any:
        if spec in GGUF_BLOCKS:
            blocks = gguf_blocks(*GGUF_BLOCKS[spec], experts, rows, columns, seed)
            return Encoded(spec, blocks, None, columns=columns)
        plain = normal(seed)(experts, rows, columns, scale=columns**-0.5)
        return plain if spec == "bf16" else encode(plain, spec)

    def layer(spec: str, precision: str, e: int, h: int, i: int, biased: bool = False, **options: Any) -> Any:
        store = ExpertStore(e, h, i, pool=pool, isa=isa, precision=precision, formats=spec, **options)
        shapes = {"gate": (i, h), "up": (i, h), "down": (h, i)}
        if not store.gated:
            del shapes["gate"]
        parts = {name: matrix(spec, e, *shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
        draw = normal(7)
        parts |= {f"{name}_bias": draw(e, shape[0], scale=0.5) for name, shape in shapes.items() if biased}
        store.pack(**parts)
        return store

    def factors(store: Any, rank: int, seed: int, size: float) -> list[Any]:
        draw, e, h, i = normal(seed), store.num_experts, store.hidden_size, store.intermediate_size
        wide, down = (h**-0.5 * size, h, i), (i**-0.5, i, h)
        sizes = [wide, wide, down] if store.gated else [wide, down]
        made = [t for scale, k, n in sizes for t in (draw(e, rank, k, scale=scale), draw(e, n, rank, scale=0.5))]
        return made if store.gated else [None, None, *made]

    def adapter(store: Any, tensors: list[Any]) -> Any:
        rank = tensors[2].shape[1]
        made = store.new_adapter(rank if store.gated else 0, rank, rank)
        made.pack(*tensors, gate_scale=0.5, up_scale=0.5, down_scale=2.0)
        return made

    def passes(store: Any, tokens: int, finer: bool) -> Keys:
        hidden, ids, weights, grad = batch(tokens, store.num_experts, store.hidden_size)
        # Random blocks of GGUF are large numbers: what meets them is small, so that activations are not saturated.
        size = 2.0 ** round(math.log2(store.decode("up", 0).double().norm(dim=1).mean().item()))
        hidden = (hidden.double() if finer else hidden) / size
        given = (hidden, ids, weights.double() if finer else weights)
        grad = grad.to(hidden.dtype)
        loras = [factors(store, 4, 11, size), factors(store, 20, 12, size)]
        adapters = [adapter(store, one) for one in loras]
        drop = Dropout(0.3, 12345)
        yield "forward", store.forward(*given)
        yield "forward/lora", store.forward(*given, adapters=adapters[:1])
        rows = (torch.arange(tokens) % 3 - 1).int()
        yield "forward/adapters", store.forward(*given, adapter=rows, adapters=adapters)
        if not store.w8a8_unsupported:
            yield "forward/w8a8", store.forward(*given, w8a8=True)
            yield "forward/w8a8-adapters", store.forward(*given, adapter=rows, adapters=adapters, w8a8=True)
        keep = store.new_keep(*ids.shape)
        yield "forward/keep", store.forward(*given, keep=keep)
        yield "backward", list(store.backward(grad, *given, keep=keep))
        grads = [None if one is None else torch.empty_like(one) for one in loras[0]]
        options: dict[str, Any] = {"adapters": adapters[:1], "factors": [grads]}
        for name, dropout in (("lora", Dropout(0.0, 0)), ("dropout", drop))[: 1 + (tokens == 40)]:
            yield f"forward/{name}-keep", store.forward(*given, keep=keep, adapters=adapters[:1], dropout=dropout)
            found = store.backward(grad, *given, keep=keep, dropout=dropout, **options)
            yield f"backward/{name}/hidden", found[0]
            yield f"backward/{name}/weights", found[1]
            yield f"backward/{name}/factors", [one for one in grads if one is not None]

    for spec in [*PLAIN, *GGUF_BLOCKS]:
        coarse = GGUF_BLOCKS.get(spec, (0,))[0] == 256
        sizes = (3, 256, 256) if coarse else (3, 160, 96)
        for precision in able if spec in EXACT else ["bf16"]:
            store = layer(spec, precision, *sizes)
            if precision == able[-1]:
                yield f"{spec}/{precision}/decode", [store.decode(name, 1) for name in ("gate", "up", "down")]
            for tokens in (1, 5, 40):
                for key, value in passes(store, tokens, precision == "f64"):
                    yield f"{spec}/{precision}/{tokens}/{key}", value
    for name, options in FEATURES.items():
        options = dict(options)
        store = layer("bf16", "bf16", *options.pop("sizes"), **options)
        for tokens in (1, 40):
            for key, value in passes(store, tokens, False):
                yield f"{name}/{tokens}/{key}", value
    yield from beside_experts(_core, pool)


def beside_experts(core: Any, pool: Any) -> Keys:
    """Of the native core what is no expert: linear layers, norms, attention, LoRA of a few rows."""
    import torch

    for dtype in (torch.bfloat16, torch.float32):
        draw, word = normal(3), str(dtype).removeprefix("torch.")
        x, weight, out = draw(3, 128).to(dtype), draw(128).to(dtype), torch.empty(3, 128, dtype=dtype)
        core.rms_norm(x, weight, out, 1e-6)
        yield f"rms-norm/{word}", out
        core.add_lora(x, draw(4, 128), draw(4, 128), out, 0.5)
        yield f"add-lora/{word}", out
        yield f"argmax/{word}", pool.argmax(draw(3, 1000).to(dtype))
        matrices = [draw(n, 128).bfloat16() for n in (96, 64)]
        outs = [torch.empty(3, len(one), dtype=dtype) for one in matrices]
        pool.linear(x, matrices, outs)
        yield f"linear/{word}", outs
        query, key, value = draw(4, 2, 32).to(dtype), draw(2, 2, 32).to(dtype), draw(2, 2, 32).to(dtype)
        cache = tuple(draw(2, 2, 64, 32).to(dtype) for _ in range(2))
        rows = torch.arange(2, dtype=torch.int32)
        out = torch.empty(2, 4, 32, dtype=dtype)
        pool.attend(query, key, value, out, cache, core.StepSequences(rows, rows + 8, rows[:, None]), scale=0.17)
        yield f"attend/{word}", out


def model() -> Keys:
    import torch

    from ktransformers.nn import load_model

    tokens = torch.randint(3, 6400, (2, 12), generator=torch.Generator().manual_seed(3))
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            directory = tiny_model(Path(folder) / family, family)
            for dtype in (torch.float32, torch.bfloat16):
                loaded = load_model(directory, dtype=dtype)
                with torch.no_grad():
                    yield f"{family}/{dtype}/logits", loaded(input_ids=tokens).logits
            for key, value in lora_gradients(adapt(load_model(directory, dtype=torch.float32)), tokens):
                yield f"{family}/{key}", value
        for key, value in quantised(Path(folder) / "qwen3_moe", tokens):
            yield f"quantised/{key}", value


def quantised(directory: Path, tokens: Any) -> Keys:
    """Packed directories, as `kt quant` writes them."""
    import torch

    from ktransformers.nn import load_model
    from ktransformers.quant.convert import convert
    from ktransformers.quant.plan import make_plan, parse_formats

    need("pydantic")
    for spec in ("int4", "int8", "mxfp4", "fp8:128x128"):
        out = directory.parent / spec.replace(":", "-")
        convert(make_plan(directory, parse_formats(spec), THREADS), out)
        loaded = load_model(out, dtype=torch.float32)
        with torch.no_grad():
            yield f"{spec}/logits", loaded(input_ids=tokens).logits
        if spec == "int4":
            for key, value in lora_gradients(adapt(loaded), tokens):
                yield f"{spec}/{key}", value


def train() -> Keys:
    need("pydantic", "trl", "datasets", "accelerate")
    from safetensors.torch import load_file

    from ktransformers.train.resolve import read_settings
    from ktransformers.train.run import train as run

    class Watcher:
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_step(self, progress: Any) -> None:
            self.losses += [progress.values["loss"]] if "loss" in progress.values else []

        def ignore(self, *_: Any) -> None:
            pass

        on_plan = on_load = on_reference = on_note = on_position = ignore

    recipe = {
        "dataset": "identity", "max_samples": 16, "cutoff_len": 96, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 4, "logging_steps": 1, "lora_rank": 4,
        "save_strategy": "no", "lora_dropout": 0.05, "cpu_infer": THREADS, "report_to": "none",
    }  # fmt: skip
    dpo = {"stage": "dpo", "dataset": "style_neko_en_dpo", "max_steps": 2}
    with tempfile.TemporaryDirectory() as folder:
        paths = {"model_name_or_path": str(tiny_model(Path(folder) / "model"))}
        for name, changes in {"sft": {}, "packing": {"packing": True}, "dpo": dpo}.items():
            watcher, output = Watcher(), Path(folder) / name
            run(read_settings(recipe | paths | {"output_dir": str(output)} | changes), watcher)
            yield f"{name}/losses", watcher.losses
            for key, tensor in sorted(load_file(output / "adapter_model.safetensors").items()):
                yield f"{name}/{key}", tensor


class Served:
    """A model as the server holds it, and adapters beside it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ktransformers.nn import load_model
        from ktransformers.serve.scheduler.forward import Forward
        from ktransformers.serve.scheduler.lora import LoraModules

        self.directory = tiny_model(folder / "model")
        for name, rank, targets in (
            ("experts", 4, LORA),
            ("other", 7, LORA),
            ("linear", 3, {"target_modules": ["o_proj"]}),
        ):
            stock = AutoModelForCausalLM.from_pretrained(self.directory, dtype="float32")
            adapted: PeftModel = adapt(stock, rank, rank, **targets)
            adapted.save_pretrained(folder / name)
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(self.directory)
        self.model = load_model(self.directory, **options)
        self.forward = Forward(self.model)
        self.forward.check_against_stock()
        self.places = LoraModules(self.model)

    def decode(self, names: list[str | None], new: int = 12) -> list[list[Any]]:
        """Greedily, all in one batch: (token, log-probability) of each sequence."""
        from ktransformers.serve.sampling.sampling import Sampling
        from ktransformers.serve.scheduler.engine import ServeEngine
        from ktransformers.serve.scheduler.scheduler import Limits
        from ktransformers.serve.scheduler.sequence import GenerationRequest, Sequence

        opened = {n: self.places.open(self.folder / n, n, 1, str(self.directory)) for n in names if n is not None}
        engine = ServeEngine(self.forward, Limits(6, 64, 32, 4096, 512))
        heard: list[list[Any]] = [[] for _ in names]
        for seed, (name, events) in enumerate(zip(names, heard, strict=True)):
            prompt = tuple(random.Random(seed).choices(range(3, 6400), k=5 + 9 * seed))
            adapter = None if name is None else opened[name]
            ask = GenerationRequest(
                prompt, adapter=adapter, max_tokens=new, sampling=Sampling(temperature=0), logprobs=2
            )
            engine.submit([Sequence(ask, self.tokenizer, events.append)])
        while engine.busy:
            engine.step()
        return [[(score.token, score.logprob) for event in events for score in event.scores] for events in heard]


MIXTURE: list[str | None] = [None, "experts", "other", None, "linear", "experts", "other"]


def serve() -> Keys:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            served = Served(Path(tempfile.mkdtemp(dir=folder)), dtype=dtype)
            for place, (name, scores) in enumerate(zip(MIXTURE, served.decode(MIXTURE), strict=True)):
                yield f"{dtype}/{place}-{name or 'base'}/tokens", [token for token, _ in scores]
                yield f"{dtype}/{place}-{name or 'base'}/logprobs", [logprob for _, logprob in scores]
