"""`kt chat` on a terminal: markdown, several lines, history, commands, Ctrl-C; models that it serves itself."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from ktransformers.cli.chat import ChatHistory
from ktransformers.cli.chat_input import read_message
from ktransformers.cli.chat_server import is_address, serve_words
from ktransformers.cli.chat_view import MarkdownView, split_blocks
from ktransformers.ground.client import Client
from ktransformers.ground.errors import InputError, KTError
from tests.support.chat_peer import ChatPeer
from tests.support.terminal_session import CTRL_C, CTRL_D, TerminalSession

PROMPT = r"^base\S*>"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}


def test_ctrl_c_stops_the_answer_and_not_the_chat(folders: dict[str, str]) -> None:
    endless = ["word "] * 2000
    with ChatPeer(endless, ["short"], pause=0.02) as peer, TerminalSession("chat", peer.url, **folders) as session:
        session.wait_for(PROMPT)
        session.type("Count.\n")
        session.wait_for("word word")
        session.type(CTRL_C)
        session.wait_for(r"\[interrupted\]")
        session.wait_for("tokens/s")
        assert peer.left.wait(10), "the stream is closed, so the server cancels the request"
        assert peer.sent < len(endless)
        session.wait_for(PROMPT, times=2)
        session.type("Again.\n")
        session.wait_for("short")
        session.wait_for(PROMPT, times=3)
        session.type(CTRL_C)
        session.wait_for("Ctrl-D or /exit ends the chat")
        session.type(CTRL_D)
        assert session.wait() == 0
        told = [message["content"] for message in peer.bodies[1]["messages"]]
        assert told[0] == "Count." and told[1].startswith("word word") and told[2] == "Again."


def test_own_servers_are_reached_beside_a_proxy_and_answers_printed_in_any_encoding(folders: dict[str, str]) -> None:
    """`kt` in a pipe, with a proxy that refuses and an encoding without the answer's letters."""
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    with ChatPeer(["na\u00efve \u2713"]) as peer:
        command = [sys.executable, "-c", "from ktransformers.cli.main import main; main()", "chat", peer.url]
        done = subprocess.run(command, input=b"Hello \xff\n", capture_output=True, env=os.environ | folders | proxy)
    assert done.returncode == 0 and done.stderr == b"", done.stderr.decode()
    assert done.stdout.startswith(b"na?ve ?\n[1 tokens")
    assert peer.bodies[0]["messages"] == [{"role": "user", "content": "Hello \ufffd"}]


def test_conversation_that_cannot_be_saved(tmp_path: Path) -> None:
    with ChatPeer(["yes"]) as peer:
        history = ChatHistory(Client(peer.url, None), "base", {}, quiet=True)
        with pytest.raises(InputError, match=r"history-file: given .*expected a file in a folder that exists"):
            history.remember(tmp_path / "none" / "chat.json")
        (tmp_path / "gone").mkdir()
        history.remember(tmp_path / "gone" / "chat.json")
        (tmp_path / "gone").rmdir()
        with pytest.raises(KTError, match=r"chat\.json: No such file or directory; the answer is not saved"):
            history.ask("Hello")


def test_several_lines_and_history(folders: dict[str, str], tmp_path: Path) -> None:
    with ChatPeer(["yes"]) as peer:
        with TerminalSession("chat", peer.url, **folders) as session:
            session.wait_for(PROMPT)
            session.type("one \\\n")
            session.wait_for(r"^\.\.\.")
            session.type("two\n")
            session.wait_for("yes")
            session.wait_for(PROMPT, times=2)
            session.type('"""first\n')
            session.wait_for(r"^\.\.\.", times=2)
            session.type('\n  second"""\n')
            session.wait_for(PROMPT, times=3)
            session.type("/exit\n")
            assert session.wait() == 0
        asked = [body["messages"][-1]["content"] for body in peer.bodies]
        assert asked == ["one \ntwo", "first\n\n  second"]
        file = tmp_path / "data" / "ktransformers" / "chat_history"
        assert "one \\" in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600
        with TerminalSession("chat", peer.url, **folders) as session:
            session.wait_for(PROMPT)
            session.type("\x1b[A\x1b[A")  # up, past /exit
            session.wait_for('second"""')
            session.type(CTRL_C)
            session.wait_for("ends the chat")
            session.type(CTRL_D)
            assert session.wait() == 0


def test_commands(folders: dict[str, str], tmp_path: Path) -> None:
    adapter = tmp_path / "saves" / "law"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    typed = ["/adapter", "/adapter neko", "Hi", "/base", "/system Be brief.", "Hi", f"/adapter {adapter}", "Hi"]
    typed += ["/adapter none", f"/save {tmp_path}/talk.json", f"/save {tmp_path}/talk.md", "/save", "/what"]
    typed += [f"/save {tmp_path}/no/where.md", "/clear", "Hi"]
    with ChatPeer(["yes"]) as peer, TerminalSession("chat", peer.url, columns=160, **folders) as session:
        for number, line in enumerate(typed, 1):
            session.wait_for(PROMPT, times=number)
            session.type(f"{line}\n")
        session.wait_for(PROMPT, times=len(typed) + 1)
        session.type("/exit\n")
        assert session.wait() == 0
        shown = session.text
    assert [body["model"] for body in peer.bodies] == ["base:neko", "base", "base:law", "base:law"]
    assert peer.loaded == [{"lora_name": "law", "lora_path": str(adapter)}]
    assert [message["role"] for message in peer.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert len(peer.bodies[3]["messages"]) == 2
    assert "* base:neko" in shown and "(base:none is not served)" in shown and "/adapter NAME" in shown
    assert "no/where.md: No such file" in shown
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in talk] == ["system", *["user", "assistant"] * 3]
    assert (tmp_path / "talk.md").read_text().startswith("## system\n\nBe brief.\n\n## user\n\nHi\n")


MARKDOWN = "# Title\n\nSome **bold** words and <think>aloud</think>.\n\n```python\nx = 1\n\ny = 2\n```\n\n- a\n- b\n"


def test_markdown_is_rendered_on_a_terminal(folders: dict[str, str]) -> None:
    pieces = [MARKDOWN[at : at + 3] for at in range(0, len(MARKDOWN), 3)] + ["evil \x1b]0;title\x07 end"]
    with ChatPeer(pieces) as peer:
        with TerminalSession("chat", peer.url, **folders) as session:
            session.wait_for(PROMPT)
            session.type("Hi\n")
            session.wait_for("tokens/s")
            session.type(CTRL_D)
            session.wait()
            shown = session.text
        assert "**" not in shown and "```" not in shown and "bold words and <think>aloud</think>." in shown
        assert "y = 2" in shown and " • a" in shown and shown.count("Title") == 1
        assert b"\x1b]0;" not in session.raw
        with TerminalSession("chat", peer.url, "--plain", **folders) as session:
            session.wait_for(PROMPT)
            session.type("Hi\n")
            session.wait_for("tokens/s")
            assert "Some **bold** words" in session.text and "```python" in session.text


def test_blocks_end_at_empty_lines_outside_of_code() -> None:
    assert split_blocks("a\nb\n\nc") == (["a\nb"], "c")
    assert split_blocks("```\na\n\nb") == ([], "```\na\n\nb")
    assert split_blocks("```\na\n\nb\n```\n\n") == (["```\na\n\nb\n```"], "")
    assert split_blocks("````\n```\n\n````\n\nx") == (["````\n```\n\n````"], "x")


def test_long_block_shows_its_end(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=10)
    view = MarkdownView(console)
    for number in range(40):
        view.piece(f"line {number}  \n")
    view.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    printed = Text.from_ansi(text).plain.rstrip()
    assert printed.endswith("line 39") and printed[printed.rindex("line 0") :].count("line ") == 40


def test_message_of_several_lines() -> None:
    def read(*lines: str) -> str:
        given = iter(lines)
        return read_message("> ", lambda _: next(given))

    assert read("a") == "a" and read("a\\", "b\\", "c") == "a\nb\nc"
    assert read('"""a"""') == "a" and read('"""', "a", "", "b", '"""') == "a\n\nb"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://host/v1", True),
        ("127.0.0.1:30555", True),
        ("localhost:1", True),
        ("localhost", True),
        ("10.0.0.7", True),
        ("saves/run", False),
        ("m2.1", False),
        ("Qwen/Qwen3-30B-A3B", False),
        ("recipe.yaml", False),
    ],
)
def test_addresses_and_models_are_told_apart(text: str, address: bool) -> None:
    assert is_address(text) is address


def test_what_a_model_is_served_as(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.write_text(f"run: {tmp_path}/run\nname: kite\nmodel: {{path: {tmp_path}/m}}\ntrain: {{keys: {{}}}}\n")
    with pytest.raises(InputError, match=r"kt loop .*loop\.yaml` first"):
        serve_words(str(loop))
    for name in ("kite", "pace"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "adapter_config.json").write_text("{}")
    assert serve_words(str(loop)) == serve_words(str(tmp_path / "run")) == [f"{tmp_path}/run/kite"]
    recipe = tmp_path / "train.yaml"
    recipe.write_text("model_name_or_path: m\noutput_dir: out\n")
    assert serve_words(str(recipe)) == [str(recipe)] and serve_words("m2") == ["m2"]
    (tmp_path / "empty").mkdir()
    for given, message in ((tmp_path / "empty", "neither config.json nor"), (tmp_path / "no.yaml", "does not exist")):
        with pytest.raises(InputError, match=message):
            serve_words(str(given))
