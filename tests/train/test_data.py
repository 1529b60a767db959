"""Rows of every form into tokens with the right loss, and bad rows named by file and line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from ktransformers.adapters.chat_templates import (
    EMPTY_THOUGHT,
    TEMPLATES,
    find_template,
    missing_tokens,
    templates_with_tools,
    to_jinja,
    with_defaults,
)
from ktransformers.ground.errors import InputError
from ktransformers.train.data.files import DataRow, read_rows
from ktransformers.train.data.formats import PlainText, PreferencePair, TrainingConversation, read_sample
from ktransformers.train.data.prepare import mix_datasets, pack_rows, prepare, read_datasets
from ktransformers.train.data.registry import DEMO_DATA_DIR, DatasetSource, find_source
from ktransformers.train.data.render import IGNORE_INDEX, Renderer, TrainRow, show_labels
from ktransformers.train.settings import DataSettings

TEMPLATE_FILES = Path(__file__).resolve().parent.parent / "data" / "chat_templates"
TALK = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "Four"},
]
ANSWERS = {"messages": TALK}
FOUND = TrainingConversation(TALK)


def sample_of(values: dict[str, Any], **entry: Any) -> Any:
    return read_sample(DataRow("f.jsonl", 7, values), DatasetSource(name="x", path=Path("f.jsonl"), **entry))


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in pairs]


def test_row_formats_are_detected() -> None:
    assert sample_of(ANSWERS) == FOUND
    sharegpt = turns(("human", "Hi there"), ("gpt", "Hello."), ("human", "And 2+2?"), ("gpt", "Four"))
    assert sample_of({"conversations": sharegpt}) == FOUND
    alpaca = {"instruction": "And", "input": "2+2?", "output": "Four", "history": [["Hi there", "Hello."]]}
    assert [turn["content"] for turn in sample_of(alpaca).messages] == ["Hi there", "Hello.", "And\n2+2?", "Four"]
    assert sample_of({"prompt": TALK[:1], "completion": TALK[1:2]}) == TrainingConversation(TALK[:2])
    assert sample_of({"prompt": "a", "completion": "b"}).raw_prompt == "a"
    assert sample_of({"text": "all of it"}) == PlainText("all of it")
    with_system = sample_of({"instruction": "a", "output": "b", "system": "be kind"})
    assert with_system.messages[0] == {"role": "system", "content": "be kind"}


def test_preference_pairs_of_llama_factory_and_trl_are_read() -> None:
    expected = PreferencePair(TALK[:1], TALK[1], {"role": "assistant", "content": "No."})
    rejected = {"role": "assistant", "content": "No."}
    named = {"from": "gpt", "value": "Hello."}, {"from": "gpt", "value": "No."}
    rows = [
        {"conversations": turns(("human", "Hi there")), "chosen": named[0], "rejected": named[1]},
        {"instruction": "Hi there", "chosen": "Hello.", "rejected": "No."},
        {"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": [rejected]},
        {"chosen": TALK[:2], "rejected": [TALK[0], rejected]},
    ]
    for row in rows:
        assert sample_of(row) == expected, row
    assert sample_of({"prompt": "p", "chosen": "c", "rejected": "r"}).raw == ("p", "c", "r")


def test_tool_calls_are_converted() -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    row = {
        "conversations": turns(("human", "1+1?"), ("function_call", call), ("observation", "2"), ("gpt", "Two.")),
        "tools": '[{"name": "add", "description": "adds", "parameters": {}}]',
    }
    found = sample_of(row, formatting="sharegpt")
    assert [turn["role"] for turn in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert found.tools[0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"instruction": "a", "output": 3}, "output: int"),
        ({"instruction": "a"}, "no output"),
        ({"foo": 1}, "fields foo"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "role 'boss'"),
        ({"messages": TALK[:1]}, "user last"),
        ({"messages": TALK[1:]}, "assistant first"),
        ({"messages": [*TALK, {"role": "system", "content": "x"}, *TALK]}, "in the middle"),
        ({"messages": []}, "messages: list"),
        ({"conversations": turns(("robot", "x"))}, "'robot'"),
        ({"conversations": turns(("human", "x"), ("function_call", "{"))}, "no JSON"),
        ({"chosen": TALK[:2], "rejected": TALK}, "differ before the last turn"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "pairs of texts"),
        ({"instruction": "a", "output": "b", "tools": "{"}, "tools"),
    ],
)
def test_invalid_row_error_names_file_and_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        sample_of(values)
    assert "f.jsonl, line 7" in str(error.value) and message in str(error.value)


def test_every_file_type_is_read(tmp_path: Path) -> None:
    rows = [{"instruction": f"q{n}", "input": "", "output": "a\nb"} for n in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    with (tmp_path / "c.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    lines = {"a.json": [2, 7, 12], "b.jsonl": [1, 2, 3], "c.csv": [2, 4, 6], "d.parquet": [1, 2, 3]}
    for name, expected in lines.items():
        found = list(read_rows(tmp_path / name))
        assert [row.values for row in found] == rows, name
        assert [row.line for row in found] == expected, name
    (tmp_path / "one.json").write_text(json.dumps(rows[0], indent=1))
    assert [row.values for row in read_rows(tmp_path / "one.json")] == rows[:1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", '[\n{"a": 1},\n{"a" 2}\n]', "x.json, line 3"),
        ("x.json", '[{"a": 1},', "without end"),
        ("x.json", '[\n{"a": 1},\n\n3]', "x.json, line 4: given a int"),
        ("x.jsonl", '{"a": 1}\n{"a": 2\n', "x.jsonl, line 2"),
        ("x.csv", "a,b\n1,2\n1\n", "x.csv, line 3"),
        ("x.txt", "a", "type .txt"),
    ],
)
def test_broken_file_error_names_the_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as error:
        list(read_rows(tmp_path / name))
    assert message in str(error.value)


def test_packaged_datasets_are_readable_and_licensed() -> None:
    info = json.loads((DEMO_DATA_DIR / "dataset_info.json").read_text())
    assert {"identity", "dpo_en_demo", "style_neko_en"} <= set(info)
    for name, entry in info.items():
        assert entry["licence"] and entry["origin"]
        (found,) = read_datasets([name], DataSettings(dataset=(name,)))
        assert len(found.samples) >= 60
    licences = {entry["licence"].partition(", ")[2] for entry in info.values()} - {""}
    assert all((DEMO_DATA_DIR / name).is_file() for name in licences)


def test_identity_placeholders_are_filled() -> None:
    settings = DataSettings(dataset=("identity",), identity_author="me")
    (found,) = read_datasets(["identity"], settings)
    texts = json.dumps([sample.messages for _, sample in found.samples], ensure_ascii=False)
    assert "{{" not in texts and "Kite" in texts and "developed by me" in texts


def test_user_dataset_info_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"q": "a", "a": "b"}\n')
    entry = {"file_name": "mine.jsonl", "columns": {"prompt": "q", "response": "a", "query": None}}
    openai = {"file_name": "mine.jsonl", "formatting": "openai"}
    hub = {"hf_hub_url": "a/b"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"identity": entry, "chat": openai, "far": hub}))
    settings = DataSettings(dataset=("identity",), dataset_dir=str(tmp_path))
    (found,) = read_datasets(["identity"], settings)
    assert [turn["content"] for turn in found.samples[0][1].messages] == ["a", "b"]
    assert find_source("chat", str(tmp_path)).tags.role_tag == "role"
    assert find_source("dpo_en_demo", str(tmp_path)).ranking, "the shipped ones are still there"
    assert find_source("mine.jsonl", str(tmp_path)).formatting == "auto"
    for name, message in {
        "far": "hf_hub_url",
        "identty": "`identity`, perhaps",
        "x.json": "a file that exists",
    }.items():
        with pytest.raises(InputError, match=message):
            find_source(name, str(tmp_path))
    with pytest.raises(InputError, match=r"CC BY-NC"):
        find_source("alpaca_en_demo", None)
    # Names that are no paths: of more characters than a file name has, and with a NUL.
    for name in ("x" * 300 + ".json", "x\0.json"):
        with pytest.raises(InputError, match="a file that exists"):
            find_source(name, str(tmp_path))
        with pytest.raises(InputError, match="no such file"):
            list(read_rows(tmp_path / name))
        with pytest.raises(InputError, match="dataset_dir"):
            find_source("identity", str(tmp_path / name))


def rendered(tokenizer: Any, template: str | None, conversation: TrainingConversation = FOUND, **options: Any) -> str:
    before = tokenizer.chat_template
    defaults = options.pop("default_system", None), options.pop("enable_thinking", None)
    tokenizer.chat_template = with_defaults(before if template is None else template, *defaults)
    try:
        renderer = Renderer(tokenizer, options.pop("cutoff_len", 500), **options)
        return show_labels(renderer.encode(conversation, DataRow("f", 1, {})), tokenizer)
    finally:
        tokenizer.chat_template = before


def test_labels_cover_only_assistant_tokens(tokenizer: Any) -> None:
    head = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    middle = "\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n"
    plain = to_jinja(TEMPLATES["qwen3_nothink"])
    assert rendered(tokenizer, plain) == f"{head}«Hello.<|im_end|>»{middle}«Four<|im_end|>»"
    assert rendered(tokenizer, plain, mask_history=True) == f"{head}Hello.<|im_end|>{middle}«Four<|im_end|>»"
    assert rendered(tokenizer, plain, train_on_prompt=True) == f"«{head}Hello.<|im_end|>{middle}Four<|im_end|>»"
    system = "<|im_start|>system\nBe kind<|im_end|>\n"
    assert rendered(tokenizer, plain, default_system="Be kind").startswith(system + head)


def test_reasoning_is_rendered_as_in_the_template(tokenizer: Any) -> None:
    think = to_jinja(TEMPLATES["qwen3"])
    empty = "<think>\n\n</think>\n\n"
    assert f"«{empty}Four<|im_end|>»" in rendered(tokenizer, think)
    assert f"{empty}«Four<|im_end|>»" in rendered(tokenizer, think, enable_thinking=False)
    thought = TrainingConversation([TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}])
    own = (TEMPLATE_FILES / "qwen3.jinja").read_text()
    for template in (think, own):
        assert rendered(tokenizer, template, thought).endswith("«<think>\nhm\n</think>\n\nHello.<|im_end|>»")
    assert rendered(tokenizer, own).endswith(f"«{empty}Four<|im_end|>»")
    assert "«Hello.<|im_end|>»" in rendered(tokenizer, own), "the history of Qwen3's own template has no thoughts"


def test_named_templates_match_released_templates(tokenizer: Any) -> None:
    """Marks and masks: the released templates say the same as ours of that name."""
    system = TrainingConversation([{"role": "system", "content": "Be kind."}, *TALK])
    one = TrainingConversation(TALK[:2])
    qwen, deepseek = ((TEMPLATE_FILES / f"{name}.jinja").read_text() for name in ("qwen3", "deepseek_v3"))
    deepseek = deepseek.replace("<｜end▁of▁sentence｜>", tokenizer.eos_token)
    for conversation in (FOUND, system, one):
        assert rendered(tokenizer, to_jinja(TEMPLATES["deepseek3"]), conversation) == rendered(
            tokenizer, deepseek, conversation
        )
    assert rendered(tokenizer, to_jinja(TEMPLATES["qwen3"]), one) == rendered(tokenizer, qwen, one)
    for prompt in (FOUND.messages[:1], system.messages[:2]):
        for name, released in (("qwen3", qwen), ("qwen3_nothink", qwen), ("deepseek3", deepseek)):
            texts = [
                tokenizer.apply_chat_template(prompt, chat_template=text, tokenize=False, add_generation_prompt=True)
                for text in (to_jinja(TEMPLATES[name]), released)
            ]
            assert texts[0] == texts[1], name


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_masks_and_ends(tokenizer: Any, name: str) -> None:
    text = rendered(tokenizer, to_jinja(TEMPLATES[name]))
    assert text.count("«") == 2
    assert "Hello." in text.split("«")[1] and "Hi there" not in text.split("«")[1].split("»")[0]
    assert text.endswith("»")
    end = TEMPLATES[name].assistant[1].strip() or tokenizer.eos_token
    assert text[:-1].endswith((end, tokenizer.eos_token))


def test_unknown_template_and_missing_tokens_are_reported(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="`qwen3`, perhaps"):
        find_template("qwen33")
    assert missing_tokens(TEMPLATES["llama3"], tokenizer) == ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    assert missing_tokens(TEMPLATES["qwen3"], tokenizer) == []
    result = TrainingConversation([*TALK, {"role": "tool", "content": "x"}, *TALK[1:2]])
    call = TrainingConversation([*TALK[:1], {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}])
    for conversation, message in ((result, "no form for tool"), (call, "no form for calls")):
        with pytest.raises(InputError, match=message):
            rendered(tokenizer, to_jinja(TEMPLATES["chatml"]), conversation)


@pytest.mark.parametrize("name", templates_with_tools())
def test_named_templates_show_tools_as_released_templates_do(tokenizer: Any, name: str) -> None:
    add = {"name": "add", "description": 'Zählt "a" und b', "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": add}, {"type": "function", "function": add | {"name": "sub"}}]

    def call(function: str, arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": function, "arguments": arguments}}

    several = [call("add", {"a": 1, "b": "ü"}), call("sub", '{"a": 2}')]
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 + ü?"},
        {"role": "assistant", "content": "", "tool_calls": several},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Once more.", "tool_calls": several[:1]},
        {"role": "tool", "content": "5"},
    ]
    answer = {"role": "assistant", "content": "Five."}
    released = (TEMPLATE_FILES / "qwen3.jinja").read_text()

    def text(template: str, messages: list[dict[str, Any]], prompt: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": prompt, "chat_template": template}
        return str(tokenizer.apply_chat_template(messages, tools=tools, **options)).replace(EMPTY_THOUGHT, "")

    ours = to_jinja(TEMPLATES[name])
    beginnings = (0,) if TEMPLATES[name].default_system else (0, 1)  # with a system message, and without
    for first in beginnings:
        assert text(ours, talk[first:], True) == text(released, talk[first:], True)
        assert text(ours, [*talk[first:], answer], False) == text(released, [*talk[first:], answer], False)
    learned = rendered(tokenizer, ours, TrainingConversation([*talk, answer], tools))
    assert learned.count("«") == 3 and "Five.<|im_end|>»" in learned
    assert '"arguments": {"a": 1, "b": "ü"}}\n</tool_call>\n<tool_call>' in learned.split("»")[0].split("«")[1]
    system = TEMPLATES[name].default_system
    beginning = f"{system}\n\n# Tools" if system else "# Tools"
    assert text(ours, talk[1:2], True).startswith(f"<|im_start|>system\n{beginning}")


def test_tools_are_passed_to_the_tokenizer_template(tokenizer: Any) -> None:
    (found,) = read_datasets(["glaive_toolcall_en_demo"], DataSettings(dataset=("x",), max_samples=20))
    renderer = Renderer(tokenizer, 4096)
    called = 0
    for row, sample in found.samples:
        tokens = renderer.encode(sample, row)
        learned = tokenizer.decode([label for label in tokens.labels if label != IGNORE_INDEX])
        called += "<tool_call>" in learned
        assert "<tool_response>" not in learned
    assert called > 3


def test_tools_under_a_template_without_them_are_refused(tokenizer: Any) -> None:
    from ktransformers.train.tokenizer import check_template

    (found,) = read_datasets(["glaive_toolcall_en_demo"], DataSettings(dataset=("x",), max_samples=20))
    check_template(tokenizer, [found])
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = to_jinja(TEMPLATES["qwen3"])
        check_template(tokenizer, [found])
        tokenizer.chat_template = to_jinja(TEMPLATES["llama3"])
        message = "tools, which the chat template does not show, expected a template .* qwen, qwen3, qwen3_nothink"
        with pytest.raises(InputError, match=message):
            check_template(tokenizer, [found])
    finally:
        tokenizer.chat_template = before


def test_plain_text_and_raw_prompts_are_encoded(tokenizer: Any) -> None:
    assert rendered(tokenizer, None, PlainText("abc")) == f"«abc{tokenizer.eos_token}»"  # type: ignore[arg-type]
    raw = TrainingConversation([{"role": "assistant", "content": " b"}], raw_prompt="a")
    assert rendered(tokenizer, None, raw) == f"a« b{tokenizer.eos_token}»"


def test_rows_are_truncated_mixed_split_and_dropped(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b " * 40}] * 3 + [{"instruction": "a " * 200, "output": "b"}]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    settings = DataSettings(dataset=(str(tmp_path / "x.json"), "identity"), cutoff_len=32, max_samples=10, val_size=2)
    found = read_datasets(settings.dataset, settings)
    renderer = Renderer(tokenizer, 32)
    split = prepare(found, [], renderer, settings, seed=1)
    assert split.dropped == 1 and len(split.evaluation) == 2 and len(split.train) == 11
    assert max(len(row.ids) for row in split.train) == 32
    again = prepare(found, [], renderer, settings, seed=1)
    assert again == split
    with pytest.raises(InputError, match="val_size"):
        prepare(found, [], renderer, settings.model_copy(update={"val_size": 50}), seed=1)


def test_rows_with_an_empty_answer_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": text} for text in ("", " ", "b", "c d")]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    settings = DataSettings(dataset=(str(tmp_path / "x.json"),), cutoff_len=64)
    split = prepare(read_datasets(settings.dataset, settings), [], Renderer(tokenizer, 64), settings, seed=1)
    assert (split.ends, len(split.train), split.dropped) == (2, 4, 0)


def test_interleaving_follows_probabilities() -> None:
    parts = [list(range(100)), list(range(1000, 1010))]
    under = mix_datasets(parts, DataSettings(mix_strategy="interleave_under"), seed=3)
    over = mix_datasets(parts, DataSettings(mix_strategy="interleave_over", interleave_probs=(0.5, 0.5)), seed=3)
    assert sum(row >= 1000 for row in under) <= 10 and len(under) < 110
    assert set(over) == {*parts[0], *parts[1]} and over.count(1000) > 1
    with pytest.raises(InputError, match="interleave_probs"):
        mix_datasets(parts, DataSettings(mix_strategy="interleave_under", interleave_probs=(1.0,)), seed=3)


def test_packing_keeps_every_row() -> None:
    lengths = [5, 9, 3, 7, 2, 10, 1, 6]
    rows = [TrainRow([n] * n, [n] * n) for n in lengths]
    packs = pack_rows(rows, 10)
    assert sorted(len(row.ids) for part in packs for row in part) == sorted(lengths)
    assert all(sum(len(row.ids) for row in part) <= 10 for part in packs)
    assert len(packs) == 5  # 43 tokens need at least five sequences of ten
