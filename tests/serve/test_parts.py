"""Small parts: text that comes in pieces, sampling, slots, what cannot be served."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.adapters import LoraPair, adapter_from_tensors
from ktransformers.errors import InputError
from ktransformers.serve.engine.detokenizer import StreamingText
from ktransformers.serve.engine.engine import Limits, ServeEngine
from ktransformers.serve.engine.forward import Chunk, Forward, SequentialForward, most_likely, open_forward
from ktransformers.serve.engine.head import collect
from ktransformers.serve.engine.kv_cache import KVCache, KVSlot
from ktransformers.serve.engine.lora import LoraModules
from ktransformers.serve.engine.sampling import Sampling, choose, generator, scores
from ktransformers.serve.engine.sequence import GenerationRequest, Sequence
from tests.nn.families import FAMILIES, build
from tests.serve.conftest import Bench, Heard


@pytest.mark.parametrize(
    "said", ["Plain words, and more.", "Ein schöner Tag 🌞🌞 am Meer", "日本語のテキスト", "a  b\n\nc"]
)
def test_text_in_pieces_is_the_text(bench: Bench, said: str) -> None:
    text = StreamingText(bench.tokenizer)
    pieces = [text.add(token) for token in bench.tokenizer(said)["input_ids"]]
    assert "".join(pieces) + text.end() == said
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["Tag", "schöner", " am", "🌞"])
def test_a_stop_string_never_shows(bench: Bench, stop: str) -> None:
    said = "Ein schöner Tag 🌞 am Meer"
    text, out = StreamingText(bench.tokenizer, ["nie", stop]), ""
    for token in bench.tokenizer(said)["input_ids"]:
        out += text.add(token)
        if text.stopped is not None:
            break
    assert out == said[: said.index(stop)] and text.stopped == stop and text.end() == ""


def draws(sampling: Sampling, logits: torch.Tensor, count: int = 400, new: tuple[int, ...] = ()) -> Counter[int]:
    draw = generator(Sampling(seed=1), 0)
    return Counter(choose(logits, sampling, (0,), new, draw) for _ in range(count))


def test_sampling_keeps_what_it_says() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))
    assert set(draws(Sampling(temperature=0), logits)) == {0}
    assert set(draws(Sampling(top_k=2), logits)) == {0, 1}
    assert set(draws(Sampling(top_p=0.6), logits)) == {0, 1}  # the token that crosses the share belongs to it
    assert set(draws(Sampling(min_p=0.2), logits)) == {0, 1, 2}
    assert set(draws(Sampling(top_k=4, top_p=0.8), logits)) == {0, 1, 2}
    for least in (Sampling(top_p=5e-324), Sampling(temperature=5e-324), Sampling(temperature=1e-5), Sampling(min_p=1)):
        assert set(draws(least, logits)) == {0}
    shares = draws(Sampling(), logits, 4000)
    for token, share in enumerate([0.5, 0.25, 0.15, 0.07, 0.03]):
        assert shares[token] / 4000 == pytest.approx(share, abs=0.03)
    sharp = draws(Sampling(temperature=0.5), logits, 4000)
    assert sharp[0] / 4000 == pytest.approx(0.25 / 0.3408, abs=0.03)
    assert set(draws(Sampling(temperature=0, logit_bias={3: 100.0}), logits)) == {3}
    assert set(draws(Sampling(temperature=0, repetition_penalty=5.0), logits)) == {1}  # 0 is in the prompt
    assert set(draws(Sampling(temperature=0, presence_penalty=2.0), logits, new=(0, 1))) == {2}
    allowed = torch.tensor([False, False, True, False, True])
    assert choose(logits, Sampling(temperature=0), (0,), (), generator(Sampling(), 0), allowed) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_rows_are_searched_together(dtype: torch.dtype) -> None:
    """As one by one in float32, the first of equals included."""
    torch.manual_seed(0)
    logits = torch.randn(5, 20011).to(dtype)
    logits[1] = logits[1].round()
    logits[2] = -torch.inf
    logits[3, 17:] = -0.0
    logits[3, :17] = -1
    logits[3, 40] = 0.0
    logits[4, [50, 19000]] = torch.inf
    plain, draw = Sampling(temperature=0), generator(Sampling(), 0)
    one_by_one = [choose(row.float(), plain, (0,), (), draw) for row in logits]
    assert one_by_one[2:] == [0, 17, 50]
    assert most_likely(logits, [0, 1, 2, 3, 4]) == one_by_one
    assert most_likely(logits, [3, 1]) == [one_by_one[3], one_by_one[1]] and most_likely(logits, []) == []


def test_pieces_of_greedy_answers_bring_their_token() -> None:
    model: Any = build("qwen3_moe")
    forward = Forward(model)
    read: list[torch.Tensor] = []
    asked = [([5, 6, 7], True, True), ([8, 9], False, False), ([1], True, False), ([2, 3], False, True)]
    pieces = [
        Chunk(KVSlot(None, capacity=16), tokens, 0, None, collect(read) if not at else None, greedy or last, greedy)
        for at, (tokens, last, greedy) in enumerate(asked)
    ]
    first, middle, drawn, last = forward.run(pieces)
    assert middle is None and first is not None and drawn is not None and last is not None
    assert read[0].shape[0] == 3 and torch.allclose(read[0][-1], first.logits, atol=1e-5)
    assert drawn.token is None and drawn.logits.shape == last.logits.shape == read[0].shape[1:]
    for found in (first, last):
        assert found.token == int(found.logits.float().argmax())


def test_scores_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    (score,) = scores(logits, [2], 2)
    logs = logits.log_softmax(-1)[0].tolist()
    assert score.logprob == pytest.approx(logs[2]) and [token for token, _ in score.top] == [1, 2]


def test_slots_keep_to_their_room() -> None:
    slots = KVCache(256)
    one = slots.take(None, range(100))
    two = slots.take(("a", 1), range(100))
    assert one is not None and two is not None and one is not two and slots.room_used == 256
    assert slots.take(None, range(10)) is None
    one.tokens = list(range(100))
    slots.release(one)
    again = slots.take(None, [*range(50), 7, 7])
    assert again is one and again.length == 50
    slots.release(again)
    assert slots.take(("b", 1), range(120)) is not None  # the idle one gave way
    assert one not in slots.slots and slots.room_used <= 256


@pytest.mark.parametrize(("family", "words"), [("deepseek_v32", "index of keys"), ("jamba", "differ by")])
def test_what_cannot_be_computed_in_pieces_is_refused_by_name(family: str, words: str) -> None:
    with pytest.raises(InputError, match=f"{family}.*{words}"):
        open_forward(build(family)).check()


def test_families_with_a_state_are_computed_alone() -> None:
    for family in ("qwen3_5_moe_text", "lfm2_moe"):
        forward = open_forward(build(family))
        assert isinstance(forward, SequentialForward) and forward.check() > 0
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert isinstance(open_forward(build("qwen3_moe", rope_parameters=rope)), SequentialForward)
    assert isinstance(open_forward(build("qwen3_moe")), Forward)


@pytest.mark.slow
def test_every_family_is_served_or_refused() -> None:
    """docs/serve.md says these numbers."""
    found: Counter[str] = Counter()
    for family in FAMILIES:
        try:
            forward = open_forward(build(family))
            forward.check()
            found[type(forward).__name__] += 1
        except InputError as error:
            assert family in str(error)
            found["refused"] += 1
    assert found == {"Forward": 33, "Alone": 7, "refused": 6}


def test_a_state_is_continued_and_never_cut_back(bench: Bench) -> None:
    """qwen3_5 in the engine: several at a time, a conversation that goes on, one that turns elsewhere."""
    from ktransformers.nn import attach
    from ktransformers.nn.experts import select_implementation

    model: Any = build("qwen3_5_moe_text")
    attach(model)
    select_implementation(model)
    forward = open_forward(model)
    places = LoraModules(model)
    shapes = {"gate": (6, 40, 64), "up": (6, 40, 64), "down": (6, 64, 40)}
    torch.manual_seed(0)
    experts = {
        f"model.layers.{layer}.mlp": {
            role: LoraPair(torch.randn(e, 3, i) / 8, torch.randn(e, o, 3) / 2, 1.0)
            for role, (e, o, i) in shapes.items()
        }
        for layer in range(2)
    }
    adapter = places.bind(adapter_from_tensors(experts, {}), "made", "made", 1)

    def say(engine: ServeEngine, *asked: tuple[list[int], Any]) -> list[Heard]:
        heard = [Heard() for _ in asked]
        sampling = Sampling(temperature=0)
        engine.submit(
            Sequence(GenerationRequest(tuple(prompt), 6, sampling, one, logprobs=0), bench.tokenizer, ear)
            for (prompt, one), ear in zip(asked, heard, strict=True)
        )
        while engine.busy:
            engine.step()
        return heard

    def fresh() -> ServeEngine:
        return ServeEngine(forward, Limits(running=4, queued=16, chunk=8, tokens=1024, context=128))

    prompt = [(3 * at + 4) % 90 for at in range(20)]
    engine = fresh()
    base, made = say(engine, (prompt, None), (prompt, adapter))
    assert base.tokens != made.tokens
    assert [base.tokens] == [one.tokens for one in say(fresh(), (prompt, None))]
    assert [made.tokens] == [one.tokens for one in say(fresh(), (prompt, adapter))]
    longer = prompt + made.tokens + [5, 6, 7]
    (went_on,) = say(engine, (longer, adapter))
    assert went_on.events[-1].cached == 25
    assert [went_on.tokens] == [one.tokens for one in say(fresh(), (longer, adapter))]
    (turned,) = say(engine, ([*prompt[:12], 8, 9], adapter))
    assert turned.events[-1].cached == 0
    assert [turned.tokens] == [one.tokens for one in say(fresh(), ([*prompt[:12], 8, 9], adapter))]


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral", "glm4_moe"])
def test_families_agree_with_themselves_in_pieces(family: str) -> None:
    """Sinks and windows, keys and values of different sizes, plain ones: `check` compares with the stock model."""
    assert Forward(build(family)).check() > 0


def test_a_window_is_kept_over_chunks() -> None:
    """gpt_oss with a window of 8 and 40 tokens in uneven pieces against the stock model."""
    model: Any = build("gpt_oss")
    tokens = [(11 * at + 5) % 90 for at in range(40)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    forward, slot = Forward(model), KVSlot(None, capacity=64)
    found: list[torch.Tensor] = []
    for first, last in ((0, 13), (13, 14), (14, 33), (33, 40)):
        forward.run([Chunk(slot, tokens[first:last], first, None, collect(found))])
    assert torch.allclose(torch.cat(found), expected, atol=1e-4)


def pair(*shape: int) -> LoraPair:
    return LoraPair(torch.ones(*shape[:-2], 2, shape[-1]), torch.ones(*shape[:-2], shape[-2], 2), 1.0)


@pytest.mark.parametrize(
    ("experts", "linears", "words"),
    [
        ({}, {"model.layers.0.self_attn.nothing": pair(64, 64)}, r"self_attn\.nothing.*no such layer"),
        ({}, {"lm_head": pair(6400, 64)}, "lm_head.*no such layer"),
        ({}, {"model.layers.9.self_attn.q_proj": pair(64, 64)}, r"layers\.9"),
        ({}, {"model.layers.0.self_attn.q_proj": pair(64, 32)}, "64 by 32, expected 64 by 64"),
        ({"model.layers.5.mlp": {"down": pair(6, 64, 40)}}, {}, r"layers\.5"),
        ({"model.layers.0.mlp": {"down": pair(5, 64, 40)}}, {}, "down"),
    ],
)
def test_every_tensor_of_an_adapter_has_its_place(bench: Bench, experts: Any, linears: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        bench.places.bind(adapter_from_tensors(experts, linears), "saves/x", "x", 1)


def test_a_changed_adapter_is_not_served(bench: Bench, adapters: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(adapters["one"], copy)
    tensors = load_file(copy / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    save_file(tensors, copy / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=name):
        bench.places.open(copy, "copy", 1, str(bench.directory))


def test_a_name_is_loaded_once_by_two_who_come_together(bench: Bench, adapters: dict[str, Path]) -> None:
    """The second is told so, although nobody had the name when it came."""
    from ktransformers.serve.http.registry import Registry

    registry = Registry("tiny", bench.places, str(bench.directory), lambda owner: None)
    barrier = threading.Barrier(2, timeout=60)
    opened, refused = registry._open, []

    def together(name: str, source: str | Path) -> Any:
        made = opened(name, source)
        barrier.wait()
        return made

    def load() -> None:
        try:
            registry.load("one", adapters["one"])
        except InputError as error:
            refused.append(str(error))

    registry._open = together  # type: ignore[method-assign]
    both = [threading.Thread(target=load) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert list(registry.loaded) == ["one"] and len(refused) == 1 and "not loaded yet" in refused[0]


def test_openmp_rests_soon_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.openmp import SPIN_COUNT, USER_VARIABLES, limit_spinning

    for name in USER_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    done = subprocess.run(
        [sys.executable, "-c", "import sys; import ktransformers.openmp; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n", "too late: torch has loaded libgomp by now"
