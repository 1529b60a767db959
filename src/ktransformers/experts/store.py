"""`ExpertStore`: the experts of one layer, packed once for the CPU kernels and computed for any batch.

Shapes: E experts, H hidden, I intermediate, T tokens, k experts per token. Sources are gate and up `[E, I, H]` and down
`[E, H, I]`, or `gate_up` with both, as in transformers; `transposed` and `interleaved` are the contract's
`is_transposed` and `not is_concatenated`. All of these become strided views of the caller's tensors: the core reads any
strides, so the only copy is the one into packed tiles. A matrix may also be an `Encoded` in one of the formats of
docs/formats.md: its bits are rearranged, never dequantized. A store is below autograd (`experts/operator.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.mapped import read_only_tensor
from ktransformers.experts import buffer_pool
from ktransformers.experts.pack_inputs import (
    as_matrices,
    as_vectors,
    formats_by_matrix,
    require_none,
    split_encoded,
    split_fused,
)
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.pool import default_pool

# Version of the byte layout of `ExpertStore.memory`, which docs/formats.md describes.
LAYOUT_VERSION = 2
W8A8_FORMATS = "experts in integer formats, such as int8, int4 and GGUF's types"


@dataclass(frozen=True)
class Dropout:
    """Dropout of LoRA's inputs: each element is dropped with probability `rate`; forward and backward with the same
    `seed` drop the same elements."""

    rate: float = 0.0
    seed: int = 0


NO_DROPOUT = Dropout()
_rounds_weights: ContextVar[bool] = ContextVar("rounds_weights", default=False)


@contextmanager
def round_weights() -> Iterator[None]:
    """Stores that are called inside compute as with `needs_grad`: quantised weights are rounded to bf16 for experts
    with few rows too, so a row's result does not depend on how many rows its experts have."""
    token = _rounds_weights.set(True)
    try:
        yield
    finally:
        _rounds_weights.reset(token)


def weights_are_rounded() -> bool:
    """Whether the calling code is inside of `round_weights`."""
    return _rounds_weights.get()


class PatchOverflowError(KTError, ValueError):
    """A matrix in bf16:12 has more values to patch than its strips have patches; it can be stored as bf16."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.role = message.partition(" ")[0]  # gate, up or down


class ExpertCall:
    """An asynchronous call of one expert layer: bound to its tensors once, submitted and awaited any number of times.

    Returned by `ExpertStore.prepare`. Every `submit` reads hidden states and routing from the bound tensors."""

    def __init__(self, call: _core.Call, out: Tensor) -> None:
        self._call = call
        self.out = out

    def submit(self) -> None:
        """Start the computation and return at once. Another thread may `wait`."""
        self._call.submit()

    def wait(self) -> Tensor:
        """The output of the last submission."""
        self._call.wait()
        return self.out

    @property
    def done(self) -> bool:
        """Whether no submission is running."""
        return self._call.done

    @property
    def address(self) -> int:
        """The argument of `_core.host_callbacks()`."""
        return self._call.address


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
        """`limit` > 0 clamps gate to at most limit and up to +-limit; `alpha` belongs to activation "swiglu_oai".

        `precision` is the type of packed weights: "bf16", or "f32" and "f64", in which activations and sums are kept
        too. Without `isa` the best CPU variant that supports it is used. Sources, hidden states, outputs, LoRA and
        gradients may have any float dtype, float64 included, with any precision.

        `formats` is the storage format of "gate", "up" and "down", one for all or one each. A format other than "bf16"
        stays quantized and is dequantized to `precision` inside the kernels.
        """
        self.gated = gated
        self.formats = formats_by_matrix(formats, gated)
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
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        # The CPU variant that computes, the type of packed weights, and the number of threads.
        self.isa, self.precision, self.threads = self._experts.isa, self._experts.precision, self._experts.threads

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertStore:
        # Packed experts are frozen, so a copy of a model (a reference model, an average of weights) shares them: a
        # second set would not fit into memory.
        return self

    @property
    def core(self) -> _core.Experts:
        """For calls of the core that compute more than the experts."""
        return self._experts

    @property
    def packed_bytes(self) -> int:
        return self._experts.packed_bytes

    @property
    def w8a8(self) -> bool:
        """Default of `forward` and `prepare` for 8-bit activations: an approximation, off by default.

        In int8 and int4, rows of hidden and activated states are rounded to 8 bits with one scale per row and
        multiplied exactly with the int8 weights. int4 weights are requantised to 8 bits with one scale per output,
        except for experts with at most four rows of the batch, which use the int4 weights. In other formats each 32
        columns of a row have a scale of their own and are multiplied with the packed weights, on CPUs that multiply
        bf16 for at most four rows of an expert. LoRA is computed in full precision."""
        return self._w8a8

    @w8a8.setter
    def w8a8(self, on: bool) -> None:
        self._w8a8 = self._resolve_w8a8(on)

    @property
    def w8a8_unsupported(self) -> str:
        """Why this store cannot compute with 8-bit activations; empty: it can."""
        return self._experts.w8a8_unsupported

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
        """Pack experts from `first_expert` on: matrices of one expert, or of a range with an expert dimension in front.

        Pass `gate` and `up`, or `gate_up` with the rows of gate before those of up (`interleaved`: alternating). With
        `transposed` every matrix is input-major: gate_up `[E, H, 2I]`, down `[E, I, H]`. An `Encoded` is always
        output-major and has the store's format for that matrix.
        """
        intermediate, hidden = self.intermediate_size, self.hidden_size
        if gate_up is not None:
            require_none("gate", gate, "None with gate_up")
            require_none("up", up, "None with gate_up")
            if isinstance(gate_up, Encoded):
                gate, up = split_encoded(gate_up, interleaved)
            else:
                fused = as_matrices("gate_up", gate_up, 2 * intermediate, hidden, transposed)
                gate, up = split_fused(fused, interleaved)
        if gate_up_bias is not None:
            require_none("gate_bias", gate_bias, "None with gate_up_bias")
            require_none("up_bias", up_bias, "None with gate_up_bias")
            gate_bias, up_bias = split_fused(as_vectors("gate_up_bias", gate_up_bias, 2 * intermediate), interleaved)
        else:
            gate_bias = None if gate_bias is None else as_vectors("gate_bias", gate_bias, intermediate)
            up_bias = None if up_bias is None else as_vectors("up_bias", up_bias, intermediate)
        if up is None:
            raise InputError("up", None, "a tensor", "give gate and up, or gate_up" if self.gated else "")
        if self.gated and gate is None:
            raise InputError("gate", None, "a tensor: these experts are gated", "give gate and up, or gate_up")
        if not self.gated:
            require_none("gate" if gate_up is None else "gate_up", gate, "None: these experts have no gate")
        transposed_halves = transposed and gate_up is None
        matrices = (
            None if gate is None else self._core_matrix("gate", gate, intermediate, hidden, transposed_halves),
            self._core_matrix("up", up, intermediate, hidden, transposed_halves),
            self._core_matrix("down", down, hidden, intermediate, transposed),
        )
        down_vector = None if down_bias is None else as_vectors("down_bias", down_bias, hidden)
        try:
            self._experts.pack(first_expert, *matrices, gate_bias, up_bias, down_vector)
        except OverflowError as error:
            raise PatchOverflowError(str(error)) from None

    def _core_matrix(self, name: str, matrix: Tensor | Encoded, rows: int, columns: int, transposed: bool) -> Any:
        """The core's argument for a matrix: a view of the tensor, or quantized values, scales and tensor scale."""
        stored = self.formats[name]
        if isinstance(matrix, Encoded):
            if matrix.format != stored:
                raise InputError(name, f"format {matrix.format}", stored, "create the store with these formats")
            if (matrix.rows, matrix.columns) != (rows, columns):
                raise InputError(name, f"{matrix.rows} rows of {matrix.columns}", f"{rows} rows of {columns}")
            if matrix.order is not None:
                raise InputError(name, "columns in order of activation (desc_act)", "experts in their own order")
            return matrix.packable
        if stored != "bf16":
            raise InputError(name, "a tensor", f"an Encoded of format {stored}", "see ktransformers.checkpoint.encode")
        return as_matrices(name, matrix, rows, columns, transposed)

    def decode(self, matrix: str, expert: int) -> Tensor:
        """One matrix ("gate", "up" or "down") of an expert, `[N, K]`, dequantised to the dtype of `precision`."""
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}[self.precision]
        shape = (self.hidden_size, self.intermediate_size)
        out = torch.empty(shape if matrix == "down" else shape[::-1], dtype=dtype)
        self._experts.decode(matrix, expert, out)
        return out

    def transpose(self, source: Tensor, target: Tensor) -> None:
        """`source` `[n, m]` into `target` `[m, n]`, both dense and of one dtype, on the store's thread pool."""
        self._experts.transpose(source, target)

    def memory(self) -> dict[str, Tensor]:
        """The packed bytes "gate_up" and "down", and the biases if any ("gate_up_bias", "down_bias").

        They are views to read, though torch and DLPack refuse no writes, and keep the memory alive; if the experts were
        packed on more than one NUMA node, copies in the layout of one node.
        """
        return {name: read_only_tensor(array) for name, array in self._experts.memory().items()}

    def parts(self) -> dict[str, list[tuple[int, Tensor]]]:
        """The packed bytes "gate_up" and "down" as they lie, without a copy: (offset in an expert's bytes, read-only
        uint8 [E, bytes]). One part, or one for every NUMA node if the experts were packed on several."""
        by_matrix = self._experts.parts().items()
        return {name: [(offset, read_only_tensor(array)) for offset, array in parts] for name, parts in by_matrix}

    def biases(self) -> dict[str, Tensor]:
        """The biases of `memory()`."""
        return {name: read_only_tensor(array) for name, array in self._experts.biases().items()}

    def place_pages(self) -> None:
        """Read in the pages of adopted experts, each on the NUMA node that computes with it; `verify` does so for
        single experts. Nothing to do on one node."""
        self._experts.place_pages()

    def checksums(self) -> list[int]:
        """CRC-32C of every expert: of its bytes in `memory()`, gate_up, down and then the biases."""
        return self._experts.checksums()

    def verify(self, experts: Sequence[int]) -> None:
        """Compare experts with their checksums from `adopt`, those that were not compared before; `forward` and the
        other calls do so for the experts that they compute. Nothing to do without checksums."""
        self._experts.verify(experts)

    def adopt(
        self,
        *,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        checksums: Tensor | None = None,
        source: str = "",
    ) -> None:
        """Instead of `pack`: use what `memory` returned for a store of the same shape, formats and `LAYOUT_VERSION`.

        The tensors, e.g. of a mapped file, are used without a copy and kept alive; nothing can be packed afterwards.
        Each NUMA node reads its range of the rows of every expert. `checksums` (int64 [E], of `checksums()`) are
        compared when an expert is first read; an error names `source`.
        """
        self._experts.adopt(gate_up, down, gate_up_bias, down_bias, checksums, source)

    def layout(self) -> dict[str, Any]:
        """The layout of `memory()`: sizes of blocks, and of the strips of encoded ones."""
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
        needs_grad: bool = False,
    ) -> Tensor:
        """Sum over k of weight * expert(hidden), in hidden's shape; `[..., H]`, `[..., k]`, `[..., k]`.

        Ids outside [0, E), such as -1, and experts with `skip[e]` contribute nothing. `out` may have another dtype.
        `keep`, from `new_keep`, receives gate and up for a backward of the same batch. `adapter[t]` is the index in
        `adapters` of token t's LoRA, or -1; a single adapter without `adapter` applies to every token. `w8a8` overrides
        the property. `needs_grad`, implied by `keep` and dropout: weights are rounded as in backward for small batches
        too (docs/formats.md).
        """
        w8a8 = self._resolve_w8a8(w8a8)
        if w8a8 and (keep is not None or dropout.rate):
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
            dropout.rate,
            dropout.seed,
            w8a8,
            needs_grad or (_rounds_weights.get() and not w8a8),
        )
        return out

    def _resolve_w8a8(self, w8a8: bool | None) -> bool:
        if w8a8 and (reason := self.w8a8_unsupported):
            given = f"on, with {', '.join(sorted(set(self.formats.values())))} in precision {self.precision}"
            raise InputError("w8a8", given, f"{W8A8_FORMATS}, and precision bf16", reason)
        return self._w8a8 if w8a8 is None else w8a8

    def refuse_gradients(self) -> None:
        """Raise because W8A8 has no backward pass."""
        raise InputError("w8a8", "on", "off where gradients are wanted", "training computes with all bits")

    def new_adapter(
        self, gate_rank: int = 0, up_rank: int = 0, down_rank: int = 0, *, shared: bool = False
    ) -> _core.Adapter:
        """An empty adapter for LoRA factors of these ranks (0: none for that matrix); `shared`: gate and up share A."""
        return _core.Adapter(self._experts, gate_rank, up_rank, down_rank, shared)

    def new_keep(self, tokens: int, top_k: int) -> Tensor:
        """A buffer for gate and up of every (token, slot); its layout is private to the core."""
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
        """Gradients of hidden (in its dtype) and of the routing weights (float64 if they are, else float32); the
        experts are frozen.

        With `keep` from `forward`, gate and up are not recomputed. `factors` receives the gradients of LoRA: for every
        adapter the tensors for gate_a, gate_b, up_a, up_b, down_a and down_b, each a tensor or None.
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
            dropout.rate,
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
        """An asynchronous call. It reads the tensors when it is submitted, so they must be viewable as rows."""
        for name, tensor in (("hidden", hidden), ("ids", ids), ("weights", weights), ("adapter", adapter)):
            if tensor is not None and tensor.dim() > 2 and not tensor.is_contiguous():
                raise InputError(name, f"strides {list(tensor.stride())}", "a contiguous tensor", "copy it first")
        rows, out, target = self._rows(hidden, out)
        inputs = (rows, _flat(ids), _flat(weights), target, _flat_adapter(adapter), skip, adapters)
        return ExpertCall(self._experts.prepare(*inputs, self._resolve_w8a8(w8a8)), out)

    def _rows(self, hidden: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden as rows, the output in hidden's shape, and a view of the output as rows."""
        if not isinstance(hidden, Tensor):
            raise TypeError(f"hidden: given a {type(hidden).__name__}, expected a torch tensor")
        if out is None:
            out = buffer_pool.empty_output_like(hidden)
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
    """`[..., n]` as `[T, n]`. Non-tensors and 0-D tensors pass unchanged; the core refuses them."""
    if not isinstance(tensor, Tensor) or not tensor.dim():
        return tensor
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _flat_adapter(adapter: Tensor | None) -> Tensor | None:
    return adapter.reshape(-1) if adapter is not None and adapter.dim() > 1 else adapter
