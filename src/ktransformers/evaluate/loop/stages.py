"""The stages of a loop, or of all runs of a sweep, in order: the command of each, its inputs and its outputs.

Nothing runs here except `Stage.prepare` and `Stage.finish`, which write the small files between two commands. A stage's
arguments follow `kt`; SERVER stands for the address of a server that is started for the first stage that needs it and
stopped after the last, so that the arguments of a finished stage do not depend on the port.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ktransformers.evaluate.loop import pace
from ktransformers.evaluate.loop.results import proof_lines, read_json, training_lines
from ktransformers.evaluate.loop.settings import Loop, Options, merge_keys
from ktransformers.ground import model_registry
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_yaml_mapping, write_text
from ktransformers.ground.packages import require_extra

SERVER = "SERVER"
BASE_NAME = "base"  # model name of the base in requests
TRAINING_STAGES = ("pace", "train")
DEFAULT_RUNNING = 16  # of `kt serve --max-running-requests`
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True)
class Stage:
    name: str
    arguments: tuple[str, ...]  # after `kt`
    title: str = ""  # what happens in it, as a sentence; empty: nothing is shown of it
    outputs: tuple[Path, ...] = ()
    inputs: tuple[Path, ...] = ()  # files and folders
    extra_inputs: Callable[[], tuple[Path, ...]] = tuple  # inputs that outputs of earlier stages name
    document: Path | None = None  # file for the JSON that it prints
    can_resume: Callable[[], bool] | None = None  # whether it can resume from an unfinished output
    needs_server: bool = False
    run: str = ""  # the run of a sweep that it belongs to
    is_check: bool = False  # its failure is a result: later stages still run, and the loop exits with an error
    prepare: Callable[[bool], bool] | None = None  # (preview) -> whether its file changes; written unless preview
    finish: Callable[[], list[str]] | None = None  # returns lines for the listener
    settle: Callable[[bool], list[str] | None] | None = None  # (preview) -> the same if its result is known without it,
    # which is written unless preview; None: it runs


@dataclass(frozen=True)
class RunPaths:
    """Paths in a run's directory."""

    run: Path
    name: str
    model: str  # a directory, or a model name
    eval: Path  # shared by all runs of a sweep

    @property
    def adapter(self) -> Path:
        return self.run / self.name

    @property
    def recipe(self) -> Path:
        return self.run / "recipe.yaml"

    @property
    def train(self) -> Path:
        return self.run / "train.yaml"

    @property
    def pace(self) -> Path:
        return self.run / "pace.yaml"

    def document(self, stage: str) -> Path:
        return self.run / f"{stage}.json"


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


def run_paths(loop: Loop) -> RunPaths:
    run = Path(loop.run)
    model = _source(loop, run) if loop.quantise is None else str(run / "quantised")
    return RunPaths(run, loop.name, model, run / "eval")


def sweep_paths(run: Loop, shared: RunPaths) -> RunPaths:
    """Of one run of a sweep, whose model and evaluations are the sweep's."""
    return RunPaths(Path(run.run), run.name, shared.model, shared.eval)


def _source(loop: Loop, run: Path) -> str:
    """The model before quantisation."""
    return model_registry.resolve(loop.model.path) if loop.model.path else str(run / "model")


def build_recipe(loop: Loop, paths: RunPaths) -> dict[str, Any]:
    """The keys of `kt train`: the file's, the loop's, and those that follow from the run."""
    file = read_yaml_mapping(Path(loop.train.file), "a YAML file of `kt train`") if loop.train.file else {}
    keys = merge_keys(file, loop.train.keys)
    for key, value in (("model_name_or_path", paths.model), ("output_dir", str(paths.adapter))):
        if loop.train.keys.get(key, value) != value:
            raise InputError(f"train.keys.{key}", loop.train.keys[key], "nothing", "it follows from the run")
        keys[key] = value
    return keys


def _expert_flags(flag: str, loop: Loop, paths: RunPaths) -> list[str]:
    """An adapter is evaluated with the experts that it was trained on."""
    keys = build_recipe(loop, paths)
    kt_config = keys.get("kt_config")
    weight_path = keys.get("kt_weight_path") or (
        kt_config.get("kt_weight_path") if isinstance(kt_config, dict) else None
    )
    return [flag, str(weight_path)] if weight_path else []


def update_yaml(file: Path, keys: dict[str, Any], preview: bool) -> bool:
    """Whether the file differs from `keys`; it is rewritten unless `preview`."""
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    differs = not file.is_file() or file.read_text() != text
    if differs and not preview:
        write_text(file, text)
    return differs


def update_recipe(loop: Loop, paths: RunPaths, preview: bool) -> bool:
    return update_yaml(paths.recipe, build_recipe(loop, paths), preview)


def update_pace_file(loop: Loop, paths: RunPaths, preview: bool) -> bool:
    """pace.yaml: the recipe, with the few steps that are timed."""
    plan = read_document(paths, "plan")
    if plan is None:
        return True
    steps = pace.measurement_steps(loop.train, plan)
    keys = build_recipe(loop, paths) | pace.measurement_keys(steps, paths.run / "pace")
    return update_yaml(paths.pace, keys, preview)


def update_training_file(loop: Loop, paths: RunPaths, preview: bool) -> bool:
    """train.yaml: the recipe, with the number of steps that the measured pace allows."""
    keys = build_recipe(loop, paths)
    if loop.train.minutes is not None:
        decision = pace.read_decision(loop.train, paths.run)
        if decision is None:
            return True
        keys["max_steps"] = decision.steps
    return update_yaml(paths.train, keys, preview)


def can_resume_training(paths: RunPaths) -> bool:
    """A trainer resumes from checkpoints; it refuses a folder with an adapter and no checkpoint."""
    return any(paths.adapter.glob("checkpoint-*")) or not (paths.adapter / ADAPTER_FILES[0]).exists()


def read_document(paths: RunPaths, stage: str) -> Any:
    """The JSON that a stage has printed; None before it."""
    return read_json(paths.document(stage))


def always() -> bool:
    return True


def dataset_files(loop: Loop, paths: RunPaths) -> tuple[Path, ...]:
    """The files that the plan resolved for `dataset`; without a plan, the names that are files."""
    plan = read_document(paths, "plan")
    if plan is not None:
        return tuple(Path(dataset["file"]) for dataset in plan["datasets"])
    recipe = build_recipe(loop, paths)
    names = [recipe.get(key) or () for key in ("dataset", "eval_dataset")]
    listed = [
        name
        for names_of_key in names
        for name in (names_of_key.split(",") if isinstance(names_of_key, str) else names_of_key)
    ]
    return tuple(Path(name.strip()) for name in listed if Path(name.strip()).is_file())


def questions_of(loop: Loop, paths: RunPaths) -> tuple[str, ...]:
    """The loop's own, otherwise the first question of the training data."""
    plan = read_document(paths, "plan") or {}
    first = (plan.get("data") or {}).get("question")
    return loop.questions or ((first,) if first else ())


def _plan_lines(paths: RunPaths) -> list[str]:
    """Whether it fits and how much memory it takes; the time of the whole loop stands after it."""
    summary = (read_document(paths, "plan") or {}).get("summary") or {}
    return [f"{name:<8} {summary[name]}" for name in ("fits", "memory") if name in summary]


def counted_data(paths: RunPaths) -> tuple[Path, ...]:
    """The data files of the tasks, as their count has read them."""
    return tuple(Path(task["data"]) for task in (read_document(paths, "tasks") or {"tasks": []})["tasks"])


def task_data(paths: RunPaths, run: str) -> tuple[Path, ...]:
    """The data files of the answered tasks, as their runs record them."""
    heads = sorted((paths.eval / run).glob("*/run.json"))
    return tuple(Path(json.loads(head.read_text())["task"]["data"]) for head in heads)


def build_stages(loop: Loop, runs: Sequence[Loop] = ()) -> list[Stage]:
    """`runs` of a sweep. The base is judged after training: what is learned is seen minutes earlier, and one server
    answers for all. In a sweep every plan comes before any training, so that a wrong recipe is found before work."""
    _check_verbs(loop)
    shared = run_paths(loop)
    each = [(run, sweep_paths(run, shared)) for run in runs] or [(loop, shared)]
    label = _label_stage if runs else _keep_stage
    stages = _models(loop, shared)
    if loop.eval.tasks:
        stages.append(_tasks(loop, shared))
    if loop.plan or loop.train.minutes is not None:
        stages += [label(_plan(run, paths), run) for run, paths in each]
    for run, paths in each:
        if loop.train.minutes is not None:
            stages.append(label(_pace(run, paths), run))
        stages.append(label(_train(run, paths), run))
    if loop.prove:
        stages += [label(_prove(run, paths), run) for run, paths in each]
    if loop.eval.tasks:
        stages.append(_baseline(loop, shared))
        stages += [label(_eval(run, paths), run) for run, paths in each]
        stages.append(_compare([run.name for run, _ in each], shared))
    return stages


def _keep_stage(stage: Stage, run: Loop) -> Stage:
    return stage


def _label_stage(stage: Stage, run: Loop) -> Stage:
    """A stage of one run of a sweep. A training that fails, in its timed steps too, is a row of the report: its run
    ends, the others go on."""
    title = stage.title if run.name in stage.title else f"{stage.title}: {run.name}"
    failure_is_result = stage.is_check or stage.name in TRAINING_STAGES
    return replace(stage, name=f"{stage.name}-{run.name}", title=title, run=run.name, is_check=failure_is_result)


def _plan(loop: Loop, paths: RunPaths) -> Stage:
    return Stage(
        "plan",
        ("train", str(paths.recipe), f"output_dir={paths.run / 'planned'}", "--dry-run", "--json"),
        "Checking the recipe, the data and the memory",
        inputs=(paths.recipe, Path(paths.model)),
        extra_inputs=functools.partial(dataset_files, loop, paths),
        document=paths.document("plan"),
        prepare=functools.partial(update_recipe, loop, paths),
        finish=functools.partial(_plan_lines, paths),
    )


def _pace(loop: Loop, paths: RunPaths) -> Stage:
    return Stage(
        "pace",
        ("train", str(paths.pace)),
        "Timing a few steps",
        outputs=(paths.run / "pace", paths.document("pace")),
        inputs=(paths.pace, Path(paths.model)),
        extra_inputs=functools.partial(dataset_files, loop, paths),
        prepare=functools.partial(update_pace_file, loop, paths),
        finish=functools.partial(pace.write_pace, loop.train, paths.run),
        settle=functools.partial(pace.settle_pace, loop.train, paths.run),
    )


def _train(loop: Loop, paths: RunPaths) -> Stage:
    return Stage(
        "train",
        ("train", str(paths.train)),
        f"Training {loop.name}",
        outputs=(paths.adapter,),
        inputs=(paths.train, Path(paths.model)),
        extra_inputs=functools.partial(dataset_files, loop, paths),
        can_resume=functools.partial(can_resume_training, paths),
        prepare=functools.partial(update_training_file, loop, paths),
        finish=functools.partial(training_lines, paths.adapter),
    )


def _prove(loop: Loop, paths: RunPaths) -> Stage:
    return Stage(
        "prove",
        ("prove", str(paths.adapter), "--server", SERVER, "--json"),
        "Checking that the server computes what was trained",
        inputs=(*_adapter_files(paths), Path(paths.model)),
        document=paths.document("prove"),
        needs_server=True,
        is_check=True,
        finish=functools.partial(proof_lines, paths.document("prove")),
    )


def _adapter_files(paths: RunPaths) -> tuple[Path, ...]:
    return tuple(paths.adapter / name for name in ADAPTER_FILES)


def _eval_arguments(loop: Loop, paths: RunPaths) -> list[str]:
    arguments = [argument for name in loop.eval.tasks for argument in ("--task", name)] + to_flags(loop.eval.options)
    arguments += [] if loop.eval.limit is None else ["--limit", str(loop.eval.limit)]
    return [*arguments, "--out", str(paths.eval), "--json"]


def _task_files(loop: Loop) -> tuple[Path, ...]:
    return tuple(Path(name) for name in loop.eval.tasks if Path(name).is_file())


def _tasks(loop: Loop, paths: RunPaths) -> Stage:
    """A task that cannot be read is found before training, and its items say how long judging takes."""
    arguments = _eval_arguments(loop, paths)
    return Stage(
        "tasks",
        ("eval", paths.model, *arguments, "--dry-run"),
        inputs=_task_files(loop),
        extra_inputs=functools.partial(counted_data, paths),
        document=paths.document("tasks"),
    )


def _baseline(loop: Loop, paths: RunPaths) -> Stage:
    experts = _expert_flags("--experts", loop, paths)  # of the server; named here because the answers depend on them
    return Stage(
        "baseline",
        ("eval", SERVER, "--served-model", BASE_NAME, *_with_tokenizer(loop, paths), *experts),
        "Judging the base model",
        outputs=(paths.eval / "base",),
        inputs=(Path(paths.model), *_task_files(loop)),
        extra_inputs=functools.partial(task_data, paths, "base"),
        document=paths.document("baseline"),
        can_resume=always,
        needs_server=True,
    )


def _with_tokenizer(loop: Loop, paths: RunPaths) -> list[str]:
    return ["--tokenizer", paths.model, *_eval_arguments(loop, paths)]


def _eval(loop: Loop, paths: RunPaths) -> Stage:
    request = ("eval", SERVER, "--no-base", "--adapter", f"{loop.name}={BASE_NAME}:{loop.name}")
    return Stage(
        "eval",
        (*request, *_with_tokenizer(loop, paths)),
        f"Judging {loop.name}",
        outputs=(paths.eval / loop.name,),
        inputs=(*_adapter_files(paths), Path(paths.model), *_task_files(loop)),
        extra_inputs=functools.partial(task_data, paths, loop.name),
        document=paths.document("served"),
        can_resume=always,
        needs_server=True,
    )


def _compare(names: Sequence[str], paths: RunPaths) -> Stage:
    return Stage(
        "compare",
        ("eval", "--compare", "base", *names, "--out", str(paths.eval), "--json"),
        outputs=tuple(paths.eval / f"report.{suffix}" for suffix in ("md", "json", "html")),
        inputs=tuple(paths.eval / name for name in ("base", *names)),
        document=paths.document("compare"),
    )


def _models(loop: Loop, paths: RunPaths) -> list[Stage]:
    stages: list[Stage] = []
    source = _source(loop, paths.run)
    if not loop.model.path:
        verb, source_name = ("make", loop.model.make) if loop.model.make else ("upcycle", loop.model.upcycle)
        stages.append(
            Stage(
                "model",
                ("model", verb, str(source_name), *to_flags(loop.model.options), "--out", source, "--json"),
                f"Making {'the model' if verb == 'make' else 'a mixture of experts of'} {source_name}",
                outputs=(Path(source),),
                inputs=(Path(str(source_name)),) if verb == "upcycle" else (),
                document=paths.document("model"),
            )
        )
    if loop.quantise is not None:
        stages.append(
            Stage(
                "quantise",
                ("quant", source, "--out", paths.model, *to_flags(loop.quantise), "--json"),
                "Quantising the experts",
                outputs=(Path(paths.model),),
                inputs=(Path(source),),
                document=paths.document("quantise"),
            )
        )
    return stages


def serve_arguments(loop: Loop, paths: RunPaths, port: int, runs: Sequence[Loop] = ()) -> list[str]:
    """With `runs` of a sweep, all their adapters."""
    served = [sweep_paths(run, paths) for run in runs] or [paths]
    adapters = [f"{one.name}={one.adapter}" for one in served]
    arguments = ["serve", paths.model, "--lora-paths", *adapters, "--served-model-name", BASE_NAME]
    arguments += _expert_flags("--kt-weight-path", loop, paths)
    own = {key.replace("-", "_"): value for key, value in loop.serve.items()}
    options = {"max_running_requests": max(DEFAULT_RUNNING, _judged_at_once(loop))} | own
    return [*arguments, "--host", "127.0.0.1", "--port", str(port), *to_flags(options)]


def _judged_at_once(loop: Loop) -> int:
    """Sequences that `kt eval` asks for at the same time; what the server would queue is computed in fewer rows."""
    batch = str(loop.eval.options.get("batch_size", loop.eval.options.get("batch-size", "")))
    return int(batch) if loop.eval.tasks and batch.isdigit() else 0


def _check_verbs(loop: Loop) -> None:
    """Checks before anything runs that this installation has the required commands and packages."""
    require_extra("kt loop", "train")
    if loop.eval.tasks:
        require_extra("kt loop with eval.tasks", "eval")
    if loop.eval.tasks or loop.prove:
        require_extra("kt loop", "serve")
    for key, requested, verb in (("quantise", loop.quantise is not None, "quant"), ("prove", loop.prove, "prove")):
        if requested and importlib.util.find_spec(f"ktransformers.cli.{verb}") is None:
            raise InputError(key, "requested", f"a ktransformers with `kt {verb}`", f"disable {key}, or update")
