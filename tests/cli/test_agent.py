"""`kt agent` with executables in place of the clients: what they are told, what is said when something is missing, and
that nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ktransformers.cli.agent import _served_name, parse_agent
from ktransformers.ground.errors import InputError
from ktransformers.serve.agents import AGENTS
from tests.support.chat_peer import ChatPeer
from tests.support.cli import RunKt

KT = [sys.executable, "-c", "from ktransformers.cli.main import main; main()", "agent"]
# Writes its arguments, variables and the files that these name to `told.json`.
FAKE = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1:] == ["hub", "stop"]:
    open(os.environ["TOLD"] + ".stopped", "w").write(os.environ["CLINE_HUB_DISCOVERY_PATH"])
    sys.exit(0)
words = [*sys.argv[1:], *os.environ.values()]
files = {{word: open(word).read() for word in words if "/kt-" in word and os.path.isfile(word)}}
told = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files}}
open(os.environ["TOLD"], "w").write(json.dumps(told))
{{end}}
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (("PATH", f"{tmp_path}/bin"), ("TOLD", f"{tmp_path}/told.json"), ("HOME", f"{tmp_path}/home")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("bin", "home", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path / "told.json"


def write_client(told: Path, command: str, end: str = "sys.exit(7)") -> None:
    file = told.parent / "bin" / command
    file.write_text(FAKE.replace("{end}", end))
    file.chmod(0o755)


def is_clean(told: Path) -> bool:
    return not list((told.parent / "tmp").iterdir()) and not list((told.parent / "home").iterdir())


@pytest.mark.parametrize("name", AGENTS)
def test_client_is_told_where_the_model_is(name: str, told: Path, kt: RunKt, monkeypatch: pytest.MonkeyPatch) -> None:
    write_client(told, AGENTS[name].command)
    monkeypatch.setenv("WORK_KEY", "a-key-of-the-server")
    with ChatPeer(["yes"]) as peer:
        words = (name, "--url", peer.url, "--adapter", "neko", "--key-variable", "WORK_KEY", "--", "-p", "do it")
        done = kt("agent", *words)
    assert done.code == 7, done.error
    heard: dict[str, Any] = json.loads(told.read_text())
    assert heard["arguments"][-2:] == ["-p", "do it"]
    everything = json.dumps([heard["arguments"], heard["environment"], list(heard["files"].values())])
    for text in (peer.url, "base:neko", "a-key-of-the-server", str(AGENTS[name].context)):
        assert text in everything
    assert is_clean(told)


def test_settings_of_the_person_do_not_win_over_the_connection(told: Path, kt: RunKt) -> None:
    write_client(told, "claude", "sys.exit(0)")
    with ChatPeer(["yes"]) as peer:
        assert kt("agent", "claude", "--url", peer.url).code == 0
    heard = json.loads(told.read_text())
    (settings,) = heard["files"].values()
    environment = json.loads(settings)["env"]
    assert environment["ANTHROPIC_BASE_URL"] == peer.url and environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "base"
    assert environment.items() <= heard["environment"].items()
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and environment["ANTHROPIC_API_KEY"] == ""


def test_what_is_missing_is_said_in_one_line(told: Path, kt: RunKt) -> None:
    write_client(told, "claude")
    with ChatPeer(["yes"]) as peer:
        cases = {
            ("codex", "--url", peer.url): "npm install -g @openai/codex",
            ("nobody",): "NAME: given nobody, expected one of claude, codex",
            (): "NAME: given nothing",
            ("claude", "--url", peer.url, "--context-length", "9"): "expected none of `kt serve` with --url",
            ("claude", "other", "--url", peer.url): "MODEL: given other, expected one of base, base:neko",
            ("claude", "--url", peer.url, "--adapter", "x"): "adapter: given x, expected one of base, base:neko",
            ("claude", "m", "--port", "1"): "start `kt serve` with them and pass its address as --url",
            ("claude", "m", "--print"): "start `kt serve MODEL` first",
            ("claude", "m", "--no-such-flag"): "--no-such-flag",
        }
        for words, message in cases.items():
            done = kt("agent", *words)
            assert done.code == 1 and message in done.error and "\n" not in done.error, (words, done)
        peer.fields = {"context_length": 4096}
        done = kt("agent", "claude", "--url", peer.url)
        assert "given 4096 tokens of base, expected 32768 or more for Claude Code" in done.error
        peer.fields = {"context_length": 65536, "capabilities": ["completion"]}
        done = kt("agent", "claude", "--url", peer.url)
        assert "a model that calls tools, which Claude Code needs" in done.error
    assert not told.exists() and is_clean(told)


def test_client_that_crashes(told: Path, kt: RunKt) -> None:
    write_client(told, "cline", "os.kill(os.getpid(), 9)")
    with ChatPeer(["yes"]) as peer:
        assert kt("agent", "cline", "--url", peer.url).code == 128 + signal.SIGKILL
    assert is_clean(told)
    stopped = told.with_name("told.json.stopped").read_text()
    assert stopped == json.loads(told.read_text())["environment"]["CLINE_HUB_DISCOVERY_PATH"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_belong_to_the_client(number: signal.Signals, told: Path) -> None:
    """Ctrl-C reaches both processes, SIGTERM of `kt` only this one; the client decides how it ends."""
    end = "import signal\n[signal.signal(n, lambda *_: sys.exit(5)) for n in (2, 15)]\nprint('up', flush=True)\n"
    write_client(told, "qwen", f"{end}signal.pause()")
    with ChatPeer(["yes"]) as peer:
        command = [*KT, "qwen", "--url", peer.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(60) == 5
    assert is_clean(told)


@pytest.mark.parametrize("home", ["home", "a home, it's"])
def test_printed_lines_start_the_client_by_hand(
    told: Path, kt: RunKt, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", str(told.parent / home))
    monkeypatch.setenv("WORK_KEY", "a-key-of-the-server")
    (told.parent / home).mkdir(exist_ok=True)
    for name in AGENTS:
        write_client(told, AGENTS[name].command)
        with ChatPeer(["yes"]) as peer:
            words = ("agent", name, "--url", peer.url, "--key-variable", "WORK_KEY", "--print")
            printed = kt(*words, "--", "-p", "it's")
            document = kt(*words, "--json").json
        assert printed.code == 0 and not told.exists() and is_clean(told)
        assert "a-key-of-the-server" not in printed.out
        path = f"{os.environ['PATH']}:/usr/bin:/bin"
        folder = told.parent / home / ".cache" / f"kt-{AGENTS[name].command}"
        done = subprocess.run(["/bin/sh", "-c", printed.out], env={**os.environ, "PATH": path})
        heard = json.loads(told.read_text())
        assert done.returncode == 7 and heard["arguments"][-2:] == ["-p", "it's"]
        told_all = json.dumps([heard["arguments"], heard["environment"], list(heard["files"].values())])
        assert peer.url in told_all and "a-key-of-the-server" in told_all
        assert heard["files"].keys() == {str(folder / file) for file in document["files"]}
        assert all(heard["files"][str(folder / file)] == text for file, text in document["files"].items())
        assert all((folder / file).stat().st_mode & 0o077 == 0 for file in document["files"])
        told.unlink()
        shutil.rmtree(folder.parent, ignore_errors=True)


def test_adapter_is_asked_only_where_model_is_one(told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, output = tmp_path / "m", tmp_path / "my run"
    for folder, name in ((base, "config.json"), (output, "adapter_config.json")):
        folder.mkdir()
        (folder / name).write_text(json.dumps({"model_type": "qwen3", "base_model_name_or_path": str(base)}))
    listed: dict[str, Any] = {name: {} for name in ("m", "m:a", "m:my-run")}
    for words, name in (
        ([str(base), "--lora-paths", "a=DIR"], "m"),
        ([str(output), "--lora-paths", "a=DIR"], "m:my-run"),
        ([str(base), "--adapter", "a"], "m:a"),
        ([], "m"),
    ):
        assert _served_name(parse_agent(["claude", *words]), listed) == name


def test_list_says_what_is_installed(told: Path, kt: RunKt) -> None:
    write_client(told, "opencode")
    lines = {line.split()[0]: line for line in kt("agent", "--list").out.splitlines()}
    assert list(lines) == list(AGENTS)
    assert f"installed: {told.parent}/bin/opencode" in lines["opencode"]
    (found,) = [entry for entry in kt("agent", "--json", "--list").json if entry["installed"]]
    assert found["name"] == "opencode" and found["context"] == AGENTS["opencode"].context
    with ChatPeer(["yes"]) as peer:
        document = kt("agent", "claude", "--url", peer.url, "--print", "--json", "--", "-c").json
    assert document["command"][-1] == "-c" and document["environment"]["ANTHROPIC_BASE_URL"] == peer.url
    assert "npm install -g @anthropic-ai/claude-code" in lines["claude"] and "/v1/messages" in lines["claude"]


def test_words_of_a_line() -> None:
    line = parse_agent(["claude", "m", "--context-length", "65536", "--adapter", "a", "--", "-p", "--url", "x"])
    assert (line.name, line.model, line.flags) == ("claude", "m", ("--context-length", "65536"))
    assert line.client == ("-p", "--url", "x") and line.options.adapter == "a" and line.options.url is None
    line = parse_agent(["codex", "--dtype", "bfloat16"])
    assert (line.name, line.model, line.flags) == ("codex", None, ("--dtype", "bfloat16"))
    with pytest.raises(InputError, match="expected one argument"):
        parse_agent(["claude", "--url"])
