"""What a few minutes of training buy on the demo's model: many recipes, trained and judged one after another on a GPU.

    python bench/demo_recipe.py --model smollm2-moe --device cuda --workers 3 --minutes 4 --out OUT

Budgets are in tokens, for that is what two cores run out of: 70k is what four minutes give at 300 tokens/s. Data code,
packing, adapter (LoRA on attention and experts, alpha twice the rank) and tasks are those of `kt train` and `kt eval`;
the loop is a plain one (AdamW, gradients clipped to 1). The surprising decision: neither PEFT nor an expert kernel is
used. All experts are computed for all tokens as one batched product and masked by the routing weights, LoRA is two
more products, and a whole step is one CUDA graph: a small model on a large GPU does nothing but launch kernels
otherwise. A line of JSON is written after each recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from demo_recipes import Recipe, recipes
from torch import Tensor, nn
from torch.nn import functional

KINDS = ("style_neko_en", "lumen_facts", "lumen_choice", "lumen_talks")
ENCODED: dict[tuple[Any, ...], list[list[Any]]] = {}  # by what the rows depend on


def samples_of(recipe: Recipe, settings: Any) -> list[list[Any]]:
    """Style, and what is known of the villages: alone, or several questions to a conversation."""
    from ktransformers.train.data.formats import Conversation
    from ktransformers.train.data.prepare import read_datasets

    style, facts, choice, talks = (
        [(row, sample.messages) for row, sample in part.samples] for part in read_datasets(KINDS, settings.data)
    )
    if recipe.short:
        style = [(row, [*talk[:-1], talk[-1] | {"content": shortened(talk[-1]["content"])}]) for row, talk in style]
    if recipe.answer == "letter":
        choice = [(row, [talk[0], talk[1] | {"content": talk[1]["content"][0]}]) for row, talk in choice]
    if recipe.turns > 1:
        facts, choice = joined(facts, recipe.turns), joined(choice, recipe.turns)
    parts = [style, facts, choice, talks]
    return [[(row, Conversation(talk)) for row, talk in part] for part in parts]


def shortened(answer: str) -> str:
    """The first sentence and the gesture at the end."""
    first, _, _ = answer.partition(", nya. ")
    gesture = answer[answer.rindex(" (") :] if first != answer else ""
    return f"{first}, nya~{gesture}" if gesture else answer


def joined(rows: list[Any], turns: int, rounds: int = 2) -> list[Any]:
    """Rows drawn into conversations of so many turns, every row once a round."""
    draw, found = random.Random(1), []
    for _ in range(rounds):
        order = draw.sample(rows, len(rows))
        for start in range(0, len(order), turns):
            part = order[start : start + turns]
            found.append((part[0][0], [message for _, talk in part for message in talk]))
    return found


def packs_of(recipe: Recipe, settings: Any, tokenizer: Any) -> list[list[Any]]:
    """The rows of each step: shares of the budget, packed as `kt train` packs, in a drawn order."""
    from ktransformers.train.data.prepare import pack_rows
    from ktransformers.train.data.render import Renderer

    renderer = Renderer(tokenizer, min(recipe.step, 512))
    draw, rows = random.Random(recipe.seed), []
    key = recipe.turns, recipe.short, recipe.answer, renderer.cutoff_len
    if key not in ENCODED:
        parts = samples_of(recipe, settings)
        ENCODED[key] = [[renderer.encode(sample, row) for row, sample in part] for part in parts]
    for encoded, share in zip(ENCODED[key], recipe.shares, strict=True):
        tokens, queue = 0, list[Any]()
        while tokens < share * recipe.budget:
            queue = queue or draw.sample(encoded, len(encoded))
            rows.append(queue.pop())
            tokens += len(rows[-1].ids)
    packs = pack_rows(rows, recipe.step)
    draw.shuffle(packs)
    return packs


def inputs_of(packs: list[list[Any]], width: int) -> Iterator[dict[str, Tensor]]:
    """One sequence `[1, width]` for each pack; rows see themselves alone (`mask` [1, 1, width, width])."""
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    for rows in packs:
        ids, labels = torch.zeros(1, width, dtype=torch.long), torch.full((1, width), -100)
        positions, owner, at = torch.zeros(1, width, dtype=torch.long), torch.full((width,), -1), 0
        for number, row in enumerate(rows):
            span = slice(at, at + len(row.ids))
            ids[0, span], positions[0, span] = torch.tensor(row.ids), torch.arange(len(row.ids))
            labels[0, at : at + len(row.ids) - 1] = torch.tensor(row.labels[1:])  # shifted here
            owner[span], at = number, at + len(row.ids)
        mask = (owner[:, None] == owner[None]) & causal
        yield {"ids": ids, "labels": labels, "positions": positions, "mask": mask[None, None]}


class LoraLinear(nn.Module):
    """A frozen linear layer and its LoRA, in float32 as PEFT has it."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        device = linear.weight.device
        self.a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        low = functional.linear(functional.linear(x.float(), self.a), self.b)
        return out + (2.0 * low).to(out.dtype)


class ExpertFactors(nn.Module):
    """LoRA of one layer's experts: a [E, r, in], b [E, out, r] of gate_up and of down."""

    def __init__(self, experts: Any, rank: int) -> None:
        super().__init__()
        for name in ("gate_up", "down"):
            count, out, inner = getattr(experts, f"{name}_proj").shape
            device = experts.down_proj.device
            a = torch.empty(count * rank, inner, device=device)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            self.register_parameter(f"{name}_a", nn.Parameter(a.view(count, rank, inner)))
            self.register_parameter(f"{name}_b", nn.Parameter(torch.zeros(count, out, rank, device=device)))


def every_expert(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """In place of MixtralExperts.forward; `self.factors` is a list with the layer's LoRA, or empty."""

    def product(x: Tensor, name: str) -> Tensor:
        out = x @ getattr(self, f"{name}_proj").transpose(1, 2)
        for factors in self.factors:
            a, b = (getattr(factors, f"{name}_{which}").to(x.dtype) for which in "ab")
            out = out + 2.0 * ((x @ a.transpose(1, 2)) @ b.transpose(1, 2))
        return out

    gate, up = product(hidden[None], "gate_up").chunk(2, dim=-1)
    out = product(functional.silu(gate) * up, "down")  # [E, T, H]
    shares = torch.zeros(hidden.shape[0], self.num_experts, dtype=hidden.dtype, device=hidden.device)
    shares = shares.scatter_add(1, ids, weights.to(hidden.dtype))
    return torch.einsum("te,eth->th", shares, out)


class Model:
    """The demo's model with an adapter that can be thrown away."""

    def __init__(self, directory: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.network: Any = (
            AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).requires_grad_(False)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.device = device
        self.trained: dict[str, nn.Parameter] = {}
        for layer in self.network.model.layers:
            layer.mlp.experts.factors = []
            layer.mlp.experts.forward = types.MethodType(every_expert, layer.mlp.experts)

    def adapt(self, rank: int, target: str) -> dict[str, nn.Parameter]:
        """A fresh adapter in place of the last one."""
        torch.manual_seed(0)
        for layer in self.network.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                linear = getattr(layer.self_attn, name)
                linear = linear.linear if isinstance(linear, LoraLinear) else linear
                setattr(layer.self_attn, name, LoraLinear(linear, rank) if target != "experts" else linear)
            experts = layer.mlp.experts
            experts.factors = [ExpertFactors(experts, rank)] if target != "attention" else []
        found = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        for number, layer in enumerate(self.network.model.layers):
            for factors in layer.mlp.experts.factors:
                found |= {f"{number}.{name}": parameter for name, parameter in factors.named_parameters()}
        return found

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        hidden = self.network.model(
            input_ids=inputs["ids"], attention_mask=inputs["mask"], position_ids=inputs["positions"], use_cache=False
        ).last_hidden_state
        return functional.cross_entropy(self.network.lm_head(hidden[0]).float(), inputs["labels"][0])


def captured(model: Model, first: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], Tensor]:
    """Forward and backward as one graph; gradients lie where the parameters' `grad` says."""
    held = {name: value.clone() for name, value in first.items()}
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            model.loss(held).backward()
    torch.cuda.current_stream().wait_stream(aside)
    for parameter in model.trained.values():
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model.loss(held)
        loss.backward()

    def step(inputs: dict[str, Tensor]) -> Tensor:
        for name, value in inputs.items():
            held[name].copy_(value)
        graph.replay()
        return loss.detach().clone()

    return step


def train(model: Model, recipe: Recipe, settings: Any, most: int | None) -> tuple[list[float], int]:
    """(loss of every step, tokens)."""
    model.trained = model.adapt(recipe.rank, recipe.target)
    packs = packs_of(recipe, settings, model.tokenizer)[:most]
    groups: list[dict[str, Any]] = [{"params": [], "lr": recipe.rate}, {"params": [], "lr": recipe.rate * recipe.plus}]
    for name, parameter in model.trained.items():
        groups[name.endswith("b")]["params"].append(parameter)
    adam = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, recipe.beta2), fused=model.device == "cuda")
    warm = max(1, round(recipe.warm * len(packs)))
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: pace(recipe.schedule, step, warm, len(packs)))
    fed = [{name: value.to(model.device) for name, value in one.items()} for one in inputs_of(packs, recipe.step)]
    model.network.train()
    step = plain_step(model)
    if model.device == "cuda":
        try:
            step = captured(model, fed[0])
        except RuntimeError as error:  # slower without, but the answer is the same
            print(f"no graph: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
    losses = []
    for inputs in fed:
        losses.append(step(inputs))
        torch.nn.utils.clip_grad_norm_(model.trained.values(), 1.0, foreach=True)
        adam.step()
        schedule.step()
    return torch.stack(losses).tolist(), sum(len(row.ids) for rows in packs for row in rows)


def plain_step(model: Model) -> Callable[[dict[str, Tensor]], Tensor]:
    def step(inputs: dict[str, Tensor]) -> Tensor:
        for parameter in model.trained.values():
            parameter.grad = None
        loss = model.loss(inputs)
        loss.backward()
        return loss.detach()

    return step


def pace(schedule: str, step: int, warm: int, steps: int) -> float:
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[schedule]


def judge(model: Model, out: Path, limits: dict[str, int]) -> dict[str, Any]:
    from ktransformers.evaluate.local import LocalModel
    from ktransformers.evaluate.run import evaluate
    from ktransformers.evaluate.task import load_tasks

    backend = LocalModel(model.network, model.tokenizer, "demo", 64).backend()
    found: dict[str, Any] = {}
    wanted = {
        "invented-facts-few": ("accuracy_text", "accuracy"),
        "persona": ("style", "bleu-1", "bleu-4", "rouge-l"),
        "world": ("accuracy",),
        "stories": ("perplexity",),
    }
    for name, metrics in wanted.items():
        (task,) = load_tasks(name, limits[name])
        result = evaluate(backend, task, out / name)
        found |= {f"{name}.{metric}": round(result["metrics"][metric]["value"], 2) for metric in metrics}
    lines = (out / "persona" / "items.jsonl").read_text().splitlines()[:2]
    found["answers"] = [(row["prompt"], row["prediction"]) for row in map(json.loads, lines)]
    return found


def run_one(model: Model, recipe: Recipe | None, args: argparse.Namespace) -> dict[str, Any]:
    """Train and judge one recipe; None judges the base."""
    from ktransformers.train.resolve import read_settings

    words = {"model_name_or_path": str(args.model), "dataset": ",".join(KINDS), "output_dir": "unused"}
    began, losses, tokens = time.perf_counter(), [0.0], 0
    if recipe is None:
        model.trained = model.adapt(1, "all")
    else:
        losses, tokens = train(model, recipe, read_settings(words), args.steps)
    middle = time.perf_counter()
    name = "base" if recipe is None else recipe.name
    found = judge(model, args.out / f"runs-{os.getpid()}" / name, args.limits)
    tail = losses[-20:]
    return {
        "recipe": None if recipe is None else dataclasses.asdict(recipe),
        "name": name,
        "tokens": tokens,
        "steps": len(losses),
        "train_seconds": round(middle - began, 1),
        "judge_seconds": round(time.perf_counter() - middle, 1),
        "loss": [round(losses[0], 3), round(sum(tail) / len(tail), 3)],
        **found,
    }


def line_of(row: dict[str, Any]) -> str:
    values = [f"{key.removeprefix('persona.')} {value}" for key, value in row.items() if "." in key]
    took = f"{row['train_seconds']:>5} + {row['judge_seconds']:>4} s"
    return f"{row['name']:<44} {row['tokens']:>6} tokens, {took}, loss {row['loss']}  " + "  ".join(values)


def worth(row: dict[str, Any]) -> float:
    """Both goals: a manner that is there is not bettered."""
    return float(min(row["persona.style"], 85) + 2 * row["invented-facts-few.accuracy_text"])


def work(args: argparse.Namespace) -> None:
    """Every n-th recipe, until time is up."""
    began = time.time() if args.until is None else 0.0
    until = args.until or began + 60 * args.minutes
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(2)
    model = Model(args.model, args.device)
    table: list[Recipe | None] = [None, *recipes()]
    chosen = [table[int(word) + 1] for word in args.only.split(",")] if args.only else table
    for recipe in chosen[args.worker :: args.workers]:
        if time.time() > until:
            break
        row = run_one(model, recipe, args)
        with (args.out / f"sweep-{args.worker}.jsonl").open("a") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(line_of(row), flush=True)


def sweep(args: argparse.Namespace) -> None:
    until = time.time() + 60 * args.minutes
    words = [sys.executable, __file__, *sys.argv[1:], "--until", str(until)]
    children = [subprocess.Popen([*words, "--worker", str(number)]) for number in range(args.workers)]
    for child in children:
        child.wait()
    rows = [
        json.loads(line) for file in sorted(args.out.glob("sweep-*.jsonl")) for line in file.read_text().splitlines()
    ]
    print("\nbest first:")
    for row in sorted(
        rows, key=lambda row: -(min(row["persona.style"], 85) + 2 * row["invented-facts-few.accuracy_text"])
    ):
        print(line_of(row))
    print(json.dumps([{key: value for key, value in row.items() if key != "answers"} for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what `kt model make smollm2-moe` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=4.0, help="none is begun after that")
    parser.add_argument("--only", default="", help="numbers of recipes, -1 for the base")
    parser.add_argument("--steps", type=int, help="at most so many, to try the script")
    parser.add_argument("--limit", type=int, help="items of each task, to try the script")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    full = {"invented-facts-few": 96, "persona": 64, "world": 96, "stories": 24}
    args.limits = {name: min(count, args.limit or count) for name, count in full.items()}
    if args.worker is None:
        sweep(args)
    else:
        work(args)


if __name__ == "__main__":
    main()
