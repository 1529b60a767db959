"""SGLang's own `kt_ep_wrapper.py`, unmodified, in a process without SGLang: stub modules stand for what it imports.

A `Release` executes the file of one release with our `kt_kernel` and builds layers around it as SGLang's `FusedMoE`
does: shapes of a layer, a method for the experts on the GPU, weights loaded by the rule of the release, dispatch
outputs as named tuples. On a machine without a GPU the CUDA calls of the file are replaced; on one with a GPU the
streams and graphs are real.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

WRAPPER = "sglang/srt/layers/moe/kt_ep_wrapper.py"
LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 3, 8, 3, 256, 128

TopKOutput = namedtuple("TopKOutput", "topk_weights topk_ids router_logits")
DispatchOutput = namedtuple("DispatchOutput", "hidden_states topk_output")
CombineInput = namedtuple("CombineInput", "hidden_states")


def module(name: str, **attributes: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(attributes)
    if not attributes:
        made.__path__ = []
    return made


@dataclass
class RunnerConfig:
    activation: str = "silu"
    num_local_experts: int = EXPERTS
    routed_scaling_factor: float | None = None
    swiglu_limit: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None


@dataclass
class ServerArgs:
    """The arguments that either release reads."""

    kt_weight_path: str | None
    kt_num_gpu_experts: int | None
    kt_cpuinfer: int = 2
    kt_threadpool_count: int = 1
    kt_method: str = "BF16"
    kt_max_deferred_experts_per_token: int | None = None
    chunked_prefill_size: int = 64
    kt_numa_nodes: list[int] | None = None
    kt_gpu_experts_ratio: float | None = None
    kt_gpu_prefill_token_threshold: int | None = None
    kt_enable_dynamic_expert_update: bool = False
    kt_expert_placement_strategy: str = "uniform"
    kt_expert_lora_path: str | None = None
    init_expert_location: str = "trivial"
    num_hidden_layers: int = LAYERS
    model_path: str = ""


class ForkServerArgs(ServerArgs):
    def get_hf_config(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(num_hidden_layers=self.num_hidden_layers, num_experts=EXPERTS)


class GpuExperts:
    """Stands for a quantisation method of the GPU: dense products in float32, so that no choice depends on the ids and
    the call can be captured."""

    num_gpu_experts = -1

    def create_weights(self, layer: nn.Module, num_experts: int, params_dtype: torch.dtype, **words: Any) -> None:
        device = layer.device
        for name, shape in (("w13_weight", (2 * INTERMEDIATE, HIDDEN)), ("w2_weight", (HIDDEN, INTERMEDIATE))):
            weight = torch.zeros(num_experts, *shape, dtype=params_dtype, device=device)
            layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.processed = True

    def create_moe_runner(self, layer: nn.Module, config: Any) -> None:
        self.runner_config = config

    def apply(self, layer: nn.Module, dispatch: Any) -> Any:
        hidden, (weights, ids, _) = dispatch.hidden_states, dispatch.topk_output
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for expert in range(layer.w13_weight.shape[0]):
            gate, up = (hidden.float() @ layer.w13_weight[expert].float().T).chunk(2, dim=1)
            product = (torch.nn.functional.silu(gate) * up) @ layer.w2_weight[expert].float().T
            share = torch.where(ids == expert, weights.float(), 0.0).sum(1, keepdim=True)
            out += share * product
        return CombineInput(out.to(hidden.dtype))


class Layer(nn.Module):
    """The attributes of FusedMoE that the file reads."""

    def __init__(self, index: int, device: torch.device) -> None:
        super().__init__()
        self.layer_id, self.device = index, device
        self.top_k, self.num_experts, self.moe_tp_size = TOP_K, EXPERTS, 1
        self.intermediate_size_per_partition = INTERMEDIATE
        self.anchor = nn.Parameter(torch.zeros(1, device=device), requires_grad=False)  # sglang-kt asks for a device


@dataclass(frozen=True)
class Batch:
    hidden: Tensor
    ids: Tensor
    weights: Tensor

    def dispatch(self) -> Any:
        return DispatchOutput(self.hidden, TopKOutput(self.weights, self.ids, None))


@dataclass
class Checkpoint:
    """Random experts in the released layout of Qwen3-MoE, and their definition in float64."""

    path: Path
    experts: list[list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=list)  # [layer][expert] gate, up, down

    @classmethod
    def make(cls, path: Path, layers: int = LAYERS, seed: int = 0) -> Checkpoint:
        draw = torch.Generator().manual_seed(seed)
        made, tensors = cls(path), {}
        shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
        for layer in range(layers):
            made.experts.append([])
            for expert in range(EXPERTS):
                matrices = []
                for role, shape in shapes.items():
                    matrix = (torch.randn(shape, generator=draw) / shape[1] ** 0.5).bfloat16()
                    tensors[f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"] = matrix
                    matrices.append(matrix)
                made.experts[layer].append(tuple(matrices))  # type: ignore[arg-type]
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path / "model.safetensors"))
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": HIDDEN,
            "intermediate_size": 256,
            "moe_intermediate_size": INTERMEDIATE,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "torch_dtype": "bfloat16",
        }
        (path / "config.json").write_text(json.dumps(config))
        return made

    def forward(self, layer: int, batch: Batch, deltas: dict[int, Any] | None = None) -> Tensor:
        """Sum of weight * expert(hidden) in float64; ids outside of 0 to E - 1 contribute nothing."""
        hidden, ids, weights = (tensor.cpu() for tensor in (batch.hidden.double(), batch.ids, batch.weights.double()))
        out = torch.zeros_like(hidden)
        for token in range(hidden.shape[0]):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                if 0 <= expert < EXPERTS:
                    gate, up, down = (matrix.double() for matrix in self.experts[layer][expert])
                    inner = torch.nn.functional.silu(gate @ hidden[token]) * (up @ hidden[token])
                    out[token] += weight * (down @ inner)
        return out


def random_batch(tokens: int, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=draw).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, TOP_K, generator=draw) + 0.1
    weights /= weights.sum(1, keepdim=True)
    return Batch(hidden.to(device), ids.to(device), weights.to(device))


def distance(measured: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    measured = measured.double().cpu()
    return ((measured - expected).norm() / expected.norm().clamp_min(1e-12)).item()


class HostStream:
    """Stands for a CUDA stream where there is no GPU: work is done when it is submitted."""

    cuda_stream = 0

    def __init__(self, *args: Any, **words: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass


class Release:
    """`kt_ep_wrapper.py` of one release, executed with stubs."""

    def __init__(self, files: Path, name: str, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.name, self.is_fork, self.rank = name, name.startswith("sglang-kt"), rank
        self.args: ServerArgs | None = None
        self.order: Tensor | None = None  # physical to logical experts, the same in all layers
        for stub in self._stubs():
            monkeypatch.setitem(sys.modules, stub.__name__, stub)
        # The file compiles a function of two lines; without a compiler it is the same function.
        monkeypatch.setattr(torch, "compile", lambda *args, **words: lambda function: function)
        if not torch.cuda.is_available():
            self._replace_cuda(monkeypatch)
        self.files = files / name
        source = self.files / WRAPPER
        self.module = types.ModuleType("sglang.srt.layers.moe.kt_ep_wrapper")
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)
        exec(compile(source.read_text(), str(source), "exec"), self.module.__dict__)
        assert self.module.KTRANSFORMERS_AVAILABLE

    def _stubs(self) -> Iterator[types.ModuleType]:
        packages = ("", ".arg_groups", ".layers", ".layers.quantization", ".layers.moe", ".eplb", ".configs", ".lora")
        yield module("sglang")
        for package in packages:
            yield module(f"sglang.srt{package}")
        own = "sglang.srt."
        config = types.SimpleNamespace(hf_config=types.SimpleNamespace(num_hidden_layers=LAYERS))
        yield module(f"{own}arg_groups.overrides", model_config_of=lambda args: config)
        yield module(f"{own}layers.quantization.base_config", FusedMoEMethodBase=object)
        yield module(
            f"{own}runtime_context",
            get_parallel=lambda: types.SimpleNamespace(tp_rank=self.rank),
            get_exec=lambda: types.SimpleNamespace(moe=self.args),
            get_schedule=lambda: self.args,
        )
        yield module(f"{own}utils", get_compiler_backend=lambda: "eager", is_cuda=lambda: False)
        location = types.SimpleNamespace(physical_to_logical_map_cpu=_Rows(self))
        yield module(f"{own}eplb.expert_location_dispatch", get_global_expert_location_metadata=lambda: location)
        recorder = types.SimpleNamespace(on_gpu_expert_mask=lambda *args: None)
        yield module(f"{own}eplb.expert_distribution", get_global_expert_distribution_recorder=lambda: recorder)
        yield module(f"{own}layers.moe.token_dispatcher", StandardCombineInput=CombineInput)
        yield module(
            f"{own}layers.moe.topk", TopKOutputChecker=types.SimpleNamespace(format_is_bypassed=lambda output: False)
        )
        # sglang-kt alone.
        yield module(f"{own}configs.glm5_next", GLM5_NEXT_SUPPORTED_TP_SIZES=(1,))
        yield module(
            f"{own}distributed",
            get_tensor_model_parallel_rank=lambda: self.rank,
            get_tensor_model_parallel_world_size=lambda: 2,
            get_tp_group=lambda: None,
        )
        yield module(f"{own}layers.quantization.marlin_utils", marlin_permute_scales=None)
        yield module(f"{own}layers.moe.utils", is_kt_ep_wrapper_disabled=lambda: False)
        yield module(f"{own}layers.moe.quant_method_registry", register_moe_quant_wrapper=lambda *args, **words: None)
        submode = types.SimpleNamespace(get=lambda: "")
        yield module(f"{own}environ", envs=types.SimpleNamespace(SGLANG_DSV4_2604_SUBMODE=submode))
        yield module(f"{own}lora.kt_dsv4", is_native_adapter=lambda path: False, load_expert_layer=None)

    @staticmethod
    def _replace_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
        stream = HostStream()
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: stream)
        monkeypatch.setattr(torch.cuda, "Stream", HostStream)
        monkeypatch.setattr(torch.cuda, "Event", HostStream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)

    def layers(
        self, checkpoint: Checkpoint, args: ServerArgs, device: torch.device, count: int = LAYERS
    ) -> list[tuple[Any, Layer]]:
        """(method, layer) of every layer, constructed and loaded as FusedMoE does it."""
        self.args = args = ForkServerArgs(**vars(args)) if self.is_fork else args
        made = []
        for index in range(count):
            layer = Layer(index, device)
            config = self.module.create_kt_config_from_server_args(args, index)
            method = self.module.KTEPWrapperMethod(GpuExperts(), config)
            layer.moe_runner_config = runner = RunnerConfig()
            method.create_weights(
                layer=layer,
                num_experts=EXPERTS,
                hidden_size=HIDDEN,
                intermediate_size_per_partition=INTERMEDIATE,
                params_dtype=torch.bfloat16,
            )
            method.create_moe_runner(layer, runner)
            self.load_gpu_experts(checkpoint, method, layer)
            method.process_weights_after_loading(layer)
            made.append((method, layer))
        return made

    def load_gpu_experts(self, checkpoint: Checkpoint, method: Any, layer: Layer) -> None:
        """FusedMoE's weight loader: mainline has the first experts on the GPU, sglang-kt and our plugin a mask of
        them."""
        order = list(range(EXPERTS)) if self.order is None else self.order.tolist()
        slots = method.logical_to_gpu_index.tolist() if self.is_fork else getattr(method, "slot_of", range(EXPERTS))
        for physical in range(EXPERTS):
            slot = slots[physical]
            if 0 <= slot < method.num_gpu_experts:
                gate, up, down = checkpoint.experts[layer.layer_id][order[physical]]
                layer.w13_weight.data[slot].copy_(torch.cat([gate, up]))
                layer.w2_weight.data[slot].copy_(down)


class _Rows:
    """`physical_to_logical_map_cpu[layer]`."""

    def __init__(self, release: Release) -> None:
        self._release = release

    def __getitem__(self, layer: int) -> Tensor:
        order = self._release.order
        return torch.arange(EXPERTS, dtype=torch.int64) if order is None else order
