"""The server of `kt chat MODEL` and `kt agent NAME MODEL`: a `kt serve` on a free port of 127.0.0.1, ended with it.

MODEL is what `kt serve` opens, the YAML file of a loop, or the directory of one. The child process writes to a log in a
temporary directory; if it ends early, its last line is the error. Ctrl-C does not reach it (it has its own session), so
that stopping an answer leaves the server running.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ktransformers.cli.machine_state import LOOP_KEYS
from ktransformers.cli.progress import progress_bar
from ktransformers.evaluate.loop.child import StageFailed, free_port, locked, server
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.files import path_exists, read_yaml_mapping
from ktransformers.ground.progress import ProgressEvent

ADDRESS = re.compile(r"(\[[\da-fA-F:]+\]|[\w.-]+)(:\d+)(/.*)?|localhost(/.*)?|\d+(\.\d+){3}(/.*)?")


def is_address(text: str) -> bool:
    """Whether `kt chat TEXT` names a server, not a model."""
    return "://" in text or (not path_exists(text) and ADDRESS.fullmatch(text) is not None)


def serve_words(target: str) -> list[str]:
    """MODEL and adapters as `kt serve` takes them; raises InputError if training has not written its adapter yet."""
    path = Path(target).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return [_yaml_target(path)]
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return _run_words(path)
    return [target]


def _yaml_target(path: Path) -> str:
    """The adapter of a loop; a file of a training or of inference is left to `kt serve`."""
    if not path.is_file():
        raise InputError(
            "MODEL", f"{path}, which does not exist", "a YAML file of a training, of inference or of a loop"
        )
    if not set(read_yaml_mapping(path)) >= LOOP_KEYS:
        return str(path)
    from ktransformers.evaluate.loop.settings import read_loop
    from ktransformers.evaluate.loop.stages import run_paths

    adapter = run_paths(read_loop(path, [])).adapter
    if not (adapter / "adapter_config.json").is_file():
        raise InputError(str(path), f"a loop without {adapter}", "a finished training", f"run `kt loop {path}` first")
    return str(adapter)


def _run_words(directory: Path) -> list[str]:
    """The adapters in the directory of a loop, the newest first; their base is the newest one's."""
    from ktransformers.evaluate.loop.settings import RESERVED_NAMES

    adapters = [
        file.parent for file in directory.glob("*/adapter_config.json") if file.parent.name not in RESERVED_NAMES
    ]
    adapters.sort(key=lambda adapter: adapter.stat().st_mtime, reverse=True)
    if not adapters:
        expected = "a model's folder, a training output, or the directory of a loop"
        raise InputError("MODEL", f"{directory}, which holds neither config.json nor an adapter", expected)
    others = [f"{adapter.name}={adapter}" for adapter in adapters[1:]]
    return [str(adapters[0]), *(["--lora-paths", *others] if others else [])]


@contextmanager
def served(target: str, quiet: bool, flags: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server for `target`; `flags`: of `kt serve`."""
    words = serve_words(target)
    port = free_port(None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kt-chat-")))
        lock = stack.enter_context(locked(folder))
        line = ["serve", *words, *flags, "--host", "127.0.0.1", "--port", str(port)]
        with progress_bar("Starting the server", quiet=quiet, unit="%") as bar:

            def show(event: ProgressEvent) -> None:
                bar(event.done, event.total, event.title)

            try:
                url = stack.enter_context(server(line, port, folder / "serve.log", lock, show))
            except StageFailed as error:
                raise KTError(_last_error(folder / "serve.log")) from error
        yield url


def _last_error(log: Path) -> str:
    """The error line of a server that did not start."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line.removeprefix("kt: ") for line in lines if line.startswith("kt: ")]
    if errors and lines[-1].startswith("kt: "):
        return errors[-1]
    return "\n".join(lines[-12:]) if lines else "the server ended without a word; `kt serve` shows more"
