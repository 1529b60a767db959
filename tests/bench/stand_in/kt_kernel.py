"""Stands in for kt-kernel, which is no dependency of ours and exists for x86 only: its classes by name, fed with the
same raw addresses, computed by torch. Those of int8 and int4 round weights to one scale per row, as kt-kernel does.
With STAND_IN_BROKEN set, LoRA gradients are twice too large, and `--private` does not start.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peers.torch_loop import forward
from shapes import Weights

__version__ = "stand-in"
FACTORS = [f"{matrix}_lora_{factor}" for matrix in ("gate", "up", "down") for factor in "ab"]
BROKEN = os.environ.get("STAND_IN_BROKEN")
if BROKEN and "--private" in sys.argv:
    raise ImportError("no wheel for this CPU")

Task = Callable[[], None]


def tensor(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=dtype).view(shape)


class WorkerPoolConfig:
    subpool_count: int
    subpool_thread_count: list[int]


class CPUInfer:
    def __init__(self, config: WorkerPoolConfig) -> None:
        assert config.subpool_count == 1 and config.subpool_thread_count[0] >= 1
        self.backend_ = object()
        sys.stdout.write("its chatter does not reach the answers\n")
        sys.stdout.flush()

    def submit(self, task: Task) -> None:
        task()

    def sync(self) -> None:
        pass


class Config:
    """Takes whatever is set."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, *on_gpu: int) -> None:
        self.sizes = experts, hidden, intermediate

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Layer:
    levels = 0  # of a weight's size; 0: bf16

    def __init__(self, config: Config) -> None:
        self.config = config

    def load_weights_task(self) -> Task:
        def run() -> None:
            (e, h, i), c = self.config.sizes, self.config
            shapes = {"gate_proj": (e, i, h), "up_proj": (e, i, h), "down_proj": (e, h, i)}
            loaded = [tensor(getattr(c, name), torch.bfloat16, *shape).float() for name, shape in shapes.items()]
            self.base = [self.rounded(matrix) for matrix in loaded]

        return run

    def rounded(self, matrix: torch.Tensor) -> torch.Tensor:
        if not self.levels:
            return matrix
        scale = matrix.abs().amax(-1, keepdim=True) / self.levels
        return (matrix / scale).round() * scale

    def inputs(self, count: int, top_k: int, ids: int, weights: int, hidden: int) -> list[torch.Tensor]:
        """Hidden states and routing weights in f32, ids."""
        t = int(tensor(count, torch.int32, 1))
        assert t <= self.config.max_len
        states = tensor(hidden, torch.bfloat16, t, self.config.sizes[1]).float()
        return [states, tensor(weights, torch.float32, t, top_k).clone(), tensor(ids, torch.int64, t, top_k)]


class Inference(Layer):
    def forward_task(self, count: int, top_k: int, ids: int, weights: int, hidden: int, out: int, add: bool) -> Task:
        def run() -> None:
            assert not add
            x, w, chosen = self.inputs(count, top_k, ids, weights, hidden)
            tensor(out, torch.bfloat16, *x.shape).copy_(forward(Weights(*self.base), x, chosen, w))

        return run


class Training(Layer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        (e, h, i), c = config.sizes, config
        self.saved: tuple[torch.Tensor, ...] | None = None
        assert c.authoritative_optimizer_grads and not c.full_weight_grad and c.max_cache_depth == 1
        assert c.share_backward_bb is ("--private" not in sys.argv) and c.lora_rank == 8
        r, self.scale = c.lora_rank, c.lora_alpha / c.lora_rank
        self.shapes = [(e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)]

    def linear(self, rows: torch.Tensor, place: int, expert: int) -> torch.Tensor:
        a, b = (self.lora[2 * place + n][expert] for n in (0, 1))
        return F.linear(rows, self.base[place][expert]) + self.scale * F.linear(F.linear(rows, a), b)

    def forward_sft_task(
        self, count: int, top_k: int, ids: int, weights: int, hidden: int, out: int, save: bool
    ) -> Task:
        def run() -> None:
            assert save and self.saved is None
            x, w, chosen = self.inputs(count, top_k, ids, weights, hidden)
            x, w = x.requires_grad_(), w.requires_grad_()
            lora = zip(FACTORS, self.shapes, strict=True)
            self.lora = [
                tensor(getattr(self.config, name), torch.bfloat16, *shape).float().requires_grad_()
                for name, shape in lora
            ]
            result = torch.zeros_like(x)
            for expert in chosen.unique().tolist():
                rows, slots = (chosen == expert).nonzero(as_tuple=True)
                inner = F.silu(self.linear(x[rows], 0, expert)) * self.linear(x[rows], 1, expert)
                y = self.linear(inner, 2, expert) * w[rows, slots][:, None]
                result = result.index_add(0, rows, y)
            tensor(out, torch.bfloat16, *x.shape).copy_(result.detach())
            self.saved = x, w, result

        return run

    def backward_task(self, grad_out: int, grad_hidden: int, *rest: int) -> Task:
        *factors, grad_weights, gate, up, down = rest
        assert len(factors) == 6 and (gate, up, down) == (0, 0, 0)

        def run() -> None:
            assert self.saved is not None
            (x, w, result), self.saved = self.saved, None
            above = tensor(grad_out, torch.bfloat16, *x.shape).float()
            gx, gw, *own = torch.autograd.grad(result, [x, w, *self.lora], above)
            tensor(grad_hidden, torch.bfloat16, *x.shape).copy_(gx)
            tensor(grad_weights, torch.float32, *w.shape).copy_(gw)
            for address, grad in zip(factors, own, strict=True):
                tensor(address, torch.bfloat16, *grad.shape).copy_(grad * (2 if BROKEN else 1))

        return run


class moe:
    MOEConfig = MOESFTConfig = Config
    AMXBF16_MOE = Inference
    AMXInt8_MOE = type("AMXInt8_MOE", (Inference,), {"levels": 127})
    AMXInt4_MOE = type("AMXInt4_MOE", (Inference,), {"levels": 7})
    AMXBF16_SFT_MOE = Training
    AMXInt8_SFT_MOE = type("AMXInt8_SFT_MOE", (Training,), {"levels": 127})
    AMXInt4_SFT_MOE = type("AMXInt4_SFT_MOE", (Training,), {"levels": 7})


kt_kernel_ext = sys.modules[__name__]
