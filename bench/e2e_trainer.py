"""One model in training, for train_e2e.py: its steps, what they take, and where."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from e2e_clock import Clock
from e2e_models import Recipe, attention_layers, build, expert_layers, loss_of, modes, place_experts
from e2e_zero import ZeroBackend
from peaks import GIB, Peaks
from timing import Watch, spread

if TYPE_CHECKING:
    import torch

MANY = 8  # pieces
FILLED = 0.95  # of the memory that is allowed
SPARE = 48 << 20  # bytes between residents and somebody else's peak
CONTEXT_LOSS_ROWS = 1024  # rows of logits at a time of a long sequence
LEARNING_RATE = 1e-4
WARM = 4  # steps before any is timed: graphs are captured in the third


class TorchBackend:
    """The parts of a step, bf16 autocast and torch's AdamW, of all variants but `zero`."""

    def __init__(self, peft: Any, device: torch.device, learning_rate: float) -> None:
        import torch

        self._peft, self._device = peft, device
        self.facts: dict[str, str] = {}
        trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=learning_rate, fused=True)

    def loss(self, batch: torch.Tensor, rows: int) -> torch.Tensor:
        import torch

        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            return loss_of(self._peft, batch, rows)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """`last`: no other piece of the batch follows."""
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Trainer:
    """One model in training: steps of a count of tokens, cut into pieces."""

    def __init__(self, variant: str, recipe: Recipe, activation: str, spec: str = "bf16") -> None:
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.recipe = recipe
        self.peaks = Peaks(self.device)
        begun = time.perf_counter()
        self.model = build(variant, recipe, self.device, activation, spec)
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        self.recovers = variant in ("kt", "gpu")
        self.broken = False  # a step of a variant that does not recover ran out of memory
        kind = ZeroBackend if variant == "zero" else TorchBackend
        self.backend = kind(self.model, self.device, LEARNING_RATE)
        self.built = {
            "build_s": time.perf_counter() - begun,
            "build_host_peak_gib": self.peaks.read()["host_peak_gib"],
            "trained_parameters": trained,
            "torch_threads": torch.get_num_threads(),
            **self.backend.facts,
        }
        self._generator = torch.Generator().manual_seed(1)
        gc.collect()
        gc.freeze()  # as `kt train` does it: looking through all modules takes a quarter of a second

    def allow(self, gib: int) -> None:
        """GiB of the GPU that torch may allocate from now on; 0: all."""
        import torch

        if self.device.type == "cuda":
            whole = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / whole) if gib else 1.0)

    def place(self, policy: str) -> None:
        """Where experts are computed from now on."""
        import torch

        place_experts(self.model, policy, self.recipe.tokens)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def fill(self, gib: float, tokens: int, pieces: int, reserved: bool = True) -> int:
        """Residents in what a step leaves of so many GiB, as `kt train` has them by its plan; how many a layer has.
        `reserved`: with what torch's allocator holds back."""
        import torch

        placement = getattr(self.model, "placement", None)
        if not gib or placement is None:
            return 0
        placement.place_residents(size=0)
        self.peaks.reset()
        for _ in range(2 if reserved else 4):  # passes are recorded in the third
            self.step(self.batches(tokens, pieces))
        if not reserved:
            self.peaks.settle()
            self.step(self.batches(tokens, pieces))
        used = torch.cuda.max_memory_reserved() if reserved else self.peaks.allocated() + SPARE
        room = int((FILLED if reserved else 1) * gib * GIB) - used
        return min(len(row) for row in placement.place_residents(size=max(0, room)))

    def batches(self, tokens: int, pieces: int) -> list[torch.Tensor]:
        import torch

        rows = tokens // self.recipe.length
        made = torch.randint(self.recipe.vocabulary, (rows, self.recipe.length), generator=self._generator)
        return list(made.to(self.device).chunk(pieces))

    def step(self, batches: list[torch.Tensor], clock: Clock | None = None, loss_rows: int = 0) -> float:
        """The loss; the optimizer has moved when it is back."""
        import torch

        total = 0.0
        for place, batch in enumerate(batches):
            loss = self.backend.loss(batch, loss_rows or self.recipe.loss_rows) / len(batches)
            if clock:
                clock.in_backward = True
            self.backend.backward(loss, place == len(batches) - 1)
            if clock:
                clock.in_backward = False
            total += loss.item()
        begun = clock.now() if clock else 0.0
        self.backend.update()
        if clock:
            clock.add("optimizer", begun)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return total

    def measure(self, tokens: int, pieces: int, seconds: float) -> dict[str, Any]:
        batches = self.batches(tokens, pieces)
        losses: list[float] = []

        def timed() -> float:
            begun = time.perf_counter()
            losses.append(self.step(batches))
            return time.perf_counter() - begun

        warm = [timed()]
        self.peaks.reset()
        of_piece = batches[0].numel()
        least = 3 if pieces < MANY else 1  # pieces of a step are as good as steps
        while len(warm) < min(WARM, least):
            warm.append(timed())
        before = self.peaks.settle()
        taken: list[float] = []
        watch = Watch()
        while len(taken) < least or sum(taken) < seconds:
            taken.append(timed())
        foreign = watch.foreign()
        peaks = self.peaks.read(before)
        whole, parts = self.profile(batches)
        touched = self.touched(batches[0])
        step_s = statistics.median(taken)
        cell = {"tokens": tokens, "pieces": pieces, "step_s": step_s, "tokens_per_s": tokens / step_s}
        return {
            **cell,
            **peaks,
            "reps": len(taken),
            "spread": spread(taken),
            "warm_s": warm,
            "timed_s": taken,
            "modes": modes(self.model, of_piece),
            "foreign": foreign,
            "losses": [losses[0], losses[-1]],
            "profiled_s": whole,
            "parts": parts,
            "touched": touched,
        }

    def longest_contexts(self, memory: list[int], lengths: list[int]) -> Iterator[dict[str, Any]]:
        """For every limit in GiB, ascending, the longest of these sequences, ascending, whose step stays within it. A
        length that fits into a smaller limit fits into a larger one. A variant that does not recover from a step that
        ran out of memory is not given one whose tensors alone, seen without a limit, are more than the limit."""
        import torch

        self._free()  # torch's allocator would serve a step from what earlier ones left, whatever the limit
        longest: dict[str, Any] = {"tokens": 0, "step_s": 0.0}
        needed: dict[int, float] = {}  # GiB by length
        for gib in memory:
            longest |= {"gib": gib, "out_of_memory_at": 0}
            for length in lengths:
                if length <= longest["tokens"]:
                    continue
                if not self.recovers and length not in needed:
                    needed[length] = self._needed(length)
                if needed.get(length, 0.0) > gib:
                    longest["out_of_memory_at"] = length
                    break
                self.allow(gib)
                try:
                    for _ in range(2):  # the first step of a length is slower
                        begun = time.perf_counter()
                        self.step([self._sequence(length)], loss_rows=CONTEXT_LOSS_ROWS)
                except torch.OutOfMemoryError:
                    longest["out_of_memory_at"], self.broken = length, not self.recovers
                    break
                longest |= {"tokens": length, "step_s": time.perf_counter() - begun}
            if needed:
                longest["needed_gib"] = dict(needed)
            if not self.broken:
                self._free()
            yield dict(longest)
            if self.broken:
                return  # hooks of the step stopped half-way

    def _needed(self, length: int) -> float:
        """GiB of the GPU that tensors of a second step take without a limit; DeepSpeed's first holds more."""
        self.allow(0)
        self._free()
        for _ in range(2):
            self.peaks.reset()
            self.step([self._sequence(length)], loss_rows=CONTEXT_LOSS_ROWS)
        self._free()
        return self.peaks.allocated() / GIB

    def _sequence(self, length: int) -> torch.Tensor:
        import torch

        return torch.randint(self.recipe.vocabulary, (1, length), generator=self._generator).to(self.device)

    def _free(self) -> None:
        """After a step that ran out of memory: what it left is garbage."""
        import torch

        self.backend.optimizer.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def touched(self, batch: torch.Tensor) -> float:
        """Experts of a layer that a piece of a step asks for: fewer than there are, as random routers are not fair."""
        import torch

        found: list[int] = []
        seen = lambda module, args: found.append(args[1].unique().numel())  # noqa: E731
        handles = [module.register_forward_pre_hook(seen) for module in expert_layers(self.model)]
        with torch.no_grad():
            self.backend.loss(batch, self.recipe.loss_rows)
        for handle in handles:
            handle.remove()
        return statistics.mean(found)

    def profile(self, batches: list[torch.Tensor]) -> tuple[float, dict[str, float]]:
        """One step by the clock: seconds in all, and of each part."""
        clock = Clock(self.device)
        for module in expert_layers(self.model):
            clock.watch(module, "experts_forward", "experts_again", "experts_backward")
        for module in attention_layers(self.model):
            clock.watch(module, "attention", "attention", "attention")
        begun = clock.now()
        self.step(batches, clock)
        whole = clock.now() - begun
        clock.close()
        clock.seconds["rest"] = whole - sum(clock.seconds.values())
        return whole, clock.seconds
