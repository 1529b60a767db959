"""Samples as token ids, with labels that say where the loss is.

The chat template is asked twice: for the conversation, and for the same with a mark in place of every answer. What is
left between the marks is the template's own text, and what lies between two such pieces in the real rendering is what
the assistant says, however the template treats thoughts, white space or the last turn. The answer's end mark belongs to
it; the beginning that a generation would be prompted with does not. Text is tokenised piece by piece, as prompt and
answer are at inference. Labels are the ids, or IGNORED.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktransformers.train.data.files import DataRow, row_error
from ktransformers.train.data.formats import Conversation, Message, PlainText, PreferencePair, Sample

IGNORE_INDEX = -100


@dataclass(frozen=True)
class TrainRow:
    ids: list[int]
    labels: list[int]

    @property
    def learned(self) -> int:
        return sum(label != IGNORE_INDEX for label in self.labels)


@dataclass(frozen=True)
class PreferenceRow:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class Renderer:
    tokenizer: Any
    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    default_system: str | None = None
    enable_thinking: bool | None = None

    def encode(self, sample: Sample, row: DataRow) -> TrainRow:
        """A row of stage sft, not longer than cutoff_len; it may have nothing to learn left."""
        if isinstance(sample, PreferencePair):
            raise row_error(row, "chosen and rejected", "a row with one answer", "stage: dpo takes pairs")
        if isinstance(sample, PlainText):
            text = self._special(sample.text)
            text = text if text and text[-1] == self.tokenizer.eos_token_id else [*text, self.tokenizer.eos_token_id]
            return self._cut(text, list(text))
        if sample.raw_prompt is not None:
            prompt = self._special(sample.raw_prompt)
            answer = [*self._ids(sample.messages[0]["content"]), self.tokenizer.eos_token_id]
            pieces = [(prompt, False), (answer, True)]
        else:
            pieces = [(self._ids(text), learned) for text, learned in self.pieces(sample, row)]
        last = max(index for index, (_, learned) in enumerate(pieces) if learned)
        ids: list[int] = []
        labels: list[int] = []
        for index, (piece, learned) in enumerate(pieces[: last + 1]):
            keep = self.train_on_prompt or (learned and not (self.mask_history and index != last))
            ids += piece
            labels += piece if keep else [IGNORE_INDEX] * len(piece)
        return self._cut(ids, labels)

    def encode_pair(self, sample: Sample, row: DataRow) -> PreferenceRow | None:
        """A row of stage dpo; None where the prompt alone fills cutoff_len."""
        if not isinstance(sample, PreferencePair):
            raise row_error(row, "a row with one answer", "chosen and rejected", "stage: sft takes single answers")
        if sample.raw is not None:
            end = [self.tokenizer.eos_token_id]
            prompt = self._special(sample.raw[0])
            chosen, rejected = (self._ids(text) + end for text in sample.raw[1:])
        else:
            both = []
            for answer in (sample.chosen, sample.rejected):
                pieces = self.pieces(Conversation([*sample.prompt, answer], sample.tools), row)
                last = max(index for index, (_, learned) in enumerate(pieces) if learned)
                head = [token for text, _ in pieces[:last] for token in self._ids(text)]
                both.append((head, self._ids(pieces[last][0])))
            (prompt, chosen), (other, rejected) = both
            if prompt != other:
                raise row_error(row, "a template that shows the prompt differently for each answer", "the same prompt")
        room = self.cutoff_len - len(prompt)
        return PreferenceRow(prompt, chosen[:room], rejected[:room]) if room > 0 else None

    def pieces(self, sample: Conversation, row: DataRow) -> list[tuple[str, bool]]:
        """The rendered text in pieces: (text, the assistant says it)."""
        messages = sample.messages
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        full = self._template(messages, sample, row)
        marks = {index: f"\ue000{index}\ue001" for index in answers}
        marked = [
            {"role": "assistant", "content": marks[index]} if index in marks else message
            for index, message in enumerate(messages)
        ]
        frame = self._template(marked, sample, row)
        ends = [self._end(marked[: index + 1], marks[index], sample, row) for index in answers]
        fixed: list[str] = []  # the template's own text before each answer, and after the last
        for index in answers:
            before, found, frame = frame.partition(marks[index])
            if not found:
                raise row_error(row, "a chat template that drops an answer", "one that shows all", "name a `template`")
            fixed.append(before[: self._beginning(before, messages[:index], sample, row)])
        fixed.append(frame)
        pieces: list[tuple[str, bool]] = []
        at = 0
        for number, text in enumerate(fixed):
            last = number == len(fixed) - 1
            found_at = (len(full) - len(text) if full.endswith(text) else -1) if last else full.find(text, at)
            if found_at < at or (number == 0 and found_at != 0):
                raise row_error(
                    row, "a chat template whose answers cannot be found", "plain turns", "name a `template`"
                )
            if number:
                end = ends[number - 1] if text.startswith(ends[number - 1]) else ""
                pieces.append((full[at:found_at] + end, True))
                text = text[len(end) :]
            pieces.append((text, False))
            at = found_at + len(fixed[number])
        if not ends[-1]:  # a template without an end mark: the model must still learn to stop
            said, _ = pieces[-2]
            pieces[-2] = (said + self.tokenizer.eos_token, True)
        return [piece for piece in pieces if piece[0]]

    def _template(self, messages: list[Message], sample: Conversation, row: DataRow, prompt: bool = False) -> str:
        options = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=sample.tools, tokenize=False, add_generation_prompt=prompt, **options
            )
        except Exception as error:  # jinja raises what it likes, and so do the templates
            raise row_error(row, f"a row that the chat template refuses ({error})", "a row that it takes") from error
        return str(text)

    def _end(self, upto: list[Message], mark: str, sample: Conversation, row: DataRow) -> str:
        """What the template closes this answer with, without the white space that follows."""
        return self._template(upto, sample, row).rpartition(mark)[2].rstrip()

    def _beginning(self, before: str, history: list[Message], sample: Conversation, row: DataRow) -> int:
        """Where, in the template's text before an answer, a generation would begin."""
        prompted = self._template(history, sample, row, prompt=True)
        plain = self._template(history, sample, row)
        head = prompted[len(plain) :] if prompted.startswith(plain) else ""
        while head:
            at = before.rfind(head)
            if at >= 0:
                return at + len(head)
            head = head[:-1]
        return len(before)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _special(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _cut(self, ids: list[int], labels: list[int]) -> TrainRow:
        return TrainRow(ids[: self.cutoff_len], labels[: self.cutoff_len])


def show_labels(tokens: TrainRow, tokenizer: Any) -> str:
    """The row as text, what is learned between « and »."""
    parts, at = [], 0
    while at < len(tokens.ids):
        learned = tokens.labels[at] != IGNORE_INDEX
        end = at
        while end < len(tokens.ids) and (tokens.labels[end] != IGNORE_INDEX) == learned:
            end += 1
        text = tokenizer.decode(tokens.ids[at:end])
        parts.append(f"«{text}»" if learned else text)
        at = end
    return "".join(parts)
