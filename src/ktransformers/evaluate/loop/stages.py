"""The stages of a loop, or of all runs of a sweep, in order: the command of each, its inputs and its outputs.

Nothing runs here. A stage's arguments follow `kt`; SERVER stands for the address of a server that is started for the
first stage that needs it and stopped after the last, so that the arguments of a finished stage do not depend on the
port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ktransformers.evaluate.loop.results import proof_lines, read_json, training_lines
from ktransformers.evaluate.loop.settings import Loop, Options
from ktransformers.ground import model_registry
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import merge_mappings, read_yaml_mapping
from ktransformers.ground.packages import require_extra

SERVER = "SERVER"
BASE_NAME = "base"  # model name of the base in requests
# Sequences that a server computes at once on every machine, without `max_running_requests`.
ALWAYS_RUNNING = 16
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True)
class Stage:
    name: str
    arguments: tuple[str, ...]  # after `kt`
    title: str = ""  # what happens in it, as a sentence; a stage without one is not shown
    inputs: tuple[Path, ...] = ()  # files and folders
    extra_inputs: Callable[[], tuple[Path, ...]] = tuple  # inputs that outputs of earlier stages name
    outputs: tuple[Path, ...] = ()
    document: Path | None = None  # file for the JSON that it prints
    can_resume: Callable[[], bool] = bool  # whether it can resume from an unfinished output
    summary: Callable[[], list[str]] = list  # what came out, as lines
    needs_server: bool = False
    is_check: bool = False  # its failure is a result: later stages still run, and the loop exits with an error
    run: str = ""  # the run of a sweep that it belongs to

    @property
    def results(self) -> tuple[Path, ...]:
        return self.outputs if self.document is None else (*self.outputs, self.document)


@dataclass(frozen=True)
class RunPaths:
    """Paths in a run's directory."""

    run: Path
    name: str
    model: str  # a directory, or a model name
    eval: Path

    @property
    def adapter(self) -> Path:
        return self.run / self.name

    @property
    def recipe(self) -> Path:
        return self.run / "train.yaml"

    @property
    def adapter_files(self) -> tuple[Path, ...]:
        return tuple(self.adapter / name for name in ADAPTER_FILES)

    def document(self, stage: str) -> Path:
        return self.run / f"{stage}.json"


def run_paths(loop: Loop, sweep: RunPaths | None = None) -> RunPaths:
    """A run of a sweep has the model and the evaluations of the sweep."""
    run = Path(loop.run)
    if sweep is not None:
        return RunPaths(run, loop.name, sweep.model, sweep.eval)
    model = _source(loop, run) if loop.quantise is None else str(run / "quantised")
    return RunPaths(run, loop.name, model, run / "eval")


def _source(loop: Loop, run: Path) -> str:
    """The model before quantization."""
    return model_registry.resolve(loop.model.path) if loop.model.path else str(run / "model")


def to_flags(options: Options) -> list[str]:
    """`{"top_k": 4}` as `--top-k 4`; true and false as `--x` and `--no-x`, a list as a repeated flag."""
    arguments: list[str] = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool):
                arguments.append(flag if item else f"--no-{flag[2:]}")
            elif item is not None:
                arguments += [flag, str(item)]
    return arguments


def build_recipe(loop: Loop, paths: RunPaths) -> dict[str, Any]:
    """The keys of `kt train`: the file's, the loop's, and those that follow from the run."""
    file = read_yaml_mapping(Path(loop.train.file), "a YAML file of `kt train`") if loop.train.file else {}
    keys = merge_mappings(file, loop.train.keys)
    for key, value in (("model_name_or_path", paths.model), ("output_dir", str(paths.adapter))):
        if loop.train.keys.get(key, value) != value:
            raise InputError(f"train.keys.{key}", loop.train.keys[key], "nothing", "it follows from the run")
        keys[key] = value
    return keys


def build_stages(loop: Loop, runs: Sequence[Loop] = ()) -> list[Stage]:
    """`runs` of a sweep. The base is judged after training: what is learned is seen minutes earlier, and one server
    answers for all. In a sweep every plan comes before any training, so that a wrong recipe is found before work."""
    _check_packages(loop)
    shared = run_paths(loop)
    each = [(run, run_paths(run, shared)) for run in runs] or [(loop, shared)]
    judged = bool(loop.eval.tasks)
    table: tuple[tuple[bool, Callable[[Loop, RunPaths], Stage], list[tuple[Loop, RunPaths]]], ...] = (
        (loop.model.path is None, _model, [(loop, shared)]),
        (loop.quantise is not None, _quantise, [(loop, shared)]),
        (judged, _tasks, [(loop, shared)]),
        (loop.plan, _plan, each),
        (True, _train, each),
        (loop.prove, _prove, each),
        (judged, _baseline, [(loop, shared)]),
        (judged, _eval, each),
        (judged, partial(_compare, [run.name for run, _ in each]), [(loop, shared)]),
    )
    stages = []
    for is_wanted, build, rows in table:
        for run, paths in rows if is_wanted else ():
            stage = build(run, paths)
            stages.append(_label_stage(stage, run) if runs and rows is each else stage)
    return stages


def _label_stage(stage: Stage, run: Loop) -> Stage:
    """A stage of one run of a sweep. A training that fails is a row of the report: its run ends, the others go on."""
    title = stage.title if run.name in stage.title else f"{stage.title}: {run.name}"
    is_check = stage.is_check or stage.name == "train"
    return replace(stage, name=f"{stage.name}-{run.name}", title=title, run=run.name, is_check=is_check)


def _model(loop: Loop, paths: RunPaths) -> Stage:
    verb, source = ("make", loop.model.make) if loop.model.make else ("upcycle", loop.model.upcycle)
    folder = _source(loop, paths.run)
    return Stage(
        "model",
        ("model", verb, str(source), *to_flags(loop.model.options), "--out", folder, "--json"),
        f"Making {'the model' if verb == 'make' else 'a mixture of experts of'} {source}",
        inputs=(Path(str(source)),) if verb == "upcycle" else (),
        outputs=(Path(folder),),
        document=paths.document("model"),
    )


def _quantise(loop: Loop, paths: RunPaths) -> Stage:
    source = _source(loop, paths.run)
    return Stage(
        "quantise",
        ("quant", source, "--out", paths.model, *to_flags(loop.quantise or {}), "--json"),
        "Quantising the experts",
        inputs=(Path(source),),
        outputs=(Path(paths.model),),
        document=paths.document("quantise"),
    )


def _tasks(loop: Loop, paths: RunPaths) -> Stage:
    """A task that cannot be read is found before training."""
    return Stage(
        "tasks",
        ("eval", paths.model, *_eval_arguments(loop, paths), "--dry-run"),
        inputs=_task_files(loop),
        extra_inputs=lambda: tuple(Path(task["data"]) for task in read_document(paths, "tasks").get("tasks", [])),
        document=paths.document("tasks"),
    )


def _plan(loop: Loop, paths: RunPaths) -> Stage:
    def summary() -> list[str]:
        found = read_document(paths, "plan").get("summary") or {}
        return [f"{name:<8} {found[name]}" for name in ("fits", "memory") if name in found]

    return Stage(
        "plan",
        ("train", str(paths.recipe), f"output_dir={paths.run / 'planned'}", "--dry-run", "--json"),
        "Checking the recipe, the data and the memory",
        inputs=(paths.recipe, Path(paths.model)),
        extra_inputs=partial(dataset_files, loop, paths),
        document=paths.document("plan"),
        summary=summary,
    )


def _train(loop: Loop, paths: RunPaths) -> Stage:
    def can_resume() -> bool:
        """A trainer resumes from checkpoints; it refuses a folder with an adapter and no checkpoint."""
        return any(paths.adapter.glob("checkpoint-*")) or not paths.adapter_files[0].exists()

    return Stage(
        "train",
        ("train", str(paths.recipe)),
        f"Training {loop.name}",
        inputs=(paths.recipe, Path(paths.model)),
        extra_inputs=partial(dataset_files, loop, paths),
        outputs=(paths.adapter,),
        can_resume=can_resume,
        summary=partial(training_lines, paths.adapter),
    )


def _prove(loop: Loop, paths: RunPaths) -> Stage:
    return Stage(
        "prove",
        ("prove", str(paths.adapter), "--server", SERVER, "--json"),
        "Checking that the server computes what was trained",
        inputs=(*paths.adapter_files, Path(paths.model)),
        document=paths.document("prove"),
        summary=partial(proof_lines, paths.document("prove")),
        needs_server=True,
        is_check=True,
    )


def _baseline(loop: Loop, paths: RunPaths) -> Stage:
    # The experts are the server's; they are named here because the answers depend on them.
    experts = _expert_flags("--experts", loop, paths)
    tokenizer = ("--tokenizer", paths.model, *_eval_arguments(loop, paths))
    return Stage(
        "baseline",
        ("eval", SERVER, "--served-model", BASE_NAME, *tokenizer, *experts),
        "Judging the base model",
        inputs=(Path(paths.model), *_task_files(loop)),
        extra_inputs=partial(_answered_data, paths, "base"),
        outputs=(paths.eval / "base",),
        document=paths.document("baseline"),
        can_resume=lambda: True,
        needs_server=True,
    )


def _eval(loop: Loop, paths: RunPaths) -> Stage:
    adapter = ("--no-base", "--adapter", f"{loop.name}={BASE_NAME}:{loop.name}", "--tokenizer", paths.model)
    return Stage(
        "eval",
        ("eval", SERVER, *adapter, *_eval_arguments(loop, paths)),
        f"Judging {loop.name}",
        inputs=(*paths.adapter_files, Path(paths.model), *_task_files(loop)),
        extra_inputs=partial(_answered_data, paths, loop.name),
        outputs=(paths.eval / loop.name,),
        document=paths.document("served"),
        can_resume=lambda: True,
        needs_server=True,
    )


def _compare(names: Sequence[str], loop: Loop, paths: RunPaths) -> Stage:
    return Stage(
        "compare",
        ("eval", "--compare", "base", *names, "--out", str(paths.eval), "--json"),
        inputs=tuple(paths.eval / name for name in ("base", *names)),
        outputs=tuple(paths.eval / f"report.{suffix}" for suffix in ("md", "json", "html")),
        document=paths.document("compare"),
    )


def serve_arguments(loop: Loop, paths: RunPaths, port: int, runs: Sequence[Loop] = ()) -> list[str]:
    """With `runs` of a sweep, all their adapters. The server takes as many sequences at once as `kt eval` asks for:
    what it would queue is computed in fewer rows."""
    served = [run_paths(run, paths) for run in runs] or [paths]
    adapters = [f"{one.name}={one.adapter}" for one in served]
    arguments = ["serve", paths.model, "--lora-paths", *adapters, "--served-model-name", BASE_NAME]
    arguments += _expert_flags("--kt-weight-path", loop, paths)
    batch = str(loop.eval.options.get("batch_size", loop.eval.options.get("batch-size", "")))
    judged_at_once = int(batch) if loop.eval.tasks and batch.isdigit() else 0
    options = {"max_running_requests": judged_at_once} if judged_at_once > ALWAYS_RUNNING else {}
    options |= {key.replace("-", "_"): value for key, value in loop.serve.items()}
    return [*arguments, "--host", "127.0.0.1", "--port", str(port), *to_flags(options)]


def _expert_flags(flag: str, loop: Loop, paths: RunPaths) -> list[str]:
    """An adapter is evaluated with the experts that it was trained on."""
    keys = build_recipe(loop, paths)
    kt_config = keys.get("kt_config")
    path = keys.get("kt_weight_path") or (kt_config.get("kt_weight_path") if isinstance(kt_config, dict) else None)
    return [flag, str(path)] if path else []


def _eval_arguments(loop: Loop, paths: RunPaths) -> list[str]:
    arguments = [argument for name in loop.eval.tasks for argument in ("--task", name)] + to_flags(loop.eval.options)
    arguments += [] if loop.eval.limit is None else ["--limit", str(loop.eval.limit)]
    return [*arguments, "--out", str(paths.eval), "--json"]


def _task_files(loop: Loop) -> tuple[Path, ...]:
    return tuple(Path(name) for name in loop.eval.tasks if Path(name).is_file())


def _answered_data(paths: RunPaths, run: str) -> tuple[Path, ...]:
    """The data files of the answered tasks, as their runs record them."""
    heads = sorted((paths.eval / run).glob("*/run.json"))
    return tuple(Path(json.loads(head.read_text())["task"]["data"]) for head in heads)


def read_document(paths: RunPaths, stage: str) -> dict[str, Any]:
    """The JSON that a stage has printed; empty before it."""
    return read_json(paths.document(stage)) or {}


def dataset_files(loop: Loop, paths: RunPaths) -> tuple[Path, ...]:
    """The files that the plan resolved for `dataset`; without a plan, the names that are files."""
    if plan := read_document(paths, "plan"):
        return tuple(Path(dataset["file"]) for dataset in plan["datasets"])
    recipe = build_recipe(loop, paths)
    listed = [recipe.get(key) or () for key in ("dataset", "eval_dataset")]
    names = [name for value in listed for name in (value.split(",") if isinstance(value, str) else value)]
    return tuple(Path(name.strip()) for name in names if Path(name.strip()).is_file())


def questions_of(loop: Loop, paths: RunPaths) -> tuple[str, ...]:
    """The loop's own, otherwise the first question of the training data."""
    first = (read_document(paths, "plan").get("data") or {}).get("question")
    return loop.questions or ((first,) if first else ())


def _check_packages(loop: Loop) -> None:
    """Checks before anything runs that this installation has the required packages."""
    require_extra("kt loop", "train")
    if loop.eval.tasks:
        require_extra("kt loop with eval.tasks", "eval")
    if loop.eval.tasks or loop.prove:
        require_extra("kt loop", "serve")
