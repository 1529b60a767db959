"""The part of `kt prove` that asks as a client does, with messages: the tokens that the server makes of them must be
those of training.

Training recorded the messages before the first answer of a few rows and before later ones, earlier answers included,
with their tokens; without a record, sample questions are rendered by stock transformers with the template in the
adapter's directory. The base gets the same
messages and must render them as its own tokenizer does. The tokens come back as `prompt_token_ids`
(`return_token_ids`, which vLLM knows too); from a server without that field only their number can be compared. The end
of an answer is tested by making its token certain (`logit_bias`): the answer must stop there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.adapters.adapter_template import AdapterTemplate, read_adapter_template, with_ends
from ktransformers.adapters.comparison import LogprobDifference
from ktransformers.adapters.proof_record import ProofPrompt, ProofRecord
from ktransformers.adapters.router_choices import ChoiceComparison
from ktransformers.ground.client import Client
from ktransformers.ground.errors import KTError
from ktransformers.serve.target import Target

SHOWN_TIES = 16  # in a document; all are counted


@dataclass(frozen=True)
class ProofCheck:
    what: str
    passed: bool | None  # None: not possible on this machine
    detail: str
    difference: LogprobDifference | None = None
    culprit: str = ""  # tensor or layer at fault
    routers: ChoiceComparison | None = None  # None: ties between experts were not looked for

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "passed": self.passed,
            "said": self.detail,
            "difference": self.difference and self.difference.to_json(),
            "culprit": self.culprit or None,
            "routers": None if self.routers is None else _routers_to_json(self.routers),
        }


def _routers_to_json(routers: ChoiceComparison) -> dict[str, Any]:
    return {
        "ties": len(routers.ties),
        "faults": len(routers.faults),
        "not_judged": routers.unjudged,
        "tied_tokens": [tie.to_json() for tie in routers.ties[:SHOWN_TIES]],
        "faulty_tokens": [fault.to_json() for fault in routers.faults[:SHOWN_TIES]],
    }


class ProofFailed(KTError):
    """A tensor is wrong, found before anything was computed."""

    def __init__(self, what: str, culprit: str, detail: str, difference: LogprobDifference | None = None) -> None:
        super().__init__(f"{culprit}: {detail}")
        self.check = ProofCheck(what, False, detail, difference, culprit)


SAMPLE_QUESTIONS = ("What is seventeen plus twenty-five?", "Wer bist du?")
CERTAIN = 100  # logit bias that no other token outweighs


@dataclass(frozen=True)
class ServedPrompt:
    count: int
    tokens: tuple[int, ...] | None  # None: the server does not report them


def ask_prompt(client: Client, name: str, prompt: ProofPrompt) -> ServedPrompt:
    body: dict[str, Any] = {"model": name, "messages": list(prompt.messages), "max_tokens": 1, "temperature": 0}
    if prompt.tools:
        body["tools"] = prompt.tools
    answer = client.request("/v1/chat/completions", {**body, "return_token_ids": True})
    tokens = answer.get("prompt_token_ids")
    return ServedPrompt(int(answer["usage"]["prompt_tokens"]), None if tokens is None else tuple(tokens))


def check_messages(
    client: Client, base: str, adapter: str, target: Target, record: ProofRecord | None
) -> list[ProofCheck]:
    from ktransformers.modeling.pretrained import read_tokenizer

    tokenizer = read_tokenizer(target.model)
    template = read_adapter_template(target.adapters[0][1])
    trained = record.prompts if record is not None else ()
    origin = "of training" if trained else f"of {Path(template.file).name}" if template is not None else "of the base"
    sampled = trained or tuple(_stock_prompts(tokenizer, SAMPLE_QUESTIONS, template))
    checks = [_check_prompts("server, messages", client, adapter, sampled, origin)]
    if record is not None and record.other_turns and checks[0].passed:
        rest = f"; {record.other_turns} later turns are rendered otherwise than in training, and left out"
        checks = [replace(checks[0], detail=checks[0].detail + rest)]
    if template is not None:
        checks.append(_check_end(client, adapter, with_ends(template, tokenizer), sampled, tokenizer))
    base_prompts = [prompt for entry in sampled if (prompt := _with_base_tokens(tokenizer, entry)) is not None]
    checks.append(_check_prompts("base, messages", client, base, base_prompts, "of its tokenizer"))
    return checks


def _stock_prompts(tokenizer: Any, questions: Sequence[str], template: AdapterTemplate | None) -> list[ProofPrompt]:
    """Questions rendered by stock transformers; none if there is no template at all."""
    if template is None and not tokenizer.chat_template:
        return []
    prompts = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        text = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if template is None
            else template.render(tokenizer, messages)
        )
        prompts.append(ProofPrompt(tuple(messages), None, _tokens(tokenizer, text)))
    return prompts


def _with_base_tokens(tokenizer: Any, prompt: ProofPrompt) -> ProofPrompt | None:
    """The same messages with the tokens of the base's template; None if that does not take them."""
    if not tokenizer.chat_template:
        return None
    try:
        text = tokenizer.apply_chat_template(
            list(prompt.messages), tools=prompt.tools, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # templates raise anything for messages that they have no form for
        return None
    return ProofPrompt(prompt.messages, prompt.tools, _tokens(tokenizer, text))


def _tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_prompts(what: str, client: Client, name: str, prompts: Sequence[ProofPrompt], origin: str) -> ProofCheck:
    if not prompts:
        return ProofCheck(what, None, "there is no chat template to render messages with")
    for number, prompt in enumerate(prompts):
        try:
            served = ask_prompt(client, name, prompt)
        except KTError as error:
            return ProofCheck(what, False, f"prompt {number} is refused: {error}", culprit=f"chat template of {name}")
        same = served.count == len(prompt.tokens) if served.tokens is None else served.tokens == prompt.tokens
        if not same:
            detail = f"prompt {number} is served as {served.count} tokens; those {origin} are {len(prompt.tokens)}"
            return ProofCheck(what, False, f"{detail}, and differ", culprit=f"chat template of {name}")
    total = sum(len(prompt.tokens) for prompt in prompts)
    if served.tokens is None:
        return ProofCheck(what, True, f"{total} tokens, as many as those {origin}; the server does not show them")
    later = sum(prompt.follows_answers for prompt in prompts)
    turns = f", {later} of them later turns," if later else ""
    return ProofCheck(what, True, f"{total} tokens of {len(prompts)} prompts{turns} are those {origin}")


def _check_end(
    client: Client, name: str, template: AdapterTemplate, prompts: Sequence[ProofPrompt], tokenizer: Any
) -> ProofCheck:
    what = "server, end"
    if not template.stop_tokens or not prompts:
        words = f"answers end with the text {template.stop_strings}" if template.stop_strings else "no token ends them"
        return ProofCheck(what, None, f"{words}; only a single token can be made certain")
    token = min(template.stop_tokens)
    body = {"model": name, "messages": list(prompts[0].messages), "max_tokens": 2, "temperature": 0}
    reply = client.request("/v1/chat/completions", {**body, "logit_bias": {str(token): CERTAIN}})
    finish = reply["choices"][0]["finish_reason"]
    shown = tokenizer.convert_ids_to_tokens(token)
    detail = f"an answer {'ends' if finish == 'stop' else 'does not end'} with {shown}, as in training"
    return ProofCheck(what, finish == "stop", detail, culprit="" if finish == "stop" else f"end of answers of {name}")
