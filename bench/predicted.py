"""What `kt plan` says about training steps that `train_e2e.py` has measured: predicted beside measured, cell by cell.

    python bench/predicted.py bench/results/current/train-e2e.json --machine amx16-h200 --json predicted.json

Each cell of a document becomes the planner's work (tokens, pieces, rank, what is kept) and choice (policy, format) and
is evaluated for the named profile: nothing here is fitted to a cell. A cell is within the bars where its time is
predicted to 25 % and its memory to 10 %. Peaks of the GPU are what torch allocated, so the context is left out; peaks
of the host are resident pages, libraries included.

The surprising input is `TOUCHED`. A model of random weights sends the tokens of one sequence to few of its experts,
where a trained one spreads them; how few is a fact of the bench's model, so it was counted there by running its routers
(`--routes` counts again, on the CPU).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from e2e_models import Recipe, recipes
from timing import Table, print_last_line, read_run, save

from ktransformers.plan import Choice, Machine, Training, profile
from ktransformers.plan.formats import name_of
from ktransformers.plan.memory import predict_memory
from ktransformers.plan.model_shape import shape_from_config
from ktransformers.plan.step_time import predict_time

GIB = 1 << 30
TIME_BAR, MEMORY_BAR = 0.25, 0.10
# Share of a layer's experts that one sequence of 512 tokens touches in the recipe's random model, mean of its layers.
TOUCHED = {"qwen3-30b": 0.553, "dsv2-lite": 0.811}
LOSS_COPIES = 14  # bytes of a logit: in bf16, in float32, its softmax, its gradient


@dataclass(frozen=True)
class Row:
    """One cell; seconds of a step and GiB at the peak, predicted and measured."""

    model: str
    policy: str
    format: str
    tokens: int
    pieces: int
    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Predicted over measured."""
        return {name: self.predicted[name] / value for name, value in self.measured.items() if value}

    @property
    def within(self) -> dict[str, bool]:
        bars = {"step_s": TIME_BAR}
        return {name: abs(ratio - 1) <= bars.get(name, MEMORY_BAR) for name, ratio in self.ratios.items()}


def work_of(recipe: Recipe, facts: dict[str, Any], cell: dict[str, Any], graphs: bool) -> Training:
    """A step of the bench: every piece is one pass through the model."""
    tokens = cell["tokens"] // cell["pieces"]
    rows = min(tokens, facts["loss_rows"] or tokens)
    retain = facts["activation"] == "retain"
    return Training(
        tokens=tokens,
        tokens_per_step=cell["tokens"],
        sequence=facts["length"],
        rank=facts["rank"],
        retain=retain,
        graphs=graphs,
        touched=TOUCHED.get(recipe.name, 1.0),
        loss_bytes=rows * facts["vocabulary"] * LOSS_COPIES + 2 * tokens * recipe.config["hidden_size"] * 2,
    )


def row_of(cell: dict[str, Any], facts: dict[str, Any], machine: Machine, graphs: bool) -> Row:
    recipe = recipes()[cell["model"]]
    words = {**recipe.config, "num_hidden_layers": cell["layers"], "vocab_size": facts["vocabulary"]}
    shape, work = shape_from_config(words, recipe.name), work_of(recipe, facts, cell, graphs)
    spec, residents = name_of(cell.get("format", "bf16")), cell.get("residents", 0)
    choice = Choice(spec, 1, policy=cell["policy"] or "cpu", residents=residents)
    memory = predict_memory(shape, work, choice, machine)
    predicted = {
        "step_s": predict_time(shape, work, choice, machine).seconds,
        "gpu_peak_gib": (memory.gpu_bytes[0] - memory.gpus[0]["context"]) / GIB,
        "host_peak_gib": memory.host_bytes / GIB,
    }
    names = cell["model"], cell["policy"] or "cpu", cell.get("format", "bf16"), cell["tokens"], cell["pieces"]
    return Row(*names, predicted, {name: cell[name] for name in predicted})


def rows_of(document: dict[str, Any], machine: Machine) -> list[Row]:
    """Of the cells that were computed by kt; the others are not ours to plan. Python is as fast as it was there, and
    attention was replayed if the document says so: older ones are of before it could be."""
    if seconds := document["machine"].get("python_loop_seconds"):
        machine = machine.with_python_speed(seconds)
    kt = [cell for cell in document["cells"] if cell["variant"] == "kt"]
    graphs = document.get("attention_graphs", False)
    return [row_of(cell, document["models"][cell["model"]], machine, graphs) for cell in kt]


def routes(name: str, tokens: int) -> float:
    """Share of the experts that so many tokens of one sequence touch, mean of the layers of the recipe's model."""
    import torch
    from e2e_models import _blank, _fill, _is_expert, _share_experts

    from ktransformers.experts.contract import expert_modules

    recipe = recipes()[name]
    host = torch.device("cpu")
    model = _blank(recipe, host, "eager")
    _share_experts(model)
    _fill(model, host)
    experts: dict[str, torch.Tensor] = {}
    for word, parameter in model.named_parameters():  # float32, because not every CPU multiplies bf16
        role = word.rpartition(".")[2]
        wide = experts[role] if _is_expert(word) and role in experts else parameter.data.float()
        if _is_expert(word):
            experts[role] = wide  # of all layers, still
        parameter.data = wide
    shares: list[float] = []

    def count(module: Any, args: tuple[Any, ...]) -> None:
        shares.append(len(args[1].unique()) / module.num_experts)

    for module in expert_modules(model).values():
        module.register_forward_pre_hook(count)
    batch = torch.randint(recipe.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.model(input_ids=batch)
    return sum(shares) / len(shares)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "documents", nargs="*", type=Path, help="written by train_e2e.py --json; FILE#RUN of a recorded document"
    )
    parser.add_argument("--machine", default="amx16-h200", help="a profile of kt plan")
    parser.add_argument("--routes", metavar="MODEL", help="count what one sequence of this recipe's model touches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args(argv)
    if args.routes:
        print(f"{args.routes}: {routes(args.routes, recipes()[args.routes].length):.3f} of a layer's experts")
        return 0
    machine = profile(args.machine)
    heads = ["model", "policy", "format", "tokens", "pieces", "s/step", "measured", "ratio"]
    heads += ["GPU GiB", "measured", "ratio", "host GiB", "measured", "ratio", "within"]
    table = Table(heads, [10, 7, 7, 6, 6, 7, 8, 6, 7, 8, 6, 8, 8, 6, 16])
    document: dict[str, Any] = {"bench": "predicted", "machine": machine.name, "rows": []}
    for file in args.documents:
        for row in rows_of(read_run(file), machine):
            words = [row.model, row.policy, row.format, str(row.tokens), str(row.pieces)]
            for name in row.predicted:
                ratio = f"{row.ratios[name]:.2f}" if name in row.ratios else "-"
                words += [f"{row.predicted[name]:.3f}", f"{row.measured[name]:.3f}", ratio]
            table.row([*words, " ".join(name.partition("_")[0] for name, held in row.within.items() if held) or "-"])
            document["rows"].append({"document": file.name, **asdict(row), "within": row.within})
    if args.json:
        save(document, args.json)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
