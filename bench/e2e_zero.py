"""A training step under DeepSpeed's ZeRO stage 3 with offload (ZeRO-Offload) for `train_e2e.py`, one process.

Parameters and the optimizer's state lie in pinned host memory; hooks of DeepSpeed copy a module's parameters to the
device before it runs and release them after it. The configuration is what HF's trainer makes of `bf16: true` with
`offload_param` and `offload_optimizer` on `cpu`: parameters, LoRA's included, in bf16 with float32 masters, DeepSpeed's
AdamW on the CPU (compiled at first use), its defaults for prefetch and reuse. PEFT's wrapper of stacked experts is a
leaf of DeepSpeed (`set_z3_leaf_modules`, as its documentation says for MoE): PEFT reads LoRA's weights without calling
their modules, so no hook of theirs would run.

The surprising decision: the loss is computed in a module around the model, because DeepSpeed begins a step when its
root module is called, and `loss_of` may call the decoder and the head apart.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from e2e_models import loss_of

if TYPE_CHECKING:
    import torch
    from torch import nn


def configuration(pinned: bool, learning_rate: float, cpu_adam: bool) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": pinned}
    words: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": host, "offload_optimizer": host},
    }
    if cpu_adam:
        return {**words, "optimizer": {"type": "AdamW", "params": {"lr": learning_rate}}}
    return {**words, "zero_force_ds_cpu_optimizer": False}


def why_no_cpu_adam() -> str:
    """Empty if DeepSpeed's AdamW for the CPU compiles here, else DeepSpeed's reason."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load()
    except Exception as error:  # a compiler, ninja or headers: whatever is missing, torch's AdamW needs none of it
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _with_loss(peft: Any) -> nn.Module:
    import torch

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.peft = peft

        def forward(self, batch: torch.Tensor, rows: int) -> torch.Tensor:
            return loss_of(self.peft, batch, rows)

    return WithLoss().train()


class ZeroBackend:
    """The parts of a step, as `e2e_trainer.TorchBackend` has them."""

    def __init__(self, peft: Any, device: torch.device, learning_rate: float) -> None:
        import torch
        import torch.distributed as dist
        from peft.tuners.lora.layer import ParamWrapper

        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_init_required=False)
        trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.data = parameter.data.bfloat16()
        for buffer in peft.buffers():
            buffer.data = buffer.data.to(device)
        refused = why_no_cpu_adam()
        words = configuration(device.type == "cuda", learning_rate, not refused)
        # One parameter after the other; `initialize` would have the whole model on the device first.
        deepspeed.zero.Init(module=peft, config_dict_or_path=words)
        deepspeed.utils.set_z3_leaf_modules(peft, [ParamWrapper])
        self.facts = {"deepspeed": deepspeed.__version__, "optimizer": "DeepSpeedCPUAdam"}
        optimizer = None
        if refused:
            self.facts |= {"optimizer": "torch AdamW", "no_cpu_adam": refused}
            optimizer = torch.optim.AdamW(trained, lr=learning_rate, fused=True)
        self._engine, self.optimizer, _, _ = deepspeed.initialize(
            model=_with_loss(peft),
            optimizer=optimizer,
            model_parameters=trained,
            config=words,
            dist_init_required=False,
        )

    def loss(self, batch: torch.Tensor, rows: int) -> torch.Tensor:
        mean: torch.Tensor = self._engine(batch, rows)
        return mean

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """`last`: no other piece of the batch follows."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)
        if not last:
            self._engine.step()  # counts the piece, changes nothing

    def update(self) -> None:
        self._engine.step()
