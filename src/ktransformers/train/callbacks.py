"""What looks on while a model trains: did every tensor learn, how fast, how long still, and has anyone asked to stop.

A LoRA pair begins with B = 0, so A has no gradient until B has moved: a pair is dead when B never got one, or when A
got none although B was not zero. Of experts only the whole tensor must learn; single experts that no token visited are
listed. The clock measures the experts from the outside, in both directions, and holds them against what the machine
could do (`PeakRates`), by the rates that the planner has measured.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ktransformers.errors import KTError
from ktransformers.nn import ExpertStore
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.operator import is_placed
from ktransformers.nn.peft_lora import expert_adapters
from ktransformers.plan.calibrate import raise_roofs, this_machine


@dataclass(frozen=True)
class Progress:
    """One logging step."""

    step: int
    steps: int
    epoch: float
    values: dict[str, float]  # what the trainer logged
    tokens_per_second: float | None
    expert_share: float | None  # of the wall time
    memory: int  # bytes of this process in RAM
    gpu_memory: int  # peak bytes on the GPU, 0 without one
    elapsed: float
    remaining: float
    roof_share: float | None = None  # of what the experts took, the time that the machine needs for it at best


ReportProgress = Callable[[Progress], None]


@dataclass
class GradientTrace:
    """What was seen of one LoRA pair."""

    b_seen: bool = False
    a_seen: bool = False
    a_could: bool = False  # B was not zero when A's gradient was looked at
    experts: Tensor | None = None  # [E], of expert LoRA: B got a gradient

    @property
    def alive(self) -> bool:
        return self.b_seen and (self.a_seen or not self.a_could)


class GradientCheck(TrainerCallback):
    """Looks at gradients before each optimiser step, until it has seen all."""

    def __init__(self, model: nn.Module) -> None:
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
        for module, (a, b) in self.pairs.items():
            trace = self.traces[module]
            if trace.experts is None:
                if trace.b_seen and trace.a_seen:
                    continue
                trace.b_seen |= _has_gradient(b)
            elif b.grad is not None and not bool(trace.experts.all()):
                # b is [out, r * E] with the expert fastest
                trace.experts |= b.grad.reshape(-1, len(trace.experts)).ne(0).any(0).cpu()
                trace.b_seen |= bool(trace.experts.any())
            if not trace.a_seen and bool(b.detach().ne(0).any()):
                trace.a_could = True
                trace.a_seen = _has_gradient(a)

    def dead(self) -> list[str]:
        """Modules whose adapter never got a gradient."""
        return [module for module, trace in self.traces.items() if not trace.alive]

    def unvisited(self) -> dict[str, list[int]]:
        """Module -> experts without a gradient."""
        found = {}
        for module, trace in self.traces.items():
            if trace.experts is not None and not bool(trace.experts.all()):
                found[module] = torch.nonzero(~trace.experts).flatten().tolist()
        return found

    def state(self) -> dict[str, Any]:
        return {
            module: {
                "b_seen": trace.b_seen,
                "a_seen": trace.a_seen,
                "a_could": trace.a_could,
                "experts": None if trace.experts is None else trace.experts.tolist(),
            }
            for module, trace in self.traces.items()
        }

    def restore(self, checkpoint: Path) -> None:
        file = checkpoint / "kt_gradients.json"
        if not file.is_file():
            return
        for module, seen in json.loads(file.read_text()).items():
            if module in self.traces:
                experts = seen.pop("experts")
                self.traces[module] = GradientTrace(**seen, experts=None if experts is None else torch.tensor(experts))


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.ne(0).any())


@dataclass(frozen=True)
class PeakRates:
    """The rates of this machine that no kernel exceeds; LoRA's part of the work, a few percent, is not counted."""

    flops: float  # of the bare multiply loop
    read: float  # bytes a second from memory

    def seconds(self, store: ExpertStore, tokens: int, top_k: int) -> float:
        """One pass of a layer's experts, either direction: multiplying, or reading those that are touched."""
        numbers = (3 if store.gated else 2) * store.hidden_size * store.intermediate_size
        touched = 1 - (1 - top_k / store.num_experts) ** tokens  # share of them, where routes are uniform
        return max(2 * tokens * top_k * numbers / self.flops, touched * store.packed_bytes / self.read)

    def raised(self, share: float) -> PeakRates:
        """Of this one more than all was reached: what was reached is possible."""
        return PeakRates(self.flops * share, self.read * share)


def read_peak_rates() -> PeakRates | None:
    """By the planner's measurement, which was made once on this machine; None where it could not be."""
    try:
        cpu = this_machine().cpu
    except KTError:
        return None
    return PeakRates(cpu.tile_flops, cpu.read_bytes)


def _retains_experts(model: nn.Module) -> bool:
    """Checkpointing chooses what it keeps: layers that run again take the experts' results from before."""
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    return any("context_fn" in getattr(function, "keywords", {}) for function in functions)


class ExpertClock:
    """Seconds spent in expert layers, forward and backward, by hooks around them, and what they would be at the roof.

    The input goes through a view of its own, whose gradient is complete when the experts' backward has ended; that of
    the output is complete when it begins. A layer that checkpointing runs again does so inside its own backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self.roof_seconds = 0.0
        self.roof: PeakRates | None = None  # once it is known
        self._begun = 0.0
        self._kept = _retains_experts(model)
        self._handles = []
        for module in expert_modules(model).values():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: Any
        hidden, ids, *rest = args
        best = self._best(module, ids)
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(lambda gradient: self._stop(best))
        again = torch._C._current_graph_task_id() != -1  # inside a backward pass
        self.roof_seconds += 0.0 if again and self._kept else best
        self._begun = time.perf_counter()
        return (hidden, ids, *rest)

    def _best(self, module: nn.Module, ids: Tensor) -> float:
        """0 where no roof is known: before a layer's first call, which packs it, and for what a GPU computes."""
        store = getattr(module, "kt_store", None)
        if self.roof is None or store is None or is_placed(store):
            return 0.0
        return self.roof.seconds(store, ids.shape[:-1].numel(), ids.shape[-1])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """`output` is None where recomputation has all it needs and stops in the middle."""
        now = time.perf_counter()
        self.seconds += now - self._begun
        self._begun = now  # what ran again did so inside a backward that goes on
        if output is not None and torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(self._start)

    def _start(self, gradient: Tensor) -> None:
        self._begun = time.perf_counter()

    def _stop(self, best: float) -> None:
        self.seconds += time.perf_counter() - self._begun
        self.roof_seconds += best

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def format_duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


@dataclass
class TrainLog(TrainerCallback):
    """Every logging step as a line of trainer_log.jsonl, as LLaMA-Factory leaves it, and to whoever watches."""

    output: Path
    clock: ExpertClock
    report: ReportProgress
    begun: float = 0.0
    first_step: int = 0
    _last: tuple[float, ...] = field(default=(0.0,) * 4, init=False)  # time, tokens, seconds of experts, at the roof
    _raised: bool = field(default=False, init=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.clock.roof is None:
            self.clock.roof = read_peak_rates()
        self.begun, self.first_step = time.perf_counter(), state.global_step
        self._last = (self.begun, 0.0, self.clock.seconds, self.clock.roof_seconds)
        if state.is_world_process_zero:
            self._forget_after(state.global_step)

    def _forget_after(self, step: int) -> None:
        """A run that goes on from a checkpoint writes the steps after it again."""
        file = self.output / "trainer_log.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        kept = []
        for line in lines:
            try:
                if json.loads(line)["current_steps"] <= step:
                    kept.append(line)
            except (ValueError, KeyError):
                continue  # the line that a kill cut off
        self.output.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        now, tokens = time.perf_counter(), float(logs.get("num_tokens", 0.0))
        expert, best = self.clock.seconds, self.clock.roof_seconds
        since = max(now - self._last[0], 1e-9)
        training = "loss" in logs
        rate = (tokens - self._last[1]) / since if training and self._last[1] else None
        share = (expert - self._last[2]) / since if training else None
        roof = self._roof_share(expert - self._last[2], best - self._last[3]) if training else None
        if training:
            self._last = (now, tokens, expert, best)
        elapsed = now - self.begun
        done = max(state.global_step - self.first_step, 1)
        remaining = elapsed / done * (state.max_steps - state.global_step)
        values = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
        self._write(state, values, elapsed, remaining, rate)
        gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        epoch = float(state.epoch or 0.0)
        progress = (
            state.global_step,
            state.max_steps,
            epoch,
            values,
            rate,
            share,
            _resident_bytes(),
            gpu,
            elapsed,
            remaining,
            roof,
        )
        self.report(Progress(*progress))

    def _roof_share(self, taken: float, best: float) -> float | None:
        """None: nothing was computed that the roof is of. Where more than all of it is reached it was measured on a
        busy machine: it is measured once more, and after that goes by what is seen."""
        roof = self.clock.roof
        if roof is None or best <= 0:
            return None
        share = best / max(taken, 1e-9)
        if share <= 1:
            return share
        if self._raised:
            self.clock.roof = roof.raised(share)
        else:
            self._raised, rates = True, raise_roofs()
            self.clock.roof = PeakRates(max(roof.flops, rates.tile_flops), max(roof.read, rates.read_bytes))
        return 1.0

    def _write(
        self, state: Any, values: dict[str, float], elapsed: float, remaining: float, rate: float | None
    ) -> None:
        names = {"loss": "loss", "learning_rate": "lr", "eval_loss": "eval_loss", "rewards/accuracies": "accuracy"}
        line = {"current_steps": state.global_step, "total_steps": state.max_steps}
        line |= {word: values[name] for name, word in names.items() if name in values}
        line |= {
            "epoch": values.get("epoch", state.epoch),
            "percentage": round(100 * state.global_step / max(state.max_steps, 1), 2),
            "elapsed_time": format_duration(elapsed),
            "remaining_time": format_duration(remaining),
        }
        if rate is not None:
            line |= {"throughput": round(rate, 2), "total_tokens": int(values["num_tokens"])}
        with (self.output / "trainer_log.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")


class Interrupted(KTError):
    """Stopped by a signal, after saving."""

    def __init__(self, name: str, step: int) -> None:
        super().__init__(f"{name}: stopped after step {step}, which was saved; resume_from_checkpoint=true goes on")
        self.signal = name


class Stopper(TrainerCallback):
    """SIGTERM and Ctrl-C end the run after the current step, with a checkpoint; a second one ends it at once."""

    def __init__(self) -> None:
        self.received: str | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.received is not None:
            control.should_save = control.should_training_stop = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
