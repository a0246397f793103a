"""Runs the part of a command that needs a framework, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

import click

from memconsole.plan.data.paths import current_folder
from memconsole.runs.record.directory import RunDirectory
from memconsole.sanitize import clean


def program(name: str, run: RunDirectory, arguments: Iterable[str]) -> list[str]:
    """The command line of the trainer's program `name` for a run. Raises `PlanError` if it could not start."""
    current_folder()
    module = "memconsole_trainer.command"
    return [sys.executable, "-P", "-m", module, name, str(run.path), *arguments]


def run_on_terminal(name: str, run: RunDirectory, arguments: Iterable[str]) -> int:
    """Run a program that reads and prints by itself. Returns its exit code. The terminal interrupts both processes, and
    the program knows what an interrupt ends."""
    with subprocess.Popen(program(name, run, arguments)) as process:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()


def run_program(
    name: str, run: RunDirectory, arguments: Iterable[str], *, reads_input: bool = False
) -> int:
    """Run a program to its end and print its output. Returns its exit code. Its error output, such as progress, is
    shown at once. Only one that `reads_input` has this process's standard input."""
    argv = program(name, run, arguments)
    env = {**os.environ, "PYTHONUTF8": "1"}  # a prompt may be no ASCII although the locale is
    pipe = subprocess.PIPE
    source = None if reads_input else subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=source, stdout=pipe, env=env) as process:
        try:
            printed = process.communicate()[0]
        except KeyboardInterrupt:
            # The terminal interrupts both processes; the other one removes what it began.
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    click.echo(clean(printed.decode("utf-8", "replace")), nl=False)
    return process.returncode
