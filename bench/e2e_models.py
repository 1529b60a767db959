"""Models of real layer shapes for `train_e2e.py`, made in memory from random numbers, in four variants.

`kt` has its experts in host memory, computed by the CPU, and the rest on the device; `gpu` is the stock model wholly on
the device; `fsdp` is the stock model under torch's FSDP2 with `CPUOffloadPolicy`, whose parameters lie in pinned host
memory and come to the device a layer at a time; `zero` is the stock model for DeepSpeed's ZeRO-Offload
(`e2e_zero.py`), whose parameters do the same. All get the same LoRA by stock PEFT and the same checkpointing; nothing
is written to disk.

The surprising decision: the experts of all layers hold the same numbers. One layer of random bytes is made and every
layer is packed or copied from it, because 30 GB of fresh random numbers take longer than the measurement; the speed of
a product does not depend on the numbers, and the routers differ.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ktransformers.experts.contract import Contract

VARIANTS = ("kt", "gpu", "fsdp", "zero")
INSTALLED = VARIANTS[:3]  # without a package that the project does not install
POOL = 4_000_037  # random numbers that all weights are taken from; a prime
CARDS = Path(__file__).resolve().parents[1] / "src" / "ktransformers" / "plan" / "models"


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; `published` are figures to print beside ours."""

    name: str
    config: dict[str, Any]
    attention: tuple[str, ...]  # the linear modules that get LoRA, besides the routed experts
    layers: int
    vocabulary: int
    length: int = 512  # of a sequence
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    tokens: tuple[int, ...] = (512, 2048, 8192)  # of a step
    accumulate: tuple[int, ...] = (1,)  # steps are measured in one piece, and cut into so many
    variants: tuple[str, ...] = INSTALLED
    loss_rows: int = 0  # rows of logits that exist at a time; 0: all, as in the stock model
    published: tuple[str, ...] = ()
    stands_for: int = 0  # layers of experts of the whole model, of which these are a few; 0: all are here


def _card(name: str) -> dict[str, Any]:
    """The shapes of a model that ships with the planner."""
    words: dict[str, Any] = json.loads((CARDS / f"{name}.json").read_text())["config"]
    return {key: value for key, value in words.items() if key != "torch_dtype"}


def _tiny(model_type: str) -> dict[str, Any]:
    """Everything small, for tests."""
    return {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if model_type == "deepseek_v2" else 2,
        "head_dim": 16,
        "num_experts": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }


_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT_LOW_RANK = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LATENT = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_ROUTED = {
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
}


@functools.cache
def recipes() -> dict[str, Recipe]:
    """By name. The vocabulary of the first is small on purpose: an output layer is the same work in every variant."""
    return {
        recipe.name: recipe
        for recipe in (
            Recipe("qwen3-30b", {**_card("qwen3-30b-a3b"), "norm_topk_prob": True}, _QKVO, layers=8, vocabulary=4096),
            Recipe(
                "dsv2-lite",
                {**_card("deepseek-v2-lite"), **_ROUTED},
                _LATENT,
                layers=27,
                vocabulary=102400,
                alpha=32,
                dropout=0.1,
                tokens=(8192,),
                accumulate=(16, 1),
                loss_rows=1024,
                published=("530.38 tokens/s, 6.08 GB GPU", "227.6 tokens/s, 30 GB host"),
            ),
            Recipe(
                "dsv3",
                {**_card("deepseek-v3"), "first_k_dense_replace": 0},
                _LATENT_LOW_RANK,
                layers=2,
                vocabulary=4096,
                alpha=32,
                tokens=(8192,),
                variants=("kt",),
                loss_rows=1024,
                published=("40.35 tokens/s, 70 GB GPU, 1300 GB host, 58 layers of experts",),
                stands_for=58,
            ),
            Recipe("gpt-oss-20b", _card("gpt-oss-20b"), _QKVO, layers=24, vocabulary=201088, variants=("kt",)),
            Recipe("tiny", _tiny("qwen3_moe"), _QKVO, layers=2, vocabulary=128, length=32, tokens=(32, 64)),
            Recipe(
                "tiny-latent",
                {**_tiny("deepseek_v2"), **_ROUTED},
                _LATENT,
                layers=2,
                vocabulary=128,
                length=32,
                alpha=32,
                dropout=0.1,
                tokens=(64,),
                accumulate=(2, 1),
                loss_rows=24,
                published=("1 token/s",),
            ),
        )
    }


def _blank(recipe: Recipe, device: torch.device, experts: str) -> Any:
    """The stock model in bf16, its memory not yet written to."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    words = {**recipe.config, "num_hidden_layers": recipe.layers, "vocab_size": recipe.vocabulary}
    if "layer_types" in words:
        words["layer_types"] = words["layer_types"][: recipe.layers]
    config = AutoConfig.for_model(words.pop("model_type"), **words, use_cache=False, pad_token_id=None)
    with no_init_weights(), torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=experts)


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _fill(model: nn.Module, device: torch.device) -> None:
    """Norms 1, other vectors 0, matrices normal; those of a layer's experts from the first layer's."""
    import torch

    from ktransformers.quant.random_model import fill_from_pool

    generator = torch.Generator(device).manual_seed(0)
    pool = torch.randn(POOL, generator=generator, device=device).to(torch.bfloat16)
    made: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for place, (name, parameter) in enumerate(model.named_parameters()):
            role = name.rpartition(".")[2]
            if parameter.dim() == 1:
                parameter.fill_(1.0 if role == "weight" else 0.0)
            elif not _is_expert(name) or role not in made:
                fill_from_pool(parameter, pool, place * 997 % POOL)
                made[role] = parameter
            elif parameter.data_ptr() != made[role].data_ptr():
                parameter.copy_(made[role])


def _share_experts(model: nn.Module) -> None:
    """Every layer's experts become views of the first layer's: one layer of memory, until each is packed or copied."""
    first: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if _is_expert(name):
            parameter.data = first.setdefault(name.rpartition(".")[2], parameter.data)


def _adapt(model: Any, recipe: Recipe) -> Any:
    """Stock PEFT on attention and routed experts; adapters in float32, as PEFT makes them for a bf16 model."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    peft = get_peft_model(
        model,
        LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules=list(recipe.attention),
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
    )
    if recipe.dropout:  # PEFT refuses it in the configuration, because it knows none on parameters
        for layer in peft.modules():
            drops = getattr(layer, "lora_dropout", None)
            if isinstance(drops, torch.nn.ModuleDict) and "default" in drops and not hasattr(layer, "parameter_name"):
                drops["default"] = torch.nn.Dropout(recipe.dropout)
    return peft


def _checkpoint(peft: Any, retain: bool) -> None:
    from ktransformers.experts.checkpointing import save_expert_outputs

    options: dict[str, Any] = {"use_reentrant": False}
    if retain:
        options["context_fn"] = save_expert_outputs
    peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    peft.enable_input_require_grads()


def _rolled(rows: torch.Tensor, by: int) -> torch.Tensor:
    """As torch's `roll`, with all threads: the memory is new, and the system makes its pages on the way."""
    import torch

    rolled, by = torch.empty_like(rows), by % len(rows)
    rolled[by:].copy_(rows[: len(rows) - by])
    rolled[:by].copy_(rows[len(rows) - by :])
    return rolled


def _expert_tensors(module: nn.Module, contract: Contract, spec: str) -> Iterator[dict[str, Any]]:
    """One expert after the other, in the format; so many are encoded side by side as there are CPUs."""
    from ktransformers.checkpoint.encoder import encode

    parameters = {role: module.get_parameter(name) for role, name in contract.parameters().items()}

    def tensors_of(expert: int) -> dict[str, Any]:
        tensors: dict[str, Any] = {role: tensor[expert].detach() for role, tensor in parameters.items()}
        if spec != "bf16":
            for role in ("gate_up", "down"):
                matrix = tensors[role].T if contract.shape.transposed else tensors[role]
                tensors[role] = encode(matrix.contiguous(), spec)
        return tensors

    experts = range(contract.shape.num_experts)
    side_by_side = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(side_by_side) as workers:
        for first in experts[::side_by_side]:
            yield from workers.map(tensors_of, experts[first : first + side_by_side])


def _pack(model: Any, spec: str) -> None:
    """All experts of the first layer in the format; every other layer has the same bytes, experts in another order."""
    from ktransformers.checkpoint import ExpertChunk
    from ktransformers.experts.contract import expert_modules, read_contract
    from ktransformers.experts.interface import (
        attach_store,
        new_store,
        pack_chunk,
        remove_parameters,
        select_implementation,
    )

    made: dict[str, torch.Tensor] = {}
    for place, (name, module) in enumerate(expert_modules(model).items()):
        contract = read_contract(name, module)
        store = new_store(contract, formats=spec)
        if not made:
            for expert, tensors in enumerate(_expert_tensors(module, contract, spec)):
                pack_chunk(store, contract, ExpertChunk(expert, True, tensors))
            made = store.memory()
        else:
            experts = contract.shape.num_experts
            store.adopt(**{name: _rolled(tensor.view(experts, -1), place).flatten() for name, tensor in made.items()})
        attach_store(module, contract, store, remove_parameters(module, contract))
    select_implementation(model)


def build_packed(recipe: Recipe, device: torch.device, spec: str) -> Any:
    """The stock model with packed experts in host memory and the rest on the device, without LoRA."""
    import torch

    from ktransformers.ground.pool import set_default_pool
    from ktransformers.parallel.distributed import exclude_from_ddp

    set_default_pool(spare=device.type == "cuda")
    host = torch.device("cpu")
    model = _blank(recipe, host, "eager")
    _share_experts(model)
    _fill(model, host)
    _pack(model, spec)
    exclude_from_ddp(model)
    return model.to(device)


def _build_kt(recipe: Recipe, device: torch.device, activation: str, spec: str) -> Any:
    from ktransformers.nn import set_lora_dropout

    peft = _adapt(build_packed(recipe, device, spec), recipe)
    if recipe.dropout:
        set_lora_dropout(peft, recipe.dropout)
    _checkpoint(peft, activation == "retain")
    return peft


def _build_gpu(recipe: Recipe, device: torch.device, activation: str, spec: str) -> Any:
    model = _blank(recipe, device, "grouped_mm")
    _fill(model, device)
    peft = _adapt(model, recipe)
    _checkpoint(peft, False)
    return peft


def _on_host(recipe: Recipe) -> Any:
    """The stock model in host memory, for what copies each parameter into memory of its own."""
    import torch

    host = torch.device("cpu")
    model = _blank(recipe, host, "grouped_mm")
    _share_experts(model)
    _fill(model, host)
    peft = _adapt(model, recipe)
    _checkpoint(peft, False)
    return peft


def _build_fsdp(recipe: Recipe, device: torch.device, activation: str, spec: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    peft = _on_host(recipe)
    model = peft.get_base_model()
    mesh = init_device_mesh(device.type, (1,))
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # Not the PEFT model as one: `loss_of` calls the decoder and the head themselves, and the parameters of a module
    # that is not called stay sharded.
    for module in (*model.model.layers, model.model, model.lm_head):
        fully_shard(module, mesh=mesh, offload_policy=offload)
    # A loss in pieces calls the head for each, forward and again backward: it stays on the device after the first.
    model.lm_head.set_reshard_after_forward(False)
    model.lm_head.set_reshard_after_backward(False)
    return peft


def _build_zero(recipe: Recipe, device: torch.device, activation: str, spec: str) -> Any:
    return _on_host(recipe)


BUILD = {"kt": _build_kt, "gpu": _build_gpu, "fsdp": _build_fsdp, "zero": _build_zero}


def build(variant: str, recipe: Recipe, device: torch.device, activation: str, spec: str) -> Any:
    """A PEFT model in training mode for a step on `device`; `spec` is the format of kt's experts."""
    return BUILD[variant](recipe, device, activation, spec).train()


def place_experts(peft: Any, policy: str, sizes: Sequence[int] = ()) -> None:
    """From now on ours are computed where `policy` says; the modes of `auto` are decided for batches of `sizes`."""
    from ktransformers import place

    if getattr(peft, "placement", None) is not None:
        peft.placement.detach()
        peft.placement = None  # its memory is free before there is another
    peft.placement = place.attach(peft, policy=policy)
    if peft.placement is not None:
        peft.placement.tune(sizes, training=True)


def loss_of(peft: Any, batch: torch.Tensor, rows: int) -> torch.Tensor:
    """The mean cross entropy of the next token; with `rows`, so many rows of logits exist at a time."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if not rows:
        whole: torch.Tensor = peft(input_ids=batch, labels=batch).loss
        return whole
    stock = peft.get_base_model()
    hidden = stock.model(input_ids=batch).last_hidden_state[:, :-1].flatten(0, 1)
    wanted = batch[:, 1:].flatten()

    def part(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(stock.lm_head(states).float(), labels, reduction="sum")

    parts = [
        checkpoint(part, states, labels, use_reentrant=False)
        for states, labels in zip(hidden.split(rows), wanted.split(rows), strict=True)
    ]
    return torch.stack(parts).sum() / wanted.numel()  # type: ignore[arg-type]


def answer(peft: Any, recipe: Recipe, device: torch.device, prompt: int, new: int = 16) -> dict[str, float]:
    """Tokens a second of one sequence, a prompt's and new ones; the second of two, as the first touches everything."""
    import time

    import torch

    peft.eval()
    ids = torch.randint(recipe.vocabulary, (1, prompt), generator=torch.Generator().manual_seed(3)).to(device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        for _ in range(2):
            moments, token, past = [time.perf_counter()], ids, None
            for _ in range(new + 1):
                out = peft(input_ids=token, past_key_values=past, use_cache=True, logits_to_keep=1)
                token, past = out.logits[:, -1:].argmax(-1), out.past_key_values
                token.tolist()  # synchronises, as a reader of the token would
                moments.append(time.perf_counter())
    peft.train()
    prefill, decode = moments[1] - moments[0], moments[-1] - moments[1]
    return {"prompt": prompt, "new": new, "prefill_per_s": prompt / prefill, "decode_per_s": new / decode}


def modes(peft: Any, tokens: int) -> dict[str, Any]:
    """What `auto` has decided for training batches of so many tokens, and why."""
    placement = getattr(peft, "placement", None)  # None: no engine, or not ours
    if placement is None or placement.policy != "auto":
        return {}
    decision = placement.engines[0].dispatcher.decision(tokens, True)
    return {"mode": decision.mode, "predicted": dict(decision.predicted)}


def expert_layers(peft: Any) -> list[nn.Module]:
    """What computes the routed experts of each layer, PEFT's part of it included."""
    blocks = (layer.mlp for layer in peft.get_base_model().model.layers)
    return [block.experts for block in blocks if hasattr(block, "experts")]


def attention_layers(peft: Any) -> list[nn.Module]:
    return [layer.self_attn for layer in peft.get_base_model().model.layers]
