"""Every tensor argument of every function of the core, with every kind of wrong tensor.

The bindings are enumerated from the module itself: one without a case fails the test. A case is a call that works.
Each of its tensors is replaced in turn by one that is wrong or laid out unusually, and the call must either raise an
error that names the argument or return what it returned before; what lies between and behind the elements of an output
must not change. Inputs end at a page that cannot be read, so that reading past them ends the process.

The cases are in `binding_cases.py`. `make asan` runs this file with a core that was built with sanitizers, named by
KT_CORE.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from .binding_cases import CASES, WITHOUT_TENSORS, Case, H, T, _core, batch, matrices, new_experts, packed_experts

LIBC = ctypes.CDLL(None, use_errno=True)
PROT_NONE = 0
PATTERN = 0x5A  # bytes around the elements of an output


def bindings() -> Iterator[tuple[str, str]]:
    """(name, signature) of every function and method of the module."""
    for name, member in vars(_core).items():
        if type(member).__name__ == "nb_func":
            yield name, member.__nb_signature__[0][0]
        if isinstance(member, type):
            for method_name, method in vars(member).items():
                if type(method).__name__ == "nb_method":
                    yield f"{name}.{method_name}", method.__nb_signature__[0][0]


def test_every_binding_has_a_case() -> None:
    signatures = dict(bindings())
    assert len(signatures) > 30
    with_cases = {name.split(",")[0] for name in CASES}
    assert with_cases | WITHOUT_TENSORS == set(signatures)
    assert not with_cases & WITHOUT_TENSORS
    for name in WITHOUT_TENSORS - {"Experts.verify"}:  # which takes a list of numbers
        assert "object" not in signatures[name].partition("->")[0], f"{name} takes an object: give it a case"
    for name, make in CASES.items():
        case = make()
        parameters = re.findall(r"(\w+): (?:object|list)", signatures[name.split(",")[0]])
        covered = {tensor.split(".")[0] for tensor in case.tensors} | case.plain
        assert covered >= set(parameters), name


class Refused(Exception):
    """What a kind of wrong tensor does not apply to."""


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where the next page cannot be read; at a multiple of 64 where it can."""
    page, size = mmap.PAGESIZE, tensor.nbytes
    pages = -(-size // page) or 1
    memory = mmap.mmap(-1, (pages + 1) * page)
    begin = np.frombuffer(memory, np.uint8)
    assert LIBC.mprotect(ctypes.c_void_p(begin.ctypes.data + pages * page), ctypes.c_size_t(page), PROT_NONE) == 0
    offset = (
        pages * page - -(-size // 64) * 64 if size % 64 == 0 or tensor.dtype == torch.uint8 else pages * page - size
    )
    flat = torch.from_numpy(begin[offset : offset + size])
    copy = flat.view(tensor.dtype).view(tensor.shape) if size else tensor.clone()
    copy.copy_(tensor)
    return copy


def within(tensor: Tensor, shape: list[int], index: tuple[slice, ...]) -> Tensor:
    """A view of a larger tensor with a pattern around its elements."""
    around = torch.full((int(np.prod(shape)) * tensor.element_size(),), PATTERN, dtype=torch.uint8)
    view = guarded(around).view(tensor.dtype).view(shape)[index]
    view.copy_(tensor)
    return view


def rows_apart(tensor: Tensor) -> Tensor:
    *outer, last = tensor.shape
    return within(tensor, [*outer, last + 16], (..., slice(0, last)))


def columns_apart(tensor: Tensor) -> Tensor:
    *outer, last = tensor.shape
    return within(tensor, [*outer, 2 * last], (..., slice(0, None, 2)))


def first_apart(tensor: Tensor) -> Tensor:
    first, *inner = tensor.shape
    return within(tensor, [2 * first, *inner], (slice(0, None, 2),))


def transposed(tensor: Tensor) -> Tensor:
    return guarded(tensor.transpose(0, -1).contiguous()).transpose(0, -1)


def reversed_rows(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        raise Refused
    return tensor.numpy()[::-1].copy()[::-1]


def negated(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.bool, torch.uint8, torch.uint64):
        raise Refused
    return torch._neg_view(guarded(-tensor))


def imaginary(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        raise Refused
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def misaligned(tensor: Tensor) -> Tensor:
    raw = bytearray(1) + bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(raw, dtype=tensor.dtype, offset=1).view(tensor.shape)


def with_gradient(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise Refused
    return tensor.clone().requires_grad_()


def parameter(tensor: Tensor) -> Tensor:
    return torch.nn.Parameter(tensor.clone(), requires_grad=False)


def mapped(tensor: Tensor) -> Tensor:
    file = Path(os.environ["KT_TEST_FILE"])
    file.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    array = _core.map_file(str(file))
    return torch.frombuffer(memoryview(array), dtype=tensor.dtype).view(tensor.shape)


def in_numpy(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        raise Refused
    return tensor.numpy()


# The same numbers, otherwise laid out: refused, or used correctly.
SAME_NUMBERS: tuple[Callable[[Tensor], Any], ...] = (
    rows_apart, columns_apart, first_apart, transposed, reversed_rows, negated, imaginary, misaligned, with_gradient,
    parameter, mapped, in_numpy,
)  # fmt: skip


def read_only(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        raise Refused
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


def overlapping(tensor: Tensor) -> Tensor:
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    if not dims:
        raise Refused
    return tensor.narrow(dims[0], 0, 1).clone().expand(tensor.shape)


def overlapping_by_one(tensor: Tensor) -> Tensor:
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    if len(dims) < 2:
        raise Refused
    strides = list(tensor.stride())
    strides[dims[0]] -= 1
    return torch.zeros(tensor.numel(), dtype=tensor.dtype).as_strided(tensor.shape, strides)


def freed(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def fake(tensor: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def swapped_bytes(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16 or tensor.element_size() == 1:
        raise Refused
    array = tensor.numpy()
    return array.astype(array.dtype.newbyteorder(">"))


# Never right, for any tensor of any binding.
WRONG: tuple[Callable[[Tensor], Any], ...] = (
    freed, fake, swapped_bytes,
    lambda tensor: tensor.tolist(),
    lambda tensor: "tensor",
    lambda tensor: 3,
    lambda tensor: object(),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.to_sparse(),
    lambda tensor: tensor.flatten()[0],
    lambda tensor: tensor.unsqueeze(0),
    lambda tensor: tensor[0] if tensor.dim() > 1 else tensor.unsqueeze(-1),
    lambda tensor: tensor.to(torch.complex64),
    lambda tensor: tensor.to(torch.complex64).conj(),
    lambda tensor: tensor.to(torch.int16),
    lambda tensor: tensor.float().to(torch.float8_e4m3fn),
)  # fmt: skip
WRONG_OUTPUT: tuple[Callable[[Tensor], Any], ...] = (read_only, overlapping, overlapping_by_one, mapped)


def resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = size
    copy = torch.zeros(shape, dtype=tensor.dtype)
    common = min(size, tensor.shape[dim])
    copy.narrow(dim, 0, common).copy_(tensor.narrow(dim, 0, common))
    return guarded(copy)


def run(case: Case, name: str | None, replacement: Any) -> list[Any] | Exception:
    """What the call returned or raised; outputs start out as they are in the case."""
    given: dict[str, Any] = {key: guarded(tensor) for key, tensor in case.tensors.items()}
    if name is not None:
        given[name] = replacement
    try:
        return [as_tensor(value).clone() if hasattr(value, "shape") else value for value in case.call(given)]
    except (TypeError, ValueError) as error:
        return error


def as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(value.copy())


def assert_names(error: Exception, name: str) -> None:
    word = name.split(".")[-1]
    matrix = name.split(".")[0]
    assert word in str(error) or matrix in str(error), (name, error)


def assert_equal(got: list[Any], want: list[Any]) -> None:
    for value, expected in zip(got, want, strict=True):
        if isinstance(expected, Tensor):
            assert torch.equal(value, expected)
        else:
            assert value == expected


def assert_pattern(view: Tensor) -> None:
    """The bytes of the view's storage that are not its elements are as `within` left them."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    own = torch.zeros_like(storage, dtype=torch.bool)
    own.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    around = storage[: storage.numel()][~own].view(torch.uint8)
    assert bool((around == PATTERN).all())


@pytest.mark.parametrize("binding", CASES)
def test_same_numbers_in_another_layout(binding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_TEST_FILE", str(tmp_path / "file"))
    case = CASES[binding]()
    want = run(case, None, None)
    assert isinstance(want, list), want
    accepted = 0
    for name, tensor in case.tensors.items():
        for kind in SAME_NUMBERS:
            if kind is mapped and name in case.written:
                continue
            try:
                replacement = kind(tensor)
            except Refused:
                continue
            got = run(case, name, replacement)
            if isinstance(got, Exception):
                assert_names(got, name)
                continue
            accepted += 1
            assert_equal(got, want)
            if kind in (rows_apart, columns_apart, first_apart) and name in case.written:
                assert_pattern(replacement)
            assert kind not in (negated, imaginary, with_gradient) and (
                kind is not misaligned or tensor.element_size() == 1
            )
    assert accepted


@pytest.mark.parametrize("binding", CASES)
def test_wrong_tensors(binding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_TEST_FILE", str(tmp_path / "file"))
    case = CASES[binding]()
    for name, tensor in case.tensors.items():
        kinds = list(WRONG) + (list(WRONG_OUTPUT) if name in case.written else [])
        if name not in case.optional:
            kinds.append(lambda tensor: None)
        for kind in kinds:
            try:
                replacement = kind(tensor)
            except (Refused, NotImplementedError, RuntimeError):  # torch has no such tensor of this dtype
                continue
            got = run(case, name, replacement)
            assert isinstance(got, Exception), (name, getattr(kind, "__name__", kind), replacement)
            assert_names(got, name)


def copied(experts: _core.Experts) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in experts.memory().items()}


def test_memory_outlives_another_adopt() -> None:
    source = packed_experts(with_biases=True)
    experts = new_experts()
    experts.adopt(**copied(source))
    views = experts.memory()
    experts.adopt(**{name: torch.zeros_like(tensor) for name, tensor in copied(source).items()})
    fill = [np.full_like(array, 1) for array in views.values() for _ in range(8)]  # takes freed memory
    for name, array in source.memory().items():
        assert np.array_equal(views[name], array), name
    assert fill


def test_a_call_keeps_the_memory_of_its_experts() -> None:
    source, inputs = packed_experts(), batch()
    experts, out, want = new_experts(), torch.zeros(T, H), torch.zeros(T, H)
    source.forward(**inputs, out=want)
    experts.adopt(**copied(source))
    call = experts.prepare(**inputs, out=out)
    size = sum(array.nbytes for array in source.memory().values())
    del experts, source
    fill = [np.ones(size, np.uint8) for _ in range(8)]
    call.submit()
    call.wait()
    assert torch.equal(out, want) and fill


def test_adopted_experts_are_read_only() -> None:
    experts = new_experts()
    experts.adopt(**copied(packed_experts()))
    with pytest.raises(RuntimeError, match="memory of their own"):
        experts.pack(0, **matrices())
    with pytest.raises(ValueError, match="read-only"):
        experts.memory()["down"][0] = 1


@pytest.mark.parametrize("binding", CASES)
def test_other_shapes_and_dtypes(binding: str) -> None:
    """Refused or computed: the process survives, with a page behind every tensor that cannot be read."""
    case = CASES[binding]()
    for name, tensor in case.tensors.items():
        replacements = [
            resized(tensor, dim, size)
            for dim in range(tensor.dim())
            for size in (0, 1, tensor.shape[dim] - 1, tensor.shape[dim] + 1, 2 * tensor.shape[dim])
            if size != tensor.shape[dim]
        ]
        dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
        replacements += [guarded(tensor.to(dtype)) for dtype in dtypes if dtype != tensor.dtype]
        for replacement in replacements:
            got = run(case, name, replacement)
            if isinstance(got, Exception):
                assert re.match(r"[\w ]+(:| )", str(got)), got
