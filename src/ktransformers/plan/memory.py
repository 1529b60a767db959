"""Predicted bytes by place and purpose, from shapes alone: the table of docs/plan.md as code, one line per row of it.

T tokens at once, H hidden, I intermediate, E experts of a layer, k experts of a token, r rank, b bytes of a number.
Workspace and kept rows follow csrc/moe/plan.cpp and moe/task.h, packed sizes weights.cpp and lora.cpp. What autograd
keeps of a layer and what the loss needs was measured (docs/plan.md). On a CPU a tile of the loss costs eight times its
own size, which for small models is more than everything that is trained, though unlabelled tokens have no row in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktransformers.ground.linear_storage import KEEP, NUMBERS_SHARE
from ktransformers.ground.system import GPU_CONTEXT_BYTES
from ktransformers.plan.expert_time import CPU_ALL, CPU_NONE, cpu_share
from ktransformers.plan.formats import TILE_K, bytes_in_format, counted_as, format_of, packed_lora_bytes, tiles
from ktransformers.plan.machine import Machine
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.modes import SPLIT
from ktransformers.plan.workload import GRAPH_PIECE_TOKENS, Choice, Serving, Training, Work, expert_bytes

PROCESS_BYTES = 390_000_000  # Python with torch, transformers and TRL: 347 MB measured, the rest fitted to runs
SERVER_PROCESS_BYTES = 320_000_000  # Python with torch and transformers: servers on a CPU without their model, measured
CUDA_HOST_BYTES = 1_500_000_000  # added by CUDA, pages of its libraries included: a model on an H200, measured
CUBLAS_BYTES = 67_000_000  # workspaces of GEMMs, measured on an H200
LOSS_ROWS, LOSS_COLUMNS = 4096, 32768  # a tile of logits in TRL's chunked loss
LOSS_COPIES = 7.25  # float32 and bool copies of the tile where torch operators compute it (a CPU); Triton needs none
# Scores of a block of queries, twice in float32, where attention has sinks (serve/attention/attention.py).
MOST_SCORES, SCORE_BYTES = 1 << 26, 8
SCORED_ROWS = 128  # of a prompt whose log-probabilities a server computes at a time
THREAD_SCRATCH_BYTES = 3_000_000  # of one thread of the pool
HUGE_PAGE = 2 << 20  # from this size on the core maps whole huge pages
# Memory of attention graphs over what autograd keeps of a layer, measured with pieces of 512 and 1024 tokens.
GRAPH_SHARE = 1.35
# Values of a packed weight that a GPU dequantizes at a time (quantized/gpu/linear.py).
PANEL_NUMBERS = 1 << 27
FACTOR_BYTES = 14  # on the GPU per number of a layer's expert LoRA: two layers in bf16, gradients; fitted

Table = dict[str, int]  # purpose -> bytes


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the placement engine (`place/`), which takes them from here: this module imports no torch."""

    cached_layers: float = 1.2  # that the expert cache holds: the layer that runs, and the next in what it leaves
    cache_share: float = 0.25  # of a GPU's free memory that the cache may take
    group_bytes: int = 576 << 20  # of dequantised weights at a time,
    whole_layer_bytes: int = 2 << 30  # or all of a layer's, if they and the cache fit into this
    split_layer_bytes: int = 4 << 30  # the same with the policy `split`
    group_rows: int = 16384  # of a group: intermediates of a row are 20 to 40 kB;
    token_rows: int = 2  # and as many more per token
    factor_bytes: int = 256 << 20  # of expert LoRA in bf16 that stays on the device, two layers at least


ENGINE_LIMITS = EngineLimits()


@dataclass(frozen=True)
class MemoryPlan:
    host: Table  # anonymous
    gpus: tuple[Table, ...]
    disk: Table
    nodes: tuple[int, ...]  # host bytes by NUMA node
    pinned: int  # part of host
    mapped: int  # pages of the files in the page cache, packed experts among them; evicted under memory pressure

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        return tuple(sum(table.values()) for table in self.gpus)


def huge_pages(size: int) -> int:
    return size if size < HUGE_PAGE else -(-size // HUGE_PAGE) * HUGE_PAGE


def packed_layer_bytes(model: ModelShape, choice: Choice, nodes: int) -> int:
    """The experts of one layer, once: on several NUMA nodes each has a part of gate and up and a part of down, which
    end in huge pages of their own. The engine streams from these parts."""
    size = model.experts * expert_bytes(model, choice)
    if nodes == 1:
        return huge_pages(size)
    down = size // (3 if model.gated else 2)
    return sum(nodes * huge_pages(-(-matrix // nodes)) for matrix in (size - down, down))


def expert_lora_numbers(model: ModelShape, rank: int) -> int:
    """r (2 H + 3 I) per expert: gate and up have one A and a B of 2 I rows, down an A and a B."""
    gate_up_rows = (2 if model.gated else 1) * model.intermediate
    return model.expert_layers * model.experts * rank * (2 * model.hidden + gate_up_rows + model.intermediate)


def attention_lora_numbers(model: ModelShape, rank: int) -> int:
    return sum(rank * (linear.inputs + linear.outputs) for linear in model.linears)


def _rows(model: ModelShape, tokens: int) -> int:
    """Rows of all experts together, each expert's padded to tiles of 16."""
    touched = min(model.experts, tokens * model.top_k)
    return tokens * model.top_k + 8 * touched


def kept_rows_bytes(model: ModelShape, tokens: int, machine: Machine) -> int:
    """Gate and up of every row, for backward: T k times 2 I."""
    width = TILE_K * tiles(model.intermediate) * (2 if model.gated else 1)
    return tokens * model.top_k * width * machine.cpu.element


def workspace_bytes(model: ModelShape, work: Work, machine: Machine) -> int:
    """Workspace of one call: panels between units and lanes, sums of the output, scratch of the threads."""
    rows, element = _rows(model, work.tokens), machine.cpu.element
    inner = TILE_K * tiles(model.intermediate)
    sums = work.tokens * model.hidden * 4
    panels = rows * inner * element
    if isinstance(work, Training):
        panels *= 2  # gradients of gate and up
        if work.adapts_experts:
            ranks = TILE_K * tiles(work.rank)
            panels += rows * (inner + 4 * ranks) * element  # activations for dA and dB of down; rows times factors
    return huge_pages(panels + sums + machine.cpu.threads * THREAD_SCRATCH_BYTES)


def layer_bytes(model: ModelShape, work: Training) -> int:
    """What autograd keeps of one layer without its experts: 8 H for norms and residuals, attention twice, MLPs; with
    two-byte numbers also what norms compute in float32."""
    width = work.rest_bytes * (8 * model.hidden + 2 * model.attention_width + model.mlp_width)
    normed = 0 if model.latent_width else model.attention_width // 2  # norms of latents are narrow
    float32_copies = 4 * (2 * model.hidden + normed) if work.rest_bytes < 4 else 0
    return work.tokens * (width + float32_copies)


def loss_bytes(model: ModelShape, work: Training, on_gpu: bool) -> int:
    """Loss of labelled tokens, and zero gradients of the hidden states of the others."""
    if on_gpu and work.loss_bytes is not None:
        return work.loss_bytes
    rows, unlabelled = (
        min(work.labelled_tokens, LOSS_ROWS),
        (work.tokens - work.labelled_tokens) * model.hidden * work.rest_bytes,
    )
    if on_gpu:
        return rows * LOSS_COLUMNS * work.rest_bytes + work.labelled_tokens * model.hidden * 8 + unlabelled
    width = min(model.vocabulary, LOSS_COLUMNS)  # columns of a tile that are written: untouched pages take no memory
    logits = rows * (width * work.rest_bytes + int(LOSS_COPIES * width) * 4)
    return logits + work.labelled_tokens * model.hidden * 4 + unlabelled


def activation_bytes(model: ModelShape, work: Training, layers: int, on_gpu: bool, absent: int = 0) -> int:
    """With checkpointing the layers' inputs and the larger of one layer and the loss; without, all layers and the loss.

    `absent`: bytes counted elsewhere that are not allocated yet while the loss is computed.
    """
    layer, loss = layer_bytes(model, work), loss_bytes(model, work, on_gpu) - absent
    if work.checkpointing:
        return layers * work.tokens * model.hidden * work.rest_bytes + max(layer, loss)
    return layers * layer + max(0, loss)


def rest_weight_bytes(model: ModelShape, rest_bytes: int, choice: Choice, machine: Machine) -> float:
    """Bytes of a dense (non-expert) weight, the average if some are quantized: those of the computation, or on
    a CPU that widens bf16 weights those of the release."""
    choice = as_stored(model, choice, machine)
    widened = not choice.gpus and machine.cpu.products == "widened"
    size = min(rest_bytes, model.rest_dtype_bytes) if widened else rest_bytes
    if choice.linear_format == KEEP:
        return (model.quantized_bytes + (model.rest - model.quantized_weights) * size) / model.rest
    return size if choice.linear_format is None else bytes_in_format(choice.linear_format)


def as_stored(model: ModelShape, choice: Choice, machine: Machine) -> Choice:
    """KEEP on GPUs: dense weights of a checkpoint that is not quantized, or while they take less than NUMBERS_SHARE of
    their memory, as `load_model` decides."""
    if choice.linear_format != KEEP or not choice.gpus:
        return choice
    memory = sum(gpu.memory for gpu in machine.gpus[: choice.gpus])
    has_numbers = not model.quantized_weights or 2 * model.rest < NUMBERS_SHARE * memory
    return replace(choice, linear_format=None) if has_numbers else choice


def quantized_part(model: ModelShape, choice: Choice) -> tuple[int, int]:
    """The dense (non-expert) weights that are stored quantized, and their bytes. Routers stay dense, and so does the
    embedding unless the checkpoint has it quantized; a head that shares the embedding's weight has a copy of its
    own."""
    if choice.linear_format is None:
        return 0, 0
    if choice.linear_format == KEEP:
        return model.quantized_weights, model.quantized_bytes
    numbers = model.rest - model.embedding - model.router_numbers
    shared_head = model.embedding if model.tied else 0
    return numbers, round((numbers + shared_head) * bytes_in_format(choice.linear_format))


def _copied_keys(model: ModelShape, choice: Choice) -> int:
    """Weights that multiply queries for latents on a CPU: copies, but for quantized projections, which are read."""
    if choice.linear_format is None:
        return model.absorbed_numbers
    return model.absorbed_numbers - model.quantized_absorbed if choice.linear_format == KEEP else 0


def predict_memory(
    model: ModelShape, work: Work, choice: Choice, machine: Machine, engine: EngineLimits = ENGINE_LIMITS
) -> MemoryPlan:
    model = model.kept_on(machine.cpu.isa)
    choice = as_stored(model, choice, machine)
    mapped_experts = model.mapped_experts if choice.format == counted_as(model.stored) else 0
    experts = 0 if mapped_experts else model.expert_layers * packed_layer_bytes(model, choice, machine.cpu.nodes)
    on_cpu_server = isinstance(work, Serving) and not choice.gpus
    host: Table = {"process": SERVER_PROCESS_BYTES if on_cpu_server else PROCESS_BYTES, "experts": experts}
    gpus: list[Table] = [{} for _ in range(choice.gpus)]
    if choice.gpus:
        host["process"] += CUDA_HOST_BYTES
        for place, table in enumerate(gpus):
            table["context"] = GPU_CONTEXT_BYTES
            table["weights"] = _gpu_weight_bytes(model, choice, place, work.rest_bytes)
            if choice.linear_format is not None and quantized_part(model, choice)[0]:
                table["decoded weights"] = _panel_bytes(model)
            table["residents"] = _resident_bytes(model, choice) // choice.gpus
            table["workspace"] = CUBLAS_BYTES
    weight_bytes = int(rest_weight_bytes(model, work.rest_bytes, replace(choice, linear_format=None), machine))
    as_released = model.rest_dtype_bytes == weight_bytes  # then they are mapped from the files
    coded, quantized_bytes = quantized_part(model, choice)
    numbers = model.rest - coded
    mapped = numbers * weight_bytes if not choice.gpus and as_released else 0
    if coded and not choice.gpus and model.mapped_linears:
        mapped += quantized_bytes
    elif coded and not choice.gpus:
        host["linear layers"] = quantized_bytes
    if not choice.gpus and not as_released:
        host["weights"] = numbers * weight_bytes
    if on_host := host_embedding(model, choice):
        host["embedding"] = on_host * work.rest_bytes
    share = cpu_share(model, work, choice, machine)
    host["workspace"] = workspace_bytes(model, work, machine) if share != CPU_NONE else 0
    if isinstance(work, Training):
        pinned = _training(model, work, choice, machine, share, host, gpus)
        disk = {"adapter": _trained(model, work)[2] * work.trained_bytes}
        disk["checkpoints"] = work.saves * _trained(model, work)[2] * 3 * work.trained_bytes
    else:
        pinned = _serving(model, work, choice, host, gpus)
        disk = {}
    for place, table in enumerate(gpus):
        if choice.uses_engine:
            free = machine.gpus[place].memory - sum(table.values())
            table |= _engine_bytes(model, work, choice, free, engine)
    disk["checkpoint"] = model.checkpoint_bytes or _released_bytes(model)
    sliced, elsewhere = experts, sum(host.values()) - experts
    nodes = [sliced // machine.cpu.nodes] * machine.cpu.nodes
    nodes[0] += elsewhere  # allocated by one process, on its first node
    pinned += host.get("embedding", 0)
    return MemoryPlan(host, tuple(gpus), disk, tuple(nodes), pinned, mapped + mapped_experts)


def _released_bytes(model: ModelShape) -> int:
    """A checkpoint of unknown size: experts in their released format, the rest unquantised."""
    experts = model.expert_numbers_total * format_of(counted_as(model.stored)).bytes_per_weight
    return round(experts) + model.rest * model.rest_dtype_bytes


def host_embedding(model: ModelShape, choice: Choice) -> int:
    """Weights of an input embedding that stays in host memory (`quantized/host_rows.py`): with quantized weights on a
    GPU, unless the head shares them or they are quantized too."""
    if not choice.gpus or choice.linear_format is None or model.tied:
        return 0
    is_quantized = choice.linear_format == KEEP and model.quantized_weights > model.rest - model.embedding
    return 0 if is_quantized else model.embedding


def _gpu_weight_bytes(model: ModelShape, choice: Choice, place: int, size: int) -> int:
    """Each of several GPUs has its part of the quantized weights, the first GPU the head's too."""
    on_host = host_embedding(model, choice)
    own = [_gpu_numbers(model, choice.gpus, one) - (on_host if one == 0 else 0) for one in range(choice.gpus)]
    coded, quantized_bytes = quantized_part(model, choice)
    share = own[place] / sum(own)
    return round((own[place] - share * coded) * size + share * quantized_bytes)


def _panel_bytes(model: ModelShape) -> int:
    """Of a weight in bf16 that is decoded for a product with many rows (quantized/gpu/linear.py)."""
    mlp = model.hidden * model.mlp_width // 3
    largest = max(mlp, model.head, *(linear.inputs * linear.outputs for linear in model.linears))
    return 2 * min(PANEL_NUMBERS, largest)


def _gpu_numbers(model: ModelShape, gpus: int, place: int) -> int:
    """Numbers of everything but experts on one of several GPUs: layers in equal parts, embedding and head on the first
    (`place/device_map.py`)."""
    own = model.layers * (place + 1) // gpus - model.layers * place // gpus
    numbers = own * model.rest_per_layer
    if place == 0:
        numbers += model.embedding + (0 if model.tied else model.head)
    return numbers


def _resident_bytes(model: ModelShape, choice: Choice) -> int:
    return model.expert_layers * choice.residents * expert_bytes(model, choice)


def _trained(model: ModelShape, work: Training) -> tuple[int, int, int]:
    """Trained numbers: of experts, of attention, and both together."""
    experts = expert_lora_numbers(model, work.rank) if work.adapts_experts else 0
    attention = attention_lora_numbers(model, work.rank) if work.adapts_attention else 0
    return experts, attention, experts + attention


def cached_experts(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> int:
    """Experts in the first GPU's expert cache."""
    bare = predict_memory(model, work, replace(choice, policy="cpu", residents=0), machine)
    return _cache_experts(model, choice, machine.gpus[0].memory - bare.gpu_bytes[0], ENGINE_LIMITS)


def captures_expert_passes(
    model: ModelShape, work: Work, choice: Choice, machine: Machine, engine: EngineLimits = ENGINE_LIMITS
) -> bool:
    """Whether expert passes are CUDA graphs on the first GPU: all experts of a layer fit into one group."""
    if not choice.uses_engine or not model.gated:
        return False
    slots = cached_experts(model, work, choice, machine)
    rows = work.tokens * model.top_k
    return (
        model.experts - choice.residents <= slots
        and slots * expert_bytes(model, choice) + 2 * model.expert_numbers * model.experts
        <= _whole_layer_bytes(choice, engine)
        and rows <= engine.group_rows + engine.token_rows * work.tokens
    )


def _cache_experts(model: ModelShape, choice: Choice, free: int, engine: EngineLimits) -> int:
    max_experts = int(engine.cache_share * free) // expert_bytes(model, choice)
    return max(0, min(int(engine.cached_layers * model.experts), max_experts))


def _whole_layer_bytes(choice: Choice, engine: EngineLimits) -> int:
    """Up to which a layer is dequantised at once, with its cache: then its passes can be captured."""
    return engine.split_layer_bytes if choice.policy == SPLIT else engine.whole_layer_bytes


def _engine_bytes(model: ModelShape, work: Work, choice: Choice, free: int, engine: EngineLimits) -> Table:
    """GPU memory of the engine: the expert cache, dequantised weights and rows of a group, results in float32."""
    table = {"slots": _cache_experts(model, choice, free, engine) * expert_bytes(model, choice)}
    expert = 2 * model.expert_numbers
    layer = expert * model.experts
    whole = table["slots"] + layer <= _whole_layer_bytes(choice, engine)
    decoded = layer if whole else max(1, engine.group_bytes // expert) * expert
    rows = min(work.tokens * model.top_k, engine.group_rows + engine.token_rows * work.tokens)
    hidden_bytes = 14 if decoded == layer else 10  # per number of a hidden state; captured passes have static inputs
    table["groups"] = (
        decoded + rows * (6 * model.hidden + 14 * model.intermediate) + work.tokens * model.hidden * hidden_bytes
    )
    if isinstance(work, Training) and work.adapts_experts:
        numbers = expert_lora_numbers(model, work.rank)
        two_layers, layers_kept = 4 * numbers // model.expert_layers, min(engine.factor_bytes, 2 * numbers)
        table["factors"] = numbers // model.expert_layers * FACTOR_BYTES + max(0, layers_kept - two_layers)
    return table


def _training(
    model: ModelShape, work: Training, choice: Choice, machine: Machine, share: str, host: Table, gpus: list[Table]
) -> int:
    """Add what training needs to the tables; returns the pinned bytes."""
    experts, attention, _ = _trained(model, work)
    tables = gpus or [host]  # where attention is
    for table, numbers in ((host, experts), *((table, attention // len(tables)) for table in tables)):
        table["LoRA"] = table.get("LoRA", 0) + numbers * work.trained_bytes
        table["gradients"] = table.get("gradients", 0) + numbers * work.trained_bytes
        table["optimiser"] = table.get("optimiser", 0) + 2 * numbers * work.trained_bytes  # two moments
    if work.adapts_experts and choice.policy != "stream":  # a shorter batch may go to the CPU even if this one does not
        per_layer = packed_lora_bytes(model.hidden, model.intermediate, model.gated, work.rank) * model.experts
        host["packed LoRA"] = model.expert_layers * huge_pages(per_layer)
    layers_kept = model.expert_layers if work.retain or not work.checkpointing else 1
    if share == CPU_ALL:
        host["kept rows"] = layers_kept * kept_rows_bytes(model, work.tokens, machine)
    rows = work.tokens * model.hidden * work.rest_bytes
    if not gpus:
        absent = host["gradients"] if work.batches <= 1 else 0  # an earlier batch of the step has allocated them
        host["activations"] = activation_bytes(model, work, model.layers, False, absent)
        host["activations"] += (
            (layers_kept - 1) * rows if work.checkpointing else 0
        )  # outputs kept in addition to the rows
        return 0
    for table in gpus:
        table["activations"] = activation_bytes(model, work, -(-model.layers // len(gpus)), True)
        table["buffers"] = 4 * rows
        if work.uses_attention_graphs(choice):
            piece = min(work.tokens, max(work.sequence, GRAPH_PIECE_TOKENS // work.sequence * work.sequence))
            table["graphs"] = int(GRAPH_SHARE * layer_bytes(model, replace(work, tokens=piece)))
    # Without the engine the host copies of rows are kept for backward; with it those on the GPU.
    host["transfers"] = (4 + (layers_kept if layers_kept > 1 and not choice.uses_engine else 0)) * rows
    return host["LoRA"] + host["transfers"]


def _serving(model: ModelShape, work: Serving, choice: Choice, host: Table, gpus: list[Table]) -> int:
    """Add what serving needs to the tables; returns the pinned bytes."""
    cache = work.sequences * work.context * model.cached_bytes(work.rest_bytes, fp8=work.fp8_cache)
    if not gpus and (absorbed := _copied_keys(model, choice)):
        host["absorbed keys"] = absorbed * model.rest_dtype_bytes
    width = 8 * model.hidden + 2 * model.attention_width + model.mlp_width
    activations = work.tokens * (work.rest_bytes * width + 4 * model.scan_width) + work.sequences * model.vocabulary * 4
    if not gpus:  # the other parts of a layer are not there at the same time
        scores = min(MOST_SCORES, model.score_heads * work.tokens * work.context)
        activations = max(activations, SCORE_BYTES * scores)
    score = 8 if work.rest_bytes == 4 else work.rest_bytes + 8  # of a logit, its float32 copy and its logarithm
    rows = work.tokens * model.hidden * work.rest_bytes
    for table in gpus or [host]:
        table["KV cache"] = cache // max(1, len(gpus))
        if any(model.states):  # of running sequences, and as many copies for prefixes (serve/cache/snapshots.py)
            table["states"] = 2 * work.sequences * model.states.bytes(work.rest_bytes) // max(1, len(gpus))
        table["activations"] = activations
        table["scores"] = min(work.tokens, SCORED_ROWS) * model.vocabulary * score
    if not gpus:
        return 0
    for table in gpus:
        table["buffers"] = 2 * rows
    host["transfers"] = 2 * rows
    return host["transfers"]
