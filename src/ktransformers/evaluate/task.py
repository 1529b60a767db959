"""The schema of task files, and the tasks that come with the package.

A task is one YAML file. `kind` decides what is asked: `generate` (a text answer, compared with a reference), `choice`
(one of several options, by the log-probability of its letter, by generation, or by that of its text when the question
is asked without options) and `text` (likelihood of running text). A *suite* is a YAML file with only `suite: [task,
...]`. A task without `data` reads a public data set that may not be distributed with a program: the file is given with
`--data`, and `obtain` says where it comes from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists, read_yaml_mapping, short, shorten, validate
from ktransformers.ground.patterns import FilePatterns

TASK_DIR = Path(__file__).with_name("tasks")
MAX_SUITE_DEPTH = 8  # a suite may list suites

Kind = Literal["generate", "choice", "text"]
METRICS_OF_KIND: dict[str, tuple[str, ...]] = {
    "generate": ("bleu", "rouge", "chrf", "exact", "contains", "style", "loss", "judge"),
    "choice": ("letter", "generation", "text"),
    "text": ("loss",),
}


class Rubric(BaseModel):
    """Instructions for a judge: each criterion gets a mark from 1 to 5."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str = "You judge answers of an assistant. Be strict and consistent."
    criteria: dict[str, str] = Field(min_length=1)  # name -> what a high mark means
    scale: dict[int, str] = {1: "not at all", 2: "hardly", 3: "partly", 4: "mostly", 5: "fully"}


class TaskColumns(BaseModel):
    """Column names of the data; the defaults are alpaca's and the usual names of multiple choice.

    `a|b` is the first of these columns that the file has, for data sets that renamed one between releases.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str | None = "id"
    slice: str | None = None
    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"
    question: str = "question"
    choices: str = "choices"  # a list, an object {"option1": ...} or either as JSON text
    answer: str = "answer"  # a letter, a key of the object, or the text of the option
    text: str = "text"
    system: str | None = None  # a system message of the row, in place of the task's
    history: str | None = None  # earlier turns, a list of [question, answer]


class Task(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = ""
    kind: Kind
    data: Path | None = None
    obtain: str = ""  # of a task without data: where the file for `--data` comes from
    source: str = ""
    licence: str = ""
    columns: TaskColumns = TaskColumns()
    where: dict[str, str] = {}  # keep the rows whose columns have these values; `a|b`: one of them
    skip_empty: bool = False  # leave out rows whose reference is empty or "N/A"
    format: Literal["chat", "plain"] = "chat"  # plain: no chat template
    system: str | None = None
    limit: int | None = Field(None, ge=1)  # a sample of that many rows, drawn with `seed`
    seed: int = 0
    max_new_tokens: int = Field(128, ge=1)
    metrics: tuple[str, ...] = ()
    primary: str = ""  # the metric that stands for the task in a summary
    style: dict[str, str] = {}  # name -> regular expression, searched for in the answer
    extract: str | None = None  # `exact` compares the last match in answer and reference
    unrelated: bool = False  # not a training target: a report lists it separately, as the cost of an adapter
    copy_input: bool = False  # also report what copying the input would score
    judge: Rubric | None = None

    @model_validator(mode="after")
    def _check_metrics(self) -> Task:
        available = METRICS_OF_KIND[self.kind]
        unknown = [name for name in self.metrics if name not in available]
        if unknown:
            raise ValueError(f"metrics: {unknown[0]!r} is not for kind {self.kind}; there are {', '.join(available)}")
        if self.data is None and not self.obtain:
            raise ValueError("data: a file, or `obtain`, which says where the file for --data comes from")
        if "style" in self.metrics and not self.style:
            raise ValueError("metrics: style needs `style`, a table of regular expressions")
        if "judge" in self.metrics and self.judge is None:
            raise ValueError("metrics: judge needs `judge`, a rubric")
        return self

    @property
    def metric_groups(self) -> tuple[str, ...]:
        """The groups of metrics to compute."""
        defaults = {"generate": ("bleu", "rouge", "chrf"), "choice": ("letter",), "text": ("loss",)}
        return self.metrics or defaults[self.kind]

    def patterns(self, where: str) -> tuple[dict[str, FilePatterns], FilePatterns | None]:
        """The regular expressions of `style`, by name, and of `extract`; `where` names the task's file in errors."""
        style = {key: FilePatterns(f"{where}: style.{key}", [text], "search") for key, text in self.style.items()}
        extract = self.extract
        return style, None if extract is None else FilePatterns(f"{where}: extract", [extract], "last")

    @property
    def scores_chats(self) -> bool:
        """Whether log-probabilities after a chat prompt are needed."""
        return (
            self.format == "chat" and self.kind != "text" and bool({"letter", "text", "loss"} & set(self.metric_groups))
        )


def task_names() -> list[str]:
    """The tasks and suites of the package."""
    return sorted(file.stem for file in TASK_DIR.glob("*.yaml"))


def load_tasks(name: str, limit: int | None = None, data: Path | None = None, *, depth: int = 0) -> list[Task]:
    """The task, or the tasks of a suite, of a name or a YAML file; `limit` and `data` override the file."""
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        file = TASK_DIR / f"{name}.yaml"
        if not path_exists(file):
            raise InputError("task", short(name), f"a YAML file or one of {', '.join(task_names())}")
    if not path_exists(file):
        raise InputError("task", f"{shorten(file)}, which does not exist", "a YAML file")
    fields = read_yaml_mapping(file, "the keys of a task, or of a suite")
    if set(fields) == {"suite"}:
        if not isinstance(fields["suite"], list) or depth >= MAX_SUITE_DEPTH:
            raise InputError(
                f"{file}: suite", short(fields["suite"]), f"a list of tasks, at most {MAX_SUITE_DEPTH} deep"
            )
        if data is not None:
            raise InputError("data", f"{data} for the suite {name}", "one task", "name a task instead")
        return [task for part in fields["suite"] for task in load_tasks(str(part), limit, depth=depth + 1)]
    fields.setdefault("name", file.stem)
    task = validate(Task, fields, str(file))
    if "\0" in str(task.data):
        raise InputError(f"{file}: data", short(str(task.data)), "the path of a file")
    task.patterns(str(file))  # reports an invalid one before any model is loaded
    changed: dict[str, Any] = {}
    if data is not None:
        changed["data"] = data.resolve()
    elif task.data is not None:
        changed["data"] = (file.parent / task.data).resolve()
    if limit is not None:
        changed["limit"] = limit
    return [task.model_copy(update=changed)]
