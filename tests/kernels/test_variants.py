"""Choosing a CPU variant from outside, each time in a process of its own, because the choice is made once."""

from __future__ import annotations

from ktransformers import _core
from tests.support.forked import python

CODE = """
import torch
from ktransformers import _core
from ktransformers.nn import ExpertStore
store = ExpertStore(2, 40, 24)
ones = torch.ones(2, 24, 40)
store.pack(gate=ones, up=ones, down=ones.transpose(1, 2))
y = store.forward(torch.full((3, 40), 2**-5), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
print(_core.isa(), store.isa, y.std().item(), round(y.mean().item(), 2))
"""


def test_forced(isa: str) -> None:
    done = python(CODE, KT_ISA=isa)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # Every hidden number is 40 / 32, so every inner one is 1.25^2 * sigmoid(1.25) = 1.21..., in f32 or in bf16.
    chosen, used, spread, mean = done.stdout.split()
    assert (chosen, used) == (isa, isa)
    assert float(spread) == 0
    assert abs(float(mean) - 24 * 1.25**2 * 0.77730) < 0.15


def test_kt_kernels_names() -> None:
    usable = {variant["name"] for variant in _core.variants() if variant["native"] or variant["emulated"]}
    for theirs, ours in (
        ("avx2", "avx2"),
        ("avx512_vnni", "avx512_vnni"),
        ("avx512_vbmi", "avx512_vnni"),
        ("avx512_base", "avx512"),
        ("amx", "amx"),
    ):
        if ours in usable:
            assert python(CODE, KT_KERNEL_CPU_VARIANT=theirs).stdout.split()[0] == ours


def test_best_native_by_default() -> None:
    native = [variant["name"] for variant in _core.variants() if variant["native"]]
    assert python(CODE).stdout.split()[0] == native[-1]


def test_chosen_by_precision() -> None:
    words = [f"ExpertStore(1, 8, 8, precision={precision!r}).isa" for precision in ("bf16", "f32", "f64")]
    done = python(f"from ktransformers.nn import ExpertStore; print({', '.join(words)})")
    for chosen, precision in zip(done.stdout.split(), ("bf16", "f32", "f64"), strict=True):
        able = [v["name"] for v in _core.variants() if v["native"] and precision in v["precisions"]]
        assert chosen == able[-1]


def test_unknown_variant() -> None:
    done = python(CODE, KT_ISA="avx3")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "avx3" in last and "generic" in last
    # Importing asks for nothing, so it says nothing.
    assert python("import ktransformers._core", KT_ISA="avx3").returncode == 0


def test_unavailable_variant() -> None:
    """What the CPU lacks is an error that names it. A build that emulates everything has none, so then the text is
    looked at natively (tests/native/test_cpu.cpp)."""
    for variant in _core.variants():
        if variant["native"] or variant["emulated"]:
            continue
        done = python(CODE, KT_ISA=variant["name"])
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert variant["name"] in last
        assert "cannot run" in last and "use one of" in last
        if variant["missing"]:
            assert variant["missing"] in last


def test_debug_log_says_what_was_chosen() -> None:
    for switch in ({"KT_LOG": "debug"}, {"KT_KERNEL_DEBUG": "1"}):
        done = python(CODE, **switch)
        assert done.returncode == 0
        lines = done.stderr.splitlines()
        assert sum("chosen, the best native one" in line for line in lines) == 1
        for variant in _core.variants():
            assert any(line.startswith(f"kt: cpu variant {variant['name']}:") for line in lines)
    asked = python(CODE, KT_LOG="debug", KT_ISA="generic").stderr
    assert "cpu variant generic: native; chosen, asked for" in asked


def test_forced_variant_without_the_precision() -> None:
    lacking = [v["name"] for v in _core.variants() if (v["native"] or v["emulated"]) and "f64" not in v["precisions"]]
    for isa in lacking[-1:]:
        done = python("from ktransformers.nn import ExpertStore; ExpertStore(2, 8, 8, precision='f64')", KT_ISA=isa)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert f'"{isa}" (asked for by KT_ISA' in last and "no kernels of precision f64; these have: generic" in last
