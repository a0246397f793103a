"""`memconsole logs`: what a run's trainer printed."""

from __future__ import annotations

import codecs
import errno
import os
import time
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import click

from memconsole.cli import output
from memconsole.cli.completing import run_names
from memconsole.regular_file import NotRegularError, open_regular
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.records import OUTPUT
from memconsole.runs.record.run_store import find_run
from memconsole.sanitize import clean
from memconsole.units import format_bytes

CHUNK = 1 << 16
POLL_SECONDS = 0.5
LONGEST = 1 << 18
"""Characters of an unfinished line that are held back."""


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option(
    "-f", "--follow", "watch", is_flag=True, help="Go on until it ends, also with later attempts."
)
@click.option("--attempt", type=click.IntRange(1), help="An earlier attempt; the newest otherwise.")
@click.option("--raw", is_flag=True, help="Bytes as they are, control characters included.")
def command(run: str, watch: bool, attempt: int | None, raw: bool) -> None:
    """Print RUN's output."""
    found = find_run(run)
    number = found.newest_attempt() if attempt is None else attempt
    if number is None:
        wait = found.waiting()
        raise RunError(f"{found.id} has no attempt yet{f': it {wait.words}' if wait else ''}")
    while number is not None:
        _print(found, number, watch=watch, raw=raw)
        newest = found.newest_attempt() if watch and attempt is None else number
        number = None if newest == number else newest


def _print(run: RunDirectory, number: int, *, watch: bool, raw: bool) -> None:
    """Print the output of one attempt. With `watch`, goes on until it ends. Raises `RunError`."""

    def goes_on() -> bool:
        return watch and run.newest_attempt() == number and liveness(run).live

    try:
        with _opened(run.attempt_path(number) / OUTPUT, goes_on) as source:
            dropped = skip_hole(source)
            if dropped:
                click.echo(f"[{format_bytes(dropped)} of earlier output were not kept]")
            for text in texts(source, goes_on, raw=raw):
                click.echo(text, nl=False)
    except FileNotFoundError:
        raise RunError(f"{run.id}: attempt {number} has no output") from None
    except NotRegularError as error:
        raise RunError(f"{run.id}: attempt {number}: out.log is {error.strerror}") from None
    except OSError as error:
        if output.failed(error):
            raise
        problem = f"out.log cannot be read: {error.strerror}"
        raise RunError(f"{run.id}: attempt {number}: {problem}") from None


def _opened(log: Path, goes_on: Callable[[], bool]) -> BufferedReader:
    """The open file, which an attempt that has just begun may not have yet. Raises `OSError`."""
    while not files.exists(log) and goes_on():
        time.sleep(POLL_SECONDS)
    return open_regular(log)


def skip_hole(source: BinaryIO) -> int:
    """Go to the first byte that is on the disk; of long outputs only the end is kept.

    Returns the bytes before it.
    """
    try:
        return source.seek(0, os.SEEK_DATA)
    except OSError as error:
        # Not every file system reports where data begins. ENXIO: the file has no data.
        return source.seek(0, os.SEEK_END if error.errno == errno.ENXIO else os.SEEK_SET)
    except AttributeError:
        return 0


def texts(source: BinaryIO, goes_on: Callable[[], bool], *, raw: bool) -> Iterator[str]:
    """The file in pieces of whole lines, for as long as it `goes_on`.

    A line longer than `LONGEST` is printed in several pieces, so that no byte is handled twice.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    shown = str if raw else clean
    rest = ""
    while True:
        over = not goes_on()
        while chunk := source.read(CHUNK):
            lines, newline, rest = (rest + decode(chunk)).rpartition("\n")
            if newline:
                yield shown(lines + newline)
            if len(rest) > LONGEST:
                yield shown(rest)
                rest = ""
        if over:
            yield shown(rest + decode(b"", True))
            return
        time.sleep(POLL_SECONDS)
