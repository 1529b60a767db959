"""Installs the pinned packages of constraints.txt into the venv whose Python runs this: through uv, or through pip.

    .venv/bin/python scripts/install_packages.py           # all of them, for `make test`
    .venv/bin/python scripts/install_packages.py --demo    # what `make demo` needs, in the same versions

uv takes a tenth of pip's time and reads none of pip's configuration. So what `pip config list` shows is handed to uv in
the environment, and pip itself names the build of torch, which uv is then told to the last letter. A setting that is in
neither of the tables below may change what pip would install, so then pip installs; it also does where uv is not to be
had or fails. uv compiles no bytecode: Python does so at the first import, of what is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# pip's setting -> uv's variable, and what uv puts between several values, which pip divides by white space.
UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}
# These do not change which file is installed.
WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}
TO_BUILD = ("cmake", "ninja")  # pip's build backend takes the machine's own if these are not there


def read_pip_settings(listing: str) -> dict[str, str]:
    """The settings of `pip install` as `pip config list` shows them: those of the command win over those of all
    commands, the environment over both."""
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        ranks = {"global": 0, "install": 1, ":env:": 2}
        if section in ranks and ranks[section] >= found.get(name, (0, ""))[0]:
            found[name] = (ranks[section], str(ast.literal_eval(value)))
    return {name: value for name, (_, value) in found.items()}


def uv_environment(settings: dict[str, str]) -> dict[str, str] | None:
    """uv's variables for pip's settings; None if one of them has no counterpart."""
    # Of several indexes pip takes the best version, uv by default the first index that has the name.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in settings.items():
        if name in UV_VARIABLES:
            variable, between = UV_VARIABLES[name]
            variables[variable] = between.join(value.split())
        elif name not in WITHOUT_EFFECT:
            print(f"pip's setting {name} has no counterpart in uv, so pip installs", flush=True)
            return None
    return variables


def requirements(demo: bool) -> list[str]:
    """As pip and uv take them. The demo's are those of its loop and of the build; constraints.txt has the versions."""
    if not demo:
        return ["-r", str(CONSTRAINTS)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    (bundle,) = extras["sft"]  # ktransformers[train,serve,eval,gguf]
    names = [*project["project"]["dependencies"], *project["build-system"]["requires"], *TO_BUILD]
    for extra in re.findall(r"\w+", bundle.partition("[")[2]):
        names += extras[extra]
    return ["-c", str(CONSTRAINTS), *names]


def pinned(name: str) -> str:
    (line,) = re.findall(rf"(?m)^{name}==\S+", CONSTRAINTS.read_text())
    return str(line)


def torch_of_pip() -> str:
    """torch at the pinned version, with the local part of the build that pip would install: 2.13.0+cpu."""
    command = [*PIP, "install", "-qq", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    report = subprocess.run([*command, pinned("torch")], check=True, stdout=subprocess.PIPE, text=True).stdout
    (torch,) = json.loads(report)["install"]
    return f"torch=={torch['metadata']['version']}"


def install_with_uv(wanted: list[str]) -> bool:
    listing = subprocess.run([*PIP, "config", "list"], check=True, stdout=subprocess.PIPE, text=True).stdout
    variables = uv_environment(read_pip_settings(listing))
    if variables is None or subprocess.run([*PIP, "install", "--quiet", pinned("uv")]).returncode:
        return False
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config", "--python", sys.executable]
    return not subprocess.run([*uv, torch_of_pip(), *wanted], env=kept | variables).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="only what `make demo` needs")
    wanted = requirements(parser.parse_args().demo)
    if install_with_uv(wanted):
        return 0
    # torch first and exactly: the other packages accept any recent one and would pick the largest build.
    for packages in ([pinned("torch")], wanted):
        subprocess.run([*PIP, "install", "--quiet", *packages], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
