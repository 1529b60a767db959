"""Renders samples with the chat template into token ids, with labels for the loss.

The template is rendered twice: for the conversation, and with a placeholder instead of every answer. The text between
placeholders belongs to the template; the text between two such pieces in the real rendering is the assistant's answer,
however the template treats reasoning, whitespace or the last turn. The end-of-turn token belongs to the answer; the
generation prompt does not. Text is tokenised piece by piece, as prompt and answer are at inference. Labels are the ids,
or IGNORE_INDEX.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ktransformers.train.data.files import DataRow, row_error
from ktransformers.train.data.formats import Message, PlainText, PreferencePair, Sample, TrainingConversation

IGNORE_INDEX = -100


@dataclass(frozen=True)
class RowPrompt:
    """The messages before an answer, and how many tokens of the row they are."""

    messages: list[Message]
    tools: list[Any] | None
    tokens: int


@dataclass(frozen=True)
class TrainRow:
    ids: list[int]
    labels: list[int]
    prompts: tuple[RowPrompt, ...] = ()  # before each answer that follows a message; none without a chat template

    @property
    def labelled(self) -> int:
        return sum(label != IGNORE_INDEX for label in self.labels)


@dataclass(frozen=True)
class PreferenceRow:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    prompts: tuple[RowPrompt, ...] = ()


@dataclass(frozen=True)
class Renderer:
    tokenizer: Any
    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False

    def encode(self, sample: Sample, row: DataRow) -> TrainRow:
        """A row for stage sft, truncated to cutoff_len; it may have no label left."""
        if isinstance(sample, PreferencePair):
            raise row_error(row, "chosen and rejected", "a row with one answer", "stage: dpo takes pairs")
        if isinstance(sample, PlainText):
            text = self._special(sample.text)
            text = text if text and text[-1] == self.tokenizer.eos_token_id else [*text, self.tokenizer.eos_token_id]
            return self._cut(text, list(text))
        prompts: tuple[RowPrompt, ...] = ()
        if sample.raw_prompt is not None:
            prompt = self._special(sample.raw_prompt)
            answer = [*self._ids(sample.messages[0]["content"]), self.tokenizer.eos_token_id]
            pieces = [(prompt, False), (answer, True)]
        else:
            pieces = [(self._ids(text), labelled) for text, labelled in self.pieces(sample, row)]
            prompts = _row_prompts(sample, pieces)
        last = max(index for index, (_, labelled) in enumerate(pieces) if labelled)
        ids: list[int] = []
        labels: list[int] = []
        for index, (piece, labelled) in enumerate(pieces[: last + 1]):
            keep = self.train_on_prompt or (labelled and not (self.mask_history and index != last))
            ids += piece
            labels += piece if keep else [IGNORE_INDEX] * len(piece)
        return replace(self._cut(ids, labels), prompts=prompts)

    def encode_pair(self, sample: Sample, row: DataRow) -> PreferenceRow | None:
        """A row for stage dpo; None if the prompt alone fills cutoff_len."""
        if not isinstance(sample, PreferencePair):
            raise row_error(row, "a row with one answer", "chosen and rejected", "stage: sft takes single answers")
        prompts: tuple[RowPrompt, ...] = ()
        if sample.raw is not None:
            end = [self.tokenizer.eos_token_id]
            prompt = self._special(sample.raw[0])
            chosen, rejected = (self._ids(text) + end for text in sample.raw[1:])
        else:
            encoded = []
            for answer in (sample.chosen, sample.rejected):
                pieces = self.pieces(TrainingConversation([*sample.prompt, answer], sample.tools), row)
                last = max(index for index, (_, labelled) in enumerate(pieces) if labelled)
                prompt_ids = [token for text, _ in pieces[:last] for token in self._ids(text)]
                encoded.append((prompt_ids, self._ids(pieces[last][0])))
            (prompt, chosen), (other_prompt, rejected) = encoded
            if prompt != other_prompt:
                raise row_error(row, "a template that shows the prompt differently for each answer", "the same prompt")
            prompts = (RowPrompt(sample.prompt, sample.tools, len(prompt)),)
        answer_tokens = self.cutoff_len - len(prompt)
        if answer_tokens <= 0:
            return None
        return PreferenceRow(prompt, chosen[:answer_tokens], rejected[:answer_tokens], prompts)

    def pieces(self, sample: TrainingConversation, row: DataRow) -> list[tuple[str, bool]]:
        """The rendered text in pieces: (text, whether it is the assistant's)."""
        messages = sample.messages
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        full = self._template(messages, sample, row)
        placeholders = {index: f"\ue000{index}\ue001" for index in answers}
        with_placeholders = [
            {"role": "assistant", "content": placeholders[index]} if index in placeholders else message
            for index, message in enumerate(messages)
        ]
        remaining = self._template(with_placeholders, sample, row)
        ends = [self._end(with_placeholders[: index + 1], placeholders[index], sample, row) for index in answers]
        template_texts: list[str] = []  # template text before each answer, and after the last
        for index in answers:
            preceding, placeholder, remaining = remaining.partition(placeholders[index])
            if not placeholder:
                raise row_error(row, "a chat template that drops an answer", "one that shows all", "name a `template`")
            template_texts.append(preceding[: self._beginning(preceding, messages[:index], sample, row)])
        template_texts.append(remaining)
        pieces: list[tuple[str, bool]] = []
        position = 0
        for number, text in enumerate(template_texts):
            last = number == len(template_texts) - 1
            start = (len(full) - len(text) if full.endswith(text) else -1) if last else full.find(text, position)
            if start < position or (number == 0 and start != 0):
                raise row_error(
                    row, "a chat template whose answers cannot be found", "plain turns", "name a `template`"
                )
            if number:
                end = ends[number - 1] if text.startswith(ends[number - 1]) else ""
                pieces.append((full[position:start] + end, True))
                text = text[len(end) :]
            pieces.append((text, False))
            position = start + len(template_texts[number])
        if not ends[-1]:  # without an end-of-turn token the model must still learn to stop
            answer, _ = pieces[-2]
            pieces[-2] = (answer + self.tokenizer.eos_token, True)
        return [piece for piece in pieces if piece[0]]

    def _template(
        self, messages: list[Message], sample: TrainingConversation, row: DataRow, prompt: bool = False
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=sample.tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # jinja and templates raise arbitrary exceptions
            raise row_error(row, f"a row that the chat template refuses ({error})", "a row that it takes") from error
        return str(text)

    def _end(self, messages: list[Message], placeholder: str, sample: TrainingConversation, row: DataRow) -> str:
        """The template's end of this answer, without trailing whitespace."""
        return self._template(messages, sample, row).rpartition(placeholder)[2].rstrip()

    def _beginning(self, preceding: str, history: list[Message], sample: TrainingConversation, row: DataRow) -> int:
        """Index in the template text before an answer where generation would start."""
        prompted = self._template(history, sample, row, prompt=True)
        plain = self._template(history, sample, row)
        generation_prompt = prompted[len(plain) :] if prompted.startswith(plain) else ""
        while generation_prompt:
            index = preceding.rfind(generation_prompt)
            if index >= 0:
                return index + len(generation_prompt)
            generation_prompt = generation_prompt[:-1]
        return len(preceding)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _special(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _cut(self, ids: list[int], labels: list[int]) -> TrainRow:
        return TrainRow(ids[: self.cutoff_len], labels[: self.cutoff_len])


def _row_prompts(sample: TrainingConversation, pieces: list[tuple[list[int], bool]]) -> tuple[RowPrompt, ...]:
    answers = [index for index, message in enumerate(sample.messages) if message["role"] == "assistant"]
    before = [sum(len(ids) for ids, _ in pieces[:index]) for index, (_, labelled) in enumerate(pieces) if labelled]
    if len(answers) != len(before):  # an answer without any text
        answers, before = answers[:1], before[:1]
    pairs = zip(answers, before, strict=True)
    return tuple(RowPrompt(sample.messages[:index], sample.tools, tokens) for index, tokens in pairs if index)


def show_labels(tokens: TrainRow, tokenizer: Any) -> str:
    """The row as text, labelled parts between « and »."""
    parts, start = [], 0
    while start < len(tokens.ids):
        labelled = tokens.labels[start] != IGNORE_INDEX
        end = start
        while end < len(tokens.ids) and (tokens.labels[end] != IGNORE_INDEX) == labelled:
            end += 1
        text = tokenizer.decode(tokens.ids[start:end])
        parts.append(f"«{text}»" if labelled else text)
        start = end
    return "".join(parts)
