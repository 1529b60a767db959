"""Whole training steps of a model with LoRA on attention and experts: ours beside what a user would do without us.

    python bench/train_e2e.py --models qwen3-30b --tokens 512,2048,8192 --json e2e.json

A step is forward, backward (non-reentrant checkpointing) and AdamW on random tokens in sequences of 512, under bf16
autocast as the HF trainer does it; `zero` has no autocast, its parameters are all bf16. Variants (`e2e_models.py`):
`kt`, experts on the CPU; `gpu`, the stock model wholly on the GPU; `fsdp`, the stock model under FSDP2 with CPU
offload; `zero`, the stock model under DeepSpeed's ZeRO stage 3 with offload (`e2e_zero.py`), where it is asked for.
`kt` is measured for each of `--policies` (where experts are computed) and `--formats` (of their packed bytes). Each
variant and format runs in a process of its own, so that no peak is another's; with `--contexts`, the longest of these
sequences whose step stays within each of `--context-memory` is told. Its policies take turns on one model, the CPU's
first. Steps come first until `auto` has settled (`warm_s`: the seconds of each, `settled`: whether it has). The seconds
are the median of steps after that, which nothing interrupts (`timed_s`: of each); where they go is told by one more
step, in which the device is waited for at every border. A step is over when its results are there: copies of experts
that were queued for the next one go on, and count there. With `--serve` the model, its LoRA included, then answers: a
prompt's tokens a second, and new tokens a second, one sequence, by stock transformers. `ideal` (`ideal.py`) is the best
schedule that the machine's bare rates allow for ours. Where a recipe has a few layers of a large model, `whole` is the
step of all of them (`whole_model`). With `--fill-like fsdp` kt has residents, as `kt train` gives them free memory by
its plan, up to the peak of the other variant at the same tokens. Without a GPU everything runs on the CPU (for tests).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from e2e_clock import PARTS
from e2e_models import VARIANTS, Recipe, answer, recipes
from e2e_trainer import Trainer
from ideal import STREAMED, ideal
from timing import Table, describe_machine, print_last_line, save

from ktransformers.ground import env
from ktransformers.plan.roofs import Roofs, measure_here

POLICIES = ("cpu", "stream", "resident", "auto")


def parse(argv: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    def limits(text: str) -> dict[str, float]:
        return {cell: float(gib) for cell, _, gib in (word.partition(":") for word in words(text))}

    known = recipes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=["qwen3-30b", "dsv2-lite"], help=f"of {', '.join(known)}")
    parser.add_argument("--variants", type=words, default=[], help=f"of {', '.join(VARIANTS)}; default: the model's")
    parser.add_argument("--tokens", type=numbers, default=[], help="of a step; default: the model's")
    parser.add_argument("--accumulate", type=numbers, default=[], help="pieces that a step is cut into")
    parser.add_argument("--layers", type=int, default=0, help="of the model; default: the recipe's")
    parser.add_argument("--policies", type=words, default=["cpu"], help=f"where kt computes: {', '.join(POLICIES)}")
    parser.add_argument("--formats", type=words, default=["bf16"], help="of kt's experts: bf16, int8, int4:32 ...")
    parser.add_argument("--gpu-memory", type=numbers, default=[0], help="GiB that torch may allocate; 0: all")
    parser.add_argument(
        "--fill-like",
        choices=VARIANTS,
        help="residents of kt in what this one, measured before, took at the same tokens",
    )
    parser.add_argument(
        "--contexts", type=numbers, default=[], help="lengths: the longest that trains, with the last policy"
    )
    parser.add_argument(
        "--context-memory", type=numbers, default=[8, 16, 24], help="GiB that torch may allocate for it"
    )
    parser.add_argument("--limits", type=limits, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--activation", choices=["retain", "recompute"], default="retain", help="of the experts of kt")
    parser.add_argument("--serve", type=int, default=0, metavar="N", help="also a prompt of N tokens and 16 new ones")
    parser.add_argument(
        "--seconds-per-cell", type=float, default=6.0, help="of timed steps, three at least, one if of many pieces"
    )
    parser.add_argument("--longest", type=float, default=400.0, help="seconds that a variant's process may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.models:
        if name not in known:
            parser.error(f"--models: no model {name!r}; there are {', '.join(known)}")
    for name in args.variants:
        if name not in VARIANTS:
            parser.error(f"--variants: no variant {name!r}; there are {', '.join(VARIANTS)}")
    for name in args.models:
        length = known[name].length
        if any(tokens < length or tokens % length for tokens in args.tokens):
            parser.error(f"--tokens: {name} has sequences of {length}, so expected multiples of {length}")
    for name in args.models:
        variants = args.variants or known[name].variants
        if args.fill_like and args.fill_like not in variants:
            measured = ", ".join(variants)
            parser.error(f"--fill-like: {args.fill_like!r} is not measured for {name}, only {measured}; see --variants")
    if args.serve and "zero" in args.variants:
        parser.error("--serve: the model of variant zero computes inside of DeepSpeed's training step alone")
    for name in args.policies:
        if name not in POLICIES:
            parser.error(f"--policies: no policy {name!r}; there are {', '.join(POLICIES)}")
    return args


def child(args: argparse.Namespace, recipe: Recipe) -> int:
    """Measures one variant; every cell is a line of JSON."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    (variant,) = args.variants
    trainer = Trainer(variant, recipe, args.activation, args.formats[0])
    for gib, policy in itertools.product(args.gpu_memory, args.policies if variant == "kt" else [""]):
        named: dict[str, Any] = {"gpu_memory": gib, "policy": policy}
        trainer.allow(gib)
        if policy:
            trainer.place(policy)
            named["residents"] = trainer.fill(gib, max(args.tokens), max(args.accumulate))
        for tokens, pieces in itertools.product(args.tokens, args.accumulate):
            if pieces <= tokens // recipe.length:
                if policy and (limit := args.limits.get(f"{tokens}/{pieces}")):
                    named["residents"] = trainer.fill(limit, tokens, pieces, reserved=False)
                cell = trainer.measure(tokens, pieces, args.seconds_per_cell)
                print(json.dumps({**named, **cell, **trainer.built}), flush=True)
        if args.contexts and policy in ("", args.policies[-1]):
            for longest in trainer.longest_contexts(sorted(args.context_memory), sorted(args.contexts)):
                print(json.dumps({**named, "context": longest}), flush=True)
        if trainer.broken:
            break
        if args.serve:
            trainer.allow(gib)
            served = answer(trainer.model, recipe, trainer.device, args.serve)
            print(json.dumps({**named, "serve": served}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def expert_tflops(recipe: Recipe, cell: dict[str, Any]) -> dict[str, float]:
    """Of a profiled step's time in experts: by the formula of KTransformers' guides, 16 operations for each weight of a
    token's expert of H x I, and by the 12 that frozen gate, up and down take, 6 forward and 6 backward."""
    words = recipe.config
    sparse = cell["layers"] - words.get("first_k_dense_replace", 0)
    weights = words["num_experts_per_tok"] * words["hidden_size"] * words["moe_intermediate_size"] * sparse
    seconds = sum(cell["parts"][part] for part in ("experts_forward", "experts_again", "experts_backward"))
    rate = cell["tokens"] * weights / seconds / 1e12
    return {"guide": 16 * rate, "products": 12 * rate}


def whole_model(recipe: Recipe, cell: dict[str, Any], rates: Roofs) -> dict[str, Any]:
    """A step of the model that these few layers stand for.

    Two layers fit into the cache of experts, so backward finds there what forward copied, which many layers never do: a
    streamed step that took less time than copying all experts twice counts as long as that.
    """
    mode = cell["modes"].get("mode", cell["policy"])
    least = ideal(recipe, {**cell, "policy": mode}, rates)["seconds"] if mode in STREAMED else 0.0
    seconds = max(cell["step_s"], least) * recipe.stands_for / cell["layers"]
    return {"layers": recipe.stands_for, "step_s": seconds, "tokens_per_s": cell["tokens"] / seconds}


class Bench:
    """The parent: starts a process for each variant, prints a row for each of its cells."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.args = args
        self.failed = False
        machine = describe_machine()
        machine["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.rates = measure_here()
        machine["rates"] = dataclasses.asdict(self.rates)
        self.document: dict[str, Any] = {"bench": "train_e2e", "machine": machine}
        self.document |= {"attention_graphs": env.graphs_enabled("attention"), "models": {}, "cells": []}
        print(f"{machine['cpu']}: {machine['cpus']} CPUs; GPU: {machine['gpu'] or 'none'}")
        heads = ["model", "variant", "format", "tokens", "pieces", "s/step", "ideal", "tokens/s", "GPU GiB", "host GiB"]
        heads += ["fwd", "bwd", "again", "attn", "optim", "rest"]
        self.table = Table(heads, [10, 10, 7, 6, 6, 8, 7, 8, 7, 8, 7, 7, 7, 7, 7, 7])

    def note(self, text: str) -> None:
        self.failed = True
        self.document.setdefault("notes", []).append(text)
        print(f"    ! {text}", flush=True)

    def add(self, cell: dict[str, Any]) -> None:
        self.document["cells"].append(cell)
        variant = f"{cell['variant']} {cell['policy']}".rstrip()
        row = [cell["model"], variant, cell["format"], str(cell["tokens"]), str(cell["pieces"])]
        best = f"{cell['ideal']['seconds']:.3f}" if "ideal" in cell else ""
        row += [f"{cell['step_s']:.3f}", best, f"{cell['tokens_per_s']:.0f}"]
        row += [f"{cell['gpu_peak_gib']:.2f}", f"{cell['host_peak_gib']:.2f}"]
        row += [f"{cell['parts'][part]:.3f}" for part in PARTS]
        self.table.row(row)
        tflops = cell["expert_tflops"]
        words = (
            f"    experts: {tflops['guide']:.1f} TFLOPS by the guides' formula, {tflops['products']:.1f} of products"
        )
        if "whole" in cell:
            of = cell["whole"]
            words += f"; as {of['layers']} layers {of['step_s']:.1f} s, {of['tokens_per_s']:.1f} tokens/s"
        print(words, flush=True)
        if cell["modes"]:
            print(f"    auto: {cell['modes']['mode']}", flush=True)
        if self.args.json:
            save(self.document, self.args.json)

    def serve(self, cell: dict[str, Any]) -> None:
        self.document.setdefault("served", []).append(cell)
        of = cell["serve"]
        words = (
            f"{of['prefill_per_s']:.0f} tokens/s of a prompt of {of['prompt']}, {of['decode_per_s']:.1f} new tokens/s"
        )
        within = f" within {cell['gpu_memory']} GiB" if cell["gpu_memory"] else ""
        print(f"    {cell['model']}, {cell['policy']} {cell['format']}{within}: {words}", flush=True)
        if self.args.json:
            save(self.document, self.args.json)

    def context(self, cell: dict[str, Any]) -> None:
        self.document.setdefault("contexts", []).append(cell)
        of = cell["context"]
        end = f"out of memory at {of['out_of_memory_at']}" if of["out_of_memory_at"] else "the longest that was tried"
        variant = f"{cell['variant']} {cell['policy']}".rstrip()
        words = f"a sequence of {of['tokens']} tokens within {of['gib']} GiB, {of['step_s']:.2f} s ({end})"
        print(f"    {cell['model']}, {variant} {cell['format']}: {words}", flush=True)
        if self.args.json:
            save(self.document, self.args.json)

    def run(self) -> None:
        for name in self.args.models:
            recipe = recipes()[name]
            layers = self.args.layers or recipe.layers
            facts = {**dataclasses.asdict(recipe), "layers": layers, "activation": self.args.activation}
            self.document["models"][name] = {key: value for key, value in facts.items() if key != "config"}
            # Whoever sets a limit comes first.
            for variant in sorted(self.args.variants or recipe.variants, key=lambda one: one != self.args.fill_like):
                for spec in self.args.formats if variant == "kt" else ["bf16"]:
                    self.measure(recipe, layers, variant, spec)
            for words in recipe.published:
                print(f"    {name}, published for KTransformers: {words}", flush=True)

    def measure(self, recipe: Recipe, layers: int, variant: str, spec: str) -> None:
        def commas(numbers: Any) -> str:
            return ",".join(map(str, numbers))

        command = [sys.executable, str(Path(__file__).resolve()), "--child", "--models", recipe.name]
        command += ["--variants", variant, "--layers", str(layers), "--activation", self.args.activation]
        command += ["--tokens", commas(self.args.tokens or recipe.tokens), "--formats", spec]
        command += ["--gpu-memory", commas(self.args.gpu_memory), "--serve", str(self.args.serve)]
        command += ["--accumulate", commas(self.args.accumulate or recipe.accumulate)]
        command += ["--contexts", commas(self.args.contexts), "--context-memory", commas(self.args.context_memory)]
        command += ["--seconds-per-cell", str(self.args.seconds_per_cell)]
        command += ["--policies", ",".join(sorted(self.args.policies, key=POLICIES.index))]
        if variant == "kt" and self.args.fill_like:
            like = {"model": recipe.name, "variant": self.args.fill_like}
            cells = [cell for cell in self.document["cells"] if like.items() <= cell.items()]
            command += ["--limits", commas(f"{c['tokens']}/{c['pieces']}:{c['gpu_peak_gib']}" for c in cells)]
        named = {"model": recipe.name, "variant": variant, "layers": layers, "format": spec}
        with tempfile.TemporaryFile("w+") as complaints:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True)
            assert process.stdout is not None
            stop = threading.Timer(self.args.longest, process.kill)
            stop.start()
            for line in process.stdout:
                if line.startswith("{"):
                    cell = {**named, **json.loads(line)}
                    if "serve" in cell:
                        self.serve(cell)
                        continue
                    if "context" in cell:
                        self.context(cell)
                        continue
                    cell["expert_tflops"] = expert_tflops(recipe, cell)
                    if variant == "kt":
                        cell["ideal"] = ideal(recipe, cell, self.rates)
                    if recipe.stands_for and variant == "kt":
                        cell["whole"] = whole_model(recipe, cell, self.rates)
                    self.add(cell)
            status = process.wait()
            stop.cancel()
            if status:
                complaints.seek(0)
                said = complaints.read()
                sys.stderr.write(said)
                why = (
                    f"stopped after {self.args.longest:.0f} s" if status == -signal.SIGKILL else f"exit status {status}"
                )
                if said.strip():
                    why += f": {said.strip().splitlines()[-1]}"
                self.note(f"{recipe.name}, {variant} {spec}: {why}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        recipe = dataclasses.replace(recipes()[args.models[0]], layers=args.layers)
        return child(args, recipe)
    bench = Bench(args)
    bench.run()
    print_last_line(bench.document)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
