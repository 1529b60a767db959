"""Coding agents that `kt agent` starts: for each what it is called, what it needs, and how it is told where the server
is.

A connection reaches the client through its environment, its arguments and files of a temporary folder, never through
files of the person who starts it. Variables and keys are those that the clients document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_OUTPUT_TOKENS = 16384  # of one answer, if the context length leaves as many
REQUEST_MILLISECONDS = 3_600_000  # a long prompt on a CPU takes minutes
NO_KEY = "none"  # clients refuse an empty key


@dataclass(frozen=True)
class AgentConnection:
    """A served model, as a client is told of it."""

    url: str  # without /v1
    model: str
    context: int  # tokens
    folder: Path  # for files of the client
    key: str = NO_KEY

    @property
    def output(self) -> int:
        """Tokens that an answer may have."""
        return min(MAX_OUTPUT_TOKENS, self.context // 4)


@dataclass(frozen=True)
class ClientSetup:
    """What a client is started with besides the person's own arguments."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # name in the folder -> text


@dataclass(frozen=True)
class Agent:
    title: str
    command: str
    package: str  # of npm
    path: str  # of the API that it speaks
    context: int  # least tokens: its own instructions and tools, and room for a small task
    setup: Callable[[AgentConnection], ClientSetup]
    needs_tools: bool = True
    stop: tuple[str, ...] = ()  # arguments with which it ends the processes that it leaves behind

    @property
    def install(self) -> str:
        return f"npm install -g {self.package}"


def _claude(connection: AgentConnection) -> ClientSetup:
    """Settings that are passed as an argument win over those of the person, which may name another server."""
    model = connection.model
    names = ("OPUS", "SONNET", "HAIKU")
    environment = {
        "ANTHROPIC_BASE_URL": connection.url,
        "ANTHROPIC_AUTH_TOKEN": connection.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name in names},
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(connection.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(connection.output),
        # A line of the system prompt that changes with every request would end the cached prefix.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(REQUEST_MILLISECONDS),
    }
    settings = _file(connection, "settings.json")
    return ClientSetup(environment, ("--settings", settings), {"settings.json": _json({"env": environment})})


def _codex(connection: AgentConnection) -> ClientSetup:
    settings = {
        "model": connection.model,
        "model_provider": "kt",
        "model_providers.kt.name": "ktransformers",
        "model_providers.kt.base_url": f"{connection.url}/v1",
        "model_providers.kt.wire_api": "responses",
        "model_providers.kt.env_key": "KT_AGENT_KEY",
        "model_providers.kt.stream_idle_timeout_ms": REQUEST_MILLISECONDS,
        "model_context_window": connection.context,
        "show_raw_agent_reasoning": True,
        "web_search": "disabled",
        "analytics.enabled": False,
        "check_for_update_on_startup": False,
    }
    # A value is TOML, which writes texts, numbers and booleans as JSON does.
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return ClientSetup({"KT_AGENT_KEY": connection.key}, tuple(arguments))


def _opencode(connection: AgentConnection) -> ClientSetup:
    name = f"kt/{connection.model}"
    model = {
        "name": connection.model,
        "tool_call": True,
        "reasoning": True,
        "limit": {"context": connection.context, "output": connection.output},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ktransformers",
        "options": {"baseURL": f"{connection.url}/v1", "apiKey": connection.key, "timeout": REQUEST_MILLISECONDS},
        "models": {connection.model: model},
    }
    config = {"model": name, "small_model": name, "autoupdate": False, "provider": {"kt": provider}}
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return ClientSetup(environment)


def _qwen(connection: AgentConnection) -> ClientSetup:
    limits = {
        "contextWindowSize": connection.context,
        "timeout": REQUEST_MILLISECONDS,
        "samplingParams": {"max_tokens": connection.output},
    }
    settings = {
        "general": {"enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": connection.model, "generationConfig": limits},
        "privacy": {"usageStatisticsEnabled": False},
    }
    environment = {
        "OPENAI_BASE_URL": f"{connection.url}/v1",
        "OPENAI_API_KEY": connection.key,
        "OPENAI_MODEL": connection.model,
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": _file(connection, "settings.json"),
    }
    return ClientSetup(environment, (), {"settings.json": _json(settings)})


def _continue(connection: AgentConnection) -> ClientSetup:
    model = {
        "name": connection.model,
        "provider": "openai",
        "model": connection.model,
        "apiBase": f"{connection.url}/v1",
        "apiKey": connection.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": connection.context, "maxTokens": connection.output},
    }
    # JSON is YAML too.
    config = {"name": "ktransformers", "version": "1.0.0", "schema": "v1", "models": [model]}
    arguments = ("--config", _file(connection, "config.yaml"))
    return ClientSetup({"CONTINUE_TELEMETRY_ENABLED": "0"}, arguments, {"config.yaml": _json(config)})


def _cline(connection: AgentConnection) -> ClientSetup:
    name = "openai-compatible"
    settings = {
        "provider": name,
        "apiKey": connection.key,
        "model": connection.model,
        "baseUrl": f"{connection.url}/v1",
        "contextWindow": connection.context,
        "maxTokens": connection.output,
        "timeout": REQUEST_MILLISECONDS,
    }
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: entry}}
    environment = {
        "CLINE_PROVIDER_SETTINGS_PATH": _file(connection, "providers.json"),
        # A background process of its own, because it would keep this connection for later sessions.
        "CLINE_SESSION_BACKEND_MODE": "local",
        "CLINE_HUB_DISCOVERY_PATH": _file(connection, "hub.json"),
        "CLINE_NO_AUTO_UPDATE": "1",
    }
    return ClientSetup(environment, (), {"providers.json": _json(providers)})


def _file(connection: AgentConnection, name: str) -> str:
    return str(connection.folder / name)


def _json(document: Any) -> str:
    return json.dumps(document, indent=2) + "\n"


MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
AGENTS = {
    "claude": Agent("Claude Code", "claude", "@anthropic-ai/claude-code", MESSAGES, 32768, _claude),
    "codex": Agent("Codex CLI", "codex", "@openai/codex", RESPONSES, 24576, _codex),
    "opencode": Agent("OpenCode", "opencode", "opencode-ai", CHAT, 16384, _opencode),
    "qwen": Agent("Qwen Code", "qwen", "@qwen-code/qwen-code", CHAT, 32768, _qwen),
    "cn": Agent("Continue CLI", "cn", "@continuedev/cli", CHAT, 8192, _continue),
    "cline": Agent("Cline CLI", "cline", "cline", CHAT, 16384, _cline, stop=("hub", "stop")),
}


def connection_lines(url: str) -> tuple[str, str]:
    """What to set by hand for clients of the two APIs, for the end of a server's start."""
    return (
        f"agents: `kt agent NAME --url {url}`; or export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={NO_KEY}",
        f"for clients of OpenAI's API: export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={NO_KEY}",
    )
