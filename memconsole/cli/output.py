"""Errors of standard output: a full disk, or a reader that has closed its end of a pipe."""

from __future__ import annotations

import os
import sys

import click

from memconsole.errors import UserError


class OutputError(UserError):
    """Standard output cannot be written. What it could not take is dropped: Python would try again when it ends, and
    end with another code."""

    exit_code = 1

    def __init__(self, error: OSError, more: str = "") -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}{more}")
        give_up()


def failed(error: OSError) -> bool:
    """Whether `error` was raised by printing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is click.echo.__code__


def give_up() -> None:
    """Write nothing more to standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
