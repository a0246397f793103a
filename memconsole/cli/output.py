"""Standard streams that cannot be used: closed ones, a full disk, a reader that has closed its end of a pipe."""

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


def open_closed() -> None:
    """Let each standard stream that was closed be the null device: Python has None for it, and the next file that is
    opened would get its descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
        mode = "r" if number == 0 else "w"
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def failed(error: OSError) -> bool:
    """Whether `error` was raised by printing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is click.echo.__code__


def give_up() -> None:
    """Write nothing more to standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
