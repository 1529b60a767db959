"""One turn with a tool through a library, as its users write it: the tool gives a number, the answer is printed.

python tool_loops.py LOOP URL NUMBER
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "TASK-ONE: what is the sum of notes.txt?"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
DESCRIPTION = "The sum of a file."
MODEL = "scripted"


def langchain(url: str, result: str, *, use_responses_api: bool) -> str:
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"stream_usage": True, "use_responses_api": use_responses_api}
    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", **options)
    tool = {"type": "function", "function": {"name": "sum", "description": DESCRIPTION, "parameters": PARAMETERS}}
    with_tools = model.bind_tools([tool])
    messages: list[Any] = [HumanMessage(QUESTION)]
    while True:
        answer: AIMessageChunk | None = None
        for piece in with_tools.stream(messages):
            answer = piece if answer is None else answer + piece
        assert answer is not None
        assert answer.usage_metadata and answer.usage_metadata["input_tokens"] > 0
        if not answer.tool_calls:
            return answer.text
        messages.append(answer)
        for made in answer.tool_calls:
            assert made["args"] == {"path": "notes.txt"}
            messages.append(ToolMessage(result, tool_call_id=made["id"]))


def litellm_responses(url: str, result: str) -> str:
    import litellm

    tool = {"type": "function", "name": "sum", "description": DESCRIPTION, "parameters": PARAMETERS}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        model = f"openai/{MODEL}"
        answer = litellm.responses(model=model, input=items, tools=[tool], api_base=f"{url}/v1", api_key="none")
        output = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in output if item["type"] == "function_call"]
        if not calls:
            return "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
        items += output
        items += [{"type": "function_call_output", "call_id": made["call_id"], "output": result} for made in calls]


def litellm_messages(url: str, result: str) -> str:
    import litellm

    tool = {"name": "sum", "description": DESCRIPTION, "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    async def ask() -> Any:
        model = f"anthropic/{MODEL}"
        return await litellm.anthropic.messages.acreate(
            model=model, messages=messages, tools=[tool], max_tokens=500, api_base=url, api_key="none"
        )

    while True:
        answer = asyncio.run(ask())
        content = answer["content"]
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            return "".join(block["text"] for block in content if block["type"] == "text")
        assert answer["stop_reason"] == "tool_use" and calls[0]["input"] == {"path": "notes.txt"}
        results = [{"type": "tool_result", "tool_use_id": made["id"], "content": result} for made in calls]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


def openai_agents(url: str, result: str) -> str:
    """With the model that the package asks for by default."""
    import os

    os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    from agents import Agent, FunctionTool, Runner

    async def call(_: Any, arguments: str) -> str:
        assert json.loads(arguments) == {"path": "notes.txt"}
        return result

    schema = {**PARAMETERS, "additionalProperties": False}
    tool = FunctionTool(name="sum", description=DESCRIPTION, params_json_schema=schema, on_invoke_tool=call)

    async def ask() -> str:
        streamed = Runner.run_streamed(Agent(name="Sums", instructions="Be brief.", tools=[tool]), QUESTION)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    return asyncio.run(ask())


LOOPS: dict[str, Callable[[str, str], str]] = {
    "langchain-chat": lambda url, result: langchain(url, result, use_responses_api=False),
    "langchain-responses": lambda url, result: langchain(url, result, use_responses_api=True),
    "litellm-responses": litellm_responses,
    "litellm-messages": litellm_messages,
    "openai-agents": openai_agents,
}

if __name__ == "__main__":
    sys.stdout.write(LOOPS[sys.argv[1]](sys.argv[2], f"SUM={sys.argv[3]}") + "\n")
