"""Every flag and YAML key with its default, meaning and help, compared with the record in `tests/data/options.json`.

A name, default or meaning changes only together with the record: `python -m tests.test_options` writes it anew, and its
diff is what users will notice. The meaning of a flag or key is what one sample value changes in the parsed launch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ktransformers.ground.options.placement import read_options
from ktransformers.serve.flags import make_parser, make_run_parser, parse, parse_run
from ktransformers.serve.sglang.options import add_arguments
from ktransformers.serve.yaml_keys import FIXED_KEYS, KNOWN_KEYS, with_yaml_keys
from ktransformers.train.llamafactory.arguments import MAPPING, MODEL_FIELDS
from ktransformers.train.settings import SECTION_OF_KEY, SECTIONS

RECORD = Path(__file__).parent / "data" / "options.json"
SAMPLES: dict[str, Any] = {
    "--mem-fraction-static": "0.25",
    "--dtype": "float32",
    "--kv-cache-dtype": "fp8",
    "--kt-method": "AMXINT8",
    "--engine": "sglang",
    "--kt-expert-partition": "layers",
    "--attention-backend": "torch",
    "--dense-dtype": "fp8",
    "--lora-paths": "a=b",
    "--kv-disk-gb": "3 --kv-disk X",
    "--max-schema-depth": "7",
    "--tool-call-parser": "glm45",
    "--reasoning-parser": "qwen3",
    "--max-total-tokens": "77",
    "--max-body-bytes": "2048",
    "--kt-place": "stream",
    "--kt-expert-placement-strategy": "random",
    "init_expert_location": __file__,
    "infer_dtype": "float32",
    "kt_backend": "AVX2BF16",
    "kt_use_cuda_graph": False,
    "trust_remote_code": True,
    "kt_place": "stream",
    "kt_expert_placement_strategy": "random",
    "kt_gpu_experts_ratio": 0.5,
    "kt_config": {"kt_num_gpu_experts": 7, "kt_num_threads": 7},
    "kt_record_experts": "x",
    "kt_optimize_rule": "x",
}
LAUNCH_FIELDS = (
    *("target", "lora_paths", "served_model_name", "host", "port", "api_key", "allowed_hosts", "cors_origins", "watch"),
    *("max_running_requests", "max_queued_requests", "chunked_prefill_size", "max_total_tokens", "context_length"),
    *("memory", "kv_host_gb", "kv_disk", "kv_disk_gb", "kv_cache_dtype", "max_body_bytes", "max_prompts"),
    *("max_messages", "max_tools", "max_schema_properties", "max_schema_depth", "prepare_workers", "prepare_timeout"),
    *("request_timeout", "dtype", "trust_remote_code", "device", "chat_template", "threads", "groups", "isa"),
    *("expert_format", "always_on", "experts", "pages", "verify", "deterministic", "gpus", "place"),
    *(
        "nodes",
        "nodes_address",
        "nodes_timeout",
        "expert_partition",
        "first_node_experts",
        "cuda_graph_max_bs",
        "disable_cuda_graph",
    ),
    *("disable_overlap_schedule", "attention_backend", "rest", "log_level", "force", "notes"),
    *("tool_call_parser", "reasoning_parser", "strict_fields", "strict_model_names"),
)


def launch_values(launch: Any) -> dict[str, Any]:
    values = {name: getattr(launch, name) for name in LAUNCH_FIELDS}
    return dict(json.loads(json.dumps(values, default=str)))


def changes(launch: Any, name: str) -> dict[str, Any]:
    default = launch_values(parse(["M"]))
    found = {key: value for key, value in launch_values(launch).items() if value != default[key]}
    return json.loads(json.dumps(found).replace(__file__, f"FILE of {name}")) if found else {}


def describe(action: argparse.Action) -> dict[str, Any]:
    kind = "switch" if action.nargs == 0 else getattr(action.type, "__name__", "str")
    return {
        "names": list(action.option_strings),
        "kind": kind,
        "values": action.nargs,
        "default": action.default,
        "help": action.help,
    }


def flags_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    return {action.option_strings[0]: describe(action) for action in actions}


def sample_words(name: str, flag: dict[str, Any]) -> list[str]:
    if flag["kind"] == "switch":
        return [name]
    sample = {"int": "7", "float": "0.5"}.get(flag["kind"], "x")
    return [name, *str(SAMPLES.get(name, sample)).split()]


def serve_flags() -> dict[str, Any]:
    """Flags of `kt serve` with what a sample value of each changes in the launch."""
    flags = flags_of(make_parser())
    for name, flag in flags.items():
        words = sample_words(name, flag)
        launch = parse(words if name == "--model" else ["M", *words])
        flag["changes"] = {"given": " ".join(words), **changes(launch, name)}
    return flags


def run_flags() -> dict[str, Any]:
    flags = {name: flag for name, flag in flags_of(make_run_parser()).items() if name not in flags_of(make_parser())}
    default = vars(parse_run(["M"]))
    for name, flag in flags.items():
        given = vars(parse_run(["M", *sample_words(name, flag)]))
        flag["changes"] = {key: given[key] for key in given if given[key] != default[key]}
    return flags


def serve_keys() -> dict[str, Any]:
    """Keys of a file that `kt serve` opens; those that name the model, its template or requests change no option."""
    keys: dict[str, Any] = {}
    for name in KNOWN_KEYS:
        sample = SAMPLES.get(name, True if name.startswith("kt_enable") or name == "kt_w8a8" else 7)
        found = changes(with_yaml_keys(parse(["M"]), {name: sample}), name)
        options = vars(read_options({name: sample}))
        placed = {key: value for key, value in options.items() if value != vars(read_options())[key]}
        text = json.dumps({"launch": found, "placement": placed, "values": FIXED_KEYS.get(name)}, default=str)
        keys[name] = json.loads(text.replace(__file__, f"FILE of {name}"))
    return keys


def train_keys() -> dict[str, Any]:
    """Keys of `kt train`: section, default, types and limits, help."""
    keys = {}
    for section, model in SECTIONS.items():
        schema = TypeAdapter(model).json_schema()
        for name, entry in schema["properties"].items():
            if name not in SECTION_OF_KEY:
                continue
            keys[name] = {"section": section, "required": name in schema.get("required", ()), **entry}
            for word in ("title", "format", "flags", "keys", "metavar"):
                keys[name].pop(word, None)
    return keys


def sglang_flags() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = flags_of(parser)
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            flags[action.option_strings[0]]["choices"] = action.choices
    return flags


def llamafactory_fields() -> dict[str, Any]:
    return {item.name: {"default": item.default, "help": item.help} for item in (*MODEL_FIELDS, MAPPING)}


TABLES = {
    "kt serve": serve_flags,
    "kt run": run_flags,
    "keys of serving": serve_keys,
    "keys of training": train_keys,
    "SGLang": sglang_flags,
    "LLaMA-Factory": llamafactory_fields,
    "launch": lambda: launch_values(parse(["M"])),
}


def read_record() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text()))


@pytest.mark.parametrize("table", TABLES)
def test_names_defaults_and_meanings_are_those_of_the_record(table: str) -> None:
    made, recorded = json.loads(json.dumps(TABLES[table](), default=str)), read_record()[table]
    assert sorted(made) == sorted(recorded)
    for name, entry in made.items():
        assert entry == recorded[name], name


def test_record_has_every_flag_and_key() -> None:
    recorded = read_record()
    assert len(recorded["kt run"]) == 5
    assert len([flag for flag in recorded["kt serve"].values() if flag["help"] != argparse.SUPPRESS]) == 70 + 3
    assert len(recorded["keys of training"]) == 70 and len(recorded["keys of serving"]) == 39


def write_record() -> None:
    """One line for each flag, key or field, sorted by name."""
    tables = {
        name: [f"  {json.dumps(key)}: {json.dumps(entry, default=str)}" for key, entry in sorted(make().items())]
        for name, make in TABLES.items()
    }
    text = ",\n".join(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }" for name, lines in tables.items())
    RECORD.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    write_record()
