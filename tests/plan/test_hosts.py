"""Plans over several hosts: bytes on the wire by enumeration, memory of every host, partitions, remedies, the command,
and the tables of docs/scale.md."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.cli.plan_text import choice_line, size_text
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.field import options_of
from ktransformers.ground.options.serving import ServingOptions
from ktransformers.plan import Machine, ModelShape, Plan, Serving, Training, open_shape, profile, with_gpus, with_memory
from ktransformers.plan.exchange import (
    HEADER_BYTES,
    backward_row,
    expected_max,
    forward_row,
    hit_probabilities,
    layer_exchange,
)
from ktransformers.plan.hosts import (
    BY_EXPERTS,
    BY_LAYERS,
    evaluate_hosts,
    even_shares,
    hosts_of,
    make_hosts_plan,
    parse_network,
)
from ktransformers.plan.planner import evaluate
from ktransformers.plan.workload import Choice, expert_bytes
from ktransformers.serve.flags import parse
from ktransformers.serve.launch import serve

SCALE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
NETWORK = parse_network("25Gb")
MODELS = {"Kimi-K2 int4": "k2-thinking", "DeepSeek-V3 fp8": "deepseek-v3"}


def zen5(memory: str = "256GB") -> Machine:
    return with_memory(profile("epyc-zen5"), memory)


def kt(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize("counts", [(2, 2, 2), (0, 3, 3), (1, 5, 0), (4, 2, 1)])
def test_hosts_of_a_token_are_those_of_all_draws(counts: tuple[int, ...]) -> None:
    owner = [host for host, own in enumerate(counts) for _ in range(own)]
    draws = list(itertools.combinations(range(len(owner)), 4))
    for host, hit in enumerate(hit_probabilities(counts, 4)):
        assert hit == pytest.approx(sum(host in {owner[e] for e in draw} for draw in draws) / len(draws))
    rows = sum(len({owner[e] for e in draw} - {0}) for draw in draws) / len(draws)
    exchange = layer_exchange(10, forward_row(64, 4, 4, adapters=True), counts, 4, 0)
    peers = sum(1 for own in counts[1:] if own)
    assert exchange.sent == pytest.approx(10 * rows * (64 * 4 + 4 * 8 + 4) + peers * HEADER_BYTES)
    assert exchange.returned == pytest.approx(10 * rows * 64 * 4 + peers * HEADER_BYTES)


@pytest.mark.parametrize("drawn", [0, 1, 3, 5, 7])
def test_the_busiest_host_is_that_of_all_draws(drawn: int) -> None:
    counts = (2, 3, 2)
    owner = [0, 0, 1, 1, 1, 2, 2]
    for among in ((0, 1, 2), (1, 2)):
        draws = list(itertools.combinations(range(7), drawn))
        loads = [max(sum(owner[e] == host for e in draw) for host in among) for draw in draws]
        assert expected_max(counts, drawn, among) == pytest.approx(sum(loads) / len(loads))


def test_backward_returns_gradients_of_weights_and_sends_no_ids() -> None:
    exchange = layer_exchange(1, backward_row(64, 8, 2), (0, 8), 8, 0)
    assert (exchange.sent, exchange.returned) == (128 + HEADER_BYTES, 128 + 32 + HEADER_BYTES)


@pytest.mark.parametrize(("text", "rate"), [("25Gb", 25e9 / 8), ("800 Mbit", 1e8), ("3GB", 3e9), ("10Gb/s", 1.25e9)])
def test_rates_of_links(text: str, rate: float) -> None:
    assert parse_network(text).bandwidth == pytest.approx(0.94 * rate)


@pytest.mark.parametrize("text", ["25", "Gb", "0Gb", "25 bananas"])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="25Gb"):
        parse_network(text)


def plan(model: ModelShape, work: Serving | Training, memory: str = "256GB", hosts: int = 4) -> Plan:
    return make_hosts_plan(model, work, zen5(memory), hosts, NETWORK)


def test_all_experts_are_somewhere_and_only_once() -> None:
    model = open_shape("deepseek-v3")
    for work in (Serving(), Training()):
        best = plan(model, work).best
        assert best is not None and hosts_of(best).form == BY_EXPERTS and sum(hosts_of(best).shares) == model.experts
        total = sum(one.host["experts"] for one in hosts_of(best).memory)
        one = model.expert_layers * model.experts * expert_bytes(model, best.choice)
        assert one <= total < 1.01 * one
    served = plan(model, Serving()).best
    assert served is not None
    assert "KV cache" in hosts_of(served).memory[0].host | dict(*hosts_of(served).memory[0].gpus[:1])
    assert all("KV cache" not in one.host and not one.gpus and not one.mapped for one in hosts_of(served).memory[1:])


def test_lora_and_optimiser_live_with_their_experts() -> None:
    model, work = open_shape("qwen3-30b-a3b"), Training(adapts_attention=False)
    tables = [plan(model, work, hosts=hosts).nearest.memory.host for hosts in (2, 4)]
    for row in ("experts", "LoRA", "gradients", "optimiser", "packed LoRA"):
        rounding = 0.1 if row == "packed LoRA" else 0.01  # to huge pages
        assert tables[0][row] == pytest.approx(2 * tables[1][row], rel=rounding), row


def test_host_0_gets_fewer_experts_where_it_lacks_memory() -> None:
    """Attention on the CPU: its weights are mapped, 34 GB of the host's memory."""
    model, machine = open_shape("deepseek-v3"), replace(zen5("190GB"), gpus=())
    best = make_hosts_plan(model, Serving(), machine, 4, NETWORK).best
    assert best is not None and hosts_of(best).shares[0] < min(hosts_of(best).shares[1:])
    even = evaluate_hosts(model, Serving(), Choice("fp8"), machine, NETWORK, BY_EXPERTS, even_shares(256, 4))
    assert set(even.lacking) == {"node 0"}


def test_every_layer_is_a_round_trip() -> None:
    model = open_shape("k2-thinking")
    slow = parse_network("25Gb", 5e-3)
    near, far = (make_hosts_plan(model, Serving(), zen5(), 4, network).nearest for network in (NETWORK, slow))
    assert hosts_of(far).form == BY_LAYERS or far.time.seconds > model.expert_layers * 5e-3
    same = evaluate_hosts(model, Serving(), near.choice, zen5(), slow, hosts_of(near).form, hosts_of(near).shares)
    assert same.time.seconds - near.time.seconds == pytest.approx(model.expert_layers * 4.9e-3, rel=1e-6)
    assert hosts_of(same).wire == hosts_of(near).wire


def test_rows_travel_to_one_host_by_layers_and_to_several_by_ids() -> None:
    model, work, choice = open_shape("deepseek-v3"), Serving(), Choice("fp8")
    ids = evaluate_hosts(model, work, choice, zen5(), NETWORK, BY_EXPERTS, even_shares(256, 4))
    layers = evaluate_hosts(model, work, choice, zen5(), NETWORK, BY_LAYERS, even_shares(58, 4))
    assert 2.6 < hosts_of(ids).wire.hosts_of_token < 2.8 and hosts_of(layers).wire.hosts_of_token == pytest.approx(
        44 / 58
    )
    ratio = hosts_of(ids).wire.per_token / hosts_of(layers).wire.per_token
    assert ratio == pytest.approx(hosts_of(ids).wire.hosts_of_token / hosts_of(layers).wire.hosts_of_token, rel=0.02)
    assert ids.time.parts["experts"] < layers.time.parts["experts"]


def test_what_does_not_fit_has_remedies_that_fit() -> None:
    for work in (Serving(), Training()):
        found = plan(open_shape("kimi-k2"), work)
        assert found.best is None and found.nearest.lacking
        words = [" ".join(remedy.changes) for remedy in found.remedies]
        assert "5 hosts" in words and "experts in int4" in words and "of memory in every host" in words[2]
        assert all(remedy.candidate.fits for remedy in found.remedies)


@pytest.mark.parametrize("hosts", [0, 1, 65])
def test_counts_of_hosts_are_checked(hosts: int) -> None:
    with pytest.raises(InputError, match="hosts"):
        make_hosts_plan(open_shape("qwen3-30b-a3b"), Serving(), zen5(), hosts, NETWORK)


def test_command_prints_hosts_wire_and_time() -> None:
    line = ("--hosts", "4", "--net", "25Gb", "--ram", "256GB", "--machine", "epyc-zen5")
    code, text = kt("k2-thinking", *line)
    assert code == 0 and "node 0: 0 to 95" in text and "nodes 1-3" in text and "MB a token" in text
    code, text = kt("kimi-k2", *line, "--serve")
    assert code == 2 and "no fit" in text and "remedy 1    5 hosts" in text
    code, text = kt("k2-thinking", *line, "--serve", "--json")
    document = json.loads(text)["serve"]
    assert code == 0 and document["fits"] and document["plan"]["partition"]["shares"] == [96] * 4
    assert document["plan"]["wire"]["per_token"] > 4e6
    result = CliRunner().invoke(app, ["plan", "k2-thinking", *line, "--place", "stream"])
    assert isinstance(result.exception, InputError) or result.exit_code


def test_training_file_is_planned_over_hosts() -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    line = ("--hosts", "2", "--machine", "epyc-zen5", "--json")
    code, text = kt("qwen3-30b-a3b", "--train", str(examples / "qwen3_30b_sft.yaml"), *line)
    document = json.loads(text)
    assert code == 0 and list(document) == ["train"] and document["train"]["plan"]["wire"]["per_step"] > 0


def test_layers_of_several_gpus_are_not_called_tensor_parallel() -> None:
    machine = with_gpus(zen5(), "24GB,24GB")
    candidate = evaluate(open_shape("qwen3-30b-a3b"), Serving(), Choice("bf16", 2), machine)
    assert "2 GPUs, whole layers on each: heads are not split" in choice_line(candidate)
    flag = options_of(ServingOptions)["gpus"]
    assert "whole layers" in flag.help and "not heads" in flag.help
    lines: list[str] = []
    with pytest.raises(InputError):
        serve(parse(["/nowhere/at/all", "--tp", "2"]), lines.append, lambda _: None)
    assert "whole layers" in lines[0] and "heads are not split" in lines[0]


def test_importing_does_not_import_torch() -> None:
    code = "import sys, ktransformers.plan.hosts, ktransformers.cli.plan_text; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def table_rows(heading: str) -> list[list[str]]:
    """Rows of the first table under a heading, without its head."""
    section = re.split(r"\n##+ ", SCALE.read_text().partition(f"## {heading}\n")[2])[0]
    lines = re.findall(r"^\|.*\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_tables_of_the_page_are_the_planners() -> None:
    rows = table_rows("Plan")
    expected = []
    for name, model in MODELS.items():
        for kind, work in (("serve", Serving()), ("train", Training())):
            best = plan(open_shape(model), work).best
            assert best is not None
            first, other = hosts_of(best).memory[0], hosts_of(best).memory[1]
            gpu = f"{sum(first.gpus[0].values()) / 1e9:.1f}" if first.gpus else "none"
            host_0 = f"{(first.host_bytes + first.mapped) / 1e9:.0f}"
            moved = hosts_of(best).wire.per_prompt if kind == "serve" else hosts_of(best).wire.per_step
            rate = f"{best.time.tokens_per_second:.3g}"
            speed = f"{rate}, first after {best.time.first_token:.1f} s" if kind == "serve" else rate
            per_token = size_text(hosts_of(best).wire.per_token)
            network = f"{best.time.parts['network'] / best.time.seconds:.0%}"
            hosts = f"{(other.host_bytes + other.mapped) / 1e9:.0f}"
            expected.append([name, kind, host_0, hosts, gpu, per_token, size_text(moved), speed, network])
    assert rows == expected


def scaling_rows() -> list[list[str]]:
    rows = []
    for name, model in MODELS.items():
        shape, of_four = open_shape(model), 0.0
        for hosts in (4, 8, 16, 32, 64):
            training, serving = (plan(shape, work, hosts=hosts).best for work in (Training(), Serving()))
            assert training is not None and serving is not None and hosts_of(training).form == BY_EXPERTS
            rate, memory = training.time.tokens_per_second, hosts_of(training).memory[-1]
            of_four = of_four or rate / hosts
            rows.append(
                [
                    name,
                    str(hosts),
                    str(hosts_of(training).shares[-1]),
                    f"{(memory.host_bytes + memory.mapped) / 1e9:.0f}",
                    f"{hosts_of(training).wire.hosts_of_token:.1f}",
                    size_text(hosts_of(training).wire.per_token),
                    f"{rate:.0f}",
                    f"{rate / hosts / of_four:.0%}",
                    f"{training.time.parts['network'] / training.time.seconds:.0%}",
                    f"{serving.time.tokens_per_second:.3g}, {serving.time.first_token:.1f} s",
                ]
            )
    return rows


def test_table_of_many_hosts_is_the_planners() -> None:
    assert table_rows("On paper") == scaling_rows()
