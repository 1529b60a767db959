"""`kt rules`: what a file of rules makes of a model, before anything is loaded; `--write` writes a built-in file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.model import column_lines
from ktransformers.cli.options import print_result
from ktransformers.ground.errors import InputError
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.place.rule_report import RuleReport


def rules(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Rules: a YAML file, or the name of a built-in one.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|PATH]",
            help="A folder with config.json, or a registered name. With --write: the file to write.",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the built-in rules FILE to PATH, or to FILE here, to be edited.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Print what modules become by a file of rules. Also their bytes on every device."""

    if write:
        _write(file, model)
        return
    if model is None:
        raise InputError("model", "none", "a model's folder or registered name", "`--write` writes a built-in file")

    from ktransformers.checkpoint.small_model import resolve_model
    from ktransformers.modeling.load import meta_model
    from ktransformers.operators.rules import require_rules
    from ktransformers.place.rule_report import report_rules
    from ktransformers.plan import open_shape

    rule_file = require_rules(file)
    folder = Path(resolve_model(model)).expanduser()
    folder = folder.parent if folder.name == "config.json" else folder
    if not (folder / "config.json").is_file():
        raise InputError("model", f"{model}, where there is no config.json", "a model's folder; weights are not needed")
    released, coded = "bf16", None
    with contextlib.suppress(InputError):  # a family that the planner cannot count
        shape = open_shape(str(folder))
        released = shape.stored
        coded = shape.quantized_bytes / shape.quantized_weights if shape.quantized_weights else None
    report = report_rules(meta_model(folder), rule_file, released, coded)
    document = {"rules": str(rule_file.path), "model": str(folder), **report.document()}
    print_result(document, _table_lines(report), as_json)


def _write(given: str, target: str | None) -> None:
    from ktransformers.ground.files import write_text
    from ktransformers.operators.rules import builtin_rules

    name, text = builtin_rules(given)
    path = Path(target or name)
    path = path / name if path.is_dir() else path
    if path.exists():
        raise InputError("path", f"{path}, which exists", "a new file", "name another: kt rules --write NAME PATH")
    write_text(path, text)
    print(path)


def _table_lines(report: RuleReport) -> list[str]:
    from ktransformers.place.rule_report import rows

    table = [["module", "class", "operator", "on", "format", "modules", "size"]]
    for name, module, count, size in rows(report.modules):
        place = module.device if module.computed == module.device else f"{module.computed}, out {module.device}"
        operator = module.operator or "-"
        table.append([name or "(model)", module.stock, operator, place, module.format, str(count), gigabytes(size)])
    lines = [*column_lines(table), ""]
    lines += [f"{device:<8} {gigabytes(size)}" for device, size in report.bytes.items()]
    return lines + [f"note     {note}" for note in report.notes]
