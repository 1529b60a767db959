"""The plugin's flags, and the experts that they put on the GPU; nothing of SGLang is needed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.serve.sglang.options import OPTIONS_VARIABLE, ServerOptions, add_arguments, read_options
from ktransformers.serve.sglang.placement import place_experts
from ktransformers.serve.sglang.plugin import may_have_kt_flags
from tests.support.sglang_adapters import write_expert_adapter

LAYERS, EXPERTS = 4, 6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [1]}))
    return tmp_path


def parse(model: Path, *words: str) -> argparse.Namespace:
    """SGLang's own flags that ours depend on, and ours."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", default=str(model))
    parser.add_argument("--kt-weight-path")
    parser.add_argument("--kt-num-gpu-experts", type=int)
    parser.add_argument("--kt-threadpool-count", type=int, default=2)
    parser.add_argument("--init-expert-location", default="trivial")
    parser.add_argument("--disable-prefill-cuda-graph", action="store_true")
    parser.add_argument("--lora-paths", nargs="*")
    add_arguments(parser)
    return parser.parse_args(words)


def read(model: Path, *words: str) -> ServerOptions:
    options = read_options(parse(model, "--kt-weight-path", "x", *words))
    assert options is not None
    return options


def test_process_without_kt_flags_imports_nothing_more() -> None:
    code = (
        "import sys; sys.argv = ['serve', '--model-path', 'x']\n"
        "from ktransformers.serve.sglang.plugin import register; register()\n"
        "heavy = {'torch', 'numpy', 'sglang', 'argparse', 'ktransformers.serve.sglang.options'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kt_kernel_and_the_plugin_do_without_transformers_and_peft() -> None:
    """SGLang pins its own transformers and has no PEFT; where `import kt_kernel` fails it says that it is missing."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('transformers', 'peft', 'accelerate', 'trl')))\n"
        "from kt_kernel import KTMoEWrapper\n"
        "from ktransformers.serve.sglang import method, options"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "--model-path", "x"], False),
        (["serve", "--kt-weight-path", "x"], True),
        (["serve", "--kt-method=BF16"], True),
        (["serve", "--config", "x.yaml"], True),
        (["serve", "--config=x.yaml"], True),
        (["serve", "--model", "--kt"], False),
    ],
)
def test_command_lines_that_need_the_plugin(words: list[str], expected: bool) -> None:
    assert may_have_kt_flags(words) is expected


def test_options_reach_other_processes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, "")
    words = ("--kt-gpu-experts-ratio", "0.5", "--kt-numa-nodes", "0", "1", "--kt-expert-lora-path", "a=dir", "other")
    options = read(model, *words)
    options.to_environment()
    assert ServerOptions.from_environment() == options
    assert options.expert_lora == "other" and options.expert_lora_by_name == {"a": "dir"}
    assert options.numa_nodes == (0, 1) and env.text(OPTIONS_VARIABLE)


def test_server_without_kt_has_no_options(model: Path) -> None:
    assert read_options(parse(model)) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kt-gpu-experts-ratio", "0.5"), "--kt-weight-path"),
        (("--kt-weight-path", "x"), "--kt-num-gpu-experts"),
        (("--kt-weight-path", "x", "--kt-gpu-experts-ratio", "1.5"), "0 to 1"),
        (("--kt-weight-path", "x", "--kt-num-gpu-experts", "-1"), "0 or more"),
        (("--kt-weight-path", "x", "--kt-num-gpu-experts", "1", "--kt-numa-nodes", "0"), "--kt-threadpool-count"),
        (
            ("--kt-weight-path", "x", "--kt-num-gpu-experts", "1", "--kt-expert-placement-strategy", "frequency"),
            "--init-expert-location",
        ),
        (("--kt-weight-path", "x", "--kt-num-gpu-experts", "0", "--kt-expert-lora-path", "a", "b"), "one directory"),
        (("--kt-weight-path", "x", "--kt-num-gpu-experts", "0", "--kt-gpu-prefill-token-threshold", "-1"), "tokens"),
    ],
)
def test_refused_options(model: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_options(parse(model, *words))


def test_layerwise_prefill_switches_prefill_graphs_off(model: Path) -> None:
    words = ("--kt-weight-path", "x", "--kt-num-gpu-experts", "0", "--kt-gpu-prefill-token-threshold", "512")
    args = parse(model, *words)
    options = read_options(args)
    assert args.disable_prefill_cuda_graph and options is not None and options.gpu_prefill_token_threshold == 512


def test_dynamic_expert_update_of_the_guides_is_accepted(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ("--kt-num-gpu-experts", "1", "--kt-enable-dynamic-expert-update")
    assert read(model, *words) == read(model, "--kt-num-gpu-experts", "1")
    assert "mainline SGLang cannot move experts" in caplog.text


@pytest.mark.parametrize("gpu", [("--kt-num-gpu-experts", "1"), ("--kt-gpu-experts-ratio", "0.5")])
def test_lora_of_experts_leaves_none_on_the_gpu(
    model: Path, gpu: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, experts in (("one", True), ("rest", False)):
        write_expert_adapter(model / name, LAYERS, seed=1, attention=True, experts=experts)
    given = read(model, *gpu)
    with_lora = read(model, *gpu, "--lora-paths", f"rest={model / 'rest'}", f"one={model / 'one'}")
    assert with_lora == replace(given, num_gpu_experts=0, gpu_experts_ratio=None)
    assert f"{' '.join(gpu)} became 0: {model / 'one'} has LoRA of experts" in caplog.text
    assert read(model, *gpu, "--lora-paths", str(model / "rest"), "a/hub-name") == given
    halves = read(model, *gpu, "--kt-expert-lora-path", f"one={model / 'one'}")
    assert halves.num_gpu_experts == 0 and halves.gpu_experts_ratio is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--kt-num-gpu-experts", "2"), {0: (0, 1), 2: (0, 1), 3: (0, 1)}),
        (("--kt-num-gpu-experts", "0"), {0: (), 2: (), 3: ()}),
        (("--kt-num-gpu-experts", "6"), dict.fromkeys((0, 2, 3), tuple(range(EXPERTS)))),
        (("--kt-gpu-experts-ratio", "0"), {0: (), 2: (), 3: ()}),
        (("--kt-gpu-experts-ratio", "0.5", "--kt-num-gpu-experts", "1"), dict.fromkeys((0, 2, 3), (0, 1, 2))),
        (
            ("--kt-num-gpu-experts", "3", "--kt-expert-placement-strategy", "front-loading"),
            {0: tuple(range(EXPERTS)), 2: (0, 1, 2), 3: ()},
        ),
    ],
)
def test_experts_on_the_gpu(model: Path, words: tuple[str, ...], expected: dict[int, Any]) -> None:
    placement = place_experts(read(model, *words))
    assert placement.on_gpu == expected and placement.layers == LAYERS


def test_most_frequent_experts_are_on_the_gpu(model: Path) -> None:
    counts = torch.zeros(2, LAYERS, EXPERTS, dtype=torch.int64)
    counts[0, 0, 4], counts[1, 2, 1], counts[1, 3, 5] = 9, 8, 7
    counts[:, 1] = 100  # a dense layer
    torch.save({"logical_count": counts}, model / "counts.pt")
    args = parse(
        model,
        *("--kt-weight-path", "x", "--kt-num-gpu-experts", "1", "--kt-expert-placement-strategy", "frequency"),
        *("--init-expert-location", str(model / "counts.pt")),
    )
    options = read_options(args)
    assert options is not None and args.init_expert_location == "trivial"
    assert place_experts(options).on_gpu == {0: (4,), 2: (1,), 3: (5,)}


def test_random_experts_are_the_same_in_every_process(model: Path) -> None:
    words = ("--kt-num-gpu-experts", "3", "--kt-expert-placement-strategy", "random")
    first, second = place_experts(read(model, *words)), place_experts(read(model, *words))
    assert first == second and sum(map(len, first.on_gpu.values())) == 9
    assert first.on_gpu != place_experts(read(model, "--kt-num-gpu-experts", "3")).on_gpu


def test_deferral_needs_a_next_layer_on_the_cpu(model: Path) -> None:
    placement = place_experts(
        read(model, "--kt-num-gpu-experts", "3", "--kt-expert-placement-strategy", "front-loading")
    )
    assert [placement.may_defer(layer) for layer in range(LAYERS)] == [False, True, True, False]
    assert [placement.uses_cpu(layer) for layer in range(LAYERS)] == [False, False, True, True]


def test_slots_of_experts(model: Path) -> None:
    placement = place_experts(read(model, "--kt-num-gpu-experts", "2"))
    assert placement.slots(0) == [0, 1, -1, -1, -1, -1]
