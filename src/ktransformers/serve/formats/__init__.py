"""How each model family writes reasoning and tool calls: `recognise` finds the format of a chat template, and the
format makes parsers of answers, grammars and the template's variables."""

from ktransformers.serve.formats.answer_format import AnswerFormat, recognise

__all__ = ["AnswerFormat", "recognise"]
