"""Waits for exact numbers on a command line, with progress on standard error and a time limit."""

from __future__ import annotations

import sys
import time

import click

from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.units import format_duration

SLOW_LINES_SECONDS = 15.0
"""Time between progress lines if standard error is no terminal."""


def wait_for_exact(book: ExactBook, plan: Plan, budget: Budget, limit_seconds: float) -> str:
    """Ask for the exact numbers of `plan` and wait. Returns why they are missing, or "".

    Ctrl-C ends the waiting, not the command.
    """
    started = time.monotonic()
    lines = _Lines(sys.stderr.isatty())
    book.ask(plan, budget)
    try:
        while True:
            progress = book.progress(plan, budget)
            waited = time.monotonic() - started
            if progress.problem:
                return progress.problem
            if not progress.pending:
                return ""
            if waited >= limit_seconds:
                return f"no answer in {format_duration(limit_seconds)} (--timeout)"
            verb = "compiling" if plan.backend == "jax" else "tracing"
            lines.say(f"{verb} for {budget.name} … {waited:.0f} s", waited)
            book.wait(min(1.0, limit_seconds - waited))
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        lines.end()


class _Lines:
    """Progress: on a terminal one line that is rewritten, else a new line now and then."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._shown = 0
        self._next = 0.0

    def say(self, words: str, waited: float) -> None:
        if self._terminal:
            click.echo("\r" + words.ljust(self._shown), nl=False, err=True)
            self._shown = len(words)
        elif waited >= self._next:
            self._next = waited + SLOW_LINES_SECONDS
            click.echo(words, err=True)

    def end(self) -> None:
        if self._shown:
            click.echo("\r" + " " * self._shown + "\r", nl=False, err=True)
