"""A YAML file in place of a model: every key has its effect or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground.errors import InputError
from ktransformers.serve.flags import Launch, parse
from ktransformers.serve.target import resolve_target
from ktransformers.serve.yaml_keys import KNOWN_KEYS, is_training, with_yaml_keys


def launch_of(path: Path, keys: dict[str, Any], *words: str) -> Launch:
    path.write_text(json.dumps(keys))
    return with_yaml_keys(parse([str(path), *words]), resolve_target(str(path)).keys)


def test_keys_set_what_the_line_leaves_out(model_directory: Path, tmp_path: Path) -> None:
    base = {"model_name_or_path": str(model_directory), "infer_backend": "ktransformers", "trust_remote_code": True}
    file = tmp_path / "infer.yaml"
    launch = launch_of(file, base | {"kt_num_threads": 3, "kt_config": {"kt_threadpool_count": 1}, "kt_maxlen": 99})
    assert (launch.threads, launch.groups, launch.context_length, launch.isa) == (3, 1, 99, None)
    launch = launch_of(
        file, base | {"cpu_infer": 2, "kt_backend": "AVX2BF16", "infer_dtype": "float32", "chunk_size": 77}
    )
    assert (launch.threads, launch.isa, launch.dtype, launch.chunked_prefill_size) == (2, "avx2", "float32", 77)
    assert launch_of(file, base | {"kt_use_cuda_graph": False}).disable_cuda_graph
    assert launch_of(file, base | {"cpu_infer": 2}, "--kt-cpuinfer", "5").threads == 5, "a flag wins"
    assert with_yaml_keys(Launch("M"), {}) == Launch("M")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kt_num_thread": 3}, "`kt_num_threads`, perhaps"),
        ({"temperature": 0.5}, "requests set it"),
        ({"kt_backend": "AMXINT9"}, "kt_backend"),
        ({"use_kt": False}, "use_kt"),
        ({"kt_mode": "long_context"}, "normal"),
        ({"cpu_infer": "many"}, "cpu_infer"),
        ({"template": "lama3"}, "`llama3`, perhaps"),
        ({"vllm_gpu_util": 0.9}, "a key of inference"),
        ({"quantization_bit": 4}, "quantization_bit"),
    ],
)
def test_keys_without_effect_are_refused(
    model_directory: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        launch_of(tmp_path / "infer.yaml", {"model_name_or_path": str(model_directory), **keys})


def test_keys_of_training_are_passed_over(model_directory: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    keys = {
        "model_name_or_path": str(model_directory), "do_train": True, "stage": "sft", "dataset": "identity",
        "output_dir": str(adapters["one"]), "learning_rate": 1e-4, "lora_rank": 8, "kt_num_threads": 1,
    }  # fmt: skip
    assert is_training(keys) and launch_of(tmp_path / "train.yaml", keys).threads == 1


def test_documentation_lists_the_keys() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    assert [key for key in KNOWN_KEYS if f"`{key}`" not in text] == []
