"""The stages of a loop, in order: which command each is, what it reads, what it leaves.

This decides and runs nothing, but for `Stage.before` and `Stage.after`, which write the small files that stand between
two commands. A stage's words are those after `kt`; SERVER in them is the address of a server that is started when the
first stage needs it and ended after the last. The words of a finished stage thus say the same on every day.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ktransformers import model_registry
from ktransformers.errors import InputError
from ktransformers.files import write_text
from ktransformers.loop import pace
from ktransformers.loop.settings import Loop, Options, merge_keys, read_yaml

SERVER = "SERVER"
BASE_NAME = "base"  # what requests call the model itself
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True)
class Stage:
    name: str
    words: tuple[str, ...]  # of `kt`
    outputs: tuple[Path, ...] = ()
    inputs: tuple[Path, ...] = ()  # files and folders
    named: Callable[[], tuple[Path, ...]] = tuple  # more inputs, named by what earlier stages wrote
    document: Path | None = None  # where the JSON that it prints is kept
    resumes: Callable[[], bool] | None = None  # can it go on in an output that is not finished?
    served: bool = False
    shown: bool = False  # what it prints is passed on
    verdict: bool = False  # its failure is a finding: later stages run all the same, and the loop ends with it
    before: Callable[[bool], bool] | None = None  # brings its file up to date, or only looks: would it change?
    after: Callable[[], str] | None = None  # with what was found, in words


@dataclass(frozen=True)
class RunPaths:
    """Where things are in a run's directory."""

    run: Path
    name: str
    model: str  # a directory, or a name that the verbs know

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
    def eval(self) -> Path:
        return self.run / "eval"

    def document(self, stage: str) -> Path:
        return self.run / f"{stage}.json"


def to_flags(options: Options) -> list[str]:
    """`{"top_k": 4}` as `--top-k 4`; true and false as `--x` and `--no-x`, a list as the flag again for each."""
    words: list[str] = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, bool):
                words.append(flag if one else f"--no-{flag[2:]}")
            elif one is not None:
                words += [flag, str(one)]
    return words


def run_paths(loop: Loop) -> RunPaths:
    run = Path(loop.run)
    return RunPaths(run, loop.name, _source(loop, run) if loop.quantise is None else str(run / "quantised"))


def _source(loop: Loop, run: Path) -> str:
    """The model before quantisation."""
    return model_registry.resolve(loop.model.path) if loop.model.path else str(run / "model")


def build_recipe(loop: Loop, places: RunPaths) -> dict[str, Any]:
    """The keys of `kt train`: the file's, the loop's, and those that follow from the run."""
    file = read_yaml(Path(loop.train.file), "a YAML file of `kt train`") if loop.train.file else {}
    keys = merge_keys(file, loop.train.keys)
    for key, value in (("model_name_or_path", places.model), ("output_dir", str(places.adapter))):
        if loop.train.keys.get(key, value) != value:
            raise InputError(f"train.keys.{key}", loop.train.keys[key], "nothing", "it follows from the run")
        keys[key] = value
    return keys


def _expert_flags(flag: str, loop: Loop, places: RunPaths) -> list[str]:
    """What was trained is judged on the experts that it was trained on."""
    keys = build_recipe(loop, places)
    within = keys.get("kt_config")
    found = keys.get("kt_weight_path") or (within.get("kt_weight_path") if isinstance(within, dict) else None)
    return [flag, str(found)] if found else []


def update_yaml(file: Path, keys: dict[str, Any], look: bool) -> bool:
    """Does the file say something else? Unless this is but a look, it says the same afterwards."""
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    differs = not file.is_file() or file.read_text() != text
    if differs and not look:
        write_text(file, text)
    return differs


def update_recipe(loop: Loop, places: RunPaths, look: bool) -> bool:
    return update_yaml(places.recipe, build_recipe(loop, places), look)


def update_training_file(loop: Loop, places: RunPaths, look: bool) -> bool:
    """train.yaml: the recipe, with the steps that the pace allows."""
    keys = build_recipe(loop, places)
    if loop.train.minutes is not None:
        found = pace.read_decision(loop.train, places.run)
        if found is None:
            return True
        keys["max_steps"] = found[0]
    return update_yaml(places.train, keys, look)


def can_resume_training(places: RunPaths) -> bool:
    """A trainer goes on from its checkpoints; it refuses a folder that holds an adapter and none of them."""
    return any(places.adapter.glob("checkpoint-*")) or not (places.adapter / ADAPTER_FILES[0]).exists()


def always() -> bool:
    return True


def dataset_files(loop: Loop, places: RunPaths) -> tuple[Path, ...]:
    """The files that the plan found behind the names in `dataset`; without a plan, the names that are files."""
    if places.document("plan").is_file():
        found = json.loads(places.document("plan").read_text())
        return tuple(Path(part["file"]) for part in found["datasets"])
    given = build_recipe(loop, places)
    names = [given.get(key) or () for key in ("dataset", "eval_dataset")]
    listed = [name for some in names for name in (some.split(",") if isinstance(some, str) else some)]
    return tuple(Path(name.strip()) for name in listed if Path(name.strip()).is_file())


def task_data(places: RunPaths, run: str) -> tuple[Path, ...]:
    """The data of the tasks that were answered, as their runs name it."""
    heads = sorted((places.eval / run).glob("*/run.json"))
    return tuple(Path(json.loads(head.read_text())["task"]["data"]) for head in heads)


def build_stages(loop: Loop) -> list[Stage]:
    _check_verbs(loop)
    places = run_paths(loop)
    found = _models(loop, places)
    if loop.plan or loop.train.minutes is not None:
        found.append(_plan(loop, places))
    if loop.eval.tasks:
        found.append(_baseline(loop, places))
    if loop.train.minutes is not None:
        found.append(_pace(loop, places))
    found.append(_train(loop, places))
    if loop.prove:
        found.append(_prove(loop, places))
    if loop.eval.tasks:
        found += [_eval(loop, places), _compare(loop, places)]
    return found


def _plan(loop: Loop, places: RunPaths) -> Stage:
    return Stage(
        "plan",
        ("train", str(places.recipe), f"output_dir={places.run / 'planned'}", "--dry-run", "--json"),
        inputs=(places.recipe, Path(places.model)),
        named=functools.partial(dataset_files, loop, places),
        document=places.document("plan"),
        before=functools.partial(update_recipe, loop, places),
    )


def _pace(loop: Loop, places: RunPaths) -> Stage:
    return Stage(
        "pace",
        ("train", str(places.recipe), *pace.measurement_overrides(loop.train.pace_steps, places.run / "pace")),
        outputs=(places.run / "pace", places.document("pace")),
        inputs=(places.recipe, Path(places.model)),
        named=functools.partial(dataset_files, loop, places),
        after=functools.partial(pace.write_pace, loop.train, places.run),
    )


def _train(loop: Loop, places: RunPaths) -> Stage:
    return Stage(
        "train",
        ("train", str(places.train)),
        outputs=(places.adapter,),
        inputs=(places.train, Path(places.model)),
        named=functools.partial(dataset_files, loop, places),
        resumes=functools.partial(can_resume_training, places),
        shown=True,
        before=functools.partial(update_training_file, loop, places),
    )


def _prove(loop: Loop, places: RunPaths) -> Stage:
    return Stage(
        "prove",
        ("prove", str(places.adapter), "--server", SERVER, "--json"),
        inputs=(*_adapter_files(places), Path(places.model)),
        document=places.document("prove"),
        served=True,
        verdict=True,
    )


def _adapter_files(places: RunPaths) -> tuple[Path, ...]:
    return tuple(places.adapter / name for name in ADAPTER_FILES)


def _eval_arguments(loop: Loop, places: RunPaths) -> list[str]:
    words = [word for name in loop.eval.tasks for word in ("--task", name)] + to_flags(loop.eval.options)
    words += [] if loop.eval.limit is None else ["--limit", str(loop.eval.limit)]
    return [*words, "--out", str(places.eval), "--json"]


def _task_files(loop: Loop) -> tuple[Path, ...]:
    return tuple(Path(name) for name in loop.eval.tasks if Path(name).is_file())


def _baseline(loop: Loop, places: RunPaths) -> Stage:
    return Stage(
        "baseline",
        ("eval", places.model, *_expert_flags("--experts", loop, places), *_eval_arguments(loop, places)),
        outputs=(places.eval / "base",),
        inputs=(Path(places.model), *_task_files(loop)),
        named=functools.partial(task_data, places, "base"),
        document=places.document("baseline"),
        resumes=always,
    )


def _eval(loop: Loop, places: RunPaths) -> Stage:
    asked = ("eval", SERVER, "--no-base", "--adapter", f"{loop.name}={BASE_NAME}:{loop.name}")
    return Stage(
        "eval",
        (*asked, "--tokenizer", places.model, *_eval_arguments(loop, places)),
        outputs=(places.eval / loop.name,),
        inputs=(*_adapter_files(places), Path(places.model), *_task_files(loop)),
        named=functools.partial(task_data, places, loop.name),
        document=places.document("served"),
        resumes=always,
        served=True,
    )


def _compare(loop: Loop, places: RunPaths) -> Stage:
    return Stage(
        "compare",
        ("eval", "--compare", "base", loop.name, "--out", str(places.eval), "--json"),
        outputs=tuple(places.eval / f"report.{kind}" for kind in ("md", "json", "html")),
        inputs=(places.eval / "base", places.eval / loop.name),
        document=places.document("compare"),
    )


def _models(loop: Loop, places: RunPaths) -> list[Stage]:
    found: list[Stage] = []
    source = _source(loop, places.run)
    if not loop.model.path:
        verb, given = ("make", loop.model.make) if loop.model.make else ("upcycle", loop.model.upcycle)
        found.append(
            Stage(
                "model",
                ("model", verb, str(given), *to_flags(loop.model.options), "--out", source, "--json"),
                outputs=(Path(source),),
                inputs=(Path(str(given)),) if verb == "upcycle" else (),
                document=places.document("model"),
            )
        )
    if loop.quantise is not None:
        found.append(
            Stage(
                "quantise",
                ("quant", source, "--out", places.model, *to_flags(loop.quantise), "--json"),
                outputs=(Path(places.model),),
                inputs=(Path(source),),
                document=places.document("quantise"),
            )
        )
    return found


def serve_arguments(loop: Loop, places: RunPaths, port: int) -> list[str]:
    words = ["serve", places.model, "--lora-paths", f"{loop.name}={places.adapter}", "--served-model-name", BASE_NAME]
    words += _expert_flags("--kt-weight-path", loop, places)
    return [*words, "--host", "127.0.0.1", "--port", str(port), *to_flags(loop.serve)]


def _check_verbs(loop: Loop) -> None:
    """Before anything runs: the verbs that this installation must have."""
    for key, wanted, verb in (("quantise", loop.quantise is not None, "quant"), ("prove", loop.prove, "prove")):
        if wanted and importlib.util.find_spec(f"ktransformers.cli.{verb}") is None:
            raise InputError(key, "asked for", f"a ktransformers with `kt {verb}`", f"set {key} off, or update")
