"""Bad input gives an error that names the argument; nothing crashes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers import _core

T, K, E, H, I = 6, 2, 4, 40, 30  # noqa: E741


@pytest.fixture(scope="module")
def experts() -> _core.Experts:
    made = _core.Experts(_core.Pool(2), E, H, I)
    made.pack(0, torch.ones(E, I, H), torch.ones(E, I, H), torch.ones(E, H, I))
    return made


def arguments(**changed: Any) -> dict[str, Any]:
    good = {
        "hidden": torch.ones(T, H),
        "ids": torch.zeros(T, K, dtype=torch.int64),
        "weights": torch.ones(T, K),
        "out": torch.empty(T, H),
    }
    return good | changed


WRONG = [
    # argument, value, kind of error, part of the message
    ("hidden", None, TypeError, "given a NoneType"),
    ("hidden", [[1.0] * H] * T, TypeError, "given a list"),
    ("hidden", "hidden", TypeError, "given a str"),
    (
        "hidden",
        torch.ones(T, H, dtype=torch.int16),
        TypeError,
        "of int16, expected bfloat16, float16, float32, float64",
    ),
    ("hidden", torch.ones(T, H, dtype=torch.int8), TypeError, "of int8"),
    ("hidden", torch.ones(T, H, dtype=torch.complex64), TypeError, "of complex64"),
    ("hidden", torch.ones(T, H).to(torch.float8_e4m3fn), TypeError, "hidden: given a Tensor"),
    ("hidden", torch.ones(T, H, device="meta"), TypeError, "on meta, expected a tensor in CPU memory"),
    (
        "hidden",
        torch.ones(T, H, requires_grad=True),
        TypeError,
        "requires grad, expected one without; pass hidden.detach()",
    ),
    ("hidden", torch.ones(T, H).to_sparse(), TypeError, "hidden: given a Tensor"),
    ("hidden", torch.ones(H), ValueError, f"shape [{H}], expected 2 dimensions"),
    ("hidden", torch.ones(1, T, H), ValueError, "expected 2 dimensions"),
    ("hidden", torch.tensor(1.0), ValueError, "expected 2 dimensions"),
    ("hidden", torch.ones(T, H + 1), ValueError, f"shape [{T}, {H + 1}], expected [{T}, {H}] (tokens, hidden)"),
    ("hidden", torch.ones(H, T).T, ValueError, "expected 1 in the last dimension; pass hidden.contiguous()"),
    ("hidden", torch.ones(T, 2 * H)[:, ::2], ValueError, f"given strides [{2 * H}, 2]"),
    ("ids", torch.zeros(T, K), TypeError, "of float32, expected int64, int32"),
    ("ids", torch.zeros(T, K, dtype=torch.int16), TypeError, "of int16"),
    ("ids", torch.zeros(T + 1, K, dtype=torch.int64), ValueError, f"shape [{T + 1}, {K}], expected [{T}, {K}]"),
    ("ids", torch.zeros(T, 0, dtype=torch.int64), ValueError, "second dimension of ids: given 0, expected 1 to"),
    ("ids", torch.zeros(K, T, dtype=torch.int64).T, ValueError, "pass ids.contiguous()"),
    ("ids", torch.zeros(T, K, dtype=torch.int64, device="meta"), TypeError, "on meta"),
    ("weights", torch.ones(T, K, dtype=torch.int64), TypeError, "of int64"),
    ("weights", torch.ones(T, K + 1), ValueError, f"expected [{T}, {K}] (tokens, top k)"),
    ("weights", torch.ones(K, T).T, ValueError, "pass weights.contiguous()"),
    ("weights", torch.ones(T, K, requires_grad=True), TypeError, "weights.detach()"),
    ("out", torch.empty(T, H, dtype=torch.int32), TypeError, "of int32"),
    ("out", torch.empty(T - 1, H), ValueError, f"shape [{T - 1}, {H}]"),
    ("out", torch.empty(H, T).T, ValueError, "pass out.contiguous()"),
    ("out", torch.empty(1, H).expand(T, H), ValueError, "elements that overlap, expected elements of its own"),
    ("out", torch.empty(T * H).as_strided((T, H), (1, 1)), ValueError, "elements that overlap"),
    ("adapter", torch.full((T,), -1), TypeError, "of int64, expected int32"),
    ("adapter", torch.full((T + 1,), -1, dtype=torch.int32), ValueError, f"expected [{T}]"),
    (
        "adapter",
        torch.tensor([-1, -1, 3, -1, -1, -1], dtype=torch.int32),
        ValueError,
        "3 for token 2, expected -1 (none); no",
    ),
    ("adapter", torch.tensor([-2] * T, dtype=torch.int32), ValueError, "given -2 for token 0"),
    ("skip", torch.zeros(E), TypeError, "of float32, expected bool, uint8"),
    ("skip", torch.zeros(E + 1, dtype=torch.bool), ValueError, f"expected [{E}] (experts)"),
    ("skip", torch.zeros(2 * E, dtype=torch.bool)[::2], ValueError, "pass skip.contiguous()"),
]


@pytest.mark.parametrize("way", ["forward", "prepare"])
@pytest.mark.parametrize(("name", "value", "kind", "part"), WRONG, ids=[f"{w[0]}-{n}" for n, w in enumerate(WRONG)])
def test_wrong_argument_of_a_call(
    experts: _core.Experts, way: str, name: str, value: Any, kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind, match=re.escape(part)) as caught:
        getattr(experts, way)(**arguments(**{name: value}))
    assert name in str(caught.value).split(":")[0]


def test_out_must_not_be_where_hidden_is(experts: _core.Experts) -> None:
    rows, columns = torch.ones(2 * T, H), torch.ones(T, 2 * H)
    for hidden, out in (
        (rows[:T], rows[:T]),
        (rows[:T], rows[T - 1 : -1]),
        (rows[::2], rows[:T]),
        (columns[:, :H], columns[:, H - 1 : -1]),
    ):
        with pytest.raises(ValueError, match="out: given memory that overlaps hidden"):
            experts.forward(**arguments(hidden=hidden, out=out))
    for hidden, out in ((rows[:T], rows[T:]), (rows[::2], rows[1::2]), (columns[:, :H], columns[:, H:])):
        experts.forward(**arguments(hidden=hidden, out=out))


def test_row_strides_are_free(experts: _core.Experts) -> None:
    want = torch.empty(T, H)
    experts.forward(**arguments(out=want))
    wide = {
        "hidden": torch.ones(T, 3 * H)[:, H : 2 * H],
        "ids": torch.zeros(T, 9, dtype=torch.int64)[:, 3 : 3 + K],
        "weights": torch.ones(T, 9)[:, 1 : 1 + K],
    }
    whole = torch.zeros(T, 3 * H)
    experts.forward(**arguments(**wide, out=whole[:, H : 2 * H]))
    assert torch.equal(whole[:, H : 2 * H], want)
    assert (whole[:, :H] == 0).all() and (whole[:, 2 * H :] == 0).all()


def test_numpy_is_welcome(experts: _core.Experts) -> None:
    want = torch.empty(T, H)
    experts.forward(**arguments(out=want))
    x = np.ones((T, H), np.float32)
    out = np.empty((T, H), np.float32)
    experts.forward(x[::-1], np.zeros((T, K), np.int32), np.ones((T, K), np.float32), out)
    assert np.array_equal(out, want.numpy())


def test_out_that_must_not_be_written(experts: _core.Experts) -> None:
    out = np.zeros((T, H), np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError, match=r"out: .*read-only"):
        experts.forward(**arguments(out=out))
    assert (out == 0).all()


def test_unaligned_array(experts: _core.Experts) -> None:
    raw = np.zeros(T * H * 4 + 1, np.uint8)[1:].view(np.float32).reshape(T, H)
    with pytest.raises(ValueError, match=r"hidden: .*aligned"):
        experts.forward(**arguments(hidden=raw))


def test_forward_before_all_is_packed() -> None:
    some = _core.Experts(_core.Pool(1), E, H, I)
    for ways in ("forward", "prepare"):
        with pytest.raises(RuntimeError, match="expert 0 of 4 is not packed"):
            getattr(some, ways)(**arguments())
    some.pack(0, torch.ones(2, I, H), torch.ones(2, I, H), torch.ones(2, H, I))
    with pytest.raises(RuntimeError, match="expert 2 of 4 is not packed"):
        some.forward(**arguments())


def packing(**changed: Any) -> dict[str, Any]:
    good = {"first_expert": 0, "gate": torch.ones(E, I, H), "up": torch.ones(E, I, H), "down": torch.ones(E, H, I)}
    return good | changed


WRONG_SOURCES = [
    ("gate", None, ValueError, "given None, expected a tensor: these experts are gated"),
    ("up", None, TypeError, "given None"),
    ("down", None, TypeError, "given None"),
    ("up", torch.ones(I, H), ValueError, "expected 3 dimensions"),
    ("up", torch.ones(0, I, H), ValueError, "given 0, expected 1 to 4"),
    ("up", torch.ones(E + 1, I, H), ValueError, "given 5, expected 1 to 4"),
    ("up", torch.ones(E, H, I), ValueError, f"expected [{E}, {I}, {H}] (experts, intermediate, hidden)"),
    ("gate", torch.ones(E - 1, I, H), ValueError, f"expected [{E}, {I}, {H}]"),
    ("down", torch.ones(E, I, H), ValueError, f"expected [{E}, {H}, {I}]"),
    ("down", torch.ones(E, H, I, dtype=torch.int32), TypeError, "of int32"),
    ("down", torch.ones(E, H, I, device="meta"), TypeError, "on meta"),
    ("down", torch.nn.Parameter(torch.ones(E, H, I)), TypeError, "down.detach()"),
    ("gate_bias", torch.ones(E, H), ValueError, f"expected [{E}, {I}]"),
    ("up_bias", torch.ones(E, I, 1), ValueError, "expected 2 dimensions"),
    ("down_bias", torch.ones(E, H, dtype=torch.int32), TypeError, "of int32"),
    ("first_expert", 1, ValueError, "given 1, expected 0 to 0"),
    ("first_expert", -1, ValueError, "given -1"),
    ("first_expert", 2**40, ValueError, "first_expert: given"),
]


@pytest.mark.parametrize(("name", "value", "kind", "part"), WRONG_SOURCES)
def test_wrong_source(experts: _core.Experts, name: str, value: Any, kind: type[Exception], part: str) -> None:
    with pytest.raises(kind, match=re.escape(part)) as caught:
        experts.pack(**packing(**{name: value}))
    assert name in str(caught.value).split(":")[0]


def test_ungated_takes_no_gate() -> None:
    ungated = _core.Experts(_core.Pool(1), E, H, I, gated=False, activation="relu2")
    with pytest.raises(ValueError, match=r"gate: given a tensor, expected None"):
        ungated.pack(**packing())
    with pytest.raises(ValueError, match=r"gate_bias: given a tensor, expected None"):
        ungated.pack(**packing(gate=None, gate_bias=torch.ones(E, I)))


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda p: _core.Experts(p, 0, H, I), "num_experts: given 0, expected 1 to"),
        (lambda p: _core.Experts(p, E, -1, I), "hidden: given -1"),
        (lambda p: _core.Experts(p, E, H, 2**40), "intermediate: given 1099511627776"),
        (
            lambda p: _core.Experts(p, E, H, I, activation="tanh"),
            'activation: given "tanh", expected one of silu, gelu',
        ),
        (lambda p: _core.Experts(p, E, H, I, limit=-1.0), "limit: given -1"),
        (lambda p: _core.Experts(p, E, H, I, limit=float("nan")), "limit: given nan"),
        (lambda p: _core.Experts(p, E, H, I, gated=False, limit=1.0), "limit: given 1"),
        (lambda p: _core.Experts(p, E, H, I, alpha=1.0), "alpha: given 1"),
        (lambda p: _core.Experts(p, E, H, I, activation="swiglu_oai"), "alpha: given 0.000000, expected more than 0"),
        (lambda p: _core.Experts(p, E, H, I, False, "swiglu_oai", 0.0, 1.7), "gated: given False"),
        (lambda p: _core.Experts(p, E, H, I, isa="sse9"), 'isa: no CPU variant is called "sse9"'),
        (lambda p: _core.Pool(-1), "threads: given -1"),
        (lambda p: _core.Pool(2, 3), "2 threads cannot have 3 groups"),
        (lambda p: _core.Pool(1, spin_us=-5), "spin_us: given -5"),
        (lambda p: p.rate("flops"), 'what: given "flops", expected one of registers, panels, read'),
        (lambda p: p.rate("read", 0.0), "seconds: given 0"),
        (lambda p: p.rate("read", threads=99), "threads: given 99"),
        (lambda p: p.rate("panels", 0.01, bytes=100), "100 bytes are too few"),
        (lambda p: p.rate("read", bytes=-1), "bytes: given -1"),
    ],
)
def test_wrong_construction(make: Callable[[_core.Pool], object], part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        make(_core.Pool(1))


def test_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryError):
        _core.Experts(_core.Pool(1), 2**16, 2**20, 2**20)


@pytest.mark.gpu
def test_cuda_tensors(experts: _core.Experts) -> None:
    for name in ("hidden", "ids", "weights", "out"):
        with pytest.raises(TypeError, match=f"{name}: given a Tensor .*expected a tensor in CPU memory"):
            experts.forward(**arguments(**{name: arguments()[name].cuda()}))
    pinned = {name: tensor.pin_memory() for name, tensor in arguments().items()}
    experts.forward(**pinned)
