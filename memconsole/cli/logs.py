"""`memconsole logs`: what a run's trainer printed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from memconsole.runs.read.follow import status
from memconsole.runs.record.directory import RunDirectory, RunError, find_run
from memconsole.runs.record.states import LIVE
from memconsole.sanitize import clean

CHUNK = 1 << 16


@click.command()
@click.argument("run", default="latest")
@click.option("-f", "--follow", "watch", is_flag=True, help="Go on while it trains.")
@click.option("--attempt", type=click.IntRange(1), help="An earlier attempt; the newest otherwise.")
@click.option("--raw", is_flag=True, help="Bytes as they are, control characters included.")
def command(run: str, watch: bool, attempt: int | None, raw: bool) -> None:
    """Print RUN's output."""
    found = find_run(run)
    number = found.newest_attempt() if attempt is None else attempt
    if number is None:
        raise RunError(f"{found.id} has no attempt yet")
    log = found.attempt_path(number) / "out.log"
    if not log.exists():
        raise RunError(f"{found.id}: attempt {number} has no output")
    for text in _texts(log, found if watch else None, raw=raw):
        click.echo(text, nl=False)


def _texts(log: Path, live: RunDirectory | None, *, raw: bool) -> Iterator[str]:
    """The file in chunks of whole lines. With `live`, continues until that run ends."""
    with log.open("rb") as source:
        rest = b""
        while True:
            over = live is None or status(live).state not in LIVE
            while chunk := source.read(CHUNK):
                lines, newline, rest = (rest + chunk).rpartition(b"\n")
                text = (lines + newline).decode("utf-8", "replace")
                yield text if raw else clean(text)
            if over:
                text = rest.decode("utf-8", "replace")
                yield text if raw else clean(text)
                return
            time.sleep(0.5)
