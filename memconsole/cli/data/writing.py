"""Commands that let a separate process write a data file, and tell what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from memconsole.cli.tables import columns
from memconsole.plan.plan import PlanError, quote
from memconsole.sanitize import clean_line, utf8
from memconsole.units import format_bytes


def absolute(path: Path) -> str:
    """The absolute path. Raises `PlanError` if it is not UTF-8."""
    text = os.path.abspath(path)
    if text != utf8(text):
        raise PlanError(f"{quote(text)}: the name is not UTF-8; choose another")
    return text


def check_place(out: Path, force: bool) -> None:
    """Raise `PlanError` if a file cannot be put at `out`. What is there may be replaced with `force`."""
    if os.path.exists(out) and not force:
        raise PlanError(f"{out}: exists; choose another name, or replace it with --force")
    if not os.path.isdir(out.absolute().parent):
        raise PlanError(f"{out}: there is no folder {out.absolute().parent}")


def write(module: str, request: dict[str, Any], as_json: bool) -> None:
    """Let `module` write what `request` says, and print what it wrote. Raises `PlanError`."""
    started = time.monotonic()
    facts = _written(module, request)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    rows = [[clean_line(key.replace("_", " ")), _shown(key, facts[key])] for key in facts]
    rows.append(["minutes", f"{(time.monotonic() - started) / 60:.1f}"])
    click.echo("\n".join(columns(rows, left=(0, 1))))


def _written(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """What the process of `module` wrote. Its progress bar goes to standard error."""
    argv = [sys.executable, "-P", "-m", module, json.dumps(request)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            printed = process.communicate()[0]
        except KeyboardInterrupt:
            # The terminal interrupts both processes; the other one removes what it began.
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    try:
        facts: dict[str, Any] = json.loads(printed)
    except ValueError:
        raise PlanError(
            f"{request['out']}: making it ended with code {process.returncode}; see above"
        ) from None
    if "error" in facts:
        raise PlanError(clean_line(facts["error"]))
    return facts


def _shown(key: str, value: Any) -> str:
    if isinstance(value, int) and key.endswith("bytes"):
        return format_bytes(value)
    return clean_line(f"{value:,}" if isinstance(value, int) else str(value))
