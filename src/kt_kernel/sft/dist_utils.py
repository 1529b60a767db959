"""What a distributed program asks of kt-kernel's experts, where every process has its own: nothing is gathered on rank
0 or scattered from there. The ranks share gradients of expert LoRA, and a block may ask whether it is checkpointed."""

from __future__ import annotations

from kt_kernel.sft.lora import sync_kt_lora_gradients
from ktransformers.experts.checkpointing import inside_checkpointed_block

__all__ = ["inside_checkpointed_block", "sync_kt_lora_gradients"]
