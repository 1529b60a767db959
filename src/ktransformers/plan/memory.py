"""Bytes by place and purpose, from shapes alone: the table of docs/plan.md as code, one line for each row of it.

T tokens at once, H hidden, I intermediate, E experts of a layer, k experts of a token, r rank, b bytes of a number.
Workspace and kept rows follow csrc/moe/plan.cpp and moe/task.h, packed sizes weights.cpp and lora.cpp. What autograd
keeps of a layer, and what the loss needs, was measured (docs/plan.md). The surprising row is the loss: on a CPU its
tile costs eight times its own size, which for small models is more than everything that is trained, though tokens
without a label have no row in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktransformers.plan.expert_time import ALL, NOTHING, asked_of_cpu
from ktransformers.plan.formats import TILE_K, packed_lora_bytes, tiles
from ktransformers.plan.machine import Machine
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.workload import PIECE, Choice, Serving, Training, Work, expert_bytes

PROCESS = 390_000_000  # Python with torch, transformers and TRL: 347 MB measured, the rest fitted to runs
CUDA_HOST = 1_500_000_000  # and what CUDA adds, its libraries' pages included: a model that lies on an H200, measured
CUDA_CONTEXT = 600_000_000  # of a GPU's memory: context and what its allocator wastes, estimated
CUBLAS = 67_000_000  # workspaces of products, measured on an H200
LOSS_ROWS, LOSS_COLUMNS = 4096, 32768  # a tile of logits in TRL's chunked loss
LOSS_COPIES = 7.25  # float32 and bool beside the tile, where torch operators compute it (a CPU); Triton needs none
SCORED_ROWS = 128  # of a prompt meet the vocabulary at a time where a server is asked for their log-probabilities
LANE = 3_000_000  # bytes of scratch for one thread of the pool
HUGE = 2 << 20  # the core maps in units of this from this size on
GRAPHS = (
    1.35  # of what autograd keeps of a layer: what graphs of attention hold, measured in pieces of 512 and 1024 tokens
)
FACTOR_BYTES = 14  # on the GPU for a number of a layer's expert LoRA: two layers in bf16, gradients; fitted

Table = dict[str, int]  # purpose -> bytes


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of the placement engine (placement.py, gpu/side.py, which import torch; a test compares)."""

    slot_layers: float = 1.2  # whose experts there is room for
    slot_share: float = 0.25  # of a GPU's free memory that this may take
    group_bytes: int = 576 << 20  # of decoded weights at a time,
    room_bytes: int = 2 << 30  # or all of a layer's, where they fit into this with the slots
    group_rows: int = 16384  # at a time,
    token_rows: int = 2  # and so many more for each token
    factor_bytes: int = 256 << 20  # of expert LoRA in bf16 that stays there, two layers at least


ENGINE = EngineSizes()


@dataclass(frozen=True)
class MemoryPlan:
    host: Table  # anonymous
    gpus: tuple[Table, ...]
    disk: Table
    nodes: tuple[int, ...]  # host bytes by NUMA node
    pinned: int  # part of host
    mapped: int  # pages of the checkpoint in use: the page cache, which gives way under pressure

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        return tuple(sum(table.values()) for table in self.gpus)


def _huge(size: int) -> int:
    return size if size < HUGE else -(-size // HUGE) * HUGE


def expert_lora_numbers(model: ModelShape, rank: int) -> int:
    """r (2 H + 3 I) for an expert: gate and up have one A and a B of 2 I rows, down an A and a B."""
    wide = (2 if model.gated else 1) * model.intermediate
    return model.expert_layers * model.experts * rank * (2 * model.hidden + wide + model.intermediate)


def attention_lora_numbers(model: ModelShape, rank: int) -> int:
    return sum(rank * (linear.inputs + linear.outputs) for linear in model.linears)


def _rows(model: ModelShape, tokens: int) -> int:
    """Rows of all experts together, each expert's filled up to tiles of 16."""
    touched = min(model.experts, tokens * model.top_k)
    return tokens * model.top_k + 8 * touched


def keep_bytes(model: ModelShape, tokens: int, machine: Machine) -> int:
    """Gate and up of every row, for backward: T k times 2 I."""
    width = TILE_K * tiles(model.intermediate) * (2 if model.gated else 1)
    return tokens * model.top_k * width * machine.cpu.element


def workspace_bytes(model: ModelShape, work: Work, machine: Machine) -> int:
    """What one call borrows: panels between units and lanes, sums of the output, scratch of the threads."""
    rows, element = _rows(model, work.tokens), machine.cpu.element
    inner = TILE_K * tiles(model.intermediate)
    sums = work.tokens * model.hidden * 4
    panels = rows * inner * element
    if isinstance(work, Training):
        panels *= 2  # gradients of gate and up
        if work.adapts_experts:
            ranks = TILE_K * tiles(work.rank)
            panels += rows * (inner + 4 * ranks) * element  # activated rows for dA and dB of down; rows times factors
    return _huge(panels + sums + machine.cpu.threads * LANE)


def layer_bytes(model: ModelShape, work: Training) -> int:
    """What autograd keeps of one layer, its experts apart: 8 H for norms and residuals, attention twice, MLPs; and
    where numbers are of two bytes, what norms compute in float32."""
    width = work.rest_bytes * (8 * model.hidden + 2 * model.attention_width + model.mlp_width)
    exact = 4 * (2 * model.hidden + model.attention_width // 2) if work.rest_bytes < 4 else 0
    return work.tokens * (width + exact)


def loss_bytes(model: ModelShape, work: Training, on_gpu: bool) -> int:
    """Of labelled tokens alone; the gradients of the others' hidden states are zeros, but they are there."""
    if on_gpu and work.loss_bytes is not None:
        return work.loss_bytes
    rows, blank = min(work.scored, LOSS_ROWS), (work.tokens - work.scored) * model.hidden * work.rest_bytes
    if on_gpu:
        return rows * LOSS_COLUMNS * work.rest_bytes + work.scored * model.hidden * 8 + blank
    width = min(model.vocabulary, LOSS_COLUMNS)  # what is written of a tile: pages that nobody touches take nothing
    logits = rows * (width * work.rest_bytes + int(LOSS_COPIES * width) * 4)
    return logits + work.scored * model.hidden * 4 + blank


def activation_bytes(model: ModelShape, work: Training, layers: int, on_gpu: bool, absent: int = 0) -> int:
    """With checkpointing the layers' inputs and the larger of one layer and the loss; without, all layers and the loss.

    `absent`: bytes counted elsewhere that are not there yet while the loss is computed.
    """
    layer, loss = layer_bytes(model, work), loss_bytes(model, work, on_gpu) - absent
    if work.checkpointing:
        return layers * work.tokens * model.hidden * work.rest_bytes + max(layer, loss)
    return layers * layer + max(0, loss)


def memory_of(
    model: ModelShape, work: Work, choice: Choice, machine: Machine, engine: EngineSizes = ENGINE
) -> MemoryPlan:
    experts = model.expert_layers * _huge(model.experts * expert_bytes(model, choice))
    host: Table = {"process": PROCESS, "experts": experts}
    gpus: list[Table] = [{} for _ in range(choice.gpus)]
    if choice.gpus:
        host["process"] += CUDA_HOST
        for place, table in enumerate(gpus):
            table["context"] = CUDA_CONTEXT
            table["weights"] = _share(model, choice.gpus, place) * work.rest_bytes
            table["residents"] = _resident_bytes(model, choice) // choice.gpus
            table["workspace"] = CUBLAS
    same = model.rest_dtype_bytes == work.rest_bytes
    mapped = model.rest * work.rest_bytes if not choice.gpus and same else 0
    if not choice.gpus and not same:
        host["weights"] = model.rest * work.rest_bytes
    asked = asked_of_cpu(model, work, choice, machine)
    host["workspace"] = workspace_bytes(model, work, machine) if asked != NOTHING else 0
    if isinstance(work, Training):
        pinned = _training(model, work, choice, machine, asked, host, gpus)
        disk = {"adapter": _trained(model, work)[2] * work.trained_bytes}
        disk["checkpoints"] = work.saves * _trained(model, work)[2] * 3 * work.trained_bytes
    else:
        pinned = _serving(model, work, host, gpus)
        disk = {}
    for place, table in enumerate(gpus):
        if choice.uses_engine:
            free = machine.gpus[place].memory - sum(table.values())
            table |= _engine_bytes(model, work, choice, free, engine)
    disk["checkpoint"] = model.checkpoint_bytes or model.numbers * 2
    sliced, elsewhere = host["experts"], sum(host.values()) - host["experts"]
    nodes = [sliced // machine.cpu.nodes] * machine.cpu.nodes
    nodes[0] += elsewhere  # whoever touches it first, which is one process
    return MemoryPlan(host, tuple(gpus), disk, tuple(nodes), pinned, mapped)


def _share(model: ModelShape, gpus: int, place: int) -> int:
    """Numbers of everything but experts on one of several GPUs: layers in equal parts, both ends on the first
    (`spread.py`)."""
    own = model.layers * (place + 1) // gpus - model.layers * place // gpus
    numbers = own * model.rest_per_layer
    if place == 0:
        numbers += model.embedding + (0 if model.tied else model.head)
    return numbers


def _resident_bytes(model: ModelShape, choice: Choice) -> int:
    return model.expert_layers * choice.residents * expert_bytes(model, choice)


def _trained(model: ModelShape, work: Training) -> tuple[int, int, int]:
    """Numbers that are trained: of experts, of attention, together."""
    experts = expert_lora_numbers(model, work.rank) if work.adapts_experts else 0
    attention = attention_lora_numbers(model, work.rank) if work.adapts_attention else 0
    return experts, attention, experts + attention


def slot_count(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> int:
    """Experts that the first GPU has room for while they are streamed."""
    bare = memory_of(model, work, replace(choice, policy="cpu", residents=0), machine)
    return _slots(model, choice, machine.gpus[0].memory - bare.gpu_bytes[0], ENGINE)


def recorded(model: ModelShape, work: Work, choice: Choice, machine: Machine, engine: EngineSizes = ENGINE) -> bool:
    """Whether passes of experts are replayed on the first GPU: all of a layer are decoded at once, in one group."""
    if not choice.uses_engine or not machine.gpus[0].records or not model.gated:
        return False
    slots = slot_count(model, work, choice, machine)
    rows = work.tokens * model.top_k
    return (
        model.experts - choice.residents <= slots
        and slots * expert_bytes(model, choice) + 2 * model.expert_numbers * model.experts <= engine.room_bytes
        and rows <= engine.group_rows + engine.token_rows * work.tokens
    )


def _slots(model: ModelShape, choice: Choice, free: int, engine: EngineSizes) -> int:
    most = int(engine.slot_share * free) // expert_bytes(model, choice)
    return max(0, min(int(engine.slot_layers * model.experts), most))


def _engine_bytes(model: ModelShape, work: Work, choice: Choice, free: int, engine: EngineSizes) -> Table:
    """What computing experts on a GPU takes there: slots, decoded weights and rows of a group, results in float32."""
    table = {"slots": _slots(model, choice, free, engine) * expert_bytes(model, choice)}
    one = 2 * model.expert_numbers
    whole = one * model.experts
    decoded = whole if table["slots"] + whole <= engine.room_bytes else max(1, engine.group_bytes // one) * one
    rows = min(work.tokens * model.top_k, engine.group_rows + engine.token_rows * work.tokens)
    desk = 14 if decoded == whole else 10  # bytes of a number; passes that are recorded have inputs of their own
    table["groups"] = decoded + rows * (6 * model.hidden + 14 * model.intermediate) + work.tokens * model.hidden * desk
    if isinstance(work, Training) and work.adapts_experts:
        numbers = expert_lora_numbers(model, work.rank)
        two, kept = 4 * numbers // model.expert_layers, min(engine.factor_bytes, 2 * numbers)
        table["factors"] = numbers // model.expert_layers * FACTOR_BYTES + max(0, kept - two)
    return table


def _training(
    model: ModelShape, work: Training, choice: Choice, machine: Machine, asked: str, host: Table, gpus: list[Table]
) -> int:
    """Fills in what learns; returns the pinned bytes."""
    experts, attention, _ = _trained(model, work)
    near = gpus or [host]  # where attention lives
    for table, numbers in ((host, experts), *((table, attention // len(near)) for table in near)):
        table["LoRA"] = table.get("LoRA", 0) + numbers * work.trained_bytes
        table["gradients"] = table.get("gradients", 0) + numbers * work.trained_bytes
        table["optimiser"] = table.get("optimiser", 0) + 2 * numbers * work.trained_bytes  # two moments
    if work.adapts_experts and choice.policy != "stream":  # whatever this batch asks: a shorter one may go to the CPU
        per_layer = packed_lora_bytes(model.hidden, model.intermediate, model.gated, work.rank) * model.experts
        host["packed LoRA"] = model.expert_layers * _huge(per_layer)
    kept = model.expert_layers if work.retain or not work.checkpointing else 1
    if asked == ALL:
        host["kept rows"] = kept * keep_bytes(model, work.tokens, machine)
    rows = work.tokens * model.hidden * work.rest_bytes
    if not gpus:
        absent = host["gradients"] if work.batches <= 1 else 0  # an earlier batch of the step would have left them
        host["activations"] = activation_bytes(model, work, model.layers, False, absent)
        host["activations"] += (kept - 1) * rows if work.checkpointing else 0  # outputs beside kept rows
        return 0
    for table in gpus:
        table["activations"] = activation_bytes(model, work, -(-model.layers // len(gpus)), True)
        table["buffers"] = 4 * rows
        if work.replays(choice):
            piece = min(work.tokens, max(work.sequence, PIECE // work.sequence * work.sequence))
            table["graphs"] = int(GRAPHS * layer_bytes(model, replace(work, tokens=piece)))
    # Without the engine the rows that came down stay for backward; with it those on the GPU do.
    host["transfers"] = (4 + (kept if kept > 1 and not choice.uses_engine else 0)) * rows
    return host["LoRA"] + host["transfers"]


def _serving(model: ModelShape, work: Serving, host: Table, gpus: list[Table]) -> int:
    """Fills in what serving needs; returns the pinned bytes."""
    cache = work.sequences * work.context * model.cache_width * work.rest_bytes
    width = 8 * model.hidden + 2 * model.attention_width + model.mlp_width
    moment = work.tokens * work.rest_bytes * width + work.sequences * model.vocabulary * 4
    score = 8 if work.rest_bytes == 4 else work.rest_bytes + 8  # a logit, in float32, and its logarithm
    rows = work.tokens * model.hidden * work.rest_bytes
    for table in gpus or [host]:
        table["KV cache"] = cache // max(1, len(gpus))
        table["activations"] = moment
        table["scores"] = min(work.tokens, SCORED_ROWS) * model.vocabulary * score
    if not gpus:
        return 0
    for table in gpus:
        table["buffers"] = 2 * rows
    host["transfers"] = 2 * rows
    return host["transfers"]
