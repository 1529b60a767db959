"""The rule files that have names of their own (`DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml`), generated when they are
asked for.

A name is a model, then `-sft` for fine-tuning, `-amx`, and `-multi-gpu` with a number of GPUs. Each of the 104 texts is
a complete file, because users write one out (`kt rules --write NAME`) and edit it; the texts differ in a few words.
Four of them are in `samples/`, for readers. A test holds the texts to recorded hashes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    # None: any number of layers, all of them on one GPU.
    layers: int | None
    # The stock class of the block around the experts.
    moe: str
    moe_operator: str
    model_operator: str
    # Multi-head latent attention.
    latent: bool


DEEPSEEK_V3 = Family(61, "DeepseekV3MoE", "KDeepseekV3MoE", "KDeepseekV2Model", True)
FAMILIES = {
    "DeepSeek-V2-Lite-Chat": Family(27, "DeepseekV2Moe", "KDeepseekV2MoE", "KDeepseekV2Model", True),
    "DeepSeek-V2-Chat": Family(60, "DeepseekV2Moe", "KDeepseekV2MoE", "KDeepseekV2Model", True),
    "DeepSeek-V3-Chat": DEEPSEEK_V3,
    "DeepSeek-R1": DEEPSEEK_V3,
    "Kimi-K2": DEEPSEEK_V3,
    "Qwen3Moe": Family(None, "Qwen3MoeSparseMoeBlock", "KQwen3MoeSparseMoeBlock", "KQwen3MoeModel", False),
    "Qwen3-30B-A3B": Family(48, "Qwen3MoeSparseMoeBlock", "KQwen3MoeSparseMoeBlock", "KQwen3MoeModel", False),
    "Qwen3-235B-A22B": Family(94, "Qwen3MoeSparseMoeBlock", "KQwen3MoeSparseMoeBlock", "KQwen3MoeModel", False),
}
# The end of a name -> GPUs.
GPUS = {"": 1, "-multi-gpu": 2, "-multi-gpu-4": 4, "-multi-gpu-8": 8}
# Models with at least this many layers have files for eight GPUs.
LARGE = 61

HEADER = """\
# {name}: {work}. Routed experts are computed on the CPU, in the bits they were released in;
# attention, shared experts and head are on {gpus}, or on the CPU where there is none.
# `kt rules {file} MODEL` shows what every module becomes.
"""
MODEL = """\
- match:
    name: "^model$"
  replace:
    class: ktransformers.operators.models.{operator}
    kwargs:
      transfer_map: # hidden states are on another GPU from this layer on
{transfers}
"""
EXPERTS = """\
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "{prefill}"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "{op}"
      out_device: "cuda" # the GPU of the layer
      backend: "{backend}" # AMXInt8 or AMXInt4: experts are encoded while they are loaded
  recursive: False
"""
ATTENTION = """\
- match:
    name: "^model\\\\.layers\\\\..*\\\\.self_attn$"
  replace:
    class: ktransformers.operators.attention.KDeepseekV2Attention # absorbed where that takes fewer operations
    kwargs:
      generate_device: "cuda"
"""
MOE = """\
- match:
    class: {moe}
  replace:
    class: ktransformers.operators.experts.{operator}
    kwargs:
      generate_device: "cuda"
"""
LINEAR = """\
- match:
    name: "^model\\\\.layers\\\\."
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda"
      generate_op: "KLinearCPUInfer" # as quantized in the files; KLinearQ8: int8, KLinearMarlin: int4
      prefill_op: "KLinearTorch"
"""
TRAINED_LINEAR = """\
- match:
    name: "^model\\\\.layers\\\\."
    class: torch.nn.Linear
  replace:
    class: default # stored as `rest` of the recipe says; operators.linear.KTransformersLinear chooses formats
    kwargs:
      generate_device: "cuda"
"""
ROTARY = """\
- match:
    name: "rotary_emb$"
  replace:
    class: ktransformers.operators.RoPE.RotaryEmbedding
    kwargs:
      generate_device: "cuda"
"""
REST = """\
- match:
    name: "^model\\\\.layers\\\\.|^model\\\\.norm$|^lm_head$"
  replace:
    class: default
    kwargs:
      generate_device: "cuda"
- match:
    name: "^model\\\\.embed_tokens$"
  replace:
    class: default
    kwargs:
      generate_device: "cpu" # the table is in host memory, and a GPU looks rows up there
"""


def _text(name: str, file: str, family: Family, *, training: bool, amx: bool, gpus: int) -> str:
    work = "fine-tuning" if training else "inference"
    where = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    parts = [HEADER.format(name=name, work=work, gpus=where, file=file)]
    if gpus > 1:
        assert family.layers is not None
        starts = [(family.layers * place // gpus, place) for place in range(1, gpus)]
        lines = "\n".join(f'        {layer}: "cuda:{place}"' for layer, place in starts)
        parts.append(MODEL.format(operator=family.model_operator, transfers=lines))
    op, prefill = ("KSFTExpertsCPU", "cpu") if training else ("KExpertsCPU", "cuda")
    parts.append(EXPERTS.format(op=op, prefill=prefill, backend="AMXBF16" if amx else "llamafile"))
    if family.latent:
        parts.append(ATTENTION)
    parts.append(MOE.format(moe=family.moe, operator=family.moe_operator))
    return "".join([*parts, TRAINED_LINEAR if training else LINEAR, ROTARY, REST])


@functools.cache
def rule_files() -> dict[str, str]:
    """File name -> text."""
    files = {}
    for name, family in FAMILIES.items():
        for training in (False, True):
            for amx in (False, True):
                for end, gpus in GPUS.items():
                    if gpus > 1 and (family.layers is None or (gpus == 8 and family.layers < LARGE)):
                        continue
                    file = f"{name}{'-sft' if training else ''}{'-amx' if amx else ''}{end}.yaml"
                    files[file] = _text(name, file, family, training=training, amx=amx, gpus=gpus)
    return files
