"""What to change when memory runs out while requests are computed: the flags in the order of the guides, each with its
present value and what the plan counts for it.
"""

from __future__ import annotations

from ktransformers.plan import Plan
from ktransformers.serve.flags import Launch


def memory_advice(launch: Launch, plan: Plan | None, cache_tokens: int, cache_bytes: int) -> str:
    tables = [] if plan is None else [plan.nearest.memory.host, *plan.nearest.memory.gpus]

    def planned(*names: str) -> str:
        size = sum(table.get(name, 0) for table in tables for name in names)
        return f", planned {size / 2**30:.2f} GiB" if size else ""

    prefill = "no limit" if launch.chunked_prefill_size >= 2**31 else str(launch.chunked_prefill_size)
    steps = [
        f"a smaller --chunked-prefill-size (now {prefill}{planned('activations', 'scores', 'workspace', 'groups')})",
        f"fewer --max-running-requests (now {launch.max_running_requests})",
    ]
    if plan is not None and plan.nearest.choice.residents:
        residents = plan.nearest.choice.residents
        steps.append(f"fewer --kt-num-gpu-experts (now {residents} a layer{planned('residents', 'slots')})")
    if plan is not None and plan.nearest.choice.format not in ("int8", "int4"):
        experts = f"{plan.nearest.choice.format}{planned('experts')}"
        steps.append(f"int8 experts by `kt quant --format int8` (now {experts})")
    cache = f"{cache_tokens} tokens, {cache_bytes / 2**30:.2f} GiB when full"
    if launch.max_total_tokens is None:
        steps.append(f"a smaller --mem-fraction-static (now {launch.memory:g}: a KV cache of {cache})")
    else:
        steps.append(f"fewer --max-total-tokens (now a KV cache of {cache})")
    return ", ".join(steps)
