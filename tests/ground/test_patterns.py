"""Regular expressions of downloaded files: the answers of `re`, within bounds of time and memory."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest
import torch

from ktransformers.adapters import read_adapter, write_adapter
from ktransformers.adapters.config import check_for_peft
from ktransformers.evaluate.measure import statistics
from ktransformers.evaluate.task import load_tasks
from ktransformers.ground import patterns
from ktransformers.ground.errors import InputError
from ktransformers.ground.patterns import FilePatterns
from ktransformers.operators.plan import first_rules
from ktransformers.operators.rules import read_rules
from tests.support.adapter_samples import Recipe, sample, write_model_config

NAMES = [f"model.layers.{layer}.{leaf}" for layer in range(3) for leaf in ("self_attn.q_proj", "mlp.gate", "norm")]
SLOW = r"(([a-z_.0-9])+)+!"  # exponential in `re` for any name


def used_seconds() -> float:
    """CPU time of processes that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 1.0)


@pytest.mark.parametrize("method", ["fullmatch", "match", "search"])
@pytest.mark.parametrize(
    "listed",
    [
        ["q_proj", "norm"],
        [r"model\.layers\.1\.norm"],
        [r".*\.(1|2)\..*proj", r".*norm"],
        [r"(?i:MODEL)\.\w+\.0.*"],
        [".*"],
    ],
)
def test_answers_are_those_of_re(method: str, listed: list[str]) -> None:
    matcher = FilePatterns("f: k", listed, method)
    for name in NAMES:
        expected = next((n for n, pattern in enumerate(listed) if getattr(re, method)(pattern, name)), None)
        assert matcher.first(name) == expected
    again = FilePatterns("f: k", listed, "match", r"(.*\.)?({})$")
    again.prefetch(NAMES)
    for name in NAMES:
        assert again.fits(name) == any(re.match(rf"(.*\.)?({pattern})$", name) for pattern in listed)


def test_names_alone_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = FilePatterns("f: k", ["q_proj", r"self_attn\.q_proj", "model.layers.1.norm"], "search")
    with monkeypatch.context() as patched:
        patched.setattr(patterns, "run_sandboxed", None)
        assert matcher.first("model.layers.1.norm") == 2
    assert matcher.first("q_proj" * 200) == 0


@pytest.mark.parametrize("pattern", [SLOW, "(.|[a-z])*!", r"((((((\w?){100}){100}){100}){100}){100})!"])
def test_slow_pattern_ends_in_an_error(pattern: str) -> None:
    start = used_seconds()
    with pytest.raises(InputError, match=r"^f: k: given the regular expression .* takes more than"):
        matcher = FilePatterns("f: k", [pattern])
        matcher.first("model.layers.10.self_attn.q_proj_and_a_long_name")
    assert used_seconds() - start < 10


def test_slow_patterns_together_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "FILE_SECONDS", 0.2)
    matcher = FilePatterns("f: k", [".*x"])
    matcher._seconds = 0.0
    with pytest.raises(InputError, match="takes more than"):
        matcher.first("a")


@pytest.mark.parametrize("pattern", ["(", "[", "*", "(?P<a>", r"\1(", "a{2,1}", "x" * 60_000])
def test_invalid_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InputError, match=r"^f: k: given"):
        FilePatterns("f: k", [pattern])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", SLOW),
        ("target_modules", "("),
        ("exclude_modules", "("),
        ("rank_pattern", {SLOW: 4}),
        ("rank_pattern", {"(": 4}),
        ("alpha_pattern", {SLOW: 4.0}),
        ("alpha_pattern", {"[": 4.0}),
    ],
)
def test_adapter_with_a_bad_pattern_is_refused(key: str, value: object, tmp_path: Path) -> None:
    model = write_model_config(Recipe(), tmp_path / "m")
    write_adapter(sample(), tmp_path / "a", "peft")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    start = used_seconds()
    with pytest.raises(InputError, match=rf"adapter_config\.json: {key}: given"):
        read_adapter(tmp_path / "a", model=model)
    network = torch.nn.Sequential()
    network.add_module("a_name_that_is_long_enough_for_years_of_matching", torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match=rf"adapter_config\.json: {key}: given"):
        check_for_peft(tmp_path / "a", network)
    assert used_seconds() - start < 10


def test_pattern_of_an_adapter_selects_what_peft_selects(tmp_path: Path) -> None:
    model = write_model_config(Recipe(), tmp_path / "m")
    write_adapter(sample(), tmp_path / "a", "peft")
    file = tmp_path / "a" / "adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"target_modules": r".*\.self_attn\.[qko]_proj|.*\.gate"}))
    assert len(read_adapter(tmp_path / "a", model=model).modules) == 8
    file.write_text(json.dumps(fields | {"target_modules": r".*\.self_attn\.[qk]_proj|.*\.gate"}))
    with pytest.raises(InputError, match="LoRA on a module that target_modules does not name"):
        read_adapter(tmp_path / "a", model=model)


def test_rule_with_a_slow_pattern_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"- match: {{name: '{SLOW}'}}\n  replace: {{class: default}}\n")
    network = torch.nn.Sequential()
    network.add_module("a_name_that_is_long_enough_for_years_of_matching", torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"r\.yaml, entry 1: match\.name: given the regular expression"):
        first_rules(network, read_rules(tmp_path / "r.yaml"))


def test_task_with_a_slow_pattern_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (tmp_path / "t.yaml").write_text(
        f"kind: generate\ndata: rows.jsonl\nmetrics: [style, exact]\nstyle: {{slow: '{SLOW}'}}\nextract: '\\d+'\n"
    )
    (task,) = load_tasks(str(tmp_path / "t.yaml"))
    records = [{"prediction": "an_answer_of_forty_characters_or_a_few_more", "reference": "12"}]
    with pytest.raises(InputError, match=r"style\.slow: given the regular expression"):
        statistics(task, records)
    (tmp_path / "t.yaml").write_text("kind: generate\ndata: rows.jsonl\nextract: '('\n")
    with pytest.raises(InputError, match=r"t\.yaml: extract: given '\(', which is no regular expression"):
        load_tasks(str(tmp_path / "t.yaml"))
