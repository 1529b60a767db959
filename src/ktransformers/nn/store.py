"""The experts of one layer: packed once, computed for any batch.

Shapes: E experts, H hidden, I intermediate, T tokens, k experts per token. Sources are gate and up `[E, I, H]` and down
`[E, H, I]`, or `gate_up` that holds both as transformers' experts do; `transposed` and `interleaved` are the contract's
`is_transposed` and `not is_concatenated`. All of these become strided views of what was given: the core reads any
strides, so nothing is copied but into the packed tiles. A matrix may instead come as it was released, an `Encoded` in
one of the formats of docs/formats.md: its bits are sorted, never expanded. Gradients do not pass through here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded
from ktransformers.errors import InputError
from ktransformers.nn import buffer_pool
from ktransformers.nn.expert_call import ExpertCall
from ktransformers.nn.pack_inputs import (
    formats_of,
    halves_of_encoded,
    halves_of_tensor,
    matrices_of,
    refuse,
    vectors_of,
)
from ktransformers.nn.pool import default_pool

# Of the order of bytes in `ExpertStore.memory`; docs/formats.md describes it.
LAYOUT_VERSION = 2


@dataclass(frozen=True)
class Dropout:
    """Which share of LoRA's inputs is dropped; the seed says which, the same in forward and backward."""

    share: float = 0.0
    seed: int = 0


NO_DROPOUT = Dropout()


class ExpertStore:
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        limit: float = 0.0,
        alpha: float = 0.0,
        pool: _core.Pool | None = None,
        isa: str | None = None,
        precision: str = "bf16",
        formats: str | Mapping[str, str] = "bf16",
    ) -> None:
        """`limit` > 0 clamps gate from above and up to +-limit; `alpha` belongs to activation "swiglu_oai".

        `precision` is what weights are packed in: "bf16", or one of the exact kinds "f32" and "f64", in which
        activations and sums are kept too. Without `isa` the best variant that has it is taken. Sources, hidden states,
        results, LoRA and gradients may be of any float dtype, float64 among them, with any precision.

        `formats` says what "gate", "up" and "down" are stored in, one word for all or one each; what is not "bf16"
        stays in its released bits and is decoded to `precision` where it is used.
        """
        self.gated = gated
        self.formats = formats_of(formats, gated)
        self._w8a8 = False
        self._experts = _core.Experts(
            pool if pool is not None else default_pool(),
            num_experts,
            hidden_size,
            intermediate_size,
            gated,
            activation,
            limit,
            alpha,
            isa or "",
            precision,
            self.formats.get("gate", self.formats["up"]),
            self.formats["up"],
            self.formats["down"],
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertStore:
        # Packed experts are frozen, so a copy of a model (a reference, an average of weights) may share them; a second
        # set of bytes is what nobody has the memory for.
        return self

    @property
    def num_experts(self) -> int:
        return self._experts.num_experts

    @property
    def hidden_size(self) -> int:
        return self._experts.hidden

    @property
    def intermediate_size(self) -> int:
        return self._experts.intermediate

    @property
    def packed_bytes(self) -> int:
        return self._experts.packed_bytes

    @property
    def isa(self) -> str:
        """The CPU variant that computes."""
        return self._experts.isa

    @property
    def precision(self) -> str:
        """What the weights are packed in."""
        return self._experts.precision

    @property
    def threads(self) -> int:
        return self._experts.threads

    @property
    def w8a8(self) -> bool:
        """What `forward` and `prepare` do where they are not told: an approximation, off by default.

        Rows of hidden and activated states are rounded to 8 bits, each with a scale of its own, and multiplied with the
        int8 weights as they are, exactly; int4 weights become integers of 8 bits with one scale for each output, too,
        but for experts with four rows of a batch or fewer, which keep theirs. LoRA is computed as ever.
        """
        return self._w8a8

    @w8a8.setter
    def w8a8(self, on: bool) -> None:
        self._w8a8 = self._asked(on)

    @property
    def against_w8a8(self) -> str:
        """What stands against it; empty: nothing."""
        return self._experts.against_w8a8

    def pack(
        self,
        *,
        down: Tensor | Encoded,
        gate: Tensor | Encoded | None = None,
        up: Tensor | Encoded | None = None,
        gate_up: Tensor | Encoded | None = None,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        transposed: bool = False,
        interleaved: bool = False,
        first_expert: int = 0,
    ) -> None:
        """Experts from `first_expert` on: matrices of one expert, or of several with a dimension in front.

        Give `gate` and `up`, or `gate_up` with the rows of gate before those of up (`interleaved`: in turns). With
        `transposed` every matrix lies input-major: gate_up `[E, H, 2I]`, down `[E, I, H]`. An `Encoded` lies
        output-major always, and is of the format that this store has for the matrix.
        """
        wide, narrow = self.intermediate_size, self.hidden_size
        if gate_up is not None:
            refuse("gate", gate, "None beside gate_up")
            refuse("up", up, "None beside gate_up")
            if isinstance(gate_up, Encoded):
                gate, up = halves_of_encoded(gate_up, interleaved)
            else:
                fused = matrices_of("gate_up", gate_up, 2 * wide, narrow, transposed)
                gate, up = halves_of_tensor(fused, interleaved)
        if gate_up_bias is not None:
            refuse("gate_bias", gate_bias, "None beside gate_up_bias")
            refuse("up_bias", up_bias, "None beside gate_up_bias")
            gate_bias, up_bias = halves_of_tensor(vectors_of("gate_up_bias", gate_up_bias, 2 * wide), interleaved)
        else:
            gate_bias = None if gate_bias is None else vectors_of("gate_bias", gate_bias, wide)
            up_bias = None if up_bias is None else vectors_of("up_bias", up_bias, wide)
        if up is None:
            raise InputError("up", None, "a tensor", "give gate and up, or gate_up" if self.gated else "")
        if self.gated and gate is None:
            raise InputError("gate", None, "a tensor: these experts are gated", "give gate and up, or gate_up")
        if not self.gated:
            word = "gate" if gate_up is None else "gate_up"
            refuse(word, gate, "None: these experts have no gate")
        self._experts.pack(
            first_expert,
            None if gate is None else self._given("gate", gate, wide, narrow, transposed and gate_up is None),
            self._given("up", up, wide, narrow, transposed and gate_up is None),
            self._given("down", down, narrow, wide, transposed),
            gate_bias,
            up_bias,
            None if down_bias is None else vectors_of("down_bias", down_bias, narrow),
        )

    def _given(self, name: str, matrix: Tensor | Encoded, rows: int, columns: int, transposed: bool) -> Any:
        """What the core takes for a matrix: a view of the tensor, or the three parts of an encoded one."""
        stored = self.formats[name]
        if isinstance(matrix, Encoded):
            if matrix.format != stored:
                raise InputError(name, f"format {matrix.format}", stored, "make the store with these formats")
            if (matrix.rows, matrix.columns) != (rows, columns):
                raise InputError(name, f"{matrix.rows} rows of {matrix.columns}", f"{rows} rows of {columns}")
            return matrix.codes, matrix.scales, matrix.tensor_scale
        if stored != "bf16":
            raise InputError(name, "a tensor", f"an Encoded of format {stored}", "see ktransformers.checkpoint.encode")
        return matrices_of(name, matrix, rows, columns, transposed)

    def decode(self, matrix: str, expert: int) -> Tensor:
        """`[N, K]` of "gate", "up" or "down" as it is multiplied: in bfloat16, or in the precision's own dtype."""
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}[self.precision]
        shape = (self.hidden_size, self.intermediate_size)
        out = torch.empty(shape if matrix == "down" else shape[::-1], dtype=dtype)
        self._experts.decode(matrix, expert, out)
        return out

    def transpose(self, source: Tensor, target: Tensor) -> None:
        """`[n, m]` into `[m, n]`, both dense and of one dtype, by the threads of these experts."""
        self._experts.transpose(source, target)

    def memory(self) -> dict[str, Tensor]:
        """The packed bytes, "gate_up" and "down", and the biases where there are any ("gate_up_bias", "down_bias").

        They are views that keep the store alive; on several NUMA nodes, copies in the order of a single one.
        """
        return {name: torch.from_numpy(array) for name, array in self._experts.memory().items()}

    def adopt(
        self,
        *,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """Instead of `pack`: what `memory` gave for a store of the same shape, formats and `LAYOUT_VERSION`.

        On one NUMA node the tensors are used where they lie, a mapped file among them, and kept alive.
        """
        self._experts.adopt(gate_up, down, gate_up_bias, down_bias)

    def layout(self) -> dict[str, Any]:
        """Where things are in `memory()`: blocks, their bytes, and the strips of encoded ones."""
        return self._experts.layout()

    def forward(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        adapter: Tensor | None = None,
        skip: Tensor | None = None,
        out: Tensor | None = None,
        keep: Tensor | None = None,
        adapters: Sequence[_core.Adapter] = (),
        dropout: Dropout = NO_DROPOUT,
        w8a8: bool | None = None,
        learns: bool = False,
    ) -> Tensor:
        """Sum over k of weight * expert(hidden), in hidden's shape; `[..., H]`, `[..., k]`, `[..., k]`.

        Ids outside [0, E), -1 among them, and experts with `skip[e]` add nothing. `out` may be of another dtype.
        `keep`, from `new_keep`, takes gate and up for a backward of the same batch. `adapter[t]` is the place in
        `adapters` of token t's LoRA, or -1; a single adapter without `adapter` is every token's. `w8a8`: see there.
        `learns`, implied by `keep` and dropout: weights are rounded as in backward, for few rows too (docs/formats.md).
        """
        w8a8 = self._asked(w8a8)
        if w8a8 and (keep is not None or dropout.share):
            self.refuse_gradients()
        rows, out, target = self._rows(hidden, out)
        self._experts.forward(
            rows,
            _flat(ids),
            _flat(weights),
            target,
            _flat_adapter(adapter),
            skip,
            keep,
            adapters,
            dropout.share,
            dropout.seed,
            w8a8,
            learns,
        )
        return out

    def _asked(self, w8a8: bool | None) -> bool:
        if w8a8 and (why := self.against_w8a8):
            given = f"on, with {', '.join(sorted(set(self.formats.values())))} in precision {self.precision}"
            raise InputError("w8a8", given, "experts in int8 or int4 and precision bf16", why)
        return self._w8a8 if w8a8 is None else w8a8

    def refuse_gradients(self) -> None:
        """Where they are asked for beside W8A8."""
        raise InputError("w8a8", "on", "off where gradients are wanted", "training computes with all bits")

    def new_adapter(
        self, gate_rank: int = 0, up_rank: int = 0, down_rank: int = 0, *, shared: bool = False
    ) -> _core.Adapter:
        """Room for LoRA factors of these ranks (0: none on that matrix); `shared`: gate and up have one A."""
        return _core.Adapter(self._experts, gate_rank, up_rank, down_rank, shared)

    def new_keep(self, tokens: int, top_k: int) -> Tensor:
        """Memory for gate and up of every (token, slot); its contents belong to the core."""
        return buffer_pool.empty((self.keep_bytes(tokens, top_k),), torch.uint8)

    def keep_bytes(self, tokens: int, top_k: int) -> int:
        return tokens * top_k * self._experts.keep_row_bytes

    def backward(
        self,
        grad_out: Tensor,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        adapter: Tensor | None = None,
        skip: Tensor | None = None,
        keep: Tensor | None = None,
        adapters: Sequence[_core.Adapter] = (),
        factors: Sequence[Sequence[Tensor | None]] | None = None,
        dropout: Dropout = NO_DROPOUT,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of hidden (in its dtype) and of the routing weights (float32, or float64 where they are); the
        experts are frozen.

        With what `forward` kept, gate and up are not computed again. `factors` takes the gradients of LoRA: for every
        adapter tensors for gate_a, gate_b, up_a, up_b, down_a and down_b, or None in their places.
        """
        if self._w8a8:
            self.refuse_gradients()
        rows, grad_hidden, target = self._rows(hidden, None)
        grad_weights = torch.empty(ids.shape, dtype=torch.float64 if weights.dtype == torch.float64 else torch.float32)
        self._experts.backward(
            _flat(grad_out),
            rows,
            _flat(ids),
            _flat(weights),
            target,
            _flat(grad_weights),
            skip,
            keep,
            _flat_adapter(adapter),
            adapters,
            factors,
            dropout.share,
            dropout.seed,
        )
        return grad_hidden, grad_weights

    def prepare(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        adapter: Tensor | None = None,
        skip: Tensor | None = None,
        out: Tensor | None = None,
        adapters: Sequence[_core.Adapter] = (),
        w8a8: bool | None = None,
    ) -> ExpertCall:
        """A call to submit and wait for; it reads the tensors as they are when it is submitted, so they must be
        viewable as rows."""
        for name, tensor in (("hidden", hidden), ("ids", ids), ("weights", weights), ("adapter", adapter)):
            if tensor is not None and tensor.dim() > 2 and not tensor.is_contiguous():
                raise InputError(name, f"strides {list(tensor.stride())}", "a contiguous tensor", "copy it first")
        rows, out, target = self._rows(hidden, out)
        given = (rows, _flat(ids), _flat(weights), target, _flat_adapter(adapter), skip, adapters)
        return ExpertCall(self._experts.prepare(*given, self._asked(w8a8)), out)

    def _rows(self, hidden: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden as rows, the result in hidden's shape, and the result as rows of the same memory."""
        if not isinstance(hidden, Tensor):
            raise TypeError(f"hidden: given a {type(hidden).__name__}, expected a torch tensor")
        if out is None:
            out = buffer_pool.result_like(hidden)
        elif out.shape != hidden.shape:
            raise InputError("out", f"shape {list(out.shape)}", f"the shape of hidden, {list(hidden.shape)}")
        if hidden.dim() == 2:
            return _flat(hidden), out, _flat(out)
        try:
            return _flat(hidden), out, out.detach().view(-1, hidden.shape[-1])
        except RuntimeError:
            raise InputError(
                "out", f"strides {list(out.stride())}", "a tensor viewable as rows", "pass out.contiguous()"
            ) from None


def _flat(tensor: Tensor) -> Tensor:
    """`[..., n]` as `[T, n]`. What is no tensor, or has no dimensions, is left for the core to refuse."""
    if not isinstance(tensor, Tensor) or not tensor.dim():
        return tensor
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _flat_adapter(adapter: Tensor | None) -> Tensor | None:
    return adapter.reshape(-1) if adapter is not None and adapter.dim() > 1 else adapter
