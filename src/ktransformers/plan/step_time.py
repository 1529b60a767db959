"""Predicted seconds of a training step and of a serving pass from shapes and rates, as a sum of parts.

Routed experts are computed by the CPU, or by CPU and GPU with the placement engine (`plan/expert_time.py`), whose
copies overlap with the rest of the layer. Everything else is counted in operations at a share of the GPU's nominal
rate, or on a CPU at the measured rate of torch's GEMM in the arithmetic that the run chooses (`system.dense_products`).
Launching a layer from Python, LoRA and checkpointing included, takes longer than computing it until a step has
thousands of tokens; without a GPU nothing overlaps with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.ground.linear_storage import KEEP
from ktransformers.plan.expert_time import (
    CPU_NONE,
    INFERENCE_FLOPS_SHARE,
    LAUNCHES_PER_STEP,
    TRAINING_FLOPS_SHARE,
    cpu_layer_seconds,
    cpu_share,
    dense_layer_seconds,
    expected_experts,
    experts_of_batch,
    placed_layer_seconds,
    planned_decision,
    training_decision,
)
from ktransformers.plan.formats import bytes_in_format, packed_lora_bytes
from ktransformers.plan.machine import EFFICIENCY, Machine
from ktransformers.plan.memory import (
    as_stored,
    attention_lora_numbers,
    cached_experts,
    captures_expert_passes,
    expert_lora_numbers,
    layer_bytes,
    rest_weight_bytes,
)
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.modes import TRAINING_CALL_SECONDS, Decision
from ktransformers.plan.workload import Choice, Serving, Training, Work

INFERENCE_LAYER_SECONDS = 0.3e-3  # Python launching the about sixty operators of a layer without gradients; estimated
# Share of a layer's launch time in a training step with a GPU that it takes without one, calls of experts included:
# 12.8 ms in float32 and 15 ms in bf16 on two AMX cores where that is 18 ms, the difference between steps of 4 and of 12
# layers of next to no size.
CPU_LAUNCH_SHARE = 0.75
# How often a step without a GPU moves what autograd keeps of a layer, at the read rate: norms, casts, residuals and
# attention, whose backward costs 20 to 45 us a token whatever it sees. Steps of 16 and of 45 short rows at once were
# 0.62 ms a token apart, of which products and experts explain 0.18 (6 layers of 512, bf16, two AMX cores). In float32
# nothing is cast: outside of products and experts a step of the demo (476 tokens, 30 layers of 576) takes 1.1 s of one
# AVX-512 core, of which launches explain 0.6.
ACTIVATION_MOVES = {2: 150, 4: 30}  # by bytes of a dense value
CALLBACK_SECONDS = 50e-6  # of a layer's experts: two host callbacks of 23 us, measured
HEAD_PASSES = 3  # the head: forward, recomputed in backward, and its gradient
ADAM_BYTES = 28  # read and written per trained number: weight, gradient, two moments
ADAM_SHARE = 0.62  # of the read rate that torch's AdamW reaches with eight threads: 16 ms for 53 million numbers
# Share of a GPU's nominal bandwidth at which few rows read a large packed matrix: DeepSeek-V3's head in one and
# in 16 rows on an H200 (bench/gpu_linear.py), the mean; bf16 reaches 0.95 and counts as 1. What small matrices take
# in addition, 6 to 7 us each in any format, is part of INFERENCE_LAYER_SECONDS.
PACKED_SHARE = {"fp8": 0.85, "int8": 0.85, "int4": 0.74, "mxfp4": 0.59, "q4_k": 0.51, "q6_k": 0.42}
EIGHT_BITS, FEWER_BITS = "fp8", "q6_k"  # whose shares other formats have
DECODED_FIRST = ("iq", "tq1")  # how formats begin that no GPU kernel multiplies packed
# Rows that are multiplied with packed weights; for more the weight is dequantized (quantized/gpu/linear.py).
PACKED_ROWS = 64
DECODE_SHARE = 0.7  # at this share of the nominal bandwidth for what is read and written: V3's o, measured there
PREFETCH_ROWS = 4  # per expert on average: from here on the next layer's experts are prefetched


@dataclass(frozen=True)
class PredictedTime:
    """Seconds by part: of one optimiser step in training, of one token of every sequence in serving."""

    parts: dict[str, float]
    tokens: float  # computed in these seconds
    first_token: float | None = None  # seconds from the prompt to the first token

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def text(self) -> str:
        parts = ", ".join(f"{name} {seconds / self.seconds:.0%}" for name, seconds in self.parts.items() if seconds)
        rate = f"{self.tokens_per_second:.3g} tokens/s ({parts})"
        if self.first_token is None:
            return f"{self.seconds:.3g} s a step of {self.tokens:.0f} tokens, {rate}"
        return f"first token after {self.first_token:.3g} s, then {rate}"


def dense_seconds(
    model: ModelShape, tokens: float, earlier_tokens: float, machine: Machine, choice: Choice, size: int
) -> float:
    """GEMMs of all layers besides their experts in one forward pass; `earlier_tokens`: average number per token."""
    numbers = model.layers * model.rest_per_layer
    operations = 2 * tokens * (numbers + model.layers * model.scores_width * earlier_tokens)
    return _products(model, numbers, tokens, operations, machine, choice, size)


def head_seconds(
    model: ModelShape, tokens: float, machine: Machine, choice: Choice, size: int, share: float = INFERENCE_FLOPS_SHARE
) -> float:
    return _products(model, model.embedding, tokens, 2 * tokens * model.embedding, machine, choice, size, share)


def _products(
    model: ModelShape,
    numbers: float,
    tokens: float,
    operations: float,
    machine: Machine,
    choice: Choice,
    size: int,
    share: float = INFERENCE_FLOPS_SHARE,
) -> float:
    """Seconds of products with so many dense weights."""
    if choice.gpus:
        reading, decoding = _gpu_reading(model, numbers, tokens, machine, choice, size)
        return max(operations / (machine.gpus[0].flops * share), reading) + decoding
    cpu = machine.cpu
    in_bf16 = size < 4 and cpu.products == "bfloat16"
    weights = numbers * rest_weight_bytes(model, size, choice, machine)
    products = max(operations / (cpu.dense_flops if in_bf16 else cpu.dense_flops_f32), weights / cpu.read_bytes)
    return max(products, _opening(model, numbers, machine, choice))


def _gpu_reading(
    model: ModelShape, numbers: float, tokens: float, machine: Machine, choice: Choice, size: int
) -> tuple[float, float]:
    """Seconds in which products on a GPU read their weights, and those in which the weights are dequantized before."""
    bandwidth, stored = machine.gpus[0].bandwidth, as_stored(model, choice, machine).linear_format
    if stored is None:
        return numbers * size / bandwidth, 0.0
    keeps = stored == KEEP
    coded = numbers * (model.quantized_weights / model.rest if keeps else 1.0)
    of_quantized = model.quantized_bytes / max(1, model.quantized_weights) if keeps else bytes_in_format(stored)
    plain = (numbers - coded) * size / bandwidth
    if tokens > PACKED_ROWS or (not keeps and stored.startswith(DECODED_FIRST)):
        return plain + coded * size / bandwidth, coded * (of_quantized + size) / (bandwidth * DECODE_SHARE)
    other = PACKED_SHARE[EIGHT_BITS if of_quantized >= 1 else FEWER_BITS]
    share = PACKED_SHARE.get(stored.partition(":")[0], other)
    return plain + coded * of_quantized / (bandwidth * share), 0.0


def _opening(model: ModelShape, numbers: float, machine: Machine, choice: Choice) -> float:
    """Seconds in which a CPU turns so many packed weights into operands, as it does for experts."""
    if choice.linear_format is None or choice.gpus:
        return 0.0
    share = model.quantized_weights / model.rest if choice.linear_format == KEEP else 1.0
    return share * numbers * EFFICIENCY[machine.cpu.isa].multiply_code / machine.cpu.tile_flops


def transfer_seconds(
    model: ModelShape, tokens: float, machine: Machine, choice: Choice, size: int, call: float = CALLBACK_SECONDS
) -> float:
    """Copies of hidden states to the CPU and of results back, of all layers."""
    if not choice.gpus:
        return 0.0
    round_trip = 2 * tokens * model.hidden * size / machine.gpus[0].link
    return model.expert_layers * (round_trip + call)


@dataclass(frozen=True)
class _Pass:
    """One pass through all layers in a training step."""

    launches: int  # of LAUNCHES_PER_STEP
    products: int  # GEMMs besides the experts, in units of a forward pass
    experts: bool  # computed, not replayed from kept outputs
    backward: bool = False
    resident_all: bool = False  # the pass before left all experts of the layer in the cache


def training_passes(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> list[_Pass]:
    passes = [_Pass(1, 1, True)]
    if work.checkpointing:
        passes.append(_Pass(1, 1, not work.retain))
    fits_cache = choice.uses_engine and cached_experts(model, work, choice, machine) >= model.experts
    return [
        *passes,
        _Pass(2, 1, True, backward=True, resident_all=fits_cache and passes[-1].experts and work.checkpointing),
    ]


def training_time(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> PredictedTime:
    rank, size = work.rank if work.adapts_experts else 0, work.rest_bytes
    touched, sparse = experts_of_batch(model, work), model.expert_layers / model.layers
    captured = captures_expert_passes(model, work, choice, machine)
    parts = dict.fromkeys(("experts", "rest", "loss", "crossing", "optimiser"), 0.0)
    for pass_ in training_passes(model, work, choice, machine):
        rest = _training_rest(model, work, machine, choice, pass_) / model.layers
        parts["rest"] += work.batches * model.layers * rest
        if not pass_.experts:
            continue
        if choice.uses_engine:
            lead = rest / sparse  # seconds in which the link copies before the experts run
            expert = placed_layer_seconds(
                model,
                work.tokens,
                touched,
                machine,
                choice,
                lead,
                rank=rank,
                backward=pass_.backward,
                resident_all=pass_.resident_all,
                captured=captured,
            )
        else:
            expert = cpu_layer_seconds(
                model, work.tokens, machine, choice, rank=rank, backward=pass_.backward, touched=touched
            )
            crossing = transfer_seconds(model, work.tokens, machine, choice, size, TRAINING_CALL_SECONDS)
            parts["crossing"] += work.batches * crossing
        parts["experts"] += work.batches * model.expert_layers * expert
    parts["loss"] = (
        work.batches
        * HEAD_PASSES
        * head_seconds(model, work.mean_labelled_tokens, machine, choice, size, TRAINING_FLOPS_SHARE)
    )
    parts["crossing"] += _factor_seconds(model, work, choice, machine)
    parts["optimiser"] = optimiser_seconds(model, work, choice, machine)
    return PredictedTime(parts, max(work.tokens_per_step, work.tokens))


def _training_rest(model: ModelShape, work: Training, machine: Machine, choice: Choice, pass_: _Pass) -> float:
    """All layers besides their experts; on a CPU also embedding and head, about as much as one layer."""
    if not choice.gpus:
        products = dense_seconds(model, work.tokens, work.sequence / 2, machine, choice, work.rest_bytes)
        launching = CPU_LAUNCH_SHARE * machine.layer_seconds * (model.layers + 1)
        moving = (
            ACTIVATION_MOVES[min(4, work.rest_bytes)] * model.layers * layer_bytes(model, work) / machine.cpu.read_bytes
        )
        return pass_.products * products + pass_.launches / LAUNCHES_PER_STEP * (launching + moving)
    layers = model.layers * dense_layer_seconds(model, work, machine, choice, pass_.launches, pass_.products)
    numbers = model.layers * model.rest_per_layer
    _, decoding = _gpu_reading(model, numbers, work.tokens, machine, choice, work.rest_bytes)
    return layers + pass_.products * decoding


def _factor_seconds(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> float:
    """Uploads of expert LoRA factors for every batch; copies of their gradients overlap with the next layer."""
    if not choice.uses_engine or not work.adapts_experts:
        return 0.0
    return work.batches * expert_lora_numbers(model, work.rank) * work.trained_bytes / machine.gpus[0].link


def optimiser_seconds(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> float:
    experts = expert_lora_numbers(model, work.rank) if work.adapts_experts else 0
    attention = attention_lora_numbers(model, work.rank) if work.adapts_attention else 0
    bandwidth = machine.gpus[0].bandwidth if choice.gpus else machine.cpu.read_bytes
    host = machine.cpu.read_bytes * ADAM_SHARE
    seconds = experts * ADAM_BYTES / host + attention * ADAM_BYTES / (bandwidth if choice.gpus else host)
    if work.adapts_experts and cpu_share(model, work, choice, machine) != CPU_NONE:  # factors are packed every step
        packed = packed_lora_bytes(model.hidden, model.intermediate, model.gated, work.rank)
        seconds += model.expert_layers * model.experts * packed / machine.cpu.read_bytes
    return seconds


def inference_decision(
    model: ModelShape, tokens: float, earlier_tokens: float, machine: Machine, choice: Choice, size: int
) -> Decision:
    """The mode of one forward pass without gradients."""
    lead = _inference_lead(model, tokens, inference_rest(model, tokens, earlier_tokens, machine, choice, size))
    return planned_decision(model, tokens, expected_experts(model, tokens), machine, choice, lead=lead)


def inference_rest(
    model: ModelShape, tokens: float, earlier_tokens: float, machine: Machine, choice: Choice, size: int
) -> float:
    """All layers besides their experts, in one forward pass without gradients."""
    return dense_seconds(model, tokens, earlier_tokens, machine, choice, size) + INFERENCE_LAYER_SECONDS * model.layers


def _inference_lead(model: ModelShape, tokens: float, rest: float) -> float:
    """Seconds per layer in which the link prefetches experts."""
    return rest / model.expert_layers if tokens * model.top_k >= PREFETCH_ROWS * model.experts else 0.0


def inference_pass(
    model: ModelShape, tokens: float, earlier_tokens: float, machine: Machine, choice: Choice, size: int
) -> PredictedTime:
    """One forward pass without gradients; the head computes one token per sequence."""
    rest = inference_rest(model, tokens, earlier_tokens, machine, choice, size)
    if choice.uses_engine:
        touched = expected_experts(model, tokens)
        lead = _inference_lead(model, tokens, rest)
        expert = placed_layer_seconds(model, tokens, touched, machine, choice, lead, training=False)
        crossing = 0.0
    else:
        expert = cpu_layer_seconds(model, tokens, machine, choice)
        crossing = transfer_seconds(model, tokens, machine, choice, size)
    parts = {
        "experts": model.expert_layers * expert,
        "rest": rest,
        "head": head_seconds(model, 1, machine, choice, size),
        "crossing": crossing,
    }
    return PredictedTime(parts, tokens)


def serving_time(model: ModelShape, work: Serving, choice: Choice, machine: Machine) -> PredictedTime:
    prefill, decode = (
        inference_pass(model, tokens, earlier_tokens, machine, choice, work.rest_bytes)
        for tokens, earlier_tokens in serving_passes(work).values()
    )
    context = (work.prompt + work.context) / 2
    cache = work.sequences * model.read_bytes(context, work.rest_bytes, fp8=work.fp8_cache)
    cache += 2 * work.sequences * model.states.bytes(work.rest_bytes)  # read and written
    bandwidth = machine.gpus[0].bandwidth if choice.gpus else machine.cpu.read_bytes
    return PredictedTime(decode.parts | {"cache": cache / bandwidth}, work.sequences, prefill.seconds)


def predict_time(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> PredictedTime:
    model = model.kept_on(machine.cpu.isa)
    if isinstance(work, Training):
        return training_time(model, work, choice, machine)
    return serving_time(model, work, choice, machine)


def serving_passes(work: Serving) -> dict[str, tuple[int, float]]:
    """Tokens of a pass, and the average number of earlier tokens of each, of a prompt and of a decode step."""
    return {"prefill": (work.prompt, work.prompt / 2), "decode": (work.sequences, (work.prompt + work.context) / 2)}


def planned_modes(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> dict[str, tuple[int, Decision]]:
    """The mode of a layer of experts and its reason, by kind of pass, with the tokens of the pass."""
    if isinstance(work, Training):
        return {"training": (work.tokens, training_decision(model, work, machine, choice))}
    return {
        name: (tokens, inference_decision(model, tokens, earlier_tokens, machine, choice, work.rest_bytes))
        for name, (tokens, earlier_tokens) in serving_passes(work).items()
    }
