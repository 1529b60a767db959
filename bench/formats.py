"""One layer of routed experts in the formats of released weights, against the roof of this machine and kt-kernel.

    python bench/formats.py --formats int8,int4:32 --peers kt_int8=/path/to/python kt_int4=/path/to/python

For each format: packing, forward from one token up, forward and backward with LoRA of rank 8, the error against the
bf16 weights that were encoded, and memory. The roof counts the bytes of the release, not of bf16. `codes` is the other
roof of small batches: the weights over the rate of the variant's own packed GEMV on codes in L1; the last column is the
share of the slower of the two. A
few experts are encoded and the others repeat their bytes, since encoding a layer would take longer than measuring it;
errors are taken on those few alone. Formats of GGUF hold random blocks and have no error: most have no encoder.
`int8+w8a8` is int8 with 8-bit activations, and so are `int4:32+w8a8` and `q4_k+w8a8`; their roof is the bare product of
bytes, and they are not trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import layer_bench
import moe
import train_step
from arguments import numbers, words
from layer_bench import RATES, TIMES, Column, LayerBench, Program, Setup
from peers.protocol import Peer, Runner, from_text
from shapes import Shape, Weights, make_weights, make_work
from sweeps import ALPHA, RANK, Sweeper, grad_out, lora_parameters, make_lora, operations
from timing import Yardstick, save

if TYPE_CHECKING:
    import torch

    from ktransformers.checkpoint.encoded import Encoded

W8A8 = "+w8a8"  # behind a format: activations as bytes, too
WITHOUT_W8A8 = ("bf16", "fp8", "mxfp8")
DEFAULT_FORMATS = ("int8", "int8+w8a8", "int4:32", "int4:32+w8a8", "fp8:128x128", "mxfp4", "q4_k", "q6_k", "bf16")
DEFAULT_TOKENS = (1, 16, 512, 2048, 8192)
MODES = ("forward_lora", "backward_lora")
TRAINED_LAYERS = 4  # at most: from 512 tokens on every call reads a whole layer
PROBE_TOKENS = 64
LEAST_ENCODED = 8  # experts
MOST_CODES_ROWS = 8  # of an expert, for which the rate of packed GEMV is measured
# Programs by what they do; a peer is measured beside the formats of the same width.
FORWARD = {f"kt_{kind}": Program("peers.kt", ("--kind", kind)) for kind in ("int8", "int4")}
TRAINING = {f"kt_{kind}": Program("peers.kt_sft", ("--kind", kind)) for kind in ("int8", "int4")}
# Blocks of GGUF: where their half-precision scales are, and what these must be for weights of deviation one.
BLOCK_SCALES = {
    "q8_0": {0: 1 / 74},
    "q4_0": {0: 1 / 4.6},
    "q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
    "q5_0": {0: 1 / 9.2},
    "q5_1": {0: 1 / 9.2, 2: -15.5 / 9.2},
    "q2_k": {80: 1 / 12, 82: 1.5 / 12},
    "q3_k": {108: 1 / 43},
    "q4_k": {0: 1 / 250, 2: 7.5 / 250},
    "q5_k": {0: 1 / 500, 2: 15.5 / 500},
    "q6_k": {208: 1 / 1370},
    "iq4_nl": {0: 1 / 71},
    "iq4_xs": {0: 1 / 1310},
    "tq1_0": {52: 1 / 0.82},
    "tq2_0": {64: 1 / 0.71},
    "iq1_s": {0: 1 / 7.2},
    "iq2_xxs": {0: 1 / 53},
    "iq2_xs": {0: 1 / 56},
    "iq2_s": {0: 1 / 57},
    "iq3_xxs": {0: 1 / 142},
    "iq3_s": {0: 1 / 141},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    defaults = ",".join(DEFAULT_FORMATS), ",".join(map(str, DEFAULT_TOKENS))
    trained = list(train_step.DEFAULT_TOKENS)
    parser = layer_bench.options(__doc__, FORWARD, ["qwen3-30b"])
    parser.add_argument("--formats", type=words, default=list(DEFAULT_FORMATS), help=f"default {defaults[0]}")
    parser.add_argument(
        "--tokens", type=numbers, default=list(DEFAULT_TOKENS), help=f"of forward, default {defaults[1]}"
    )
    parser.add_argument(
        "--train-tokens",
        type=numbers,
        default=trained,
        help=f"with LoRA, default {','.join(map(str, trained))}; empty: no training",
    )
    parser.add_argument("--seconds-per-cell", type=float, default=0.6, help="of timed calls for each implementation")
    args = layer_bench.parse(parser, FORWARD, argv)
    layer_bench.check_tokens(parser, "--tokens", args.tokens)
    if args.train_tokens:
        layer_bench.check_tokens(parser, "--train-tokens", args.train_tokens)
    check_formats(parser, args.formats)
    return args


def check_formats(parser: argparse.ArgumentParser, formats: list[str]) -> None:
    from ktransformers.checkpoint.encoded import GGUF_BLOCKS, format_of
    from ktransformers.ground.errors import InputError

    if not formats:
        parser.error(f"--formats: expected some of {', '.join(DEFAULT_FORMATS)}")
    for name in formats:
        if name in GGUF_BLOCKS and name not in BLOCK_SCALES:
            parser.error(
                f"--formats: no blocks of {name} can be made up; of GGUF's there are {', '.join(BLOCK_SCALES)}"
            )
        try:
            stored = name.removesuffix(W8A8)
            if name != stored and stored.partition(":")[0] in WITHOUT_W8A8:
                parser.error(f"--formats: {name}: {stored} has no integer codes, and so no 8-bit activations")
            if name != "bf16":
                format_of(stored)
        except InputError as error:
            parser.error(f"--formats: {error}")


@dataclass(frozen=True)
class Source:
    """A layer as it was released; the first `encoded` experts hold the bf16 weights of the same number."""

    format: str
    matrices: dict[str, Encoded] | None  # gate, up, down; None: the bf16 weights
    bytes: int
    encoded: int  # 0: made up


def make_source(shape: Shape, weights: Weights, format: str, encoded: int) -> Source:
    if format == "bf16":
        return Source(format, None, shape.layer_bytes, encoded)
    if format in BLOCK_SCALES:
        matrices = {name: random_blocks(format, encoded, *matrix.shape[1:]) for name, matrix in named(weights)}
    else:
        from ktransformers.checkpoint.encoder import encode

        matrices = {name: encode(matrix[:encoded], format) for name, matrix in named(weights)}
    matrices = {name: repeated(matrix, shape.experts) for name, matrix in matrices.items()}
    total = sum(matrix.bytes for matrix in matrices.values())
    return Source(format, matrices, total, 0 if format in BLOCK_SCALES else encoded)


def named(weights: Weights) -> list[tuple[str, torch.Tensor]]:
    return [("gate", weights.gate), ("up", weights.up), ("down", weights.down)]


def random_blocks(format: str, experts: int, rows: int, columns: int) -> Encoded:
    """Random codes and sub-scales; the scales make weights of about deviation 1 / sqrt(columns)."""
    import torch

    from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded

    values, size = GGUF_BLOCKS[format]
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(256, (experts, rows, columns // values, size), dtype=torch.uint8, generator=generator)
    if format == "tq2_0":  # codes are 0, 1 and 2: a 3 becomes a 1
        blocks ^= blocks & 0xAA & ((blocks & 0x55) << 1)
    for place, scale in BLOCK_SCALES[format].items():
        half = torch.tensor([scale * columns**-0.5], dtype=torch.float16).view(torch.uint8)
        blocks[..., place : place + 2] = half
    return Encoded(format, blocks.flatten(2), None, columns=columns)


def repeated(few: Encoded, experts: int) -> Encoded:
    """All experts of a layer, in memory of their own, so that packing reads as much as it would from a file."""
    import torch

    places = torch.arange(experts) % few.experts

    def filled(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[places]

    return replace(few, qweight=few.qweight[places], scales=filled(few.scales), tensor_scale=filled(few.tensor_scale))


def expected(shape: Shape, weights: Weights, experts: int, lora: bool) -> dict[str, torch.Tensor]:
    """The probe's output `out` and the gradient of its `hidden` in float32, with LoRA merged into the weights."""
    import torch
    from peers.torch_loop import forward

    matrices = {name: matrix[:experts].float() for name, matrix in named(weights)}
    if lora:
        factors = make_lora(shape)
        for name, matrix in matrices.items():
            a, b = (factors[f"{name}_{which}"][:experts].float() for which in "ab")
            matrix.baddbmm_(b, a, alpha=ALPHA / RANK)
    work = make_work(shape, PROBE_TOKENS, 1, experts=experts)
    hidden = work.hidden.float().requires_grad_()
    out = forward(Weights(**matrices), hidden, work.steps[0][1], work.weights)
    (grad,) = torch.autograd.grad(out, hidden, grad_out(work).float())
    return {"out": out.detach().flatten(), "hidden": grad.flatten()}


@dataclass(frozen=True)
class Truth:
    """What the probe should give without and with LoRA; errors are relative, in the Euclidean norm."""

    request: dict[str, Any]
    bare: dict[str, torch.Tensor]
    adapted: dict[str, torch.Tensor]

    @staticmethod
    def of(shape: Shape, weights: Weights, experts: int) -> Truth:
        request = {"do": "probe", "tokens": PROBE_TOKENS, "experts": experts}
        return Truth(request, expected(shape, weights, experts, False), expected(shape, weights, experts, True))

    def forward_errors(self, answer: dict[str, str]) -> dict[str, float]:
        return {"forward": relative(from_text(answer["out"]), self.bare["out"])}

    def training_errors(self, answer: dict[str, str]) -> dict[str, float]:
        """By mode: of the output, and of the gradient of the hidden states."""
        errors = [relative(from_text(answer[name]), self.adapted[name]) for name in ("out", "hidden")]
        return dict(zip(MODES, errors, strict=True))


def relative(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result - truth).norm() / truth.norm())


def beside(format: str, programs: dict[str, Program]) -> dict[str, Program]:
    """The peers of a format: kt-kernel's int8 beside int8, its int4 beside int4 of any group."""
    kind = format.removesuffix(W8A8).partition(":")[0]
    return {name: program for name, program in programs.items() if name == f"kt_{kind}"}


class Bench(LayerBench):
    NAME = "formats"
    PROGRAMS: ClassVar = {}  # each format starts its own
    COLUMNS: ClassVar = [
        Column("shape", 10, "shape"),
        Column("format", 13, "format"),
        Column("isa", 7, "isa"),
        Column("tokens", 6, "tokens"),
        Column("mode", 13, "mode"),
        *TIMES,
        *RATES,
        Column("codes ms", 9, "codes_ms", 3),
        Column("of both", 7, "share_of_both", 2),
        Column("error", 7, "error", 4),
    ]

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.document.update(rank=RANK, memory=[])

    def peer_columns(self, peers: Mapping[str, str]) -> list[Column]:
        """A format has one at most, so all share the columns."""
        columns = [Column("kt ms", 9, "peers/*", 3), Column("kt x", 5, "speedup/*", 2)]
        return [*columns, Column("kt error", 7, "peer_errors/*", 4)] if peers else []

    @contextmanager
    def peers_beside(self, format: str, isa: str, programs: dict[str, Program]) -> Iterator[dict[str, Peer]]:
        """Peers have one variant: beside the first one is enough."""
        peers = self.start_peers(beside(format, programs)) if isa == self.isas[0] else {}
        try:
            yield peers
        finally:
            for peer in peers.values():
                peer.close()

    def measure_shape(self, shape: Shape, isa: str, peers: dict[str, Peer]) -> None:
        from ktransformers import _core

        weights = make_weights(shape)
        encoded = min(shape.experts, max(shape.top_k, LEAST_ENCODED))
        truth = Truth.of(shape, weights, encoded)
        for format in self.args.formats:
            rounds, stored = format.endswith(W8A8), format.removesuffix(W8A8)
            yardstick = Yardstick(self.roof_pool, isa, w8a8=rounds)
            source = make_source(shape, weights, stored, encoded)
            each = source.bytes / shape.experts
            with self.peers_beside(format, isa, FORWARD) as peers:
                ours = Runner(moe.Ours(self.pool, isa, stored, source.matrices, rounds), lambda _: weights)
                self.measure_forward(Setup(shape, isa, ours, peers, yardstick, format, each), source, truth)
                del ours
            if self.args.train_tokens and not rounds:
                with self.peers_beside(format, isa, TRAINING) as peers:
                    # A pool of its own: what it keeps to compute with is counted.
                    pool = _core.Pool(threads=self.pool.threads)
                    trained = train_step.Ours(pool, isa, format, source.matrices, MODES)
                    sweeper = Sweeper(trained, lambda _: weights)
                    setup = Setup(shape, isa, sweeper, peers, yardstick, format, each)
                    self.measure_training(setup, trained, sweeper, source, truth)
                    del setup, sweeper, trained, pool

    def probe(
        self, setup: Setup, source: Source, truth: Truth, errors: Callable[[dict[str, str]], dict[str, float]]
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Errors by mode, of ours (none where the weights are made up) and of the peers by name."""
        mine = errors(setup.ours.ask(truth.request)) if source.encoded else {}
        return mine, {name: errors(answer) for name, answer in self.ask_peers(setup.peers, truth.request).items()}

    def add_with_errors(
        self, cell: dict[str, Any], mine: dict[str, float], theirs: dict[str, dict[str, float]]
    ) -> None:
        if cell["mode"] in mine:
            cell["error"] = mine[cell["mode"]]
        cell["peer_errors"] = {name: errors[cell["mode"]] for name, errors in theirs.items() if name in cell["peers"]}
        self.add(cell)

    def measure_forward(self, setup: Setup, source: Source, truth: Truth) -> None:
        shape = setup.shape
        layers = self.args.layers or shape.layers(self.cache, source.bytes)
        request = {"do": "load", "shape": shape.name, "layers": layers}
        request["max_tokens"] = max([PROBE_TOKENS, *self.args.tokens])
        rates = self.measure_pack(setup, request)
        mine, theirs = self.probe(setup, source, truth, truth.forward_errors)
        rounds = setup.format.endswith(W8A8)
        for tokens in self.args.tokens:
            if self.too_long(setup, tokens, rates.roof_seconds(shape.operations(tokens), 0)):
                continue
            cell, answers = moe.measure_forward(self, setup, tokens)
            if rounds:  # registers are measured with bf16
                del cell["register_share"], cell["register_tflops"]
            elif setup.format != "bf16":
                self.add_codes_roof(setup, cell)
            self.compare(f"{shape.name} {setup.format}, {tokens} tokens", answers)
            self.add_with_errors(cell, mine, theirs)

    def add_codes_roof(self, setup: Setup, cell: dict[str, Any]) -> None:
        """Where packed GEMV takes the rows of an average expert."""
        shape, experts = setup.shape, cell["unique_experts"]
        rows = max(1, round(cell["tokens"] * shape.top_k / experts))
        if rows > MOST_CODES_ROWS:
            return
        try:
            rate = self.roof_pool.codes_rate(setup.format, rows, seconds=0.05, isa=setup.isa)
        except ValueError:
            return
        cell["codes_ms"] = 1e3 * experts * (shape.layer_bytes / shape.experts / 2) / rate
        cell["share_of_both"] = max(cell["codes_ms"], cell["roof_ms"]) / cell["ms"]

    def measure_training(
        self, setup: Setup, ours: train_step.Ours, sweeper: Sweeper, source: Source, truth: Truth
    ) -> None:
        from ktransformers import _core

        shape = setup.shape
        layers = self.args.layers or min(TRAINED_LAYERS, shape.layers(self.cache, source.bytes))
        request = {"do": "load", "shape": shape.name, "layers": layers}
        request["max_tokens"] = max([PROBE_TOKENS, *self.args.train_tokens])
        before = _core.pooled_bytes()
        setup.ours.ask(request)
        resident = {name: answer["resident"] for name, answer in self.ask_peers(setup.peers, request).items()}
        mine, theirs = self.probe(setup, source, truth, truth.training_errors)
        for tokens in self.args.train_tokens:
            setup.sample_rates()
            if self.too_long(setup, tokens, setup.samples[-1].roof_seconds(operations(shape, tokens, MODES[-1]), 0)):
                continue
            cells, answers = train_step.measure_modes(self, setup, tokens, MODES)
            self.compare(f"{shape.name} {setup.format}, {tokens} tokens with LoRA", answers)
            for cell in cells:
                self.add_with_errors(cell, mine, theirs)
        grown = sweeper.resident() - (_core.pooled_bytes() - before)
        self.add_memory(setup, ours, grown, source, layers, resident)

    def compare(self, where: str, answers: dict[str, dict[str, Any]]) -> None:
        """Weights differ by design, so only routes are compared; results have been probed."""
        for name, answer in answers.items():
            self.same_routes(f"{where}, {name}", answers[""], answer)

    def add_memory(
        self, setup: Setup, ours: train_step.Ours, grown: int, source: Source, layers: int, theirs: dict[str, int]
    ) -> None:
        """`grown` is what training has left in this process besides activations and gradients of the buffer pool."""
        shape = setup.shape
        lora = ours.packed_lora_bytes + 2 * shape.experts * lora_parameters(shape)
        packed = layers * ours.packed_bytes
        scratch = grown - packed - layers * lora
        entry: dict[str, Any] = {
            "shape": shape.name,
            "isa": setup.isa,
            "format": setup.format,
            "layers": layers,
            "released_bytes": layers * source.bytes,
            "packed_bytes": packed,
            "lora_bytes": layers * lora,
            "scratch_bytes": scratch,
            "packed_over_released": packed / (layers * source.bytes),
            "scratch_over_packed": scratch / packed,
            "peers": theirs,
        }
        self.document["memory"].append(entry)
        parts = [f"released {entry['released_bytes'] / 1e6:.1f} MB", f"packed {packed / 1e6:.1f}"]
        parts += [f"kept beside these and LoRA {scratch / 1e6:.1f} ({100 * scratch / packed:.1f} %)"]
        parts += [f"{name} {value / 1e6:.1f}" for name, value in theirs.items()]
        print(f"    {shape.name}, {setup.format}, {layers} layers: {', '.join(parts)}", flush=True)
        if self.args.json:
            save(self.document, self.args.json)


def main(argv: list[str] | None = None) -> int:
    return Bench(parse(argv)).main()


if __name__ == "__main__":
    sys.exit(main())
