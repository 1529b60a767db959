"""The native core (csrc/bindings/module.cpp). `ktransformers.nn` is the interface for users."""

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

class Array(Protocol):
    """A CPU tensor: torch, numpy or any other that implements DLPack."""

    def __dlpack__(self) -> Any: ...

class VariantInfo(TypedDict):
    name: str
    native: bool  # this CPU and OS run it
    emulated: bool  # software intrinsics, for tests: runs anywhere, slowly, only when requested by name
    missing: str  # features that the machine lacks, comma-separated
    precisions: list[str]  # those of bf16, f32 and f64 that this build has

class Machine(TypedDict):
    cpu: str
    cpus: int
    cores: int
    nodes: int
    l1d: int
    l2: int
    l3: int
    hypervisor: bool
    quota: float  # cpus' worth of time that the cgroup grants; 0: no limit

class FormatInfo(TypedDict):
    """A row of csrc/kernels/format_table.h; csrc/kernels/format.h says what the kinds mean."""

    spec: str  # with what follows the name: int4:32, fp8:1x128
    name: str  # int4, fp8, bf16:12
    element: str  # bf16, int8, uint, e4m3, e2m1, iq4, grid, bf16_12: how a code becomes a number
    zero_point: int  # uint: what is subtracted from a code
    planes: list[int]  # bits of the planes that make a code, the low ones first
    # none, floats, e8m0, e4m3, scale_and_min, scale_and_zero, q2_k, q3_k, q4_k, q6_k, iq4_xs, grid, high_bytes
    scales: str
    span: int  # columns that share a header of a strip; 0: all
    header: list[tuple[str, int]]  # its fields: type (f32, f16, bf16, u8, i8, u16) and how many of it
    header_bytes: int  # of one row
    shared_header: bool  # one for the 16 rows of a strip
    tensor_scale: bool  # and one float32 for the whole matrix
    zeros: bool  # a code for each scale that stands for zero
    scale_columns: int  # columns that share a scale in a checkpoint; 0: all
    scale_rows: int  # rows that share it
    flat_scales: bool  # one scale a row is [rows], not [rows, 1]
    gguf_type: int | None  # its number in GGUF files
    block_bytes: int  # of `span` values in GGUF; 0: codes and scales are separate tensors
    scale_tensor: bool  # a matrix in a checkpoint has a tensor of scales
    patches: bool  # strips have a list of patches
    written: bool  # `kt quant` writes it

class HostCallbacks(TypedDict):
    submit: int
    wait: int

def variants() -> list[VariantInfo]: ...
def isa() -> str: ...
def machine() -> Machine: ...
def formats() -> list[FormatInfo]:
    """Every weight format; int4 with groups of 32, fp8 with each kind of block."""

def format(spec: str) -> FormatInfo:
    """One format by its name and what follows it; ValueError for any other."""

def grid(format: str) -> tuple[Any, Any]:
    """The table of a format whose codes are indices (csrc/kernels/grids.h), as numpy arrays: uint32 entries of four or
    eight codes of four bits each, those of even columns from bit 0 up and those of odd ones from bit 16 up; and the 16
    float32 levels of the codes."""

def encode(
    format: str, source: Any, codes: Any, scales: Any | None, tensor_scale: Any | None, isa: str = ""
) -> tuple[float, float, bool]:
    """Writes `codes` [E, N, bytes of a row], `scales` and `tensor_scale` [E] of `source` [E, N, K] in floats of any
    type, as a checkpoint has them; on the calling thread. Returns the sum of squares of what the numbers change by when
    they are decoded and rounded to bfloat16, that of the numbers, and whether all of them are finite; if not, what was
    written is no use."""

def quantise_rows(source: Any, bits: int, codes: Any, scales: Any) -> bool:
    """Writes `codes` int8 [N, K], or uint8 [N, K / 2] of two codes of 4 bits (each plus 8, the even column in the low
    half), and `scales` float32 [N] of `source` [N, K] in bfloat16 or float32, by the rule of kt-kernel's converter for
    8 or 4 bits; on the calling thread. Returns whether all numbers are finite; if not, what was written is no use."""

def linear_rows() -> int:
    """The most rows of x that `Pool.linear` takes, in the variant in use."""

def rms_norm(x: Any, weight: Any, out: Any, epsilon: float) -> None:
    """RMS norm: out [n, d] = x [n, d] over its root mean square, rounded, times weight [d]; all bfloat16 or all
    float32; on the calling thread."""

def add_lora(x: Any, a: Any, b: Any, out: Any, scale: float) -> None:
    """out [n, m] += scale * (x [n, k] a [r, k]^T) b [r, m] for a few rows; x and out bfloat16 or float32, a and b
    float32; on the calling thread."""

def pooled_array(bytes: int) -> Any:
    """An uninitialised numpy array of uint8 from a buffer pool, to which the memory returns with the last reference."""

def pooled_bytes() -> int:
    """Bytes of the buffer pool behind `pooled_array`, in use or free."""

def copy_rows(call: int, rows: Any, stream: int) -> int:
    """Calls the C function `int(uint64 target, const void* source, size_t bytes, void* stream)` at address `call` for
    every row of uint64 [n, 3] until one returns other than 0; returns the last result. Releases the GIL."""

def map_file(path: str) -> Any:
    """All bytes of a file as a read-only numpy array of uint8, mapped; OSError if it cannot be mapped, or is empty."""

def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of uint8 [n]; `crc` is that of the bytes before."""

def host_callbacks() -> HostCallbacks:
    """Addresses of two C functions `void(void* call)` that take `Call.address` and need no GIL."""

class TaskQueue:
    """C functions that run one after another on a thread of their own. Addresses are Python integers."""

    callback: int  # a host callback `void(void*)` that takes what `step` returned

    def __init__(self) -> None: ...
    def submit(self, function: int, argument: int) -> None:
        """Queue `void function(void* argument)`."""

    def wait(self, pending: int = 0) -> None:
        """Wait until at most `pending` tasks are queued or running; raises the first error of a task."""

    def step(self, function: int, argument: int, pending: int = 0, once: bool = True) -> int:
        """The argument of `callback` that submits a task, or, if `function` is 0, waits as `wait(pending)` does. With
        `once` the callback frees it, so it must be called exactly once; otherwise it lives as long as the queue."""

# Codes, scales or None, tensor scale or None.
Released = tuple[Array, Array | None, Array | None]

class StepSequences:
    def __init__(self, rows: Any, positions: Any, table: Any) -> None:
        """The new tokens of a step, the same for all layers, in int32, which are copied. `rows` [n]: the token's row of
        the batch, each once; `positions` [n]: its position in its sequence; `table` [n, m]: the blocks of the sequence.
        Entries behind the block of the position are ignored."""

# Strided views of one layer's part of a pool of blocks of 64 tokens: keys [blocks, groups, 64, d] and values
# [blocks, groups, 64, dv], which may be the first dv numbers of the keys. With key scales and value scales of e8m0
# [blocks, groups, 64, 1] they are codes of e4m3, all in uint8.
Cache = tuple[Any, ...]

class Pool:
    def __init__(
        self, threads: int = 0, groups: int = 0, spin_us: int = 50, pin: bool = True, yield_us: int = 500
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def cpus(self) -> list[int]: ...
    def linear(self, x: Any, weights: list[Any], outs: list[Any]) -> None:
        """Each out [T, N] = x [T, K] times its weight [N, K] transposed, for at most `linear_rows()` rows; weights in
        bfloat16."""

    def linear_heads(self, x: Any, weights: Any, out: Any) -> None:
        """out [heads, T, N] = x [heads, T, K] times weights [heads, N, K] transposed, head by head, for at most
        `linear_rows()` rows; weights in bfloat16."""

    def argmax(self, x: Any) -> list[int]:
        """The index of the largest element of each row of x [n, V], bfloat16 or float32; the first of equal ones."""

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        cache: Cache,
        sequences: StepSequences,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        sinks: Any | None = None,
    ) -> None:
        """Decode attention of single new tokens, in bfloat16 or float32: rows of query [heads, T, d], key
        [groups, T, d] and value [groups, T, dv] -> rows of out [T, heads, dv]. Each token's key and value are written
        to its position in `cache`, then its query attends to the last `window` keys, its own included, that are of its
        own chunk; chunks begin at multiples of `chunk`, and 0 means none. d and dv are multiples of 16. `sinks`:
        float32 [heads], one more score of each softmax, without a value."""

    def rate(self, what: str, seconds: float = 0.1, threads: int = 0, isa: str = "", bytes: int = 0) -> float:
        """Units per second of the first `threads` threads together, in a bare loop: "registers" and "panels" count
        flop, and so does "bytes", of W8A8; "read" counts bytes. `bytes` is each thread's scratch."""

    def codes_rate(
        self, format: str, rows: int = 1, seconds: float = 0.1, threads: int = 0, isa: str = "", w8a8: bool = False
    ) -> float:
        """Weights per second of packed GEMV on codes of a format times `rows` rows, from L1: the rate to which small
        batches are held where memory is faster. `w8a8`: with rows in int8."""

class Call:
    def submit(self) -> None: ...
    def wait(self) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def address(self) -> int: ...

class Experts:
    def __init__(
        self,
        pool: Pool,
        num_experts: int,
        hidden: int,
        intermediate: int,
        gated: bool = True,
        activation: str = "silu",
        limit: float = 0.0,
        alpha: float = 0.0,
        isa: str = "",
        precision: str = "bf16",
        gate_format: str = "bf16",
        up_format: str = "bf16",
        down_format: str = "bf16",
    ) -> None:
        """Weights are rounded to `precision` ("bf16", "f32" or "f64"), which is also that of the arithmetic: bf16 has
        f32 sums. Tensors may be of any float dtype, including float64, whatever the precision."""
    def pack(
        self,
        first_expert: int,
        gate: Array | Released | None,
        up: Array | Released,
        down: Array | Released,
        gate_bias: Array | None = None,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> None: ...
    def adopt(
        self,
        gate_up: Array,
        down: Array,
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
        checksums: Array | None = None,
        source: str = "",
    ) -> None:
        """`checksums`: int64 [E], each the CRC-32C of an expert; `source` names the layer in errors."""
    def memory(self) -> dict[str, Any]:
        """Read-only numpy arrays: "gate_up" and "down" in bytes, and the biases that there are; copies where packed
        bytes lie in several parts."""
    def parts(self) -> dict[str, list[tuple[int, Any]]]:
        """The bytes of "gate_up" and "down" as they lie: (offset in an expert's bytes, read-only array [E, bytes])."""
    def biases(self) -> dict[str, Any]:
        """The biases of `memory()`."""
    def place_pages(self) -> None:
        """Read in the pages of adopted experts, each on the NUMA node that computes with it."""
    def checksums(self) -> list[int]:
        """CRC-32C of every expert's bytes of `memory()`: gate_up, down, gate_up_bias, down_bias."""
    def verify(self, experts: Sequence[int]) -> None:
        """Compare these experts with the checksums of `adopt`, where that was not done; DamagedFileError."""
    def transpose(self, source: Any, target: Any) -> None: ...
    def decode(self, matrix: str, expert: int, out: Array) -> None: ...
    def layout(self) -> dict[str, Any]: ...
    def forward(
        self,
        hidden: Array,
        ids: Array,
        weights: Array,
        out: Array,
        adapter: Array | None = None,
        skip: Array | None = None,
        keep: Array | None = None,
        adapters: Sequence[Adapter] | None = None,
        dropout: float = 0.0,
        seed: int = 0,
        w8a8: bool = False,
        needs_grad: bool = False,
    ) -> None: ...
    def backward(
        self,
        grad_out: Array,
        hidden: Array,
        ids: Array,
        weights: Array,
        grad_hidden: Array,
        grad_weights: Array,
        skip: Array | None = None,
        keep: Array | None = None,
        adapter: Array | None = None,
        adapters: Sequence[Adapter] | None = None,
        factors: Sequence[Sequence[Array | None]] | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None: ...
    def prepare(
        self,
        hidden: Array,
        ids: Array,
        weights: Array,
        out: Array,
        adapter: Array | None = None,
        skip: Array | None = None,
        adapters: Sequence[Adapter] | None = None,
        w8a8: bool = False,
    ) -> Call: ...
    @property
    def w8a8_unsupported(self) -> str:
        """Why W8A8 is unsupported for these experts; empty: it is supported."""
    @property
    def packed_bytes(self) -> int: ...
    @property
    def keep_row_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def threads(self) -> int: ...

class CodedLinear:
    """A matrix `[rows, columns]` of a linear layer in the bits of a format that is not bf16."""

    def __init__(self, pool: Pool, rows: int, columns: int, format: str, isa: str = "") -> None: ...
    def pack(self, matrix: Released) -> None: ...
    def forward(self, x: Array, out: Array) -> None: ...
    def multiply_heads(self, x: Array, out: Array, first: int, count: int, step: int, along_rows: bool = False) -> None:
        """Products of each head with `count` rows of its own, from row `head * step + first` on: x
        `[heads, T, columns]`, out `[heads, T, count]`; `along_rows`: x `[heads, T, count]`, out `[heads, T, columns]`,
        with the exact values. A row's result does not depend on the others. T: at most 1024; out does
        not overlap x."""

    def decode(self, first: int, out: Array) -> None:
        """Rows from `first` on, in bf16, or exact in float32."""

    def gather(self, rows: Array, out: Array) -> None:
        """The same for rows by number, int64."""

    def adopt(self, blocks: Array) -> None:
        """Instead of `pack`: the blocks of another's `memory()`, which are used in place."""

    def memory(self) -> Any: ...
    def checksum(self) -> int:
        """CRC-32C of `memory()`."""

    @property
    def packed_bytes(self) -> int: ...
    @property
    def supports_w8a8(self) -> bool: ...
    @property
    def w8a8(self) -> bool:
        """Whether `forward`, and `multiply_heads` without `along_rows`, round x to int8, each 32 columns of a row with
        a scale of their own; may be set."""

    @w8a8.setter
    def w8a8(self, on: bool) -> None: ...
    @property
    def isa(self) -> str: ...

class DecodeLayer:
    """A decoder layer for at most `linear_rows()` rows of hidden states, new tokens of as many sequences. x and out are
    dense [T, hidden] in the dtype of the norms, bfloat16 or float32, and do not overlap."""

    def __init__(self, pool: Pool, hidden: int) -> None: ...
    def set_attention(
        self,
        norm: Any,
        query_norm: Any | None,
        key_norm: Any | None,
        epsilons: list[float],
        weights: list[Any],
        biases: list[Any | None],
        sinks: Any | None,
        head_size: int,
        scale: float,
    ) -> None:
        """`weights`: of queries, keys, values and the output, each bfloat16 [N, K] or a `CodedLinear`; `biases`: of
        the same, [N] in the dtype of the norms. `epsilons`: of the three norms. `sinks`: float32 [heads], one more
        score of each softmax. Tensors are kept alive and used in place."""

    def set_experts(
        self, norm: Any, epsilon: float, router: Any, bias: Any | None, experts: Experts, top_k: int, normalise: bool
    ) -> None:
        """`router`: bfloat16, or float32 beside hidden states in float32, [E, hidden]; `bias`: [E] in the dtype of the
        norm. Scores are a softmax of products and bias over all experts, with `normalise` over the `top_k` selected
        ones. `experts` are those of the layer's pool."""

    def attend(
        self, x: Any, out: Any, cos: Any, sin: Any, cache: Cache, sequences: StepSequences, window: int = 0
    ) -> None:
        """out = x + attention(norm(x)). cos and sin [T, r]: number i of a head is rotated with i + r / 2. The cache and
        the window are those of `Pool.attend`; there is a sequence for each row."""

    def route(self, x: Any, out: Any, w8a8: bool = False, needs_grad: bool = False) -> None:
        """out = x + experts(norm(x)); flags as in `Experts.forward`."""

def decode_layers(
    layers: list[DecodeLayer],
    x: Any,
    out: Any,
    cos: Any,
    sin: Any,
    caches: list[Cache],
    windows: list[int],
    sequences: StepSequences,
    w8a8: list[bool],
    needs_grad: bool = False,
) -> None:
    """`attend` and `route` of layers that follow each other, in one job; `caches`, `windows` and `w8a8` have an item
    for each layer. `needs_grad` counts where `w8a8` is False."""

class Adapter:
    def __init__(
        self, experts: Experts, gate_rank: int = 0, up_rank: int = 0, down_rank: int = 0, shared: bool = False
    ) -> None: ...
    def pack(
        self,
        gate_a: Array | None = None,
        gate_b: Array | None = None,
        up_a: Array | None = None,
        up_b: Array | None = None,
        down_a: Array | None = None,
        down_b: Array | None = None,
        gate_scale: float = 1.0,
        up_scale: float = 1.0,
        down_scale: float = 1.0,
    ) -> None: ...
    @property
    def packed_bytes(self) -> int: ...
