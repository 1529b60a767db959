"""A stock SGLang server as a child process, and what a client can ask it: greedy answers with log-probabilities, new
tokens a second, a load of mixed lengths with the memory of its processes sampled.

Prompts are token ids (`--skip-tokenizer-init`), so random checkpoints need no tokenizer. Rates count decode steps
alone: the time of an answer of 65 tokens minus that of one token, over 64 steps.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = ("--skip-tokenizer-init", "--attention-backend", "triton", "--sampling-backend", "pytorch")
FLAGS += ("--grammar-backend", "none", "--disable-radix-cache", "--mem-fraction-static", "0.3")
PROMPT_LENGTHS = (5, 33, 64, 200, 700, 1500)
ANSWER_TOKENS = 24
VOCABULARY = 512  # ids of prompts are below it, so that tiny models answer the same prompts
BAD_LINES = ("Traceback", "Segmentation", "Error", "CUDA error", "leaked")


class ServerFailed(Exception):
    """The server did not start, died or answered with an error."""


@dataclass
class Server:
    name: str
    port: int
    arguments: list[str]
    environment: dict[str, str]
    log: Path
    started: float = 0.0  # seconds until /health answered
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, timeout: float) -> None:
        words = ["python3", "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port)]
        begin = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*words, *FLAGS, *self.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        while time.monotonic() - begin < timeout:
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with {self.process.returncode}: {self.last_lines()}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
            else:
                self.started = round(time.monotonic() - begin, 1)
                return
        last = self.last_lines()
        self.kill()
        raise ServerFailed(f"{self.name} was not ready after {timeout:.0f} s: {last}")

    def last_lines(self, count: int = 12) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        bad = [line for line in lines if any(word in line for word in BAD_LINES)]
        return " | ".join([*bad[-4:], *lines[-count:]])[-3000:]

    def processes(self) -> list[int]:
        """Ids of all processes of the server's session."""
        if self.process is None:
            return []
        session, ids = self.process.pid, []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(words[3]) == session and words[0] != "Z":
                    ids.append(int(entry.name))
        return ids

    def memory_mib(self) -> dict[str, float]:
        """Anonymous and shared memory of all processes; mapped files are not counted. Torch's compile workers, which
        end after a minute without work, are counted apart. KiB lines of /proc/PID/status."""
        totals = {"anonymous": 0, "shared": 0, "compile_workers": 0}
        for process in self.processes():
            try:
                lines = Path(f"/proc/{process}/status").read_text().splitlines()
                worker = b"compile_worker" in Path(f"/proc/{process}/cmdline").read_bytes()
            except OSError:
                continue
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
            totals["compile_workers" if worker else "anonymous"] += sizes.get("RssAnon", 0)
            totals["shared"] += sizes.get("RssShmem", 0)
        return {name: round(size / 1024, 1) for name, size in totals.items()}

    def stop(self) -> float:
        """SIGTERM to the launcher, which ends the others; SIGKILL to all after 15 s; seconds until the last one
        has gone."""
        return self._end(signal.SIGTERM, 15)

    def kill(self) -> float:
        return self._end(signal.SIGKILL, 0)

    def _end(self, first: signal.Signals, patience: float) -> float:
        if self.process is None:
            return 0.0
        begin, sent = time.monotonic(), first
        self._signal(first)
        while self.processes() and time.monotonic() - begin < patience + 30:
            if sent != signal.SIGKILL and time.monotonic() - begin > patience:
                sent = signal.SIGKILL
                self._signal(sent)
            time.sleep(0.2)
        self.process.wait(timeout=30)
        return round(time.monotonic() - begin, 1)

    def _signal(self, number: signal.Signals) -> None:
        launcher = [] if self.process is None else [self.process.pid]
        for process in launcher if number == signal.SIGTERM else self.processes():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def ask(self, ids: list[Any], new_tokens: int, timeout: float = 120, **fields: Any) -> Any:
        """One request of one prompt or of several, drawn greedily; the parsed answer."""
        parameters = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": ids, "sampling_params": parameters, **fields}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ServerFailed(f"{self.name}: {error.code} {error.read()[:500]!r}") from error


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


def answers(server: Server, together: bool, **fields: Any) -> list[dict[str, Any]]:
    """Greedy ids and log-probabilities of fixed prompts, asked one by one or in one batch."""
    prompts = [prompt(length, 100 + length) for length in PROMPT_LENGTHS]
    options = {"return_logprob": True, "logprob_start_len": 0, **fields}
    if together:
        replies = server.ask(prompts, ANSWER_TOKENS, **options)
    else:
        replies = [server.ask(ids, ANSWER_TOKENS, **options) for ids in prompts]
    results = []
    for reply in replies:
        about = reply["meta_info"]
        read = [entry[0] for entry in about["input_token_logprobs"] if entry[0] is not None]
        drawn = about["output_token_logprobs"]
        ids = reply.get("output_ids") or [entry[1] for entry in drawn]
        results.append({"ids": ids, "prompt_logprobs": read, "logprobs": [entry[0] for entry in drawn]})
    return results


def compare(measured: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts with the same greedy tokens, tokens that agree before the first other one, and the distance of the
    prompts' log-probabilities, which depend on no drawn token."""
    same, agreed, total, distances = 0, 0, 0, []
    for mine, theirs in zip(measured, expected, strict=True):
        prefix = next(
            (i for i, (a, b) in enumerate(zip(mine["ids"], theirs["ids"], strict=False)) if a != b), len(theirs["ids"])
        )
        same += mine["ids"] == theirs["ids"]
        agreed, total = agreed + prefix, total + len(theirs["ids"])
        pairs = zip(mine["prompt_logprobs"], theirs["prompt_logprobs"], strict=True)
        distances += [abs(a - b) for a, b in pairs]
        pairs = zip(mine["logprobs"][:prefix], theirs["logprobs"][:prefix], strict=True)
        distances += [abs(a - b) for a, b in pairs]
    return {
        "same_answers": same,
        "answers": len(expected),
        "tokens_before_first_difference": agreed,
        "tokens": total,
        "logprob_mean": round(statistics.fmean(distances), 6),
        "logprob_max": round(max(distances), 6),
    }


def rate(server: Server, streams: int, rounds: int = 3, steps: int = 64) -> dict[str, Any]:
    """New tokens a second of `streams` sequences together: each round, and the best."""
    rates = []

    def seconds(seed: int, new_tokens: int) -> float:
        prompts = [prompt(32, seed * 1000 + stream) for stream in range(streams)]
        begin = time.perf_counter()
        server.ask(prompts if streams > 1 else prompts[0], new_tokens)
        return time.perf_counter() - begin

    seconds(1, 8)
    for turn in range(rounds):
        first = seconds(10 + turn, 1)
        rates.append(round(streams * steps / (seconds(10 + turn, steps + 1) - first), 1))
    return {"rounds": rates, "best": max(rates), "median": statistics.median(rates)}


def prefill_rate(server: Server, tokens: int, rounds: int = 2) -> float:
    """Prompt tokens a second of one prompt."""
    best = 0.0
    for turn in range(rounds + 1):
        begin = time.perf_counter()
        server.ask(prompt(tokens, 9000 + turn), 1)
        if turn:
            best = max(best, tokens / (time.perf_counter() - begin))
    return round(best, 1)


def load(server: Server, seconds: float, streams: int, adapters: tuple[str, ...] = ()) -> dict[str, Any]:
    """Requests of mixed lengths from `streams` clients, and memory in between. The slope is fitted over the second
    half, when buffers of all sizes exist."""
    until, lock = time.monotonic() + seconds, threading.Lock()
    counts = {"answered": 0, "errors": 0, "prompt_tokens": 0, "new_tokens": 0}
    failures: list[str] = []

    def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < until:
            length, new = round(4 * 1.9 ** draw.uniform(0, 9.7)), draw.choice((1, 4, 16, 48))
            fields = {"lora_path": draw.choice((*adapters, None))} if adapters else {}
            try:
                server.ask(prompt(length, draw.randrange(1 << 30)), new, **fields)
            except Exception as error:  # the count and the first few texts are the result
                with lock:
                    counts["errors"] += 1
                    failures.append(repr(error)[:200])
                time.sleep(0.5)
            else:
                with lock:
                    counts["answered"] += 1
                    counts["prompt_tokens"] += length
                    counts["new_tokens"] += new

    threads = [threading.Thread(target=client, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    samples = []
    begin = time.monotonic()
    while time.monotonic() < until:
        samples.append({"at": round(time.monotonic() - begin, 1), **server.memory_mib()})
        time.sleep(min(2.0, max(0.1, seconds / 20)))
    for thread in threads:
        thread.join()
    half = [sample for sample in samples if sample["at"] >= seconds / 2]
    return {
        "load_seconds": seconds,
        "streams": streams,
        **counts,
        "failures": failures[:5],
        "anonymous_mib": [samples[0]["anonymous"], half[0]["anonymous"], samples[-1]["anonymous"]],
        "slope_mib_per_minute": round(60 * slope([(s["at"], s["anonymous"]) for s in half]), 2),
        "samples": samples[:: max(1, len(samples) // 40)],
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares; 0 for a single point."""
    x, y = statistics.fmean(p[0] for p in points), statistics.fmean(p[1] for p in points)
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0
