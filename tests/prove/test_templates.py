"""What is trained is what is served, from messages: adapters that were trained with a template of another family get
the prompt tokens of training from `kt serve`, `kt run`, `kt eval` and `kt prove`, and the base keeps its own template
in the same server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from ktransformers.adapters import proof_record
from ktransformers.adapters.chat_templates import TEMPLATES, to_jinja
from ktransformers.cli.main import app
from ktransformers.ground.client import Client
from ktransformers.ground.errors import InputError
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import resolve_target
from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER

for package in ("trl", "datasets", "fastapi", "uvicorn"):
    pytest.importorskip(package)

torch.set_num_threads(2)
NAMES = ("deepseek", "llama3")
QUESTION = "What is seventeen plus twenty-five?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class TrainedAdapters:
    base: Path
    outputs: dict[str, Path]
    tokenizer: Any

    def prompt(self, text: str | None, **options: Any) -> list[int]:
        """The question rendered by stock transformers with this template; None: the base's own."""
        rendered = self.tokenizer.apply_chat_template(
            MESSAGES, chat_template=text, tokenize=False, add_generation_prompt=True, **options
        )
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])


def talk(number: int) -> list[dict[str, str]]:
    """A conversation of two turns."""
    answer = "Hello! I am an AI assistant."
    texts = (f"Who are you, {number}?", answer, "Really?", answer)
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedAdapters:
    from tests.support.training import recipe
    from tests.support.training_runs import run

    root = tmp_path_factory.mktemp("templates")
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512), root / "base")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, root / "base" / file.name)
    outputs = {name: root / name for name in NAMES}
    (root / "talks.json").write_text(json.dumps([{"messages": talk(number)} for number in range(16)]))
    own: dict[str, dict[str, Any]] = {
        "deepseek": {"default_system": "Answer briefly.", "dataset": str(root / "talks.json")},
        "llama3": {},
    }
    for name, output in outputs.items():
        keys = {"template": name, "val_size": 3, "learning_rate": 3e-2, "max_steps": 8, **own[name]}
        run(recipe(root / "base", output, **keys))
    return TrainedAdapters(root / "base", outputs, AutoTokenizer.from_pretrained(root / "base"))


@pytest.fixture(scope="module")
def client(trained: TrainedAdapters) -> Iterator[tuple[Client, list[str]]]:
    """One server with the base and both adapters, and the lines that it logged."""
    from ktransformers.evaluate.prove.server import start_server

    lines: list[str] = []
    paths = tuple((name, str(path)) for name, path in trained.outputs.items())
    launch = Launch(str(trained.base), lora_paths=paths, dtype="float32", max_total_tokens=4096)
    with start_server(launch, resolve_target(str(trained.base)), lines.append) as (url, _):
        yield Client(url, None), lines


def ask(client: Client, name: str, **fields: Any) -> Any:
    body = {"model": name, "messages": MESSAGES, "max_tokens": 4, "temperature": 0, **fields}
    with client.open("/v1/chat/completions", body) as reply:
        return json.loads(reply.read())


def test_adapter_carries_template_with_the_recipe_in_it(trained: TrainedAdapters) -> None:
    for name, output in trained.outputs.items():
        record = proof_record.read_record(output)
        turns = 2 if name == "deepseek" else 1
        assert record is not None and len(record.prompts) == 3 * turns and record.other_turns == 0
        assert sum(prompt.follows_answers for prompt in record.prompts) == 3 * (turns - 1)
        text = (output / "chat_template.jinja").read_text()
        for prompt, row in zip(record.prompts, [row for row in record.rows for _ in range(turns)], strict=True):
            assert prompt.tokens == row[: len(prompt.tokens)] and prompt.messages[-1]["role"] == "user"
            rendered = trained.tokenizer.apply_chat_template(
                list(prompt.messages), chat_template=text, tokenize=False, add_generation_prompt=True
            )
            assert tuple(trained.tokenizer(rendered, add_special_tokens=False)["input_ids"]) == prompt.tokens
        assert json.loads((output / "kt_manifest.json").read_text())["template"] == name


def test_one_server_renders_base_and_adapters_each_with_its_own(
    trained: TrainedAdapters, client: tuple[Client, list[str]]
) -> None:
    expected = {
        "base": trained.prompt(None),
        "base:llama3": trained.prompt(to_jinja(TEMPLATES["llama3"])),
        "base:deepseek": trained.prompt((trained.outputs["deepseek"] / "chat_template.jinja").read_text()),
    }
    assert len({len(tokens) for tokens in expected.values()}) == 3, "three templates, three prompts"
    for name, tokens in expected.items():
        answer = ask(client[0], name, return_token_ids=True)
        assert answer["prompt_token_ids"] == tokens and answer["usage"]["prompt_tokens"] == len(tokens), name
    for name, output in trained.outputs.items():
        record = proof_record.read_record(output)
        assert record is not None
        for prompt in record.prompts:
            served = ask(client[0], f"base:{name}", messages=list(prompt.messages), return_token_ids=True)
            assert tuple(served["prompt_token_ids"]) == prompt.tokens
    with client[0].open("/v1/models") as reply:
        models = {model["id"]: model.get("chat_template") for model in json.loads(reply.read())["data"]}
    assert models == {"base": None, "base:deepseek": "adapter", "base:llama3": "adapter"}
    said = [line for line in client[1] if "chat_template.jinja" in line]
    assert len(said) == 2 and all("those to base with the base's own" in line for line in said)
    assert "<|eot_id|>" in said[1]


def test_streamed_chat_reports_the_same_prompt(trained: TrainedAdapters, client: tuple[Client, list[str]]) -> None:
    body = {"model": "base:llama3", "messages": MESSAGES, "max_tokens": 2, "return_token_ids": True}
    first = next(iter(client[0].stream(body)))
    assert first["prompt_token_ids"] == trained.prompt(to_jinja(TEMPLATES["llama3"]))


def test_answer_ends_where_training_ended_it(
    trained: TrainedAdapters, client: tuple[Client, list[str]], tmp_path: Path
) -> None:
    """deepseek's end is the eos token; an end that is several tokens of this tokenizer is a stop string."""
    eos = trained.tokenizer.eos_token_id
    assert ask(client[0], "base:deepseek", logit_bias={str(eos): 100})["choices"][0]["finish_reason"] == "stop"
    generated = ask(client[0], "base:llama3", max_tokens=8)["choices"][0]["message"]["content"]
    end = generated.strip()[:-1]
    assert len(trained.tokenizer(end, add_special_tokens=False)["input_ids"]) > 1
    copy = shutil.copytree(trained.outputs["llama3"], tmp_path / "copy")
    llama3 = TEMPLATES["llama3"]
    (copy / "chat_template.jinja").write_text(to_jinja(replace(llama3, assistant=(llama3.assistant[0], end))))
    client[0].open("/v1/load_lora_adapter", {"lora_name": "ends", "lora_path": str(copy)}).close()
    answer = ask(client[0], "base:ends", max_tokens=8)
    assert answer["choices"][0]["finish_reason"] == "stop" and end not in answer["choices"][0]["message"]["content"]
    client[0].open("/v1/unload_lora_adapter", {"lora_name": "ends"}).close()


def test_eval_loss_is_that_of_the_trained_template(
    trained: TrainedAdapters, client: tuple[Client, list[str]], tmp_path: Path
) -> None:
    rows = [
        {"instruction": prompt.messages[-1]["content"], "output": "Hello! I am an AI assistant."}
        for prompt in (proof_record.read_record(trained.outputs["llama3"]) or pytest.fail("no record")).prompts
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = {"name": "own", "title": "own", "kind": "generate", "data": "rows.jsonl", "metrics": ["loss"]}
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    losses = {}
    for kind in ("own", "base"):
        copies = {}
        for name, output in trained.outputs.items():
            copies[name] = Path(shutil.copytree(output, tmp_path / kind / name))
            if kind == "base":
                for file in ("chat_template.jinja", "tokenizer_config.json"):
                    (copies[name] / file).unlink()
        words = [word for name, path in copies.items() for word in ("--adapter", f"{name}={path}")]
        done = CliRunner().invoke(
            app,
            [
                "eval", str(trained.base), "--task", str(tmp_path / "own.yaml"), *words, "--no-base", "--json",
                "--dtype", "float32", "-o", str(tmp_path / f"runs-{kind}"),
            ],
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert done.stderr.count("is asked with the chat template of") == (2 if kind == "own" else 0)
        for name in NAMES:
            result = json.loads((tmp_path / f"runs-{kind}" / name / "own" / "result.json").read_text())
            losses[kind, name] = result["metrics"]["loss"]["value"]
    for name in NAMES:
        assert losses["own", name] < losses["base", name] - 0.5, losses
    remote = ["eval", client[0].url, "--task", str(tmp_path / "own.yaml"), "--no-base", "--json"]
    words = [word for name in NAMES for word in ("--adapter", f"{name}=base:{name}")]
    done = CliRunner().invoke(app, [*remote, *words, "--tokenizer", str(trained.base), "-o", str(tmp_path / "remote")])
    assert done.exit_code == 0, done.output
    for name in NAMES:
        result = json.loads((tmp_path / "remote" / name / "own" / "result.json").read_text())
        assert result["metrics"]["loss"]["value"] == pytest.approx(losses["own", name], abs=1e-4), name


def test_eval_scores_the_tokens_of_training(trained: TrainedAdapters) -> None:
    """Also where the text of prompt and answer would be joined by a token, as in `Assistant:` and `//`."""
    from ktransformers.adapters.adapter_template import read_adapter_template
    from ktransformers.evaluate.backend import EvalPrompt, PromptTokenizer
    from ktransformers.train.data.files import DataRow
    from ktransformers.train.data.formats import TrainingConversation
    from ktransformers.train.data.render import Renderer

    tokenizer: Any = AutoTokenizer.from_pretrained(trained.outputs["deepseek"])
    answer = {"role": "assistant", "content": "// a comment"}
    row = Renderer(tokenizer, 512).encode(TrainingConversation([*MESSAGES, answer]), DataRow("f", 1, {}))
    tokens = PromptTokenizer(trained.tokenizer, "base", read_adapter_template(trained.outputs["deepseek"]))
    ids, start = tokens.split(EvalPrompt(QUESTION), "// a comment")
    assert start == row.prompts[0].tokens and [*ids, tokenizer.eos_token_id] == row.ids


def test_eval_of_a_server_refuses_a_tokenizer_with_another_template(
    trained: TrainedAdapters, client: tuple[Client, list[str]]
) -> None:
    from ktransformers.evaluate.backend import EvalPrompt, PromptTokenizer, Question
    from ktransformers.evaluate.remote import RemoteBackend, connect

    tokens = PromptTokenizer(trained.tokenizer, "base")
    backend = RemoteBackend(connect(client[0].url), "base:llama3", tokens)
    with pytest.raises(InputError, match=r"renders a prompt as \d+ tokens, where base:llama3 is served \d+ others"):
        backend.likelihoods([Question(EvalPrompt(QUESTION), ("Yes",))])


def test_chat_template_of_the_line_is_for_the_base(trained: TrainedAdapters, tmp_path: Path) -> None:
    from ktransformers.serve.http.templates import ServedTemplates

    (tmp_path / "mine.jinja").write_text(to_jinja(TEMPLATES["alpaca"]))
    launch = Launch(str(trained.base), chat_template=tmp_path / "mine.jinja")
    templates = ServedTemplates(trained.tokenizer, launch, resolve_target(str(trained.base)), lambda line: None)
    own = templates.read(trained.outputs["llama3"])
    assert templates.base == to_jinja(TEMPLATES["alpaca"])
    assert own is not None and own.text == to_jinja(TEMPLATES["llama3"])
    assert "chat_template.jinja" in (templates.describe(own) or "") and templates.describe(None) is None


@pytest.mark.parametrize("tampered", [False, True])
def test_prove_asks_with_messages(
    trained: TrainedAdapters, client: tuple[Client, list[str]], tmp_path: Path, tampered: bool
) -> None:
    """An adapter whose template was exchanged after training fails at the messages, though its numbers are right."""
    output = trained.outputs["deepseek"]
    if tampered:
        output = Path(shutil.copytree(output, tmp_path / "deepseek"))
        (output / "chat_template.jinja").write_text(to_jinja(TEMPLATES["chatml"]))
    done = CliRunner().invoke(app, ["prove", str(output), "--server", client[0].url, "--device", "cpu", "--json"])
    proof = json.loads(done.stdout)
    checks = {check["what"]: check for check in proof["checks"]}
    assert checks["server, adapter"]["passed"] and checks["base, messages"]["passed"]
    assert "of its tokenizer" in checks["base, messages"]["said"]
    assert checks["server, messages"]["passed"] is not tampered and done.exit_code == int(tampered), done.output
    if tampered:
        assert "chat template of base:" in proof["culprit"]
    else:
        assert "6 prompts, 3 of them later turns, are those of training" in checks["server, messages"]["said"]
        assert checks["server, end"]["passed"]


def test_run_answers_with_the_template_of_the_adapter(trained: TrainedAdapters) -> None:
    done = CliRunner().invoke(
        app, ["run", str(trained.outputs["llama3"]), QUESTION, "--max-tokens", "2", "--temperature", "0", "--json"]
    )
    assert done.exit_code == 0, done.output
    expected = len(trained.prompt(to_jinja(TEMPLATES["llama3"])))
    assert json.loads(done.stdout)["prompt_tokens"] == expected != len(trained.prompt(None))
    assert "are rendered with the chat template of" in done.stderr


def test_merged_model_has_the_template_of_its_adapter(trained: TrainedAdapters, tmp_path: Path) -> None:
    from ktransformers.adapters import convert, merge

    for name, output in trained.outputs.items():
        merge(trained.base, output, tmp_path / name, dtype="float32")
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.chat_template == (output / "chat_template.jinja").read_text()
    convert(trained.outputs["llama3"], tmp_path / "converted", "kt", dtype="bfloat16")
    text = (trained.outputs["llama3"] / "chat_template.jinja").read_text()
    assert (tmp_path / "converted" / "chat_template.jinja").read_text() == text


def test_yaml_file_for_inference_names_the_template(trained: TrainedAdapters, tmp_path: Path) -> None:
    """Of its adapters, or of the base if it names none; an adapter trained with that name keeps its own file."""
    keys = {"model_name_or_path": str(trained.base), "template": "deepseek", "cpu_infer": 1, "kt_backend": "auto"}
    asked = [QUESTION, "--max-tokens", "1", "--json"]

    def prompt_tokens(**more: Any) -> int:
        (tmp_path / "infer.yaml").write_text(json.dumps(keys | more))
        done = CliRunner().invoke(app, ["run", str(tmp_path / "infer.yaml"), *asked])
        assert done.exit_code == 0, done.output
        return int(json.loads(done.stdout)["prompt_tokens"])

    plain = len(trained.prompt(to_jinja(TEMPLATES["deepseek"])))
    own = len(trained.prompt((trained.outputs["deepseek"] / "chat_template.jinja").read_text()))
    assert prompt_tokens() == plain != own, "the recipe's default_system is in the adapter's file"
    assert prompt_tokens(adapter_name_or_path=str(trained.outputs["deepseek"])) == own
    assert prompt_tokens(adapter_name_or_path=str(trained.outputs["llama3"])) == plain
    assert prompt_tokens(default_system="Answer briefly.") == own
