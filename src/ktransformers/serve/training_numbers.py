"""The numbers that a served adapter was trained on: the bits of linear layers (`rest`) and the operators of its run.
They are used where the launch line names none, and a line says where they differ.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ktransformers.ground.linear_storage import AS_RELEASED
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import Target


def as_trained(launch: Launch, target: Target) -> Launch:
    """A training output is served on the numbers that it was trained on, unless the line names others."""
    if launch.rest != "keep" or target.rest is None:
        return launch
    return replace(launch, rest=target.rest)


def differences_from_training(launch: Launch, target: Target, rules: str | None) -> list[str]:
    """Lines on what changes numbers and is not as in the training of the adapter that is served."""
    from ktransformers.operators.rules import operators_of

    lines = []
    trained_codes = target.rest if target.rest is not None and target.rest not in AS_RELEASED else None
    if target.rest is not None and (launch.rest if launch.rest not in AS_RELEASED else None) != trained_codes:
        lines.append(f"--rest {launch.rest}: the adapter was trained with `rest: {target.rest}`, on other numbers")
    if target.operators is not None and target.operators != operators_of(rules):
        given = "no rules" if rules is None else f"the rules of {Path(rules).name}"
        lines.append(f"kt_optimize_rule: the adapter was trained with other operators than {given}")
    return lines
