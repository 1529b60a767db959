"""`kt config` and its file; precedence of flags, environment and file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from ktransformers.cli.guide import Guide
from ktransformers.ground import settings
from ktransformers.ground.errors import InputError
from ktransformers.serve.flags import Launch
from ktransformers.serve.launch import with_environment
from tests.support.cli import RunKt


def test_set_get_show_path_reset(kt: RunKt, tmp_path: Path) -> None:
    file = tmp_path / "xdg" / "config" / "ktransformers" / "config.yaml"
    assert kt("config", "path", "--json").json == {"path": str(file), "exists": False}
    assert kt("config", "path").out.strip() == str(file)
    assert kt("config", "get", "server.port", "--json").json == 30000
    assert kt("config", "set", "server.port", "30001", "--json").json == {"server.port": 30001}
    assert kt("config", "get", "server.port").out == "30001\n"
    assert yaml.safe_load(file.read_text()) == {"server": {"port": 30001}}  # only what was set
    kt("config", "set", "paths.models", "/a, /b")
    assert kt("config", "get", "paths.models").out == "/a,/b\n"
    shown = kt("config", "show", "--json").json
    assert shown["paths.models"] == {"value": ["/a", "/b"], "set": True} and not shown["server.host"]["set"]
    assert set(shown) == set(settings.keys())
    assert len(kt("config", "show").out.splitlines()) == len(shown)
    assert kt("config", "show", "server.port").out.startswith("* server.port")
    assert kt("config", "set", "server.port", "").code == 0  # forgotten
    assert settings.value("server.port") == 30000
    assert "--yes" in kt("config", "reset").error and file.exists()
    assert kt("config", "reset", "--yes", "--json").json["reset"]
    assert not file.exists() and kt("config", "reset", "--json").json["reset"] is False


def test_invalid_values_are_refused_and_not_written(kt: RunKt) -> None:
    kt("config", "set", "server.port", "30001")
    before = settings.config_file().read_text()
    assert "65535" in kt("config", "set", "server.port", "70000").error
    assert "did you mean server.port?" in kt("config", "set", "server.prot", "1").error
    assert "kt config show" in kt("config", "get", "nonsense").error
    assert "modelscope" in kt("config", "set", "download.source", "elsewhere").error
    assert "download.endpoint" in kt("config", "set", "download.endpoint", "not a url").error
    assert settings.config_file().read_text() == before


def test_file_without_the_right_to_write_is_kept(kt: RunKt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing it would need rights on its folder alone. A guided answer is then not remembered, and is used."""
    kt("config", "set", "server.port", "30001")
    monkeypatch.setattr(os, "access", lambda file, mode: False)  # root may write everything
    with pytest.raises(PermissionError):
        settings.set_value("server.port", "30002")
    assert Guide("serve", {}).keep("port", "30002", "port") == "30002"
    assert settings.value("server.port") == 30001 and settings.value("answers.port") is None


def test_invalid_config_file_is_reported(kt: RunKt) -> None:
    file = settings.config_file()
    file.parent.mkdir(parents=True)
    for text, lines in (("server: [", "no YAML"), ("- a", "kt config reset"), ("server: {prot: 1}", "server.port")):
        file.write_text(text)
        with pytest.raises(InputError, match=lines):
            settings.read()
    assert kt("model", "list").code == 1
    file.write_text("")
    assert settings.read() == settings.Settings()


def test_init_writes_every_key_as_a_comment(kt: RunKt) -> None:
    assert kt("config", "init", "--json").json["written"]
    text = settings.config_file().read_text()
    assert settings.read() == settings.Settings() and settings.read_config_file() == {}
    bare = "\n".join(line[2:] for line in text.splitlines())
    assert settings.Settings.model_validate(yaml.safe_load(bare)) == settings.Settings()  # and is right without the #
    assert kt("config", "init", "--json").json["written"] is False


def test_flag_overrides_environment_overrides_file(kt: RunKt, monkeypatch: pytest.MonkeyPatch) -> None:
    kt("config", "set", "server.host", "10.0.0.1")
    kt("config", "set", "server.port", "1234")
    created = with_environment(Launch("m"))
    assert (created.host, created.port) == ("10.0.0.1", 1234)
    monkeypatch.setenv("API_PORT", "2345")
    created = with_environment(Launch("m", host="0.0.0.0"))
    assert (created.host, created.port) == ("0.0.0.0", 2345)


def test_chat_uses_the_configured_server(kt: RunKt) -> None:
    from ktransformers.cli.chat import _server_url

    assert _server_url(None, None) == "http://127.0.0.1:30000"
    kt("config", "set", "server.host", "0.0.0.0")
    kt("config", "set", "server.port", "1")
    assert _server_url(None, None) == "http://127.0.0.1:1" and _server_url("far", 2) == "http://far:2"
    assert "http://127.0.0.1:1" in kt("chat").error
    assert "one of them" in kt("chat", "http://x", "--port", "2").error
