"""`memconsole data make`: write a dataset to train on."""

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
import msgspec

from memconsole.cli import completing
from memconsole.cli.tables import columns
from memconsole.plan.data.made import KINDS, kind, parse_options, parse_size
from memconsole.plan.plan import PlanError, quote
from memconsole.sanitize import clean_line, utf8
from memconsole.units import format_bytes


class _Help(click.Command):
    """A command whose help lists the kinds and their options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Kinds"):
            formatter.write_dl([(k.name, f"{k.help}; a size counts {k.units}") for k in KINDS])
        for found in KINDS:
            if found.options:
                with formatter.section(f"--set of {found.name}"):
                    formatter.write_dl(
                        [
                            (o.name, f"{o.help} [default: {o.default or 'none'}]")
                            for o in found.options
                        ]
                    )


@click.command("make", cls=_Help)
@click.argument("name", metavar="KIND", shell_complete=completing.kinds)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--size", required=True, help="How much: 100000, 100k, 1.5M, 1g; or bytes: 512MiB, 2GB."
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Same seed, same data."
)
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="An option of KIND."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def make_command(
    name: str,
    out: Path,
    size: str,
    seed: int,
    assignments: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write a dataset of KIND to OUT, in constant memory.

    The size is approximate, because rows that belong together are never separated. OUT appears when it is complete.
    """
    found = kind(name)
    path = os.path.abspath(out)
    if path != utf8(path):
        raise PlanError(f"{quote(path)}: the name is not UTF-8; choose another")
    request = {
        "kind": found.name,
        "out": path,
        "size": msgspec.to_builtins(parse_size(size)),
        "seed": seed,
        "options": parse_options(found, assignments),
    }
    if found.suffixes and out.suffix.lower() not in found.suffixes:
        allowed = " or ".join(found.suffixes)
        raise PlanError(f"{out}: {found.name} is read from a file whose name ends with {allowed}")
    if out.exists() and not force:
        raise PlanError(f"{out}: exists; choose another name, or replace it with --force")
    if not out.absolute().parent.is_dir():
        raise PlanError(f"{out}: there is no folder {out.absolute().parent}")
    started = time.monotonic()
    facts = _made(request)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    rows = [[clean_line(key.replace("_", " ")), _shown(key, facts[key])] for key in facts]
    rows.append(["minutes", f"{(time.monotonic() - started) / 60:.1f}"])
    click.echo("\n".join(columns(rows, left=(0, 1))))


def _made(request: dict[str, Any]) -> dict[str, Any]:
    """Make the data in a separate process, whose progress bar goes to standard error. Raises `PlanError`."""
    argv = [sys.executable, "-P", "-m", "memconsole_trainer.data.make", json.dumps(request)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            printed = process.communicate()[0]
        except KeyboardInterrupt:
            # The terminal interrupts both processes; the other one removes what it began.
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    try:
        found: dict[str, Any] = json.loads(printed)
    except ValueError:
        raise PlanError(
            f"{request['out']}: making it ended with code {process.returncode}; see above"
        ) from None
    if "error" in found:
        raise PlanError(clean_line(found["error"]))
    return found


def _shown(key: str, value: Any) -> str:
    if isinstance(value, int) and key.endswith("bytes"):
        return format_bytes(value)
    return clean_line(f"{value:,}" if isinstance(value, int) else str(value))
