"""Guided commands: a verb without what it needs asks for it, on a terminal.

`STEPS` lists for each verb the questions in order; a step is needed, or follows once something needed was asked. The
answers become words of the command line, which is shown before it runs, so that it can be typed the next time. Models,
adapters, files and ports that were given are proposed the next time (`answers` of the settings). A verb without steps
is asked for its required arguments by their help.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
import typer.main

from ktransformers.cli import ask, machine_state
from ktransformers.cli.ask import MenuChoice
from ktransformers.cli.options import UsageError
from ktransformers.ground import model_registry, settings
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.files import path_exists

SILENT = {"--json", "--quiet", "-q", "--help"}
CONFIRMED = {"run", "serve", "train", "loop", "quant", "merge", "eval", "model download"}
LAUNCH_VERBS = ("run", "serve")  # whose flags `serve/flags.py` parses
MAX_CHOICES = 20
FORMATS = ("int4", "int8", "fp8:128x128", "mxfp4", "bf16")
EMPTY: tuple[Any, ...] = (None, (), [])


@dataclass
class Guide:
    """One command being asked for."""

    verb: str
    given: dict[str, Any]  # values of its parameters by name
    answers: dict[str, str] = field(default_factory=dict)

    def known(self, name: str) -> str | None:
        """An answer, or a value of the command line."""
        value = self.answers.get(name) or self.given.get(name)
        return None if value in EMPTY else str(value[0] if isinstance(value, list | tuple) else value)

    def keep(self, name: str, value: str, key: str | None = None) -> str:
        """Notes an answer, and remembers it under `answers.KEY` of the settings."""
        self.answers[name] = value
        if key is not None:
            with contextlib.suppress(OSError):  # a home that cannot be written costs the memory alone
                settings.set_value(f"answers.{key}", value)
        return value


@dataclass(frozen=True)
class Step:
    parameter: str  # of the command; empty: of none
    ask: Callable[[Guide], list[str]]
    needed: bool = True


def _remembered(key: str) -> str | None:
    value = settings.value(f"answers.{key}")
    return None if value is None else str(value)


def _wrong_model(given: str) -> str | None:
    if path_exists(given) or given.count("/") == 1 or model_registry.find(given) or model_registry.known_model(given):
        return None
    return f"no such model; {model_registry.name_hint(given)}"


def choose_model(guide: Guide, name: str = "model") -> str:
    from ktransformers.cli.model import describe_kind, entry_document

    documents = [entry_document(entry) for entry in model_registry.all_models() if entry.exists][:MAX_CHOICES]
    choices = [MenuChoice(entry["name"], describe_kind(entry)) for entry in documents]
    last = _remembered("model")
    default = last if last and _wrong_model(last) is None else choices[0].value if len(choices) == 1 else None
    ask.tell("a number, a folder, a hub id, or a short name of `kt model known`")
    return guide.keep(name, ask.choose("model", choices, default, other=_wrong_model), "model")


def _model(guide: Guide) -> list[str]:
    return [choose_model(guide)]


def _show_plan(guide: Guide) -> list[str]:
    """Whether the model fits, how fast it is and how much memory it takes."""
    from ktransformers.cli.plan import serving_summary

    try:
        rows = serving_summary(guide.known("model") or "")
    except KTError:
        ask.tell("its memory is planned once its config.json is here")
        return []
    for name, value in rows:
        ask.tell(f"{name:<8} {value}")
    return []


def _fits_base(run: machine_state.FoundRun, model: str) -> bool:
    names = {Path(word).name.lower() for word in (model, model_registry.resolve(model))}
    return run.base is not None and Path(run.base).name.lower() in names


def _adapters(guide: Guide) -> list[str]:
    """`--lora-paths` of adapters that were trained on this model."""
    model = guide.known("model") or ""
    runs = [run for run in machine_state.find_adapters() if _fits_base(run, model)][:MAX_CHOICES]
    if not runs:
        return []
    for number, run in enumerate(runs, 1):
        ask.tell(f"{number:>3}  {machine_state.shorten(run.path)}  {run.note}")
    while True:
        words = ask.text("adapters, numbers with commas, or none", "none").replace(",", " ").split()
        if words == ["none"]:
            return []
        if all(word.isdecimal() and 1 <= int(word) <= len(runs) for word in words):
            chosen = [runs[int(word) - 1].path for word in dict.fromkeys(words)]
            return ["--lora-paths", *(f"{_lora_name(path)}={machine_state.shorten(path)}" for path in chosen)]
        ask.tell(f"numbers from 1 to {len(runs)}")


def _lora_name(path: Path) -> str:
    return re.sub(r"[^\w.-]+", "-", path.name)


def _port(guide: Guide) -> list[str]:
    """A port on which nothing listens."""
    from ktransformers.evaluate.loop.child import free_port
    from ktransformers.serve.running import accepts

    server = settings.read().server
    wanted = int(_remembered("port") or server.port)

    def wrong(word: str) -> str | None:
        if not word.isdecimal() or not 1 <= int(word) <= 65535:
            return "a number from 1 to 65535"
        return f"port {word} is in use" if accepts("127.0.0.1", int(word)) else None

    while True:
        word = ask.text("port", str(wanted if wrong(str(wanted)) is None else free_port(None)))
        problem = wrong(word)
        if problem is None:
            return ["--port", guide.keep("port", word, "port")]
        ask.tell(problem)


def _wrong_file(given: str) -> str | None:
    return None if Path(given).expanduser().is_file() else "no such file"


def _choose_file(guide: Guide, key: str, files: list[Path], what: str) -> list[str]:
    choices = [MenuChoice(machine_state.shorten(file)) for file in files[:MAX_CHOICES]]
    last = _remembered(key)
    default = last if last and _wrong_file(last) is None else None
    return [guide.keep("file", ask.choose(what, choices, default, other=_wrong_file), key)]


def _recipe(guide: Guide) -> list[str]:
    return _choose_file(guide, "recipe", machine_state.find_recipes()[0], "YAML file of the training")


def _loop(guide: Guide) -> list[str]:
    return _choose_file(guide, "loop", machine_state.find_recipes()[1], "YAML file of the loop")


def _wrong_adapter(given: str) -> str | None:
    found = (Path(given).expanduser() / machine_state.ADAPTER_FILE).is_file()
    return None if found else f"no folder with {machine_state.ADAPTER_FILE}"


def _adapter(guide: Guide) -> list[str]:
    runs = machine_state.find_adapters()[:MAX_CHOICES]
    choices = [MenuChoice(machine_state.shorten(run.path), run.note) for run in runs]
    last = _remembered("adapter")
    default = last if last and _wrong_adapter(last) is None else choices[0].value if choices else None
    return [guide.keep("adapter", ask.choose("adapter", choices, default, other=_wrong_adapter), "adapter")]


def _format(guide: Guide) -> list[str]:
    word = ask.choose("format", [MenuChoice(name) for name in FORMATS], "int4", other=lambda _: None)
    return ["--format", guide.keep("format", word)]


def _out(guide: Guide) -> list[str]:
    model = Path(model_registry.resolve(guide.known("model") or "model")).name
    ending = "merged" if guide.verb == "merge" else guide.known("format") or "int4"
    return ["-o", ask.text("folder to write", f"{model}-{ending}".replace(":", "-"))]


def _task(guide: Guide) -> list[str]:
    from ktransformers.evaluate.task import task_names

    ask.tell("`kt eval --list` says what each task is")
    choices = [MenuChoice(name) for name in task_names()]
    word = ask.choose("task", choices, _remembered("task"), other=_wrong_file)
    return ["--task", guide.keep("task", word, "task")]


def _eval_adapters(guide: Guide) -> list[str]:
    guide.answers["model"] = guide.known("targets") or ""
    paths = _adapters(guide)[1:]
    return [word for path in paths for word in ("--adapter", path)]


def _target(guide: Guide) -> list[str]:
    return [choose_model(guide, "targets")]


def _peer(guide: Guide) -> list[str]:
    """A running server, an adapter or a model to talk to."""
    from ktransformers.serve.running import running_servers

    choices = [MenuChoice(server.url, f"serves {server.model}") for server in running_servers()]
    choices += [
        MenuChoice(machine_state.shorten(run.path), f"adapter {run.note}") for run in machine_state.find_adapters()[:8]
    ]
    choices += [MenuChoice(entry.name, "model") for entry in model_registry.all_models() if entry.exists][:MAX_CHOICES]
    default = choices[0].value if choices else None
    ask.tell("no server answers at the address of the settings; what to talk to:")

    def wrong(given: str) -> str | None:
        return None if "://" in given else _wrong_model(given)

    return [guide.keep("target", ask.choose("server, adapter or model", choices, default, other=wrong))]


def _hub_id(guide: Guide) -> list[str]:
    def wrong(given: str) -> str | None:
        if given.count("/") == 1 or model_registry.known_model(given):
            return None
        return f"OWNER/NAME or a short name; {model_registry.name_hint(given)}"

    return [ask.choose("hub id or short name of `kt model known`", [], other=wrong)]


SERVER_STEPS = (
    Step("model", _model),
    Step("", _show_plan, False),
    Step("lora_paths", _adapters, False),
    Step("port", _port, False),
)
STEPS: dict[str, tuple[Step, ...]] = {
    "run": SERVER_STEPS,
    "serve": SERVER_STEPS,
    "chat": (Step("target", _peer),),
    "train": (Step("file", _recipe),),
    "loop": (Step("file", _loop),),
    "plan": (Step("model", _model),),
    "bench": (Step("model", _model),),
    "quant": (Step("model", _model), Step("word", _format, False), Step("out", _out)),
    "merge": (Step("model", _model), Step("adapter", _adapter), Step("out", _out)),
    "prove": (Step("output", _adapter),),
    "eval": (Step("targets", _target), Step("task", _task), Step("", _eval_adapters, False)),
    "model download": (Step("repo", _hub_id),),
}
ALIASES = {"sft chat": "chat", "sft train": "train", "sft export": "merge"}
# Options with which the verb needs no more.
ENOUGH = {"eval": ("list_tasks", "compare"), "plan": ("machine",), "chat": ("host", "port"), "quant": ("input_path",)}


def complete(app: typer.Typer, words: Sequence[str]) -> list[str]:
    """The command line with what it lacks, asked for. Without words the verb is asked for first."""
    line = list(words)
    if not line:
        from ktransformers.cli.menu import choose_verb

        line = choose_verb(app)
    if SILENT & set(line):
        return line
    found = _find_command(app, line)
    if found is None:
        return line
    verb, command, given = found
    added = _ask_missing(verb, command, given)
    if not added:
        return line
    if verb in LAUNCH_VERBS:  # a flag with several values would take a model at the end for one more
        line = [line[0], *added, *line[1:]]
    else:
        line += added
    ask.tell(f"\n$ {shlex.join(['kt', *line])}")
    if verb in CONFIRMED and not typer.confirm("run it?", default=True, err=True):
        raise typer.Exit(0)
    return line


def _find_command(app: typer.Typer, words: Sequence[str]) -> tuple[str, Any, dict[str, Any]] | None:
    """Name, command and values of a line; None if it has an error, which the command itself reports."""
    command: Any = typer.main.get_command(app)
    names, rest, parent = list[str](), list(words), None
    try:
        while hasattr(command, "commands"):
            name = names[-1] if names else "kt"
            parent = command.make_context(name, list(rest), parent=parent, resilient_parsing=True)
            if not rest or rest[0] not in command.commands:
                return None
            names.append(rest[0])
            command, rest = command.commands[rest[0]], rest[1:]
        context = command.make_context(names[-1], list(rest), parent=parent, resilient_parsing=True)
    except UsageError:
        return None
    verb = ALIASES.get(" ".join(names), " ".join(names))
    given = {
        name: None if context.get_parameter_source(name).name == "DEFAULT" else value
        for name, value in context.params.items()
    }
    if verb in LAUNCH_VERBS:
        from ktransformers.serve.flags import make_run_parser

        try:
            options = make_run_parser().parse_intermixed_args([word for word in rest if word != "-v"])
        except InputError:
            return None
        given = {"model": options.target or options.target_flag, "port": options.port, "lora_paths": options.lora_paths}
    return verb, command, given


def _ask_missing(verb: str, command: Any, given: dict[str, Any]) -> list[str]:
    steps = STEPS.get(verb)
    if any(given.get(name) not in EMPTY for name in ENOUGH.get(verb, ())):
        return []
    if verb == "chat" and given.get("target") is None and _configured_server_answers():
        return []
    if verb == "merge" and given.get("model") and _wrong_adapter(given["model"]) is None:
        given = given | {"adapter": given["model"]}  # its base is the one that it names
    if steps is None:
        return _ask_required(verb, command, given)
    missing = [step for step in steps if step.needed and given.get(step.parameter) in EMPTY]
    if not missing:
        return []
    guide, added = Guide(verb, given), list[str]()
    for step in steps:
        if step in missing or (not step.needed and given.get(step.parameter) in EMPTY):
            added += step.ask(guide)
    return added


def _configured_server_answers() -> bool:
    from ktransformers.serve.running import RunningServer, accepts

    server = settings.read().server
    return accepts(RunningServer(0, server.host, server.port, "").address, server.port)


def _ask_required(verb: str, command: Any, given: dict[str, Any]) -> list[str]:
    """Required arguments and options of a verb, by their help."""
    if verb == "with":  # what follows is another program's
        return []
    added = list[str]()
    for parameter in command.params:
        if not parameter.required or given.get(parameter.name) not in EMPTY:
            continue
        help_text = (parameter.help or "").rstrip(".")
        question = f"{parameter.name.replace('_', ' ')}" + (f" ({help_text})" if help_text else "")
        if verb.startswith("model ") and parameter.name in ("name", "source") and verb != "model make":
            word = choose_model(Guide(verb, given))
        else:
            word = ask.text(question)
        added += [word] if parameter.param_type_name == "argument" else [parameter.opts[0], word]
    return added
