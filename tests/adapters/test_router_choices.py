"""Router choices: recorded for every family by the scores that it passes to topk, replayed token by token, and judged
as ties or faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ktransformers.adapters.comparison import measure, measure_batched, measure_noise_floor, measure_with_cache
from ktransformers.adapters.router_choices import (
    PADDING,
    SCORE_GAIN,
    ChoiceComparison,
    LayerChoices,
    RouterChoices,
    TopkChoice,
    compare_choices,
    same_choices,
)
from tests.support.tiny_models import VOCABULARY, build, rounding_otherwise, tie_experts

ROWS = [[(7 * token + 3) % VOCABULARY for token in range(12)], [(5 * token + 11) % VOCABULARY for token in range(7)]]
FAMILIES = {  # family -> selections of a router
    "qwen3_moe": 1,
    "gpt_oss": 1,
    "deepseek_v2": 1,
    "deepseek_v3": 2,
    "glm4_moe": 1,  # a single group
    "minimax_m2": 1,
    "granitemoe": 1,
    "gemma4_text": 1,
    "zaya": 1,
}

torch.set_num_threads(2)


def with_other_choice(choices: RouterChoices, name: str, token: int) -> RouterChoices:
    """The same with one expert of a token exchanged for one that it did not have."""
    layer = choices.layers[name]
    ids, chosen = layer.ids.clone(), set(layer.ids[token].tolist())
    ids[token, 0] = next(expert for expert in range(4) if expert not in chosen)
    return RouterChoices(choices.lengths, {**choices.layers, name: replace(layer, chosen=ids, ids=ids)})


@pytest.mark.parametrize("family", FAMILIES)
def test_choice_of_one_token_is_replayed(family: str) -> None:
    """Tokens before it and other rows keep their bits, it and those after it change."""
    model: Any = build(family)
    single = measure(model, ROWS)
    assert single.routers is not None and single.routers.layers
    name, layer = next(iter(single.routers.layers.items()))
    assert len(layer.selections) == FAMILIES[family] and bool((layer.chosen >= 0).all())
    token = 5  # of row 0
    forced = with_other_choice(single.routers, name, token)
    replayed = measure(model, ROWS, replay=forced)
    assert replayed.routers is not None
    assert torch.equal(replayed.routers.layers[name].ids[token], forced.layers[name].ids[token])
    assert torch.equal(replayed.routers.layers[name].chosen, layer.chosen)
    changed = (replayed.logprobs[0] - single.logprobs[0]).abs() > 1e-6
    assert not changed[:token].any() and changed[token:].any()
    assert torch.equal(replayed.logprobs[1], single.logprobs[1])
    comparison = compare_choices(replayed.routers, forced)
    assert comparison is not None
    fault = comparison.faults[0]  # later layers choose by other hidden states
    assert (fault.layer, fault.row, fault.token) == (name, 0, token) and fault.gap > fault.limit > fault.distance


@pytest.mark.parametrize("family", FAMILIES)
def test_second_choice_of_one_token(family: str) -> None:
    """Only with a gap as small as given, and only from that token on."""
    model: Any = build(family)
    single = measure(model, ROWS)
    assert single.routers is not None
    name, layer = next(iter(single.routers.layers.items()))
    token = 14  # 2 of row 1
    gap = min(float(selection.relative_gaps(torch.tensor([token]))) for selection in layer.selections)
    kept = measure(model, ROWS, flips={(name, token): 0.99 * gap})
    assert all(map(torch.equal, kept.logprobs, single.logprobs))
    flipped = measure(model, ROWS, flips={(name, token): 1.01 * gap})
    assert flipped.routers is not None
    choices = flipped.routers.layers[name].chosen
    assert set(choices[token].tolist()) != set(layer.chosen[token].tolist())
    others = torch.arange(len(choices)) != token
    assert torch.equal(choices[others], layer.chosen[others])
    assert torch.equal(flipped.logprobs[0], single.logprobs[0])
    changed = (flipped.logprobs[1] - single.logprobs[1]).abs() > 1e-5
    assert not changed[:2].any() and changed[2:].any()


def test_router_without_topk_is_neither_judged_nor_replayed() -> None:
    model: Any = build("phimoe")  # chooses by maximum and threshold
    single = measure(model, ROWS)
    assert single.routers is not None
    name = next(iter(single.routers.layers))
    assert not single.routers.layers[name].selections
    forced = with_other_choice(single.routers, name, 5)
    replayed = measure(model, ROWS, replay=forced)
    assert torch.equal(replayed.logprobs[0], single.logprobs[0])
    assert compare_choices(replayed.routers, forced) == ChoiceComparison(unjudged=1)
    assert "1 choices differ" in str(compare_choices(replayed.routers, forced))


def tied_model() -> Any:
    model: Any = build("qwen3_moe")
    tie_experts(model)
    return model


ROWS_OF_TIES = [[(7 * token + row) % VOCABULARY for token in range(40 - 9 * row)] for row in range(3)]


def test_ties_in_padded_batches_and_with_a_cache_are_replayed() -> None:
    model = tied_model()
    single = measure(model, ROWS_OF_TIES)
    assert single.routers is not None
    with rounding_otherwise(model, 1e-6):
        alone = measure_batched(model, ROWS_OF_TIES)
        runs = [
            measure_batched(model, ROWS_OF_TIES, single.routers),
            measure_with_cache(model, ROWS_OF_TIES, replay=single.routers),
            measure(model, ROWS_OF_TIES, replay=single.routers),
        ]

    def largest(outputs: Any) -> float:
        pairs = zip(outputs.logprobs, single.logprobs, strict=True)
        return max(float((actual - expected).abs().max()) for actual, expected in pairs)

    assert largest(alone) > 1e-2
    for run in runs:
        assert largest(run) < 1e-3
        assert run.routers is not None and not same_choices(run.routers, single.routers)
        comparison = compare_choices(run.routers, single.routers)
        assert comparison is not None and comparison.ties and not comparison.faults and not comparison.unjudged
        for tie in comparison.ties:
            assert {*tie.experts, *tie.instead_of} == {0, 1} and tie.gap <= 2 * tie.distance
            assert tie.token < len(ROWS_OF_TIES[tie.row])
        for layer in run.routers.layers.values():
            assert bool((layer.chosen != PADDING).all())


def test_noise_floor_without_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tie in a padded batch does not raise the floor that other programs are held to."""
    model = tied_model()
    single = measure(model, ROWS_OF_TIES)

    def noisy(model: Any, rows: Any, replay: Any = None) -> Any:
        with rounding_otherwise(model, 1e-6):
            return measure_batched(model, rows, replay)

    monkeypatch.setattr("ktransformers.adapters.comparison.measure_batched", noisy)
    floor = measure_noise_floor(model, ROWS_OF_TIES, single)
    assert floor.logprobs.max > 1e-2 and floor.replayed.max < 1e-3


def test_replayed_choices_are_passed_on() -> None:
    """Three programs: the third computes what the first chose, and is judged by the scores of the second."""
    model = tied_model()
    first = measure(model, ROWS_OF_TIES)
    with rounding_otherwise(model, 1e-6):
        second = measure(model, ROWS_OF_TIES, replay=first.routers)
        third = measure(model, ROWS_OF_TIES, replay=second.routers)
    for one, other in zip(third.logprobs, second.logprobs, strict=True):
        assert torch.equal(one, other)
    passed_on = compare_choices(second.routers, first.routers)
    assert passed_on is not None and passed_on.ties
    assert compare_choices(third.routers, second.routers) == ChoiceComparison()


def choices(
    selections: list[tuple[list[int], list[float]]], *, shift: float = 0.0, scale: float = 1.0
) -> RouterChoices:
    """One token of one layer; the last id of a selection is the one not chosen. `shift`: relative, of its input."""
    stored = tuple(
        TopkChoice(torch.tensor([ids]), torch.tensor([scores]), torch.tensor([scale])) for ids, scores in selections
    )
    chosen, inputs = stored[-1].ids[:, :-1], torch.full((1, 8), 1.0 + shift)
    layer = LayerChoices(chosen, chosen, torch.ones(chosen.shape), inputs, torch.finfo(torch.float32).eps, stored)
    return RouterChoices((1,), {"experts": layer})


def verdict(first: RouterChoices, second: RouterChoices) -> str:
    comparison = compare_choices(first, second)
    assert comparison is not None and len(comparison.ties) + len(comparison.faults) <= 1
    return "tie" if comparison.ties else "fault" if comparison.faults else "same"


EXPECTED = choices([([4, 1, 2], [0.9, 0.5, 0.5 - 1e-6])])


@pytest.mark.parametrize(
    ("ids", "scores", "shift", "expected"),
    [
        ([1, 4, 2], [0.5, 0.9, 0.5 - 1e-6], 0.0, "same"),
        ([4, 2, 1], [0.9, 0.5, 0.5 - 1e-6], 1e-6, "tie"),
        ([4, 3, 2], [0.9, 0.5, 0.5 - 1e-6], 1e-6, "tie"),  # three experts tie
        ([4, 2, 1], [0.9, 0.6, 0.4], 1e-6, "fault"),  # the scores differ by more than the inputs explain
        ([4, 2, 1], [0.8, 0.5, 0.5 - 1e-6], 1e-6, "fault"),  # those of a shared expert do
        ([7, 6, 5], [0.9, 0.8, 0.7], 1e-6, "fault"),
        ([4, 2, 1], [0.9, 0.6, 0.4], 0.2 / SCORE_GAIN, "tie"),
        ([4, 2, 1], [0.9, float("nan"), 0.5], 1.0, "fault"),
    ],
)
def test_verdict_on_one_token(ids: list[int], scores: list[float], shift: float, expected: str) -> None:
    assert verdict(choices([(ids, scores)], shift=shift), EXPECTED) == expected


def test_other_group_of_experts_is_a_tie_of_groups() -> None:
    """Experts of a group that was not chosen have the score -inf."""
    low = -torch.inf
    first = choices([([0, 1], [1.2, 1.2 - 1e-6]), ([0, 1, 2], [0.7, 0.5, low])], shift=1e-6)
    second = choices([([1, 0], [1.2, 1.2 - 1e-6]), ([4, 5, 0], [0.8, 0.4, low])])
    assert verdict(first, second) == "tie"
    far = choices([([1, 0], [1.3, 1.2]), ([4, 5, 0], [0.8, 0.4, low])])
    assert verdict(first, far) == "fault"
    same_group = choices([([0, 1], [1.2, 1.2 - 1e-6]), ([0, 2, 1], [0.7, 0.6, 0.5])])
    assert verdict(first, same_group) == "fault"


def test_fault_is_described() -> None:
    comparison = compare_choices(choices([([4, 2, 1], [0.9, 0.6, 0.4])]), EXPECTED)
    assert comparison is not None
    text = comparison.faults[0].describe()
    assert text.startswith("token 0 of row 0 is routed to experts 2 instead of 1: scores are 0.2 apart")
    assert replace(comparison.faults[0], gap=torch.inf).to_json()["gap"] is None


def test_stored_choices_are_read_back() -> None:
    model: Any = build("deepseek_v3")
    single = measure(model, ROWS)
    assert single.routers is not None
    tensors = single.routers.to_tensors()
    names = list(single.routers.layers)
    stored = RouterChoices.from_tensors(tensors, names, [len(row) for row in ROWS])
    again = measure(model, ROWS, replay=stored)
    assert compare_choices(again.routers, stored) == ChoiceComparison()
    assert stored.layers[names[0]].epsilon == pytest.approx(single.routers.layers[names[0]].epsilon)
    with pytest.raises(ValueError, match="other than 3 tokens"):
        RouterChoices.from_tensors(tensors, names, [3])
    del tensors[f"{names[0]}/weights"]
    with pytest.raises(KeyError):
        RouterChoices.from_tensors(tensors, names, [len(row) for row in ROWS])
