"""What a few minutes of training buy on the demo's model: a sweep over recipes, and the rate of two cores.

    python bench/demo_recipe.py sweep --model smollm2-moe --workers 6 --cores 2,3,4,5,6,7,8,9,10,11,12,13 --out OUT
    python bench/demo_recipe.py rate --model smollm2-moe --cores 0,1 --out OUT

`sweep` trains every recipe of the table below in a process and on cores of its own, and judges each adapter on the
demo's tasks; where our kernels have no variant for the CPU, `--experts stock` is faster. `rate` measures tokens/s
of training, scoring and answering on the given cores. The loop is a plain one (AdamW, gradients clipped to 1): `kt
train` needs TRL and datasets, which a machine that only measures may lack; data, targets and the adapter's
configuration are those of `kt train`. Budgets are in tokens: that is what two cores run out of.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str
    budget: int = 66_000  # tokens trained on
    step: int = 512  # tokens of an optimiser step
    rate: float = 2e-3
    rank: int = 16
    style: float = 0.24  # shares of steps, or of rows where steps are mixed
    facts: float = 0.26
    choice: float = 0.50
    mixed: bool = False  # rows of all datasets in a step: long answers then outweigh single letters
    schedule: str = "cosine"  # or linear, or constant
    plus: float = 1.0  # learning rate of B over that of A
    target: str = "all"
    answer: str = "text"  # of multiple choice: "C. orange", or the letter alone


BASIC = Recipe("basic")


def recipes() -> list[Recipe]:
    """One thing changed at a time, then the guesses."""
    changes: list[dict[str, Any]] = [
        {},
        {"rate": 1e-3},
        {"rate": 4e-3},
        {"mixed": True, "style": 0.16, "facts": 0.34, "choice": 0.5},
        {"style": 0.3, "facts": 0.0, "choice": 0.7},
        {"step": 256, "rate": 1.5e-3},
        {"rank": 32},
        {"answer": "letter"},
        {"plus": 8.0, "rate": 5e-4},
        {"budget": 130_000},
    ]
    found = []
    for change in changes:
        name = ",".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in change.items()
        )
        found.append(dataclasses.replace(BASIC, name=name or "basic", **change))
    return found


def settings_of(recipe: Recipe, model: Path) -> Any:
    from ktransformers.train.resolve import read_settings

    return read_settings(
        {
            "model_name_or_path": str(model),
            "dataset": "style_neko_en,lumen_facts,lumen_choice",
            "cutoff_len": 256,
            "lora_rank": recipe.rank,
            "lora_target": recipe.target,
            "output_dir": "unused",
        }
    )


def token_rows(recipe: Recipe, settings: Any, tokenizer: Any) -> list[list[Any]]:
    """Token rows of each dataset."""
    from ktransformers.train.data.prepare import encode_all, read_datasets
    from ktransformers.train.data.render import Renderer

    found = read_datasets(settings.data.dataset, settings.data)
    if recipe.answer == "letter":
        for _, sample in found[2].samples:
            sample.messages[-1]["content"] = sample.messages[-1]["content"][0]
    return list(encode_all(found, Renderer(tokenizer, settings.data.cutoff_len), settings.data))


def drawn(parts: list[list[Any]], recipe: Recipe, step: int, seed: int = 0) -> Iterator[list[Any]]:
    """The rows of one step after another: of a dataset drawn by its share, in a new order each time round."""
    draw = random.Random(seed)
    queues: list[list[Any]] = [[] for _ in parts]
    shares = [recipe.style, recipe.facts, recipe.choice]
    while True:
        taken: list[Any] = []
        (which,) = draw.choices(range(len(parts)), shares)
        while sum(len(row.ids) for row in taken) < step:
            if recipe.mixed:
                (which,) = draw.choices(range(len(parts)), shares)
            if not queues[which]:
                queues[which] = draw.sample(parts[which], len(parts[which]))
            taken.append(queues[which].pop())
        yield taken


def batches(steps: Iterator[list[Any]], packed: bool, device: str) -> Iterator[tuple[dict[str, Any], int]]:
    """(inputs, real tokens) of steps: one packed sequence, or padded rows."""
    import torch

    for taken in steps:
        count = sum(len(row.ids) for row in taken)
        if packed:
            ids = torch.tensor([[token for row in taken for token in row.ids]])
            labels = torch.tensor([[label for row in taken for label in (-100, *row.labels[1:])]])
            positions = torch.tensor([[place for row in taken for place in range(len(row.ids))]])
            inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
        else:
            width = max(len(row.ids) for row in taken)
            ids, labels = torch.zeros(len(taken), width, dtype=torch.long), torch.full((len(taken), width), -100)
            mask = torch.zeros(len(taken), width, dtype=torch.long)
            for place, row in enumerate(taken):
                ids[place, : len(row.ids)] = torch.tensor(row.ids)
                labels[place, : len(row.ids)] = torch.tensor(row.labels)
                mask[place, : len(row.ids)] = 1
            inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        yield {name: value.to(device) for name, value in inputs.items()}, count


def open_adapted(recipe: Recipe, settings: Any, model: Path, experts: str, device: str) -> tuple[Any, Any]:
    """(model with a fresh adapter, tokenizer)."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ktransformers.system import bf16_is_fast
    from ktransformers.train.model import finish_adapter, lora_config
    from ktransformers.train.targets import find_targets

    torch.manual_seed(0)
    if experts == "kt":
        from ktransformers.nn import load_model

        dtype = torch.bfloat16 if bf16_is_fast("cpu") else torch.float32
        network: Any = load_model(model, dtype=dtype)
    else:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
        network = network.to(device)
    network.config.use_cache = False
    adapted = get_peft_model(network, lora_config(network, find_targets(network, settings.lora), settings.lora))
    finish_adapter(adapted, settings)
    return adapted, AutoTokenizer.from_pretrained(model)


def optimiser(network: Any, recipe: Recipe, steps: int) -> tuple[Any, Any]:
    import torch

    groups: dict[bool, list[Any]] = {False: [], True: []}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            groups["lora_B" in name].append(parameter)
    both = [{"params": groups[False], "lr": recipe.rate}, {"params": groups[True], "lr": recipe.rate * recipe.plus}]
    adam = torch.optim.AdamW(both, weight_decay=0.0)
    warm = max(1, steps // 20)

    def share(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, steps - warm)
        return {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[recipe.schedule]

    return adam, torch.optim.lr_scheduler.LambdaLR(adam, share)


def train_step(network: Any, inputs: dict[str, Any], adam: Any, schedule: Any, autocast: bool) -> float:
    import torch

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = network(**inputs, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in network.parameters() if p.requires_grad], 1.0)
    adam.step()
    schedule.step()
    adam.zero_grad(set_to_none=True)
    return float(loss.detach())


def judge(network: Any, tokenizer: Any, out: Path, batch_size: int, limit: int) -> dict[str, Any]:
    from ktransformers.evaluate.local import LocalModel
    from ktransformers.evaluate.run import evaluate
    from ktransformers.evaluate.task import load

    network.config.use_cache = True
    backend = LocalModel(network, tokenizer, "demo", batch_size).backend()
    found: dict[str, Any] = {}
    wanted = {
        "persona": ("style", "bleu-1", "bleu-4", "rouge-l"),
        "invented-facts": ("accuracy",),
        "world": ("accuracy",),
        "reasoning": ("accuracy",),
        "stories": ("perplexity",),
    }
    for name, metrics in wanted.items():
        (task,) = load(name, limit)
        result = evaluate(backend, task, out / name)
        found |= {f"{name}.{metric}": round(result["metrics"][metric]["value"], 2) for metric in metrics}
    lines = (out / "persona" / "items.jsonl").read_text().splitlines()[:3]
    found["answers"] = [(row["prompt"], row["prediction"]) for row in map(json.loads, lines)]
    return found


def run_one(args: argparse.Namespace, recipe: Recipe | None) -> dict[str, Any]:
    """Train and judge one recipe; None judges the base."""
    import torch

    torch.set_float32_matmul_precision("high")
    plan = recipe or BASIC
    settings = settings_of(plan, args.model)
    network, tokenizer = open_adapted(plan, settings, args.model, args.experts, args.device)
    losses, seconds = [], 0.0
    if recipe is not None:
        rows = drawn(token_rows(recipe, settings, tokenizer), recipe, recipe.step)
        steps = max(1, recipe.budget // recipe.step)
        adam, schedule = optimiser(network, recipe, steps)
        began = time.perf_counter()
        network.train()
        feed = batches(rows, True, args.device)
        for _ in range(steps):
            inputs, _ = next(feed)
            losses.append(train_step(network, inputs, adam, schedule, False))
        seconds = time.perf_counter() - began
    name = "base" if recipe is None else recipe.name
    began = time.perf_counter()
    if args.experts == "stock":
        network = network.merge_and_unload()  # stock PEFT would add up the experts' weights anew for every token
    with torch.no_grad():
        found = judge(network, tokenizer, args.out / "runs" / name.replace("=", "_"), args.batch_size, args.limit)
    tail = losses[-10:] or [0.0]
    return {
        "recipe": None if recipe is None else dataclasses.asdict(recipe),
        "name": name,
        "train_seconds": round(seconds, 1),
        "judge_seconds": round(time.perf_counter() - began, 1),
        "loss": [round(losses[0], 3), round(sum(tail) / len(tail), 3)] if losses else None,
        **found,
    }


def sweep(args: argparse.Namespace) -> None:
    """Every recipe in a child process, `workers` at a time; results as they come, best first at the end."""
    names = [str(place) for place in range(-1, len(recipes()))]
    if args.only:
        names = args.only.split(",")
    waiting, running = list(names), {}
    results: list[dict[str, Any]] = []
    began = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))
    per = max(1, len(cores) // args.workers)
    free = [cores[place * per : (place + 1) * per] for place in range(args.workers)]
    args.out.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        late = time.perf_counter() - began > args.minutes * 60
        while waiting and free and not late:
            name, cpus = waiting.pop(0), free.pop()
            file, log = args.out / f"{name}.json", (args.out / f"{name}.log").open("w")
            words = [sys.executable, __file__, "one", "--model", args.model, "--device", args.device]
            words += ["--experts", args.experts, "--out", args.out, "--limit", args.limit, "--which", name]
            words += ["--batch-size", args.batch_size, "--cores", ",".join(map(str, cpus))]
            running[name] = subprocess.Popen([str(word) for word in words], stdout=log, stderr=log), cpus, file
        if late and waiting:
            print(f"time is up: {len(waiting)} recipes not begun", flush=True)
            waiting = []
        time.sleep(0.2)
        for name, (child, cpus, file) in list(running.items()):
            if child.poll() is None:
                continue
            free.append(cpus)
            del running[name]
            if file.is_file():
                results.append(json.loads(file.read_text()))
                print(line_of(results[-1]), flush=True)
            else:
                print(f"{name}: {(args.out / f'{name}.log').read_text()[-800:]}", flush=True)
    print("\nbest first:")
    for row in sorted(results, key=lambda row: -(min(row["persona.style"], 80) + 2 * row["invented-facts.accuracy"])):
        print(line_of(row))
    (args.out / "sweep.json").write_text(json.dumps(results, indent=1, ensure_ascii=False))
    print(json.dumps([{key: value for key, value in row.items() if key != "answers"} for row in results]))


def line_of(row: dict[str, Any]) -> str:
    values = [f"{key.removeprefix('persona.')} {value}" for key, value in row.items() if "." in key]
    return (
        f"{row['name']:<46} {row['train_seconds']:>6} s + {row['judge_seconds']:>5} s  loss {row['loss']}  "
        + "  ".join(values)
    )


def rate(args: argparse.Namespace) -> None:
    """Tokens a second on these cores: training, packed and padded, then answering and scoring."""
    import torch

    from ktransformers import _core
    from ktransformers.train.watch import ExpertClock

    settings = settings_of(BASIC, args.model)
    document: dict[str, Any] = {"isa": _core.isa(), "threads": torch.get_num_threads(), "rates": {}}
    print(f"{_core.isa()}, torch threads {torch.get_num_threads()}", flush=True)
    network, tokenizer = open_adapted(BASIC, settings, args.model, "kt", "cpu")
    parts = token_rows(BASIC, settings, tokenizer)
    clock = ExpertClock(network)
    for packed in (False, True):
        for step in (512, 1024, 2048):
            feed = batches(drawn(parts, BASIC, step), packed, "cpu")
            adam, schedule = optimiser(network, BASIC, 1000)
            network.train()
            train_step(network, next(feed)[0], adam, schedule, args.autocast)
            began, experts, tokens = time.perf_counter(), clock.seconds, 0
            for _ in range(args.steps):
                inputs, count = next(feed)
                tokens += count
                train_step(network, inputs, adam, schedule, args.autocast)
            seconds = time.perf_counter() - began
            name = f"train {'packed' if packed else 'padded'} {step}"
            share = (clock.seconds - experts) / seconds
            document["rates"][name] = {"tokens_per_second": tokens / seconds, "expert_share": share}
            print(f"{name:<20} {tokens / seconds:8.0f} tokens/s, experts {share:.0%}", flush=True)
    clock.close()
    began = time.perf_counter()
    with torch.no_grad():
        document["judged"] = judge(network, tokenizer, args.out / "rate", args.batch_size, args.limit)
    for task in ("persona", "invented-facts", "world", "reasoning", "stories"):
        result = json.loads((args.out / "rate" / task / "result.json").read_text())
        document["rates"][f"judge {task}"] = {"items": result["items"], "seconds": result["seconds"]}
        print(f"judge {task:<14} {result['items']:>4} items {result['seconds']:8.1f} s", flush=True)
    document["judge_seconds"] = time.perf_counter() - began
    (args.out / "rate.json").write_text(json.dumps(document, indent=1, ensure_ascii=False))
    print(json.dumps(document["rates"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "rate", "one"))
    parser.add_argument("--model", type=Path, required=True, help="what `kt model make smollm2-moe` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experts", choices=("stock", "kt"), default="kt", help="sweep: who computes them")
    parser.add_argument("--device", default="cpu", help="sweep: cpu or cuda")
    parser.add_argument("--workers", type=int, default=1, help="sweep: processes at a time")
    parser.add_argument("--minutes", type=float, default=8.0, help="sweep: none is begun after that")
    parser.add_argument("--only", default="", help="sweep: numbers of recipes, -1 for the base")
    parser.add_argument("--which", type=int, default=-1)
    parser.add_argument("--cores", default="", help="CPUs to stay on, as in 0,1")
    parser.add_argument("--steps", type=int, default=6, help="rate: steps that are timed")
    parser.add_argument("--autocast", action="store_true", help="rate: bf16 autocast, as `bf16: true` asks for")
    parser.add_argument("--limit", type=int, default=64, help="items of each task")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {int(word) for word in args.cores.split(",")})
        os.environ["OMP_NUM_THREADS"] = str(len(args.cores.split(",")))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "sweep":
        sweep(args)
    elif args.what == "rate":
        rate(args)
    else:
        found = run_one(args, None if args.which < 0 else recipes()[args.which])
        (args.out / f"{args.which}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
