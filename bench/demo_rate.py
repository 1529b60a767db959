"""What one training step of the demo is made of on a few cores, and how fast its tasks are answered.

    taskset -c 0,1 python bench/demo_rate.py --model smollm2-moe --out OUT

The model is opened as `kt train` opens it (packed experts, PEFT's adapter), the rows are the demo's. Each line changes
one thing: where the head is applied, how attention sees packed rows, the dtype of attention's LoRA, tokens of a step.
`--profile` adds torch's own table of operators for the first and the last line. The loop is a plain one, because a
machine that only measures may lack TRL. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ktransformers.openmp import limit_spinning

if "--spin" not in sys.argv:
    limit_spinning()

import torch  # after the threads' habits are set
from torch import Tensor

LINES: tuple[dict[str, Any], ...] = (
    {},
    {"head": "labelled"},
    {"head": "labelled", "attention": "rows"},
    {"head": "labelled", "attention": "rows", "step": 256},
    {"head": "labelled", "attention": "rows", "step": 1024},
    {"head": "labelled", "attention": "rows", "target": "gate_up_proj,down_proj"},
    {"head": "labelled", "attention": "rows", "lora": "lean"},
)


class LeanLora(torch.autograd.Function):
    """x W^T + s (x A^T) B^T in products alone, in x's dtype: PEFT casts to float32, scales, adds and casts back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows, low, high = x.reshape(-1, x.shape[-1]), a.to(x.dtype), b.to(x.dtype)
        inner = rows @ low.t()
        ctx.save_for_backward(rows, inner, weight, low, high)
        ctx.scale, ctx.shape = scale, x.shape
        return torch.addmm(rows @ weight.t(), inner, high.t(), alpha=scale).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, weight, low, high = ctx.saved_tensors
        grad = grads[0].reshape(rows.shape[0], -1)
        back = (grad @ high) * ctx.scale
        high_grad = (grad.t() @ inner) * ctx.scale
        row_grad = torch.addmm(grad @ weight, back, low).view(ctx.shape)
        return row_grad, None, (back.t() @ rows).float(), high_grad.float(), None


def lean(network: Any) -> None:
    """PEFT's linear layers by `LeanLora`."""
    for layer in network.modules():
        if type(layer).__name__ == "Linear" and hasattr(layer, "lora_A"):
            weight, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
            scale = layer.scaling["default"]
            layer.forward = lambda x, w=weight, a=a, b=b, s=scale: LeanLora.apply(x, w, a, b, s)


def packs_of(settings: Any, tokenizer: Any, step: int) -> list[list[Any]]:
    import random

    from ktransformers.train.data.prepare import encode_all, mix_datasets, pack_rows, read_datasets
    from ktransformers.train.data.render import Renderer

    found = read_datasets(settings.data.dataset, settings.data)
    rows = mix_datasets(
        [list(part) for part in encode_all(found, Renderer(tokenizer, step), settings.data)], settings.data, 0
    )
    packs = pack_rows(rows, step)
    random.Random(0).shuffle(packs)
    return packs


def open_adapted(args: argparse.Namespace, change: dict[str, Any]) -> tuple[Any, Any, Any]:
    from peft import get_peft_model
    from transformers import AutoTokenizer

    from ktransformers.nn import load_model
    from ktransformers.system import bf16_is_fast
    from ktransformers.train.model import build_lora_config
    from ktransformers.train.resolve import read_settings
    from ktransformers.train.targets import find_targets

    words = {"model_name_or_path": str(args.model), "output_dir": "unused", "lora_rank": 16, "lora_target": "all"}
    words |= {"dataset": "style_neko_en,lumen_talks", "lora_target": change.get("target", "all")}
    words |= {"mix_strategy": "interleave_under", "interleave_probs": "0.25,0.75"}
    settings = read_settings(words)
    torch.manual_seed(0)
    model: Any = load_model(args.model, dtype=torch.bfloat16 if bf16_is_fast("cpu") else torch.float32)
    model.config.use_cache = False
    adapted = get_peft_model(model, build_lora_config(model, find_targets(model, settings.lora), settings.lora))
    if "lora" in change:
        lean(adapted)
    return adapted, settings, AutoTokenizer.from_pretrained(args.model)


def loss_of(network: Any, rows: list[Any], head: str) -> Tensor:
    ids = torch.tensor([[token for row in rows for token in row.ids]])
    labels = torch.tensor([label for row in rows for label in (*row.labels[1:], -100)])
    positions = torch.tensor([[place for row in rows for place in range(len(row.ids))]])
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if head == "labelled":
        kept = (labels != -100).nonzero()[:, 0]
        logits = network(**given, logits_to_keep=kept).logits[0]
        return torch.nn.functional.cross_entropy(logits.float(), labels[kept])
    return torch.nn.functional.cross_entropy(network(**given).logits[0].float(), labels)


def train_steps(network: Any, packs: list[list[Any]], adam: Any, head: str) -> int:
    tokens = 0
    for rows in packs:
        loss_of(network, rows, head).backward()
        torch.nn.utils.clip_grad_norm_([p for p in network.parameters() if p.requires_grad], 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        tokens += sum(len(row.ids) for row in rows)
    return tokens


def measure(args: argparse.Namespace, change: dict[str, Any], profiled: bool) -> dict[str, Any]:
    from ktransformers.train.callbacks import ExpertClock

    step, head = change.get("step", 512), change.get("head", "all")
    network, settings, tokenizer = open_adapted(args, change)
    if change.get("attention") == "rows":
        from ktransformers.train.packed_attention import use_packed_attention

        assert use_packed_attention(network.get_base_model())
    packs = packs_of(settings, tokenizer, step)
    count = max(2, args.tokens // step)
    adam = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-4, fused=True)
    network.train()
    train_steps(network, packs[:1], adam, head)
    clock = ExpertClock(network)
    began = time.perf_counter()
    tokens = train_steps(network, packs[1 : 1 + count], adam, head)
    seconds = time.perf_counter() - began
    found = {"tokens_per_second": round(tokens / seconds, 1), "expert_share": round(clock.seconds / seconds, 3)}
    clock.close()
    if profiled:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            train_steps(network, packs[1:3], adam, head)
        name = "-".join(str(value) for value in change.values()) or "stock"
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=60)
        shaped = profile.key_averages(group_by_input_shape=True).table(
            sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=40, max_shapes_column_width=60
        )
        (args.out / f"profile-{name}.txt").write_text(table + "\n" + shaped)
    return found


def judge(args: argparse.Namespace) -> dict[str, Any]:
    from ktransformers.evaluate.local import LocalModel
    from ktransformers.evaluate.run import evaluate
    from ktransformers.evaluate.task import load_tasks

    found = {}
    for size in (16, 32):
        backend = LocalModel.open(args.model, batch_size=size).backend()
        for name in ("persona", "invented-facts"):
            (task,) = load_tasks(name, args.limit)
            result = evaluate(backend, task, args.out / f"judge-{size}-{os.getpid()}" / name)
            found[f"{name}, batches of {size}"] = {"items": result["items"], "seconds": result["seconds"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what `kt model make smollm2-moe` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lines", default="", help="numbers of the lines to measure; all by default")
    parser.add_argument("--tokens", type=int, default=3072, help="of each measurement")
    parser.add_argument("--limit", type=int, default=32, help="items of each task; 0 answers none")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--spin", action="store_true", help="let OpenMP's threads look for work as long as they like")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    from ktransformers import _core

    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cores))
    document: dict[str, Any] = {"isa": _core.isa(), "cores": cores, "spin": args.spin, "lines": []}
    chosen = [LINES[int(word)] for word in args.lines.split(",")] if args.lines else list(LINES)
    for number, change in enumerate(chosen):
        row = {"change": change, **measure(args, change, args.profile and number in (0, len(chosen) - 1))}
        document["lines"].append(row)
        print(f"{row['tokens_per_second']:8.0f} tokens/s, experts {row['expert_share']:.0%}  {change}", flush=True)
        (args.out / f"rate-{cores[0]}.json").write_text(json.dumps(document, indent=1))
    if args.limit:
        document["tasks"] = judge(args)
        (args.out / f"rate-{cores[0]}.json").write_text(json.dumps(document, indent=1))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
