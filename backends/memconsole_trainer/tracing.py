"""The tracer process: it reads questions from standard input and writes answers to standard output.

An urgent question drops all waiting questions, and interrupts the current one if the backend can.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import IO

import msgspec

from memconsole import typed_json
from memconsole.memory.exact.timeline import TracerAnswer, TracerQuestion

DROPPED = "a newer question came first"

Interrupt = Callable[[], None]
"""Called from time to time during work. Raises when the work is no longer wanted."""
Answering = Callable[[TracerQuestion, Interrupt], TracerAnswer]


class DroppedError(Exception):
    """A more urgent question arrived."""


def run(answer: Answering) -> None:
    """Serve on the process's standard streams; other output is redirected to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(answer, sys.stdin.buffer, answers)


def serve(answer: Answering, questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer questions from a stream until it ends."""
    arrived: queue.SimpleQueue[TracerQuestion | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions, arrived), daemon=True).start()
    waiting = deque[TracerQuestion]()
    encoder = msgspec.json.Encoder()

    def say(said: TracerAnswer) -> None:
        answers.write(encoder.encode(said) + b"\n")
        answers.flush()

    def take(question: TracerQuestion) -> None:
        """Queue a question. An urgent one drops all questions that wait."""
        if question.urgent:
            while waiting:
                say(TracerAnswer(id=waiting.popleft().id, problem=DROPPED))
        waiting.append(question)

    def interrupt() -> None:
        """Stop the current work if an urgent question or the end of the stream has arrived."""
        while not arrived.empty():
            question = arrived.get()
            if question is None:
                raise EOFError
            take(question)
            if question.urgent:
                raise DroppedError

    while True:
        if not waiting:
            question = arrived.get()
            if question is None:
                return
            take(question)
            continue
        try:
            interrupt()
        except DroppedError:
            pass
        except EOFError:
            return
        question = waiting.popleft()
        try:
            say(answer(question, interrupt))
        except DroppedError:
            say(TracerAnswer(id=question.id, problem=DROPPED))
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 (the next question may have an answer)
            traceback.print_exc()
            said = f"the tracer raised {type(error).__name__}: {error}"
            say(TracerAnswer(id=question.id, problem=" ".join(said.split())))


def _read(questions: IO[bytes], arrived: queue.SimpleQueue[TracerQuestion | None]) -> None:
    decoder = typed_json.decoder(TracerQuestion)
    for line in questions:
        try:
            arrived.put(decoder.decode(line))
        except msgspec.DecodeError as error:
            print(f"not a question: {error}", file=sys.stderr)
    arrived.put(None)
