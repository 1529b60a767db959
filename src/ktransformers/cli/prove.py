"""`kt prove`: whether the served adapter computes what was trained. Prints a table or one JSON document; exit code 1 if
it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.options import Json, NoVerify, Verbose
from ktransformers.cli.progress import error as show_error
from ktransformers.cli.progress import log

if TYPE_CHECKING:
    from ktransformers.evaluate.prove.run import Proof

STATUS_WORDS = {True: "same", False: "DIFFERENT", None: "left out"}


def proof_lines(proof: Proof) -> list[str]:
    floor, effect = proof.floor, proof.effect
    lines = [
        f"{'adapter':<18} {proof.output}",
        f"{'base':<18} {proof.base}, {proof.dtype}",
        f"{'sample':<18} {proof.tokens} tokens in {proof.rows} {proof.sample}",
        f"{'noise floor':<18} max {floor.max:.2g}, mean {floor.mean:.2g}: the same rows in other batches",
        f"{'effect':<18} max {effect.max:.2g}, mean {effect.mean:.2g}: the adapter against the base",
        *(f"{check.what:<18} {STATUS_WORDS[check.passed]:<10} {check.detail}" for check in proof.checks),
    ]
    if effect.within(floor):
        lines.append("note: the adapter changes these rows by no more than noise, so that they prove nothing")
    return lines


def prove(
    output: Annotated[Path, typer.Argument(help="A training output directory, or another PEFT adapter.")],
    server: Annotated[
        str | None, typer.Option(help="A running server, such as http://127.0.0.1:30000; otherwise one is started.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of that server.")] = None,
    dtype: Annotated[str, typer.Option(help="Of everything but experts; auto: as recorded by training.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")] = None,
    no_verify: NoVerify = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Prove that a served adapter computes what was trained. The base is compared too."""
    from ktransformers.cli.library_output import library_output
    from ktransformers.evaluate.prove.messages import ProofFailed
    from ktransformers.evaluate.prove.run import prove as run

    try:
        with library_output():
            proof = run(output, log, server=server, api_key=api_key, dtype=dtype, device=device)
    except ProofFailed as error:
        if as_json:
            failed_check = {"what": error.check.what, "passed": False, "said": error.check.detail}
            document = {"output": str(output), "passed": False, "culprit": error.check.culprit}
            print(json.dumps({**document, "checks": [failed_check]}, indent=2))
        show_error(f"not proven: {error}")
        raise typer.Exit(1) from error
    print(json.dumps(proof.to_json(), indent=2) if as_json else "\n".join(proof_lines(proof)))
    if not proof.passed:
        show_error(f"not proven: {proof.culprit}")
        raise typer.Exit(1)
    if not as_json:
        print("proven: what is served is what was trained, and the base is unchanged")
