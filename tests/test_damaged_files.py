"""Every reader of a foreign file under thousands of damaged copies of a good one: a copy is read, or refused with our
own error that names the file or the tensor, and never takes long. Each damage comes from a seed, which a failure shows.

`CASES` has one row for each kind of file: what a good one is, how it is damaged and who reads it. The first hundred
seeds of each run everywhere, the next thousands under `make test-slow`.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml

from ktransformers.adapters import read_adapter, write_adapter
from ktransformers.adapters.proof_record import PROOF_FILE, read_record
from ktransformers.checkpoint import ExpertShape, Shards
from ktransformers.checkpoint.dense import open_dense
from ktransformers.checkpoint.gguf_tokenizer import tokenizer_files
from ktransformers.checkpoint.kt_files import MANIFEST_FILE as TREE_MANIFEST
from ktransformers.checkpoint.kt_files import KTHeader
from ktransformers.checkpoint.sources import open_source
from ktransformers.checkpoint.sources.gguf_header import read_header
from ktransformers.evaluate.items import read_items
from ktransformers.evaluate.loop.settings import read_loop
from ktransformers.evaluate.task import load_tasks
from ktransformers.ground import model_registry, settings
from ktransformers.ground.errors import KTError
from ktransformers.modeling.load import load_config
from ktransformers.modeling.prepare import read_config
from ktransformers.operators.rules import read_rules
from ktransformers.plan.model_shape import open_shape
from ktransformers.quant.kt_layers import MergedLayer, add_tree_layer, store_matrix
from ktransformers.quant.report import QUALITY_FILE, read_report
from ktransformers.serve.target import resolve_target
from ktransformers.train.data.prepare import read_dataset
from ktransformers.train.resolve import read_settings
from ktransformers.train.settings import DataSettings
from tests.support.adapter_samples import Recipe, sample, write_model_config
from tests.support.mutations import damage_bytes, damage_json, damage_safetensors, damage_yaml
from tests.support.releases import write_gguf

OLD = Path(__file__).parent / "data" / "v0.1.0"
SECONDS = 20  # for one damaged file, on two slow cores
LONGEST_MESSAGE = 4000
GGUF_SHAPE = ExpertShape(2, 32, 64)

Damage = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Case:
    build: Callable[[Path], Path]  # writes good files into an empty folder, and returns the one to damage
    damage: Damage
    read: Callable[[Path], Any]  # gets the folder
    named: bool = True  # an error names the file; False: it may name a tensor or a key of it instead
    tolerant: bool = False  # a listing, which shows what it can


def _copy(source: Path, name: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return folder / name

    return build


def _text(name: str, text: str, **others: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        for other, contents in others.items():
            (folder / other.replace("__", ".")).write_text(contents)
        (folder / name).write_text(text)
        return folder / name

    return build


def read_sample_adapter(folder: Path) -> None:
    read_adapter(folder / "a", model=str(folder / "m"))


def _run(folder: Path) -> Path:
    """A trained adapter that names its base by a path that exists."""
    file = _copy(OLD / "run", "adapter_config.json")(folder)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(OLD / "base")}))
    return file


def _adapter(adapter_format: str, name: str, manifest: bool = True) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        write_model_config(Recipe(), folder / "m")
        write_adapter(sample(), folder / "a", adapter_format)
        if not manifest:
            (folder / "a" / "kt_manifest.json").unlink()
        return folder / "a" / name

    return build


def gguf_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a model of one layer with two experts, of 32 by 64, and a vocabulary of 4."""
    fields: dict[str, Any] = {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.key_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0, "expert_used_count": 1, "expert_count": 2, "expert_feed_forward_length": 64,
        "feed_forward_length": 64,
    }  # fmt: skip
    own = {f"qwen3moe.{key}": value for key, value in fields.items()}
    vocabulary = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab", "<e>"], "token_type": [1, 1, 1, 3]}
    vocabulary |= {"merges": ["a b"], "eos_token_id": 3}
    return own | {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()} | changes


def gguf_tensors(kind: str = "Q8_0") -> dict[str, tuple[Any, str]]:
    import gguf

    rng = numpy.random.default_rng(0)
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate_inp": (2, 32), "attn_norm": (32,), "ffn_norm": (32,), "attn_q_norm": (16,)}
    tensors: dict[str, tuple[Any, str]] = {"token_embd.weight": (rng.random((4, 32), numpy.float32), "F32")}
    tensors["output_norm.weight"] = (numpy.ones(32, numpy.float32), "F32")
    for leaf, shape in shapes.items():
        tensors[f"blk.0.{leaf}.weight"] = (rng.random(shape, numpy.float32), "F32")
    for role, shape in (("gate", (2, 64, 32)), ("up", (2, 64, 32)), ("down", (2, 32, 64))):
        data = gguf.quants.quantize(rng.random(shape, numpy.float32), gguf.GGMLQuantizationType[kind])
        tensors[f"blk.0.ffn_{role}_exps.weight"] = (data, kind)
    return tensors


def _gguf_model(folder: Path) -> Path:
    write_gguf(folder / "m.gguf", "qwen3moe", gguf_fields(), gguf_tensors())
    return folder / "m.gguf"


def read_gguf_model(folder: Path) -> None:
    """Everything that `kt quant` reads of the file, without building the model."""
    file = folder / "m.gguf"
    source = open_source(file)
    source.config()
    tokenizer_files(str(file), read_header(file).fields)
    for tensor in source.rest():
        tensor.read()
    for _ in source.layer("model.layers.0.mlp.experts", GGUF_SHAPE).chunks():
        pass


def _gguf_dense(folder: Path) -> Path:
    fields = {key.replace("qwen3moe", "llama"): value for key, value in gguf_fields().items() if "expert" not in key}
    tensors = {name: value for name, value in gguf_tensors().items() if "exps" not in name and "_norm" not in name}
    write_gguf(folder / "m.gguf", "llama", fields, tensors)
    return folder / "m.gguf"


def _read_dense(folder: Path) -> None:
    model = open_dense(folder / "m.gguf")
    model.read("model.layers.0.self_attn.q_proj.weight")
    model.write_tokenizer(folder)


def _read_shards(folder: Path) -> None:
    shards = Shards.of_directory(folder)
    for name in shards.names:
        shards.ref(name)
        shards.read(name)


def _read_model(folder: Path) -> None:
    source = open_source(folder, None)
    for tensor in source.rest():
        tensor.read()


def _index(folder: Path) -> Path:
    _copy(OLD / "base", "")(folder)
    shards = Shards.of_directory(folder)
    weight_map = dict.fromkeys(shards.names, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / "model.safetensors.index.json"


KT_EXPERTS = {role: torch.ones(2, 64, 64) for role in ("gate", "up", "down")}


def _kt_tree(folder: Path) -> Path:
    add_tree_layer(folder, 0, KT_EXPERTS, 8, 1)
    return folder / TREE_MANIFEST


def _kt_shard(folder: Path) -> Path:
    header = KTHeader(8, 1, 2, 64, 64, "id", "a test")
    layer = MergedLayer(folder, "model.safetensors", 0, header, False)
    for role, matrices in KT_EXPERTS.items():
        for expert in range(2):
            store_matrix(matrices[expert : expert + 1], role, expert, header, layer.write)
    layer.finish()
    return folder / "model.safetensors"


def _read_kt_experts(folder: Path) -> None:
    for _ in open_source(folder).layer("model.layers.0.mlp.experts", ExpertShape(2, 64, 64)).chunks():
        pass


ALPACA = [
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "s", "tools": "[]"},
    {"instruction": "f", "output": "g"},
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s", "tools": "[]"},
    {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "b"},
        ]
    },
]
MESSAGES = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [{"name": "f"}]},
    {"prompt": "a", "completion": "b"},
    {"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}],
     "rejected": [{"role": "assistant", "content": "c"}]},
    {"text": "plain"},
]  # fmt: skip
INFO = {
    "d": {
        "file_name": "rows.json", "formatting": "sharegpt", "ranking": False, "num_samples": 2,
        "columns": {"messages": "conversations", "system": "system"}, "tags": {"role_tag": "from"}, "fill": {"n": "x"},
    }
}  # fmt: skip
TASK = {
    "name": "t", "kind": "choice", "data": "rows.jsonl", "columns": {"slice": "s"}, "where": {"s": "1"}, "limit": 1,
    "metrics": ["letter"],
}  # fmt: skip
ITEMS = [
    {"id": 1, "s": 1, "question": "q", "choices": ["a", "b"], "answer": "A"},
    {"id": 2, "s": 1, "question": "q", "choices": '{"option1": "a", "option2": "b"}', "answer": "option2"},
]
RULES = [
    {
        "match": {"name": r"^model\.layers\.(0|1)\."},
        "replace": {"class": "default", "kwargs": {"generate_device": "cpu"}},
    },
    {"match": {"class": "a.b.C"}, "replace": {"class": "default", "kwargs": {"transfer_map": {"1": "cuda:1"}}}},
]


def _lines(rows: list[Any]) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def _parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    rows = [{"instruction": f"question {number}", "output": "x" * number} for number in range(40)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet", compression="gzip")
    return folder / "rows.parquet"


def _dataset(name: str) -> Callable[[Path], Any]:
    return lambda folder: read_dataset(name, DataSettings(dataset=(name,), dataset_dir=str(folder)))


def _registry(folder: Path) -> Path:
    file = model_registry.registry_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"config.json": {"size": 3, "sha256": None, "git_sha1": "a"}}
    models = [{"name": "m", "path": str(OLD / "base"), "source": "huggingface", "repo": "a/m", "files": facts}]
    file.write_text(json.dumps({"version": 1, "models": models}))
    return file


def _settings(folder: Path) -> Path:
    file = settings.config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("paths:\n  models: [a, b]\nserver:\n  port: 3000\n")
    return file


CONFIG = json.loads((OLD / "base" / "config.json").read_text())
CASES = {
    "model.safetensors": Case(_copy(OLD / "base", "model.safetensors"), damage_safetensors, _read_shards, named=False),
    "source": Case(_copy(OLD / "base", "model.safetensors"), damage_safetensors, _read_model, named=False),
    "index": Case(_index, damage_json, _read_shards, named=False),
    "config.json": Case(_copy(OLD / "base", "config.json"), damage_json, lambda f: read_config(f)),
    "config.json for kt plan": Case(
        _text("config.json", json.dumps(CONFIG)), damage_json, lambda f: open_shape(str(f))
    ),
    "config.json for transformers": Case(_text("config.json", json.dumps(CONFIG)), damage_json, load_config),
    "config.json in the registry": Case(
        _copy(OLD / "base", "config.json"), damage_json, model_registry.read_facts, tolerant=True
    ),
    "gguf": Case(_gguf_model, damage_bytes, read_gguf_model, named=False),
    "gguf, dense": Case(_gguf_dense, damage_bytes, _read_dense, named=False),
    "gguf adapter": Case(
        _adapter("gguf", "adapter.gguf", manifest=False), damage_bytes, read_sample_adapter, named=False
    ),
    "adapter_config.json": Case(
        _adapter("peft", "adapter_config.json"), damage_json, read_sample_adapter, named=False
    ),
    "adapter_config.json, one pair for each expert": Case(
        _adapter("per-expert", "adapter_config.json"), damage_json, read_sample_adapter, named=False
    ),
    "adapter tensors": Case(
        _adapter("peft", "adapter_model.safetensors", manifest=False), damage_safetensors,
        read_sample_adapter, named=False,
    ),
    "kt_manifest.json": Case(_adapter("peft", "kt_manifest.json"), damage_json, read_sample_adapter, named=False),
    "kt_manifest.json of training": Case(
        _copy(OLD / "run", "kt_manifest.json"), damage_json, lambda f: read_adapter(f, model=str(OLD / "base")),
        named=False,
    ),
    "kt-kernel's manifest": Case(
        _adapter("kt", "kt_adapter_manifest.json"), damage_json, read_sample_adapter, named=False
    ),
    "kt-kernel's manifest of experts": Case(_kt_tree, damage_json, _read_kt_experts, named=False),
    "kt-kernel's merged experts": Case(_kt_shard, damage_safetensors, _read_kt_experts, named=False),
    "served adapter": Case(_run, damage_json, lambda f: resolve_target(str(f)), named=False),
    "proof": Case(_copy(OLD / "run", PROOF_FILE), damage_safetensors, read_record),
    "report": Case(_copy(OLD / "packed", QUALITY_FILE), damage_json, lambda f: read_report(f).summary()),
    "alpaca": Case(_text("rows.json", json.dumps(ALPACA, indent=1)), damage_json, _dataset("rows.json")),
    "sharegpt": Case(_text("rows.json", json.dumps(SHAREGPT, indent=1)), damage_json, _dataset("rows.json")),
    "messages": Case(_text("rows.jsonl", _lines(MESSAGES)), damage_json, _dataset("rows.jsonl")),
    "csv": Case(_text("rows.csv", 'instruction,output\na,"b\nc"\nd,e\n'), damage_bytes, _dataset("rows.csv")),
    "parquet": Case(_parquet, damage_bytes, _dataset("rows.parquet")),
    "dataset_info.json": Case(
        _text("dataset_info.json", json.dumps(INFO), rows__json=json.dumps(SHAREGPT)), damage_json, _dataset("d"),
        named=False,
    ),
    "task": Case(
        _text("t.yaml", yaml.safe_dump(TASK), rows__jsonl=_lines(ITEMS)), damage_yaml,
        lambda f: [read_items(task) for task in load_tasks(str(f / "t.yaml"))], named=False,
    ),
    "items": Case(
        _text("rows.jsonl", _lines(ITEMS), t__yaml=yaml.safe_dump(TASK)), damage_json,
        lambda f: [read_items(task) for task in load_tasks(str(f / "t.yaml"))],
    ),
    "recipe": Case(_copy(OLD, "recipe.yaml"), damage_yaml, lambda f: read_settings(f / "recipe.yaml"), named=False),
    "rules": Case(_text("r.yaml", yaml.safe_dump(RULES)), damage_yaml, lambda f: read_rules(f / "r.yaml"), named=False),
    "loop": Case(
        _copy(OLD.parents[2] / "examples", "demo.yaml"), damage_yaml, lambda f: read_loop(f / "demo.yaml"), named=False
    ),
    "models.json": Case(_registry, damage_json, lambda _: model_registry.entries()),
    "config.yaml": Case(_settings, damage_yaml, lambda _: settings.read(), named=False),
}  # fmt: skip


class TookLong(Exception):
    """Not a KTError, so that it is a failure."""


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TookLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(name: str, seeds: range, folder: Path) -> None:
    case = CASES[name]
    file = case.build(folder)
    good = file.read_bytes()
    case.read(folder)
    refused = 0
    for seed in seeds:
        data = case.damage(good, random.Random(zlib.crc32(name.encode()) * 1_000_003 + seed))
        file.unlink()  # not in place: a mapping of the file before it stays as it was
        file.write_bytes(data)
        try:
            with deadline(SECONDS):
                case.read(folder)
        except KTError as error:
            message = str(error)
            refused += 1
            assert len(message) <= LONGEST_MESSAGE, f"seed {seed}: a message of {len(message)} characters"
            assert not case.named or file.name in message or folder.name in message, f"seed {seed}: {message}"
        except BaseException as error:
            kept = Path(folder.parent, f"seed-{seed}-{file.name}")
            kept.write_bytes(data)
            raise AssertionError(f"{name}, seed {seed}, {kept}: {type(error).__name__}: {str(error)[:300]}") from error
    assert case.tolerant or refused > len(seeds) // 20, "hardly any damage was noticed: is the file read at all?"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))


@pytest.mark.parametrize("name", CASES)
def test_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    if "gguf" in name:
        pytest.importorskip("gguf")
    if name == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "files").mkdir()
    check(name, range(100), tmp_path / "files")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_thousands_of_damaged_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    check(name, range(100, 3000), tmp_path / "files")
