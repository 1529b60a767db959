"""Plans are the fastest executable configuration that fits; otherwise they name what is missing and remedies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import DEFAULT_POLICIES, POLICIES
from ktransformers.plan import (
    Choice,
    ModelShape,
    Serving,
    Training,
    make_plan,
    open_shape,
    profile,
    profiles,
    require_fit,
    shipped_shapes,
    with_gpus,
    with_memory,
)
from ktransformers.plan.expert_time import cpu_layer_seconds
from ktransformers.plan.machine import parse_bytes
from ktransformers.plan.memory import HUGE_PAGE, loss_bytes, predict_memory, quantized_part
from ktransformers.plan.meter import Meter, anonymous_bytes, compare_with_plan
from ktransformers.plan.planner import evaluate
from ktransformers.plan.step_time import dense_seconds, predict_time
from ktransformers.plan.workload import expert_bytes

QWEN = open_shape("qwen3-30b-a3b")
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "history"


def test_plan_is_executable_and_the_fastest_that_fits() -> None:
    machine = profile("desktop-4090")
    plan = make_plan(QWEN, Training(), machine)
    assert plan.best is not None and plan.best.choice == Choice("bf16", 1) and not plan.best.missing
    cpu = evaluate(QWEN, Training(), Choice(), machine)
    assert plan.best.time.seconds < cpu.time.seconds
    assert plan.others == () and plan.remedies == ()


def test_all_shows_other_formats_and_several_gpus() -> None:
    machine = with_gpus(profile("desktop-4090"), "24GB,24GB")
    plan = make_plan(QWEN, Serving(), machine, everything=True, policies=POLICIES)
    assert plan.best is not None and {other.choice.gpus for other in (plan.best, *plan.others)} >= {1, 2}
    resident = [other for other in (plan.best, *plan.others) if other.choice.policy == "resident"]
    assert all(other.choice.residents > 0 and other.memory.gpus[0]["residents"] > 0 for other in resident) and resident
    assert {other.choice.format for other in plan.others} == {"bf16", "fp8", "int8", "int4"}
    rates = [other.time.tokens_per_second for other in (plan.best, *plan.others)]
    assert rates == sorted(rates, reverse=True) and all(other.fits for other in plan.others)


def test_missing_bytes_are_exact() -> None:
    machine = with_memory(profile("desktop-4090"), "64GB")
    plan = make_plan(QWEN, Training(retain=True), machine)
    assert plan.best is None
    short = plan.nearest.lacking["host"]
    enough = replace(machine, memory=machine.memory + round(short / 0.97) + 1)
    again = evaluate(QWEN, plan.nearest.work, plan.nearest.choice, enough)
    assert again.fits
    assert not evaluate(
        QWEN, plan.nearest.work, plan.nearest.choice, replace(enough, memory=enough.memory - 10**7)
    ).fits


@pytest.mark.parametrize("name", sorted(shipped_shapes()))
@pytest.mark.parametrize("work", [Training(tokens=8192, tokens_per_step=8192, retain=True), Serving(32768, 4096, 8)])
def test_every_remedy_fits(name: str, work: Training | Serving) -> None:
    memory = "8GB" if name == "gpt-oss-20b" else "24GB"
    plan = make_plan(open_shape(name), work, with_memory(with_gpus(profile("desktop-4090"), "2GB"), memory))
    assert plan.best is None and plan.nearest.lacking
    # What was released in 8 bits has one format left to go to, what was released in 4 has none: more memory remains.
    count = {"bf16": 3, "fp8": 2, "mxfp4": 1}[plan.model.stored]
    assert len(plan.remedies) == count == len({way.changes for way in plan.remedies})
    assert all(way.candidate.fits and way.changes for way in plan.remedies)


def test_executable_remedies_come_first() -> None:
    work = Training(tokens=16384, tokens_per_step=16384, sequence=2048, retain=True)
    plan = make_plan(QWEN, work, with_memory(profile("desktop-4090"), "72GB"))
    assert plan.best is None
    first = plan.remedies[0]
    assert first.changes in (("kt_cpu_activation: recompute",), ("kt_tokens_per_batch: 4096",))
    assert not first.candidate.missing and first.same_results
    missing = [bool(way.candidate.missing) for way in plan.remedies]
    assert missing == sorted(missing)


@pytest.mark.parametrize(("stored", "bits"), [("iq1_s", 1.5625), ("iq2_xxs", 2.0625), ("q3_k", 3.4375)])
def test_the_smallest_types_are_counted_as_they_are(stored: str, bits: float) -> None:
    model, machine = replace(QWEN, stored=stored), with_gpus(profile("desktop-4090"), "24GB")
    best = make_plan(model, Serving(), with_memory(machine, "32GB")).best
    assert best is not None and best.choice.format == stored and not best.missing
    weights = 3 * QWEN.hidden * QWEN.intermediate
    assert weights * bits / 8 <= expert_bytes(model, best.choice) <= 1.05 * weights * bits / 8
    # Nothing is proposed in their place, because nothing that can be written is smaller.
    tight = make_plan(model, Serving(), with_memory(machine, "4GB"))
    assert tight.best is None
    assert not any("experts in" in change for way in tight.remedies for change in way.changes)


def test_bf16_in_12_bits_is_counted_as_it_is() -> None:
    model, machine = replace(QWEN, stored="bf16:12"), with_gpus(profile("desktop-4090"), "24GB")
    best = make_plan(model, Serving(), with_memory(machine, "96GB")).best
    assert best is not None and best.choice.format == "bf16:12" and not best.missing
    weights = 3 * QWEN.hidden * QWEN.intermediate
    assert 1.5 * weights <= expert_bytes(model, best.choice) <= 1.55 * weights


def test_bf16_that_does_not_fit_is_offered_in_12_bits_first() -> None:
    """It changes no result, so it comes before formats that round."""
    machine = with_memory(with_gpus(profile("desktop-4090"), "24GB"), "56GB")
    plan = make_plan(replace(QWEN, stored="bf16"), Serving(), machine)
    assert plan.best is None
    formats = [(way.candidate.choice.format, way.same_results, way.candidate.fits) for way in plan.remedies]
    assert formats[0] == ("bf16:12", True, True), formats
    assert plan.remedies[0].changes == ("experts in bf16:12, the same bits",)


def test_require_fit_names_the_shortfall_and_remedies_unless_forced() -> None:
    plan = make_plan(QWEN, Training(retain=True), with_memory(profile("desktop-4090"), "64GB"))
    with pytest.raises(InputError, match=r"host lacks [\d.]+ GB.*--force"):
        require_fit(plan)
    require_fit(plan, force=True)
    require_fit(make_plan(QWEN, Training(), profile("desktop-4090")))


def test_several_gpus_share_layers_and_are_proposed_where_one_does_not_do() -> None:
    machine = with_gpus(profile("dual-xeon-4090"), "24GB,24GB")
    model = open_shape("deepseek-v3")
    one, two = (predict_memory(model, Training(), Choice("bf16", gpus), machine) for gpus in (1, 2))
    assert sum(table["weights"] for table in two.gpus) == one.gpus[0]["weights"]
    assert max(two.gpu_bytes) < 0.6 * one.gpu_bytes[0]
    assert not Choice("bf16", 2).missing
    serving = Serving(context=1024, prompt=512)
    assert make_plan(QWEN, serving, with_gpus(machine, "24GB,24GB")).nearest.choice.gpus == 1, "one is enough"
    assert make_plan(QWEN, serving, with_gpus(machine, "3.4GB,3.4GB")).nearest.choice.gpus == 2


@pytest.mark.parametrize("linear_format", ["keep", "int4:32"])
def test_codes_are_divided_among_gpus(linear_format: str) -> None:
    """Each has those of its layers, the first one the head's; together as many as one would have."""
    machine = with_gpus(profile("dual-xeon-4090"), "24GB,24GB")
    model, work = open_shape("deepseek-v3"), Serving()
    choices = [Choice("fp8", gpus, linear_format=linear_format) for gpus in (1, 2)]
    one, two = (predict_memory(model, work, choice, machine) for choice in choices)
    assert not choices[1].missing
    first, second = (table["weights"] for table in two.gpus)
    assert first + second == pytest.approx(one.gpus[0]["weights"], rel=1e-6) and first > second
    assert two.host["embedding"] == one.host["embedding"] > 0
    numbers = predict_memory(model, work, Choice("fp8", 2), machine)
    assert first < 0.6 * numbers.gpus[0]["weights"]


def test_codes_are_read_at_their_measured_rate() -> None:
    """Of a token on a GPU, bytes at the share of the bandwidth that the format reaches; prompts decode first."""
    model, machine = open_shape("deepseek-v3"), profile("amx16-h200")

    def seconds(tokens: int, linear_format: str | None) -> float:
        return dense_seconds(model, tokens, 0, machine, Choice("fp8", 1, linear_format=linear_format), 2)

    numbers, bandwidth = model.layers * model.rest_per_layer, machine.gpus[0].bandwidth
    assert seconds(1, None) == pytest.approx(2 * numbers / bandwidth)
    assert seconds(1, "int4:32") == pytest.approx(numbers * (0.5 + 2 / 32) / (0.74 * bandwidth))
    order = [seconds(1, name) for name in ("int4:32", "fp8:128x128", "q6_k", None, "iq4_xs")]
    assert order == sorted(order), "as measured: fewer bits take less time, until codes are decoded first"
    assert seconds(4096, "int8") == pytest.approx(seconds(4096, None) + 3 * numbers / (0.7 * bandwidth), rel=0.01)
    keeps = replace(model, quantized_weights=model.rest, quantized_bytes=model.rest)
    small = replace(machine, gpus=(replace(machine.gpus[0], memory=24 << 30),))
    kept = dense_seconds(keeps, 1, 0, small, Choice("fp8", 1, linear_format="keep"), 2)
    assert kept == pytest.approx(numbers / (0.85 * bandwidth))


@pytest.mark.parametrize("size_of_number", [2, 4])
@pytest.mark.parametrize(
    ("name", "linear_format"),
    [("deepseek-v3", "keep"), ("deepseek-v3", "q4_k"), ("deepseek-v2", "q4_k"), ("deepseek-v2-lite", "q4_k")],
)
def test_a_token_reads_little_more_than_the_file_on_a_cpu(name: str, linear_format: str, size_of_number: int) -> None:
    """All linear layers have the bits of the release, `kv_b_proj` of latent attention among them; routers and norms are
    larger than in the file on CPUs that compute in float32."""
    model = open_shape(name)
    form = "fp8" if linear_format == "keep" else "int4"
    experts = model.expert_layers * model.top_k * expert_bytes(model, Choice(form))
    numbers, size = quantized_part(model, Choice(form, linear_format=linear_format))
    all_but_embedding = model.rest - model.embedding
    in_codes = model.quantized_weights if linear_format == "keep" else all_but_embedding - model.router_numbers
    file = experts + in_codes * size / numbers + 2 * (all_but_embedding - in_codes)
    read = experts + size + size_of_number * (all_but_embedding - numbers)
    assert 1 <= read / file < 1.1


def test_split_dequantises_larger_layers_at_once() -> None:
    """Up to 4 GiB with the cache, where other policies stop at 2."""
    machine = with_gpus(profile("dual-xeon-4090"), "24GB")
    model = open_shape("qwen3-30b-a3b")
    stream, split = (
        predict_memory(model, Serving(), Choice("bf16", 1, policy=policy), machine) for policy in ("stream", "split")
    )
    layer = 2 * model.expert_numbers * model.experts
    grown = split.gpus[0]["groups"] - stream.gpus[0]["groups"]
    slots = split.gpus[0]["slots"]
    assert slots == stream.gpus[0]["slots"] and 2 << 30 < slots + layer <= 4 << 30
    assert 0 < grown <= layer + Serving().tokens * model.hidden * 4


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(shipped_shapes())),
    gpu=st.sampled_from([1, 2, 4, 8, 24, 80, 140]),
    ram=st.sampled_from([4, 32, 66, 128, 512, 2048]),
    work=st.sampled_from([Training(512, 512, 512), Training(8192, 8192), Training(65536, 65536), Serving()]),
    machine=st.sampled_from(["desktop-4090", "amx16-h200", "epyc-zen5"]),
    policies=st.sampled_from([DEFAULT_POLICIES, ("cpu",), ("stream",)]),
)
def test_gpu_is_unused_only_if_nothing_fits_on_it(
    name: str, gpu: int, ram: int, work: Training | Serving, machine: str, policies: tuple[str, ...]
) -> None:
    here = with_memory(with_gpus(profile(machine), f"{gpu}GB"), f"{ram}GB")
    plan = make_plan(open_shape(name), work, here, policies=policies)
    bare = [replace(plan.nearest.choice, gpus=1, policy=policy, residents=0) for policy in policies]
    fits = [evaluate(plan.model, work, choice, here).fits for choice in bare]
    assert bool(plan.gpu_unused_reason) == (plan.nearest.choice.gpus == 0)
    if any(fits):
        assert plan.best is not None and plan.best.choice.gpus == 1
    if plan.gpu_unused_reason:
        assert plan.best is not None and "lacks" in plan.gpu_unused_reason and plan.gpu_unused_reason == plan.notes[0]
    insisted = make_plan(plan.model, work, here, policies=policies, needs_gpu=True)
    assert insisted.nearest.choice.gpus == 1 and not insisted.gpu_unused_reason
    assert (insisted.best is None) == (plan.best is None or bool(plan.gpu_unused_reason))
    without = make_plan(plan.model, work, replace(here, gpus=()), policies=policies, needs_gpu=True)
    assert not without.gpu_unused_reason and without.nearest.choice.gpus == 0


def test_gpu_is_used_even_if_the_cpu_alone_is_faster() -> None:
    """By the seconds of a plan, that is: a small model's layers take longer to launch than to compute."""
    small = replace(QWEN, layers=4, expert_layers=4, hidden=64, intermediate=64, embedding=64 * 1000, vocabulary=1000)
    small = replace(small, rest_per_layer=4 * 64 * 64, attention_width=256, scores_width=128)
    work, machine = Training(64, 64, 64), profile("amx16-h200")
    seconds = [evaluate(small, work, choice, machine).time.seconds for choice in (Choice(), Choice("bf16", 1))]
    assert seconds[0] < seconds[1]
    plan = make_plan(small, work, machine)
    assert plan.best is not None and plan.best.choice.gpus == 1 and not plan.gpu_unused_reason


def test_nodes_add_up_and_hold_the_experts_in_equal_parts() -> None:
    memory = predict_memory(QWEN, Training(), Choice("bf16", 1), profile("dual-xeon-4090"))
    assert sum(memory.nodes) == pytest.approx(memory.host_bytes, abs=2)
    assert len(memory.nodes) == 2 and min(memory.nodes) == memory.host["experts"] // 2


def test_experts_are_counted_once_on_any_number_of_nodes() -> None:
    machine, choice = profile("dual-xeon-4090"), Choice("bf16", 1, policy="stream")
    on = {
        nodes: predict_memory(QWEN, Training(), choice, replace(machine, cpu=replace(machine.cpu, nodes=nodes))).host[
            "experts"
        ]
        for nodes in (1, 2, 4, 8)
    }
    for nodes, size in on.items():
        assert on[1] <= size <= on[1] + QWEN.expert_layers * 2 * nodes * HUGE_PAGE
        assert size < 1.02 * on[1]


def test_profiles_are_complete() -> None:
    known = profiles()
    assert {"desktop-3090", "desktop-4090", "desktop-5090", "dual-xeon-4090", "epyc-zen3", "epyc-zen5"} <= set(known)
    for machine in known.values():
        assert machine.sources and machine.cpu.tile_flops > 0 and machine.memory > 0
        assert make_plan(QWEN, Serving(), machine).nearest.time.tokens_per_second > 0
    with pytest.raises(InputError, match="desktop-4090"):
        profile("toaster")


def test_sizes_and_gpus_as_words() -> None:
    assert [parse_bytes("x", word) for word in ("24GB", "1.5TB", "16GiB", "7")] == [24 * 10**9, 15 * 10**11, 2**34, 7]
    for word in ("24 pounds", "GB", "-3GB", ""):
        with pytest.raises(InputError, match="24GB"):
            parse_bytes("ram", word)
    machine = profile("amx16-h200")
    assert with_gpus(machine, "none").gpus == ()
    assert [gpu.memory for gpu in with_gpus(machine, "rtx-3090,12GB").gpus] == [24 * 2**30, 12 * 10**9]
    assert with_gpus(profile("arm2"), "8GB").gpus[0].bandwidth == with_gpus(machine, "rtx-4090").gpus[0].bandwidth


def test_layer_times_are_those_of_the_bench() -> None:
    """Every amx cell that was measured: 25 % at most, 10 % on average, with the rates measured beside it."""
    names = {"qwen3-30b": "qwen3-30b-a3b", "dsv2-lite": "deepseek-v2-lite"}
    names |= {"dsv3-slice": "deepseek-v3", "qwen3-235b-slice": "qwen3-235b-a22b"}
    slices = {"dsv3-slice": 16, "qwen3-235b-slice": 32}
    machine = profile("amx16-h200")
    errors = []
    for file in ("2026-11-15-moe-qwen3-30b.json", "2026-11-15-moe-other-shapes.json"):
        for cell in json.loads((RESULTS / file).read_text())["cells"]:
            if cell["mode"] != "forward":
                continue
            shape = open_shape(names[cell["shape"]])
            shape = replace(shape, experts=slices.get(cell["shape"], shape.experts))
            cpu = replace(machine.cpu, tile_flops=cell["tile_tflops"] * 1e12, read_bytes=cell["read_gbs"] * 1e9)
            found = cpu_layer_seconds(shape, cell["tokens"], replace(machine, cpu=cpu), Choice())
            errors.append(abs(found * 1e3 / cell["ms"] - 1))
    assert len(errors) == 28
    assert max(errors) < 0.25 and sum(errors) / len(errors) < 0.10


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 20000),
    rank=st.integers(1, 128),
    retain=st.booleans(),
    checkpointing=st.booleans(),
    name=st.sampled_from(sorted(shipped_shapes())),
    gpus=st.integers(0, 1),
)
def test_larger_workloads_never_cost_less(
    tokens: int, rank: int, retain: bool, checkpointing: bool, name: str, gpus: int
) -> None:
    model, machine, choice = open_shape(name), profile("desktop-4090"), Choice("bf16", gpus)
    work = Training(tokens, tokens, min(tokens, 2048), rank, retain=retain, checkpointing=checkpointing)
    here = predict_memory(model, work, choice, machine)
    for more in (replace(work, tokens=2 * tokens, tokens_per_step=2 * tokens), replace(work, rank=2 * rank)):
        there = predict_memory(model, more, choice, machine)
        assert there.host_bytes >= here.host_bytes and there.gpu_bytes >= here.gpu_bytes
        assert predict_time(model, more, choice, machine).seconds > predict_time(model, work, choice, machine).seconds
    assert predict_memory(model, replace(work, retain=True), choice, machine).host_bytes >= here.host_bytes
    assert min(*here.host.values(), *here.disk.values(), here.pinned, here.mapped) >= 0


@pytest.mark.parametrize("gpus", [0, 1])
def test_tokens_without_a_label_have_no_logits(gpus: int) -> None:
    machine, choice = profile("desktop-4090"), Choice(gpus=gpus)
    every = Training(checkpointing=False, tokens_per_step=4096)
    half = replace(every, labelled=0.5)
    found = [predict_memory(QWEN, work, choice, machine) for work in (every, half)]
    taken = [(one.gpus[0] if gpus else one.host)["activations"] for one in found]
    row = 32768 * 2 + QWEN.hidden * 6 if gpus else 32768 * 31 + QWEN.hidden * 2
    assert taken[0] - taken[1] == 1024 * row
    loss = [predict_time(QWEN, work, choice, machine).parts["loss"] for work in (every, half)]
    assert loss[0] == pytest.approx(2 * loss[1])


def test_a_narrow_vocabulary_leaves_its_tile_of_logits_untouched() -> None:
    """On a CPU: a tile is 32768 columns wide, but pages that nobody writes to are not there."""
    taken = [loss_bytes(replace(QWEN, vocabulary=count), Training(), on_gpu=False) for count in (151936, 6400)]
    assert taken[0] - taken[1] == 2048 * (32768 - 6400) * (2 + 29)  # in bf16, and 7.25 times in float32


def test_a_pass_on_a_cpu_takes_pythons_time_and_moves_what_it_keeps() -> None:
    """Measured on two AMX cores, steps of 16 short rows one by one, in layers of next to no size: 12.8 to 15 ms a layer
    and row; and in bf16 layers of 512, 0.62 ms a token where many rows go at once."""
    cpu = replace(profile("amx16-h200").cpu, tile_flops=1.4e12, read_bytes=40e9, dense_flops=1.2e12)
    machine = replace(profile("amx16-h200"), cpu=cpu, gpus=()).with_python_speed(0.052)
    model = replace(QWEN, hidden=512, intermediate=256, experts=64, top_k=4, layers=6, expert_layers=6)
    model = replace(model, rest_per_layer=690_000, attention_width=1280, scores_width=1024, mlp_width=0)
    tiny = replace(model, hidden=64, intermediate=32, experts=8, top_k=2, rest_per_layer=10**4, attention_width=192)

    def step(shape: ModelShape, tokens: int, rows: int, layers: int = 6) -> float:
        shape = replace(shape, layers=layers, expert_layers=layers, vocabulary=6400, embedding=6400 * shape.hidden)
        return predict_time(shape, Training(tokens, tokens * rows, 110), Choice(), machine).seconds

    each = (step(tiny, 56, 16, 12) - step(tiny, 56, 16, 4)) / (8 * 16)
    assert 12.8e-3 <= each <= 15e-3
    assert (step(model, 45 * 110, 1) - step(model, 16 * 110, 1)) / (29 * 110) == pytest.approx(0.62e-3, rel=0.15)


def test_invalid_workloads_are_refused() -> None:
    for bad in ({"tokens": 0}, {"rank": 0}, {"adapts_experts": False, "adapts_attention": False}):
        with pytest.raises(InputError):
            Training(**bad)
    with pytest.raises(InputError, match="context"):
        Serving(context=100, prompt=200)


def test_meter_records_a_past_peak() -> None:
    import torch

    before = anonymous_bytes()
    with Meter() as meter:
        held = torch.ones(64 << 20)
        import time

        time.sleep(0.05)
        del held
    assert meter.peak - before > 200e6
    plan = evaluate(QWEN, Training(), Choice("bf16", 1), profile("desktop-4090"))
    host, gpu, speed = compare_with_plan(plan, host=70 * 10**9, gpu=5 * 10**9, tokens_per_second=200.0)
    assert abs(host.error - (70e9 / plan.memory.host_bytes - 1)) < 1e-9 and "predicted" in str(speed)
    assert gpu.what == "GPU memory" and compare_with_plan(plan) == ()
