"""Trainer callbacks: check that every adapter receives a gradient, measure rate and time left, and stop on signals.

A LoRA pair starts with B = 0, so A has no gradient until B has changed: a pair is dead if B never got a gradient, or if
A got none although B was nonzero. For experts only the stacked tensor must get a gradient; experts that no token
reached are listed. The clock measures expert layers by hooks, forward and backward, and compares the time with the
machine's peak rates (`PeakRates`), as calibrated by the planner.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.peft_lora import expert_adapters
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import KTError
from ktransformers.ground.system import resident_bytes, scheduled_seconds
from ktransformers.parallel.exchange import expert_group
from ktransformers.parallel.sharding import is_sharded, local_tensor, on_any_rank
from ktransformers.plan.calibrate import remeasure_rates, this_machine
from ktransformers.train.expert_parallel import share_flags
from ktransformers.train.files import reporting_full_disk
from ktransformers.train.pictures import LivePicture


@dataclass(frozen=True)
class Progress:
    """One logging step."""

    step: int
    steps: int
    epoch: float
    values: dict[str, float]  # logged by the trainer
    tokens_per_second: float | None
    expert_share: float | None  # share of wall time spent in expert layers
    memory: int  # resident bytes of this process
    gpu_memory: int  # peak bytes on the GPU, 0 without one
    elapsed: float
    remaining: float
    roof_share: float | None = None  # time at peak rates / measured time of the expert layers
    wait_share: float | None = None  # share of the time on or for a core that threads waited: other processes' work


@dataclass(frozen=True)
class StepPosition:
    """One optimizer step, logged or not."""

    step: int
    steps: int
    loss: float | None
    remaining: float  # seconds


ReportProgress = Callable[[Progress], None]
ReportPosition = Callable[[StepPosition], None]


@dataclass
class GradientTrace:
    """Which factors of one LoRA pair have received a gradient."""

    b_seen: bool = False
    a_seen: bool = False
    a_could: bool = False  # B was nonzero when A's gradient was checked
    experts: Tensor | None = None  # [E], expert LoRA only: B of this expert got a gradient
    shared: bool = False  # `experts` are those of all ranks that divide them

    @property
    def alive(self) -> bool:
        return self.b_seen and (self.a_seen or not self.a_could)


class GradientCheck(TrainerCallback):
    """Checks gradients before each optimizer step, until every pair has received one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        counts = {name: int(layer.num_experts) for name, layer in expert_adapters(model).items()}
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self.traces: dict[str, GradientTrace] = {}
        for name, parameter in trained.items():
            if ".lora_B." not in name:
                continue
            module = name.partition(".lora_B.")[0]
            self.pairs[module] = (trained[name.replace(".lora_B.", ".lora_A.")], parameter)
            self.traces[module] = GradientTrace(
                experts=torch.zeros(counts[module], dtype=torch.bool) if module in counts else None
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for module, (_, b) in self.pairs.items():
            trace = self.traces[module]
            if trace.experts is not None and b.grad is not None and not bool(trace.experts.all()):
                # b is [out, r * E], experts innermost
                trace.experts |= b.grad.reshape(-1, len(trace.experts)).ne(0).any(0).cpu()
        waiting = [module for module, trace in self.traces.items() if not (trace.b_seen and trace.a_seen)]
        for module, (b_seen, b_nonzero, a_seen) in zip(waiting, self._look_at(waiting), strict=True):
            trace = self.traces[module]
            trace.b_seen |= b_seen
            if not trace.a_seen and b_nonzero:
                trace.a_could = True
                trace.a_seen = a_seen

    def _look_at(self, modules: list[str]) -> list[tuple[bool, bool, bool]]:
        """(B has a gradient, B is not zero, A has a gradient) of each pair. Of sharded ones a rank sees its shards, so
        the answers of all ranks are combined."""
        seen: dict[str, tuple[bool, bool, bool]] = {}
        for module in modules:
            a, b = self.pairs[module]
            seen[module] = (_has_gradient(b), bool(local_tensor(b).ne(0).any()), _has_gradient(a))
        sharded = [module for module in modules if any(is_sharded(tensor) for tensor in self.pairs[module])]
        if sharded:  # the same on all ranks, where experts that have been seen may be others
            flags = on_any_rank([flag for module in sharded for flag in seen[module]])
            seen |= {module: (flags[3 * at], flags[3 * at + 1], flags[3 * at + 2]) for at, module in enumerate(sharded)}
        return [seen[module] for module in modules]

    def share(self) -> None:
        """Where ranks divide the experts: joins what they have seen, so that `dead`, `unvisited` and `state` are about
        all experts. A collective call, after the last step or before a save; `restore` undoes it."""
        if expert_group(self._model) is None:
            return
        for module, trace in self.traces.items():
            if trace.experts is not None and not trace.shared:
                flags = (trace.b_seen, trace.a_seen, trace.a_could)
                experts, (b_seen, a_seen, a_could) = share_flags(self._model, module, trace.experts, flags)
                self.traces[module] = GradientTrace(b_seen, a_seen, a_could, experts, shared=True)

    def keep_own(self) -> None:
        """After `share`, before further steps: this rank's experts alone."""
        for module, trace in self.traces.items():
            if trace.experts is not None and trace.shared:
                layer: Any = self._model.get_submodule(module)
                own = trace.experts[list(layer.get_base_layer().kt.shard.experts)]
                self.traces[module] = replace(trace, experts=own, shared=False)

    def dead(self) -> list[str]:
        """Modules whose adapter never received a gradient."""
        return [module for module, trace in self.traces.items() if not trace.alive]

    def unvisited(self) -> dict[str, list[int]]:
        """Module -> experts without a gradient."""
        experts_without_gradient = {}
        for module, trace in self.traces.items():
            if trace.experts is not None and not bool(trace.experts.all()):
                experts_without_gradient[module] = torch.nonzero(~trace.experts).flatten().tolist()
        return experts_without_gradient

    def state(self) -> dict[str, Any]:
        flags = {module: asdict(replace(trace, experts=None)) for module, trace in self.traces.items()}
        for module, trace in self.traces.items():
            flags[module]["experts"] = None if trace.experts is None else trace.experts.tolist()
            del flags[module]["shared"]
        return flags

    def restore(self, checkpoint: Path) -> None:
        file = checkpoint / "kt_gradients.json"
        if not file.is_file():
            return
        for module, trace in json.loads(file.read_text()).items():
            if module in self.traces:
                experts = trace.pop("experts")
                divided = experts is not None and expert_group(self._model) is not None
                flags = None if experts is None else torch.tensor(experts)
                self.traces[module] = GradientTrace(**trace, experts=flags, shared=divided)
        self.keep_own()


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(local_tensor(parameter.grad).ne(0).any())


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of this machine; LoRA's share of the work, a few percent, is not counted."""

    flops: float  # of the bare tile-multiply loop
    read: float  # bytes per second from memory

    def seconds(self, store: ExpertStore, tokens: int, top_k: int) -> float:
        """Time of one pass of a layer's experts, forward or backward: the larger of multiplying and reading the routed
        experts."""
        expert_numel = (3 if store.gated else 2) * store.hidden_size * store.intermediate_size
        routed_share = 1 - (1 - top_k / store.num_experts) ** tokens  # of the experts, with uniform routing
        return max(2 * tokens * top_k * expert_numel / self.flops, routed_share * store.packed_bytes / self.read)

    def raised(self, share: float) -> PeakRates:
        """Scaled rates, for a share above 1: what was measured is possible."""
        return PeakRates(self.flops * share, self.read * share)


def read_peak_rates() -> PeakRates | None:
    """Rates from the planner's calibration of this machine; None if it failed."""
    try:
        cpu = this_machine().cpu
    except KTError:
        return None
    return PeakRates(cpu.tile_flops, cpu.read_bytes)


def _retains_experts(model: nn.Module) -> bool:
    """Whether checkpointing is selective, so that recomputed layers reuse the experts' results."""
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    return any("context_fn" in getattr(function, "keywords", {}) for function in functions)


class ExpertClock:
    """Measures the time in expert layers, forward and backward, by hooks around them, and the time at peak rates.

    The input passes through a view, whose gradient is complete when the experts' backward has ended; the output's
    gradient is complete when it begins. A layer that checkpointing recomputes does so inside its own backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self.peak_seconds = 0.0
        self.peak_rates: PeakRates | None = None  # set when training begins
        self._started = 0.0
        self._retains = _retains_experts(model)
        self._handles = []
        for module in expert_modules(model).values():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: Any
        hidden, ids, *rest = args
        peak_seconds = self._peak_seconds_of(module, ids)
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(lambda gradient: self._stop(peak_seconds))
        recomputing = torch._C._current_graph_task_id() != -1  # inside a backward pass
        self.peak_seconds += 0.0 if recomputing and self._retains else peak_seconds
        self._started = time.perf_counter()
        return (hidden, ids, *rest)

    def _peak_seconds_of(self, module: nn.Module, ids: Tensor) -> float:
        """0 without peak rates: before a layer's first call, which packs it, and for layers computed on a GPU."""
        kt = packed_experts(module)
        if self.peak_rates is None or kt is None or kt.store is None or kt.is_placed:
            return 0.0
        return self.peak_rates.seconds(kt.store, ids.shape[:-1].numel(), ids.shape[-1])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """`output` is None if recomputation stops early because it has what it needs."""
        now = time.perf_counter()
        self.seconds += now - self._started
        self._started = now  # recomputation happens inside a backward that continues
        if output is not None and torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(self._start)

    def _start(self, gradient: Tensor) -> None:
        self._started = time.perf_counter()

    def _stop(self, peak_seconds: float) -> None:
        self.seconds += time.perf_counter() - self._started
        self.peak_seconds += peak_seconds

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def format_duration(seconds: float) -> str:
    """As LLaMA-Factory writes it into trainer_log.jsonl."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


@dataclass
class TrainLog(TrainerCallback):
    """Writes each logging step to trainer_log.jsonl in LLaMA-Factory's format, draws the run's picture, and reports the
    step as Progress, and every step as StepPosition."""

    output: Path
    clock: ExpertClock
    report: ReportProgress
    report_position: ReportPosition = lambda position: None
    loss_of_step: Callable[[], float | None] = lambda: None  # of the last optimizer step
    started_at: float = 0.0
    first_step: int = 0
    # time, tokens, expert seconds, seconds at peak rates, seconds on a core, seconds waiting for one
    _last: tuple[float, ...] = field(default=(0.0,) * 6, init=False)
    _first_end: float | None = field(default=None, init=False)  # time at the end of the first step, which warms up
    _remeasured: bool = field(default=False, init=False)
    _lines: list[dict[str, Any]] = field(default_factory=list, init=False)  # of the log

    def __post_init__(self) -> None:
        self._picture = LivePicture(self.output)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.clock.peak_rates is None:
            self.clock.peak_rates = read_peak_rates()
        self._last = self._totals(0.0)
        self.started_at, self.first_step = self._last[0], state.global_step
        self._first_end = None
        if state.is_world_process_zero:
            self._truncate_log(state.global_step)

    def _truncate_log(self, step: int) -> None:
        """Drops entries after `step`, which a resumed run writes again."""
        file = self.output / "trainer_log.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        entries, self._lines = [], []
        for line in lines:
            try:
                parsed = json.loads(line)
                if parsed["current_steps"] <= step:
                    entries.append(line)
                    self._lines.append(parsed)
            except (ValueError, KeyError):
                continue  # a line truncated by a kill
        self.output.mkdir(parents=True, exist_ok=True)
        with reporting_full_disk(self.output):
            file.write_text("".join(f"{line}\n" for line in entries))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self._first_end = now if self._first_end is None else self._first_end
        if state.is_world_process_zero:
            position = (state.global_step, state.max_steps, self.loss_of_step(), self._remaining(state, now))
            self.report_position(StepPosition(*position))

    def _remaining(self, state: Any, now: float) -> float:
        """Seconds left at the pace so far; the first step counts only while there is no other."""
        done, left = max(int(state.global_step) - self.first_step, 1), int(state.max_steps) - int(state.global_step)
        if self._first_end is None or done < 2:
            return (now - self.started_at) / done * left
        return (now - self._first_end) / (done - 1) * left

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        totals = self._totals(float(logs.get("num_tokens", 0.0)))
        interval, tokens, expert_seconds, peak_seconds, ran, waited = (
            total - last for total, last in zip(totals, self._last, strict=True)
        )
        now, interval = totals[0], max(interval, 1e-9)
        rate = expert_share = peak_share = wait_share = None
        if "loss" in logs:
            rate = tokens / interval if self._last[1] else None
            expert_share, peak_share = expert_seconds / interval, self._share_of_peak(expert_seconds, peak_seconds)
            wait_share = waited / (ran + waited) if ran > 0 and waited >= 0 else None
            # Measuring peak rates again, above, belongs to no step.
            self._last = (time.perf_counter(), *totals[1:4], *scheduled_seconds())
        progress = Progress(
            step=state.global_step,
            steps=state.max_steps,
            epoch=float(state.epoch or 0.0),
            values={name: float(value) for name, value in logs.items() if isinstance(value, (int, float))},
            tokens_per_second=rate,
            expert_share=expert_share,
            memory=resident_bytes(),
            gpu_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            elapsed=now - self.started_at,
            remaining=self._remaining(state, now),
            roof_share=peak_share,
            wait_share=wait_share,
        )
        self._write(progress)
        self.report(progress)

    def _totals(self, tokens: float) -> tuple[float, ...]:
        return (time.perf_counter(), tokens, self.clock.seconds, self.clock.peak_seconds, *scheduled_seconds())

    def _share_of_peak(self, measured: float, peak_seconds: float) -> float | None:
        """Time at peak rates over measured time, None if nothing was computed on the CPU. A share above 1 means that
        calibration ran on a busy machine: it is repeated once, and after that the observed rate counts as the peak."""
        peak = self.clock.peak_rates
        if peak is None or peak_seconds <= 0:
            return None
        share = peak_seconds / max(measured, 1e-9)
        if share <= 1:
            return share
        if self._remeasured:
            self.clock.peak_rates = peak.raised(share)
        else:
            self._remeasured, rates = True, remeasure_rates()
            self.clock.peak_rates = PeakRates(max(peak.flops, rates.tile_flops), max(peak.read, rates.read_bytes))
        return 1.0

    def _write(self, progress: Progress) -> None:
        names = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm", "eval_loss": "eval_loss"}
        names |= {"rewards/accuracies": "accuracy"}
        values = progress.values
        line: dict[str, Any] = {"current_steps": progress.step, "total_steps": progress.steps}
        line |= {field_name: values[name] for name, field_name in names.items() if name in values}
        line |= {
            "epoch": values.get("epoch", progress.epoch),
            "percentage": round(100 * progress.step / max(progress.steps, 1), 2),
            "elapsed_time": format_duration(progress.elapsed),
            "remaining_time": format_duration(progress.remaining),
        }
        if progress.tokens_per_second is not None:
            line |= {"throughput": round(progress.tokens_per_second, 2), "total_tokens": int(values["num_tokens"])}
            line |= {} if progress.wait_share is None else {"cpu_wait": round(progress.wait_share, 3)}
        with reporting_full_disk(self.output), (self.output / "trainer_log.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        self._lines.append(line)
        self._picture.draw(self._lines)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._picture.draw(self._lines, is_last=True)


class Interrupted(KTError):
    """The run was stopped by a signal, after a checkpoint was saved."""

    def __init__(self, name: str, step: int) -> None:
        super().__init__(f"{name}: stopped after step {step}, which was saved; resume with resume_from_checkpoint=true")
        self.signal = name


class Stopper(TrainerCallback):
    """SIGTERM and Ctrl-C end the run after the current step with a checkpoint; a second signal ends it immediately. Of
    several processes all end after the same step."""

    def __init__(self) -> None:
        self.received: str | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1 and on_any_rank([self.received is not None])[0]:
            self.received = self.received or "SIGTERM"  # of another rank, which a launcher has signalled first
        if self.received is not None:
            control.should_save = control.should_training_stop = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
