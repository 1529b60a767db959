"""Decode attention of the core over a paged KV cache, against torch in float64: blocks in any order, windows and
chunks, latents, codes, shared blocks, and what it refuses. `tests/native/test_attention.cpp` runs every CPU variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ktransformers import _core

BLOCK, BLOCKS = 64, 24
LENGTHS = (1, 64, 65, 200, 700)  # with the new token
SCALE = 0.1


def block_tables(random: torch.Generator) -> Tensor:
    """Shuffled blocks of sequences of LENGTHS; -1 behind the last ones."""
    free = torch.randperm(BLOCKS, generator=random).tolist()
    table = torch.full((len(LENGTHS), 11), -1, dtype=torch.int32)
    for blocks, length in zip(table, LENGTHS, strict=True):
        used = -(-length // BLOCK)
        blocks[:used] = torch.tensor([free.pop() for _ in range(used)])
    return table


def of_sequences(numbers: Sequence[int], table: Tensor) -> _core.StepSequences:
    """Row i of the batch is the new token of sequence i of LENGTHS."""
    rows = torch.tensor(numbers, dtype=torch.int32)
    positions = torch.tensor([LENGTHS[number] - 1 for number in numbers], dtype=torch.int32)
    return _core.StepSequences(rows, positions, table[rows])


def held(part: Tensor, blocks: Tensor, first: int, end: int) -> Tensor:
    """[blocks, groups, 64, size] -> keys or values [groups, end - first, size] of a sequence in float64."""
    tokens = torch.arange(first, end)
    return part[blocks[tokens // BLOCK].long(), :, tokens % BLOCK].transpose(0, 1).double()


def oracle(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
    """query [heads, d], keys and values [groups, n, size] -> [heads, dv]."""
    repeat = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    if sinks is None:
        return scaled_dot_product_attention(query.double()[:, None], keys, values, scale=SCALE)[:, 0]
    scores = (keys @ query.double()[..., None])[..., 0] * SCALE
    weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
    return (weights[:, None] @ values)[:, 0]


def layer_of_pool(random: torch.Generator, dtype: torch.dtype, groups: int, *sizes: int) -> list[Tensor]:
    """The second of three layers in blocks of all of them."""
    block = torch.randn(BLOCKS, 3, groups * BLOCK * sum(sizes), generator=random).to(dtype)[:, 1]
    parts = block.split([groups * BLOCK * size for size in sizes], dim=1)
    return [part.unflatten(1, (groups, BLOCK, size)) for part, size in zip(parts, sizes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "groups", "key", "value"), [(8, 2, 32, 32), (3, 3, 48, 16), (5, 1, 16, 64)])
@pytest.mark.parametrize("mask", [{}, {"window": 40}, {"window": 300}, {"chunk": 80}, {"window": 70, "chunk": 600}])
def test_shuffled_blocks_match_float64(
    heads: int, groups: int, key: int, value: int, mask: dict[str, int], dtype: torch.dtype, pool: _core.Pool
) -> None:
    random, count = torch.Generator().manual_seed(0), len(LENGTHS)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    keys, values = layer_of_pool(random, dtype, groups, key, value)
    query, new_keys, new_values = numbers(heads, count, key), numbers(groups, count, key), numbers(groups, count, value)
    table, sinks = block_tables(random), torch.randn(heads, generator=random)
    before, out = (keys.clone(), values.clone()), numbers(count, heads, value)

    def attend(which: Sequence[int], to: Tensor, threads: _core.Pool) -> None:
        given = (query, new_keys, new_values, to, (keys, values), of_sequences(which, table))
        threads.attend(*given, scale=SCALE, sinks=sinks, **mask)

    attend(range(count), out, pool)
    for number, length in enumerate(LENGTHS):
        block, token = int(table[number, (length - 1) // BLOCK]), (length - 1) % BLOCK
        for old, new in zip(before, (new_keys, new_values), strict=True):
            old[block, :, token] = new[:, number]
        first = max(0, length - mask.get("window", length))
        first = max(first, (length - 1) // mask.get("chunk", length) * mask.get("chunk", 0))
        seen = [held(part, table[number], first, length) for part in (keys, values)]
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out[number].double(), oracle(query[:, number], *seen, sinks), rtol=limit, atol=limit)
        for threads in (pool, _core.Pool(3)):
            alone = torch.zeros_like(out)
            attend([number], alone, threads)
            assert torch.equal(alone[number], out[number])
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_latents_are_keys_and_values(pool: _core.Pool) -> None:
    random, count = torch.Generator().manual_seed(1), len(LENGTHS)
    (keys,) = layer_of_pool(random, torch.float32, 1, 48)
    query, key = torch.randn(6, count, 48, generator=random), torch.randn(1, count, 48, generator=random)
    table, out = block_tables(random), torch.zeros(count, 6, 32)
    cache = (keys, keys[..., :32])
    pool.attend(query, key, key[..., :32], out, cache, of_sequences(range(count), table), scale=SCALE)
    for number, length in enumerate(LENGTHS):
        latents = held(keys, table[number], 0, length)
        assert torch.equal(latents[:, -1].float(), key[:, number])
        expected = oracle(query[:, number], latents, latents[..., :32])
        torch.testing.assert_close(out[number].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_match_their_numbers(latent: bool, dtype: torch.dtype, pool: _core.Pool) -> None:
    random, count = torch.Generator().manual_seed(2), len(LENGTHS)
    codes = torch.randint(0, 0x7F, (2, BLOCKS, 2, BLOCK, 32), dtype=torch.uint8, generator=random)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, generator=random) << 7
    scales = torch.randint(117, 121, (2, BLOCKS, 2, BLOCK, 1), dtype=torch.uint8, generator=random)
    if latent:
        codes, scales = codes[:1].expand(2, -1, -1, -1, -1), scales[:1].expand(2, -1, -1, -1, -1)
    query = torch.randn(4, count, 32, generator=random).to(dtype)
    new = [torch.randn(2, count, 32, generator=random).to(dtype) for _ in range(2)]
    table, out = block_tables(random), torch.zeros(count, 4, 32, dtype=dtype)
    steps = of_sequences(range(count), table)
    pool.attend(query, *new, out, (*codes, *scales), steps, scale=SCALE, window=300)
    for number, length in enumerate(LENGTHS):
        numbers = codes.view(torch.float8_e4m3fn).double() * torch.exp2(scales.double() - 127)
        seen = [held(part, table[number], max(0, length - 300), length) for part in numbers]
        for part, given in zip(seen, new[:1] if latent else new, strict=False):
            torch.testing.assert_close(part[:, -1], given[:, number].double(), rtol=1 / 16, atol=1e-2)
        expected = oracle(query[:, number], *seen)
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out[number].double(), expected, rtol=limit, atol=limit)


def test_sequences_that_share_blocks_have_their_own_numbers(pool: _core.Pool) -> None:
    """Two sequences of 130 tokens, of which 128 are the same, and a longer part of one of them in the same batch."""
    random = torch.Generator().manual_seed(3)
    keys, values = layer_of_pool(random, torch.float32, 2, 16, 16)
    query, key, value = (torch.randn(heads, 3, 16, generator=random) for heads in (4, 2, 2))
    table = torch.tensor([[7, 2, 9], [7, 2, 4], [7, 2, 4]], dtype=torch.int32)
    positions, rows = torch.tensor([129, 129, 130], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    out = torch.zeros(3, 4, 16)
    pool.attend(query, key, value, out, (keys, values), _core.StepSequences(rows, positions, table), scale=SCALE)
    for row, position in enumerate(positions.tolist()):
        seen = [held(part, table[row], 0, position + 1) for part in (keys, values)]
        assert torch.equal(seen[0][:, -1].float(), key[:, row])
        torch.testing.assert_close(out[row].double(), oracle(query[:, row], *seen), rtol=1e-5, atol=1e-5)


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("rows", "positions", "table", "message"),
    [
        (i32(-1), i32(0), i32(0)[None], "rows: given -1"),
        (i32(0, 0), i32(0, 0), i32(0, 1)[:, None], "rows: given 0 twice"),
        (i32(0), i32(-1), i32(0)[None], "positions: given -1"),
        (i32(0), i32(128), i32(0, 1)[None], "positions: given 128 of sequence 0, .* less than the 128 tokens"),
        (i32(0), i32(0), i32()[None], "positions: given 0 .* less than the 0 tokens"),
        (i32(0), i32(64), i32(0, -1)[None], "table: given -1"),
        (i32(0), i32(0, 1), i32(0)[None], r"positions: given shape \[2\], expected \[1\]"),
        (i32(0), i32(0), i32(0, 1)[:, None], r"table: given shape \[2, 1\], expected \[1, 1\]"),
    ],
)
def test_bad_sequences_are_refused(rows: Tensor, positions: Tensor, table: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.StepSequences(rows, positions, table)


def test_sequences_are_copied(pool: _core.Pool) -> None:
    rows, positions, table = i32(0), i32(0), i32(1, 5)[None]
    steps = _core.StepSequences(rows, positions, table)
    rows[0], positions[0], table[0, 0] = 7, 70, 9
    keys, key = torch.zeros(2, 1, BLOCK, 16), torch.ones(1, 1, 16)
    pool.attend(key, key, key, torch.zeros(1, 1, 16), (keys, keys.clone()), steps, scale=SCALE)
    assert keys.sum() == 16 and torch.equal(keys[1, 0, 0], key[0, 0])


def test_unsupported_caches_are_refused() -> None:
    pool, steps = _core.Pool(1), _core.StepSequences(i32(0), i32(70), i32(2, 1)[None])
    query, key, out = torch.zeros(4, 1, 32), torch.zeros(2, 1, 32), torch.zeros(1, 4, 32)
    keys, values = torch.zeros(2, 3, 2, BLOCK, 32)
    codes, scales = torch.zeros(3, 2, BLOCK, 32).byte(), torch.zeros(3, 2, BLOCK, 1).byte()
    pool.attend(query, key, key, out, (keys, values), steps, scale=1.0)
    caches: list[tuple[Any, str]] = [
        ((keys[:2], values[:2]), "sequences: table: given block 2, expected less than the 2 blocks of cache"),
        ((keys[:, :1], values), "keys: given shape"),
        ((keys, values[:2]), "values: given shape"),
        ((keys[:, :, :32], values[:, :, :32]), "keys: given shape"),
        ((keys, keys.view(3, 2, 32, 64)[..., :32].repeat(1, 1, 2, 1)[:, :, ::2]), "values: given shape"),
        ((keys, keys.transpose(0, 1)[:, :1].expand(-1, 3, -1, -1)), "values"),
        ((keys,), "cache: given 1 tensors"),
        ((codes, codes, scales, scales.expand(-1, -1, -1, 2)[..., 1:].repeat(1, 1, 1, 2)), "value scales: given shape"),
        ((codes, codes, scales.repeat(1, 1, 1, 2)[..., :1], scales), "key scales: given a stride of 2"),
    ]
    for cache, match in caches:
        with pytest.raises(ValueError, match=match):
            pool.attend(query, key, key, out, cache, steps, scale=1.0)
    with pytest.raises(TypeError, match="keys"):
        pool.attend(query, key, key, out, (keys.double(), values), steps, scale=1.0)
    with pytest.raises(ValueError, match="divisor"):
        pool.attend(query[:3], key, key, out[:, :3], (keys, values), steps, scale=1.0)
    with pytest.raises(ValueError, match="multiple of 16"):
        pool.attend(query[..., :8], key[..., :8], key, out, (keys[..., :8], values), steps, scale=1.0)
    with pytest.raises(ValueError, match="window: given -1"):
        pool.attend(query, key, key, out, (keys, values), steps, scale=1.0, window=-1)
    second = _core.StepSequences(i32(1), i32(0), i32(0)[None])
    with pytest.raises(ValueError, match="sequences: rows: given 1, expected less than the 1 of the batch"):
        pool.attend(query, key, key, out, (keys, values), second, scale=1.0)
