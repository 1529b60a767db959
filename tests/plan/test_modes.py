"""The rule that picks a mode: predictions overrule the preferred mode beyond their error."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from ktransformers.plan.modes import (
    CPU,
    DECODE,
    HOST_CALLBACK,
    PREFILL,
    RESIDENT,
    SPLIT,
    STREAM,
    TRAINING,
    TRAINING_MARGIN,
    bucket_tokens,
    candidate_modes,
    decide,
    even_counts,
    pass_kind,
    predict,
    size_bucket,
)
from ktransformers.plan.split import Costs

REPOSITORY = Path(__file__).parents[2]

# One layer of Qwen3-30B in bf16 on a 16-core host with PCIe 5: 128 experts of 9.4 MB.
LAYER = Costs(8e-4, 0, 13e-3 / 128, 4e-3 / 8192, 22e-3 / 128, 8e-3 / 128, 5e-4, 4e-6, 25e-9)
COSTS = {"forward": LAYER, "backward": LAYER}


def predicted(kind: str, tokens: int, residents: int = 0, **options: bool) -> dict[str, float]:
    return predict(kind, COSTS, tokens, even_counts(8 * tokens, 128), residents, **options)


def test_kinds_of_passes() -> None:
    assert pass_kind(32, False) == DECODE and pass_kind(33, False) == PREFILL and pass_kind(1, True) == TRAINING


@pytest.mark.parametrize("tokens", [1, 3, 32, 512, 700, 8192])
def test_sizes_of_a_bucket_are_within_a_quarter_octave(tokens: int) -> None:
    assert 2**-0.26 < bucket_tokens(size_bucket(tokens)) / tokens < 2**0.26


def test_even_routing_spreads_rows_over_all_experts() -> None:
    assert even_counts(8, 128).sum() == 8 and np.count_nonzero(even_counts(8, 128)) == 8
    assert set(even_counts(1024, 128).tolist()) == {8}


def test_training_streams_unless_the_cpu_is_predicted_at_less_than_half() -> None:
    """In the first case, measured, a step took 0.21 s when streamed and 0.31 s on the CPU."""
    assert decide(TRAINING, {STREAM: 0.0471, CPU: 0.0441}).mode == STREAM
    assert decide(TRAINING, {STREAM: 1.0, CPU: 1 / (1 + TRAINING_MARGIN)}).mode == STREAM
    assert decide(TRAINING, {STREAM: 2.1, CPU: 1.0}).mode == CPU
    assert decide(TRAINING, predicted(TRAINING, 2048)).mode == STREAM


def test_a_slow_link_leaves_training_to_the_cpu() -> None:
    slow = Costs(**{**vars(LAYER), "link_expert": 10 * LAYER.link_expert})
    seconds = predict(TRAINING, {"forward": slow, "backward": slow}, 512, even_counts(4096, 128), 0)
    assert decide(TRAINING, seconds).mode == CPU


def test_prefill_splits_where_a_division_gains_and_streams_where_not() -> None:
    assert decide(PREFILL, predicted(PREFILL, 2048)).mode == SPLIT
    assert SPLIT not in predicted(PREFILL, 200_000)
    assert decide(PREFILL, predicted(PREFILL, 200_000)).mode == STREAM


def test_residents_replace_the_cpu_mode() -> None:
    assert candidate_modes(TRAINING, True, False) == (STREAM, RESIDENT)
    assert candidate_modes(DECODE, True, True) == (HOST_CALLBACK, RESIDENT, CPU, STREAM)
    assert set(predicted(PREFILL, 512, residents=32)) <= {SPLIT, STREAM, RESIDENT}


def test_decode_steps_take_what_a_graph_can_hold() -> None:
    assert decide(DECODE, predicted(DECODE, 4, residents=32, host_callback=True)).mode == HOST_CALLBACK
    assert decide(DECODE, {HOST_CALLBACK: 2.0, CPU: 2.0, STREAM: 1.0}).mode == HOST_CALLBACK


@pytest.mark.parametrize("without_copies", [CPU, RESIDENT])
def test_split_has_to_gain_a_fifth_over_no_copies(without_copies: str) -> None:
    assert decide(PREFILL, {SPLIT: 0.83, STREAM: 2.0, without_copies: 1.0}).mode == SPLIT
    assert decide(PREFILL, {SPLIT: 0.84, STREAM: 2.0, without_copies: 1.0}).mode == without_copies
    assert decide(PREFILL, {SPLIT: 0.84, STREAM: 1.1, without_copies: 1.0}).mode == STREAM


def test_recorded_cells_have_the_choices_that_timing_made() -> None:
    """Every mode was timed in these cells when they were recorded, and `mode` is what timing chose."""
    cells = json.loads((REPOSITORY / "bench/results/current/place.json").read_text())["runs"]["main"]["cells"]
    fixed, over_best = (CPU, STREAM, SPLIT, HOST_CALLBACK), []
    for cell in cells:
        mode = decide(pass_kind(cell["tokens"], False), cell["predicted"]).mode
        assert mode == cell["mode"], (cell["format"], cell["tokens"])
        over_best.append(cell[mode] / min(cell[name] for name in fixed))
    assert len(cells) == 14 and statistics.geometric_mean(over_best) < 1.04


def test_a_decision_says_why() -> None:
    assert decide(TRAINING, {STREAM: 2e-3, CPU: 4e-3}).reason == "stream (predicted 2.00 ms a layer; cpu 4.00)"


def test_kt_plan_has_words_for_every_policy() -> None:
    from ktransformers.cli.plan_text import POLICY_TEXTS
    from ktransformers.ground.options.placement import POLICIES

    assert set(POLICY_TEXTS) == set(POLICIES)
