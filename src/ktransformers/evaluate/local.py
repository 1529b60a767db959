"""A model in this process: transformers classes, experts packed by `ktransformers.nn`, adapters by PEFT.

Generation pads on the left, so that the next token of every row is in the last column; scoring pads on the right, which
causal attention never reads, so positions need no shift and no mask is passed. Options of one token (letters of
multiple choice) share one forward pass of their prompt. Rows of similar length are batched together to limit padding,
and the head computes the scored positions alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.adapter_template import AdapterTemplate, read_adapter_template
from ktransformers.adapters.manifest import read_manifest
from ktransformers.evaluate.backend import EvalPrompt, Likelihood, PromptTokenizer, Question
from ktransformers.ground.errors import InputError
from ktransformers.modeling.head_rows import head_rows_only
from ktransformers.modeling.spec import ModelSpec, dtype_name, parse_dtype

ENGINES = ("auto", "kt", "transformers")
MAX_SCORED_TOKENS = 4096  # padded tokens of a scoring batch, because logits are large


def trained_experts(adapters: Mapping[str, Path]) -> Path | None:
    """Path of the experts that the adapters were trained on (`kt_weight_path`); None if they come from the model."""
    manifests = {name: read_manifest(directory) or {} for name, directory in adapters.items()}
    paths = {name: (manifest.get("experts") or {}).get("path") for name, manifest in manifests.items()}
    if len(set(paths.values())) > 1:
        listed = ", ".join(f"{name} on {path or 'those of the model'}" for name, path in paths.items())
        expected = "adapters that were trained on the same experts"
        raise InputError("adapter", listed, expected, "evaluate them separately")
    name, path = next(iter(paths.items()), ("", None))
    if path and not Path(path).exists():
        problem = f"{name}, trained on the experts of {path}, which is not there"
        raise InputError("adapter", problem, "these experts", "pass --experts DIR")
    return Path(path) if path else None


class LocalModel:
    """One loaded model and its adapters; `backend` returns a view with one adapter, or none, active."""

    def __init__(self, model: Any, tokenizer: Any, name: str, batch_size: int = 8) -> None:
        if batch_size < 1:
            raise InputError("batch-size", batch_size, "1 or more")
        self.model, self.tokens = model.eval(), PromptTokenizer(tokenizer, name)
        self.name, self.batch_size = name, batch_size
        self._adapters: dict[str, str] = {}
        self._adapter_tokens: dict[str, PromptTokenizer] = {}
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        engine: str = "auto",
        dtype: str = "auto",
        device: str = "cpu",
        batch_size: int = 8,
        experts: Path | None = None,
    ) -> LocalModel:
        """`experts` is their path if they do not come from the model directory."""
        from ktransformers.modeling.load import load_dense, open_model
        from ktransformers.modeling.pretrained import read_tokenizer

        if engine not in ENGINES:
            raise InputError("engine", repr(engine), f"one of {', '.join(ENGINES)}")
        model_dtype = parse_dtype(dtype, device)
        if not (directory / "config.json").is_file():
            raise InputError("model", str(directory), "a Hugging Face directory, or a URL that starts with http")
        if experts is not None and engine == "transformers":
            raise InputError("engine", f"transformers, with experts from {experts}", "kt")
        tokenizer = read_tokenizer(directory)
        spec = ModelSpec(directory, experts, dtype=model_dtype, device=device, rest="keep")
        if engine == "auto":
            engine = "kt" if spec.has_experts else "transformers"
        model: Any = open_model(spec) if engine == "kt" else load_dense(spec)
        settings = f"{engine}, {dtype_name(model_dtype)}, {_digest(directory, 'config.json')}"
        name = f"{directory} ({settings}{f', experts of {experts}' if experts is not None else ''})"
        return cls(model, tokenizer, name, batch_size)

    def add_adapters(self, adapters: Mapping[str, Path]) -> None:
        from peft import PeftModel

        from ktransformers.adapters.config import check_for_peft

        for name, directory in adapters.items():
            if not (directory / "adapter_config.json").is_file():
                raise InputError(f"adapter {name}", str(directory), "a directory with an adapter_config.json")
            check_for_peft(directory, self.model)
            if self._adapters:
                self.model.load_adapter(str(directory), adapter_name=name)
            else:
                self.model = PeftModel.from_pretrained(self.model, str(directory), adapter_name=name).eval()
            template = read_adapter_template(directory)
            tokenizer = self.tokens.tokenizer
            own = template is not None and template.differs_from(tokenizer)
            template_note = f", chat template {template.sha256[:12]}" if own and template is not None else ""
            self._adapter_tokens[name] = PromptTokenizer(tokenizer, str(directory), template)
            self._adapters[name] = f"{directory} ({_digest(directory, 'adapter_*')}{template_note})"

    @property
    def transformer(self) -> Any:
        """The transformers model, without PEFT's wrapper."""
        return self.model.get_base_model() if self._adapters else self.model

    def tokens_of(self, adapter: str | None) -> PromptTokenizer:
        return self.tokens if adapter is None else self._adapter_tokens[adapter]

    def template_note(self, adapter: str) -> str | None:
        """The line to log if the adapter is asked with another template than the base."""
        template = self._adapter_tokens[adapter].template
        if template is None or not template.differs_from(self.tokens.tokenizer):
            return None
        return f"{adapter} is asked with the chat template of {template.file}, the base with its own"

    def backend(self, adapter: str | None = None) -> LocalBackend:
        if adapter is not None and adapter not in self._adapters:
            raise InputError("adapter", repr(adapter), f"one of {', '.join(self._adapters) or 'none'}")
        return LocalBackend(self, adapter)

    @contextmanager
    def with_adapter(self, adapter: str | None) -> Iterator[Any]:
        if adapter is not None:
            self.model.set_adapter(adapter)
        without = self.model.disable_adapter() if self._adapters and adapter is None else nullcontext()
        with without, torch.no_grad():
            yield self.model

    def describe(self, adapter: str | None) -> str:
        return self.name if adapter is None else f"{self.name} + {self._adapters[adapter]}"


@dataclass(frozen=True)
class ScoredRow:
    """A row of tokens whose logits are scored from position `start` on. `targets[i]` are the tokens that are scored
    at the i-th of these positions, one for each continuation."""

    ids: list[int]
    start: int
    targets: list[list[int]]

    def score(self, logits: Tensor) -> list[Likelihood]:
        """`logits`: `[positions, vocabulary]`. One likelihood for each continuation."""
        scores = logits.float().log_softmax(-1).gather(-1, torch.tensor(self.targets, device=logits.device))
        return [Likelihood(value, len(self.targets)) for value in scores.double().sum(0).tolist()]


class LocalBackend:
    def __init__(self, local: LocalModel, adapter: str | None) -> None:
        self._local, self._adapter = local, adapter

    @property
    def name(self) -> str:
        return self._local.describe(self._adapter)

    def generate(self, prompts: Sequence[EvalPrompt], max_new_tokens: int) -> list[str]:
        tokens = self._local.tokens_of(self._adapter)
        ends = tokens.template if any(prompt.chat for prompt in prompts) else None
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        options = greedy | {"pad_token_id": tokens.tokenizer.pad_token_id} | (self._stop_options(ends) if ends else {})
        encoded = [tokens.encode(tokens.render(prompt), prompt.chat) for prompt in prompts]
        answers = [""] * len(prompts)
        with self._local.with_adapter(self._adapter) as model:
            for indices in _by_length(encoded, self._local.batch_size):
                ids, mask = self._padded([encoded[index] for index in indices], left=True)
                out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
                for index, row in zip(indices, out[:, ids.shape[1] :], strict=True):
                    text = tokens.tokenizer.decode(row, skip_special_tokens=True)
                    for stop in () if ends is None else ends.stop_strings:
                        text = text.partition(stop)[0]
                    answers[index] = text.strip()
        return answers

    def _stop_options(self, template: AdapterTemplate) -> dict[str, Any]:
        """The ends of answers under an adapter's template, and those of the model."""
        eos = self._local.model.generation_config.eos_token_id
        model_ends = set(eos if isinstance(eos, list) else [eos]) - {None}
        options: dict[str, Any] = {"eos_token_id": sorted(model_ends | template.stop_tokens) or None}
        if template.stop_strings:
            options |= {"stop_strings": list(template.stop_strings), "tokenizer": self._local.tokens.tokenizer}
        return options

    def likelihoods(self, questions: Sequence[Question]) -> list[list[Likelihood]]:
        """One row for a question whose continuations are single tokens after the same prompt, else one per
        continuation."""
        scored: list[tuple[int, ScoredRow]] = []  # with the number of the question
        tokens = self._local.tokens_of(self._adapter)
        for number, question in enumerate(questions):
            splits = [tokens.split(question.prompt, text) for text in question.continuations]
            prefixes = {tuple(ids[:start]) for ids, start in splits}
            if len(prefixes) == 1 and all(len(ids) == start + 1 for ids, start in splits):
                prompt = list(prefixes.pop())
                scored.append((number, ScoredRow(prompt, len(prompt) - 1, [[ids[-1] for ids, _ in splits]])))
            else:
                rows = [ScoredRow(ids, start - 1, [[token] for token in ids[start:]]) for ids, start in splits]
                scored += [(number, row) for row in rows]
        row_scores: dict[int, list[Likelihood]] = {}
        with self._local.with_adapter(self._adapter) as model:
            for indices in _by_length([row.ids for _, row in scored], self._local.batch_size, MAX_SCORED_TOKENS):
                batch_rows = [scored[index][1] for index in indices]
                batch, _ = self._padded([row.ids for row in batch_rows], left=False)
                wanted = torch.zeros(batch.shape, dtype=torch.bool)
                for number, row in enumerate(batch_rows):
                    wanted[number, row.start : row.start + len(row.targets)] = True
                with head_rows_only(self._local.transformer, wanted):
                    logits = model(input_ids=batch, use_cache=False).logits[0]
                parts = torch.split(logits, [len(row.targets) for row in batch_rows])
                for index, row, part in zip(indices, batch_rows, parts, strict=True):
                    row_scores[index] = row.score(part)
        answers: list[list[Likelihood]] = [[] for _ in questions]
        for index, (number, _) in enumerate(scored):
            answers[number] += row_scores[index]
        return answers

    def _padded(self, rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
        width, pad = max(map(len, rows)), self._local.tokens.tokenizer.pad_token_id
        ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            span = slice(width - len(row), width) if left else slice(0, len(row))
            ids[index, span] = torch.tensor(row)
            mask[index, span] = 1
        device = self._local.model.device
        return ids.to(device), mask.to(device)


def _digest(directory: Path, pattern: str) -> str:
    """Hash of the files' contents, so that a run does not resume with a retrained adapter in the same path."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob(pattern)):
        digest.update(file.read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:12]


def _by_length(rows: Sequence[Sequence[int]], batch_size: int, tokens: int | None = None) -> Iterator[list[int]]:
    """Row indices in batches of similar length; `tokens` bounds rows times width."""
    order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]), index))
    while order:
        width = max(1, len(rows[order[0]]))
        count = batch_size if tokens is None else max(1, min(batch_size, tokens // width))
        yield order[:count]
        order = order[count:]
