"""/metrics in Prometheus' text format: counters of the engine, memory of the process, the host and the GPUs, and
requests by outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ktransformers.ground import system
from ktransformers.serve.cache.tier_counts import TierState
from ktransformers.serve.http.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(service: Service, requests: Counter[tuple[str, int]], restarts: int) -> str:
    """`restarts`: of worker processes."""
    return "".join(_lines(service, requests, restarts))


def _lines(service: Service, requests: Counter[tuple[str, int]], restarts: int) -> Iterator[str]:
    engine = service.engine
    counts, kv_cache = engine.counts, engine.kv_cache
    single: tuple[tuple[str, str, str, float], ...] = (
        ("kt_running_sequences", "gauge", "Sequences in the batch.", len(engine.running)),
        ("kt_waiting_sequences", "gauge", "Sequences in the queue.", len(engine.waiting)),
        ("kt_cache_tokens", "gauge", "Capacity of all KV cache slots, in tokens.", kv_cache.allocated_tokens),
        ("kt_cache_busy_tokens", "gauge", "Capacity of running sequences' slots, in tokens.", kv_cache.busy_tokens),
        ("kt_cache_limit_tokens", "gauge", "Capacity of the KV cache, in tokens.", kv_cache.limit),
        ("kt_cache_bytes_per_token", "gauge", "Bytes of a token in the KV cache.", service.kv_bytes_per_token),
        (
            "kt_cache_bytes_per_sequence",
            "gauge",
            "Bytes of a sequence's convolution and recurrent states.",
            engine.forward.bytes_per_sequence,
        ),
        ("kt_cache_states", "gauge", "States of sequences in memory, copies included.", kv_cache.states),
        ("kt_adapters", "gauge", "Adapters in memory.", len(service.registry.loaded)),
        ("kt_steps_total", "counter", "Forward passes.", counts.steps),
        ("kt_graph_steps_total", "counter", "Forward passes replayed from a CUDA graph.", engine.replayed),
        ("kt_prompt_tokens_total", "counter", "Prompt tokens computed.", counts.prompt_tokens),
        ("kt_prompt_tokens_reused_total", "counter", "Prompt tokens found in the KV cache.", kv_cache.reused_tokens),
        ("kt_sampled_answers_bytes", "gauge", "Answers that are remembered as sampled.", service.sampled_answers.bytes),
        ("kt_new_tokens_total", "counter", "Tokens generated.", counts.new_tokens),
        ("kt_preempted_total", "counter", "Sequences that were preempted.", engine.scheduler.preempted),
        ("kt_worker_restarts_total", "counter", "Processes preparing requests that were replaced.", restarts),
        ("kt_busy_seconds_total", "counter", "Seconds spent in forward passes.", counts.busy_seconds),
    )
    for name, kind, meaning, value in single:
        # All digits: the page draws differences of counters, which six digits of a large one do not show.
        yield f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n{name} {value}\n"
    yield from _tier_lines([] if engine.tiers is None else engine.tiers.states)
    yield from _host_lines(service)
    yield from _memory_lines()
    yield "# HELP kt_first_token_seconds From arrival to the first token.\n# TYPE kt_first_token_seconds summary\n"
    yield f"kt_first_token_seconds_sum {counts.first_token_seconds}\n"
    yield f"kt_first_token_seconds_count {counts.first_tokens}\n"
    yield "# HELP kt_finished_total Sequences by how they ended.\n# TYPE kt_finished_total counter\n"
    for finish, count in sorted(counts.finished.items()):
        yield f'kt_finished_total{{finish="{finish}"}} {count}\n'
    yield "# HELP kt_conversation_prompts_total Answered prompts of conversations by how they continue.\n"
    yield "# TYPE kt_conversation_prompts_total counter\n"
    for prefix, count in sorted(service.prefixes.items()):
        yield f'kt_conversation_prompts_total{{prefix="{prefix}"}} {count}\n'
    yield "# HELP kt_requests_total Requests by path and status.\n# TYPE kt_requests_total counter\n"
    for (path, status), count in sorted(requests.items()):
        yield f'kt_requests_total{{path="{path}",status="{status}"}} {count}\n'


def _tier_lines(tiers: Sequence[TierState]) -> Iterator[str]:
    """Of tiers of the KV cache below its slots."""
    table: tuple[tuple[str, str, str, Callable[[TierState], float]], ...] = (
        ("blocks", "gauge", "Blocks of tokens in a tier of the KV cache.", lambda tier: tier.blocks),
        ("bytes", "gauge", "Their bytes.", lambda tier: tier.bytes),
        ("limit_bytes", "gauge", "Capacity of the tier.", lambda tier: tier.limit_bytes),
        ("hit_tokens_total", "counter", "Prompt tokens from the tier.", lambda tier: tier.counts.hit_tokens),
        (
            "skipped_tokens_total",
            "counter",
            "Prompt tokens that were in the tier and computed, because that was predicted to be faster.",
            lambda tier: tier.counts.skipped_tokens,
        ),
        ("evictions_total", "counter", "Blocks evicted.", lambda tier: tier.counts.evictions),
        ("dropped_total", "counter", "Blocks not stored for lack of time or space.", lambda tier: tier.counts.dropped),
        ("errors_total", "counter", "Blocks damaged, or not read or written.", lambda tier: tier.counts.errors),
        ("read_bytes_total", "counter", "Bytes read.", lambda tier: tier.counts.read_bytes),
        ("write_bytes_total", "counter", "Bytes written.", lambda tier: tier.counts.write_bytes),
        ("read_seconds_total", "counter", "Seconds of reading.", lambda tier: tier.counts.read_seconds),
        ("write_seconds_total", "counter", "Seconds of writing.", lambda tier: tier.counts.write_seconds),
    )
    for name, kind, meaning, value in table:
        if tiers:
            yield f"# HELP kt_cache_tier_{name} {meaning}\n# TYPE kt_cache_tier_{name} {kind}\n"
        yield from (f'kt_cache_tier_{name}{{tier="{tier.name}"}} {value(tier)}\n' for tier in tiers)


def _host_lines(service: Service) -> Iterator[str]:
    """Of hosts with experts."""
    if service.nodes is None:
        return
    counters = service.nodes.counters()
    for name, kind, meaning in (
        ("connected", "gauge", "Hosts with experts that are connected."),
        ("losses_total", "counter", "Connections to hosts with experts that were lost."),
        ("exchanges_total", "counter", "Layers of experts that were exchanged with hosts."),
        ("sent_bytes_total", "counter", "Bytes sent to hosts with experts."),
        ("received_bytes_total", "counter", "Bytes received from hosts with experts."),
    ):
        value = counters[name.removesuffix("_total").removesuffix("_bytes")]
        yield f"# HELP kt_nodes_{name} {meaning}\n# TYPE kt_nodes_{name} {kind}\nkt_nodes_{name} {value}\n"


def _memory_lines() -> Iterator[str]:
    host = system.memory()
    for name, meaning, size in (
        ("process_resident_memory_bytes", "Memory of this process.", system.resident_bytes()),
        ("kt_host_memory_bytes", "Memory of the host, at most the cgroup's limit.", host.total),
        ("kt_host_memory_available_bytes", "Memory of the host that is available.", host.available),
    ):
        yield f"# HELP {name} {meaning}\n# TYPE {name} gauge\n{name} {size}\n"
    gpus = system.gpu_memory()
    for name, meaning, sizes in (
        ("kt_gpu_memory_bytes", "Memory of a GPU.", [total for _, total in gpus]),
        ("kt_gpu_memory_free_bytes", "Memory of a GPU that no process uses.", [free for free, _ in gpus]),
    ):
        if gpus:
            yield f"# HELP {name} {meaning}\n# TYPE {name} gauge\n"
        yield from (f'{name}{{gpu="{index}"}} {size}\n' for index, size in enumerate(sizes))
