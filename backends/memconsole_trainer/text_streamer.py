"""Shows a text on a terminal while a model writes it. An interrupt ends the text, not the program."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from memconsole.plan.templates.chat import CHAT_ANSWER
from memconsole.sanitize import clean
from memconsole_trainer.data.sources.records import Record
from memconsole_trainer.engine import GREEDY, Generator, OnTokens, Sampling
from memconsole_trainer.tasks.answering import Answerer

INTERRUPTED = 128 + signal.SIGINT
EVERY_SECONDS = 0.05
"""A text is decoded from its beginning each time it is shown, so it is not shown for every token."""
Text = Callable[[list[int], list[int]], str]
"""The text for a prompt's tokens and those drawn so far."""


class TextStreamer:
    """Implements `engine.Generator`. If standard output is no terminal, `end` prints the whole text, and an interrupt
    is not caught."""

    def __init__(
        self,
        engine: Generator,
        text: Text | None,
        end: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `text`, nothing is shown until the end. `end` is what a model may write to end its text."""
        self._engine, self._text, self._end, self._clock = engine, text, end, clock
        self._terminal = sys.stdout.isatty()
        self._shown, self._next = "", 0.0
        self.interrupted = False

    def generate(
        self,
        prompt: list[int],
        tokens: int,
        sampling: Sampling = GREEDY,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        """What was drawn until the end or an interrupt."""
        if not self._terminal:
            return self._engine.generate(prompt, tokens, sampling, on_tokens)
        found: list[int] = []

        def told(new: list[int]) -> None:
            found.extend(new)
            if on_tokens is not None:
                on_tokens(new)
            if self._text is not None and self._clock() >= self._next:
                self._show(settled(self._text(prompt, found), self._end))
                self._next = self._clock() + EVERY_SECONDS

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            told([])
            return self._engine.generate(prompt, tokens, sampling, told)
        except KeyboardInterrupt:
            self.interrupted = True
            return found
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def code(self) -> int:
        """The exit code of a program that wrote this text."""
        return INTERRUPTED if self.interrupted else 0

    def end(self, text: str) -> None:
        """Print the rest of the whole text, and end its line."""
        text = clean(settled(text) if self.interrupted else text)
        if not text.startswith(self._shown) and not self._shown.startswith(text):
            print()  # later tokens changed what earlier ones say
            self._shown = ""
        print(text[len(self._shown) :], flush=True)
        self._shown = ""

    def _show(self, text: str) -> None:
        text = clean(text)
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


def of_record(engine: Generator, answerer: Answerer, record: Record) -> TextStreamer:
    """Shows the answer to a chat; answers to other records are shown when all are there. Raises `RecordError`."""
    question = answerer.template.question(record.fields)
    stops = answerer.stops(question)

    def answer(prompt: list[int], new: list[int]) -> str:
        text = answerer.tokenizer.continuation(prompt, new, stops)
        return question.parse(text)[CHAT_ANSWER]

    chat = question.names == (CHAT_ANSWER,)
    return TextStreamer(engine, answer if chat else None, question.between[-1].strip())


def settled(text: str, end: str = "") -> str:
    """`text` without what the next token may change: spaces, a character of which bytes are missing, and the
    beginning of `end`."""
    whole, end = text.lower(), end.lower()
    begun = next((size for size in range(len(end) - 1, 0, -1) if whole.endswith(end[:size])), 0)
    return text[: len(text) - begun].rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
