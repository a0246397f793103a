"""Real runs for benchmarks, launched as a person launches them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memconsole.cli.exits import Exit
from memconsole.plan.machine import processor

BACKENDS = ("torch", "jax")
MAKERS = ("amd", "intel")
Settings = Mapping[str, object]


class RefusedError(Exception):
    """The console does not launch the plan; says why."""


def trained(
    settings: Settings,
    state: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """`memconsole report --json` of a run with `settings` and `options`, kept under the folder `state`. Raises
    `RefusedError`."""
    words = [*options]
    words += [part for assignment in assignments(settings) for part in ("--set", assignment)]
    done = subprocess.run(
        [sys.executable, "-m", "memconsole", "train", "--json", "--force", *words],
        env={**os.environ, **environment, "XDG_STATE_HOME": str(state)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == Exit.BAD_PLAN and not done.stdout.strip():
        raise RefusedError(done.stderr.strip().splitlines()[-1])
    if not done.stdout.strip():
        raise RuntimeError(f"exit code {done.returncode}: {words}\n{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    if report["verdict"]["reason"] != "finished":
        raise RuntimeError(f"{report['verdict']}: {words}\n{done.stderr[-2000:]}")
    return report


def run(
    settings: Settings, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """`trained`, in a folder that goes, whatever the run's supervisor still writes there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        return trained(settings, Path(state), environment)


def machine() -> dict[str, Any]:
    """What a result must be read with."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: _version(name) for name in ("torch", "jax", "flax", "optax")},
    }


def maker() -> str:
    """amd or intel, whose processors have tables of their own in docs/speed.md; other for the rest."""
    name = processor.name().lower()
    return next((maker for maker in MAKERS if maker in name), "other")


def results_of(name: str, maker: str) -> Path:
    """The file of the results of `name` on a processor of this maker."""
    return Path(__file__).with_name("results") / f"{name}_{maker}.json"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def markdown(rows: list[list[str]], left: int = 1) -> str:
    """A table whose first row is its head; columns from `left` on are numbers."""
    rule = ["---"] * left + ["---:"] * (len(rows[0]) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])


def into_page(page: Path, name: str, text: str) -> None:
    """Put `text` between the markers of `name` in `page`. Raises `ValueError` where they are missing."""
    whole = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, tail = whole.index(begin) + len(begin), whole.index(end)
    page.write_text(f"{whole[:head]}\n{text}\n{whole[tail:]}", encoding="utf-8")


def assignments(settings: Settings) -> list[str]:
    """As `--set` takes them."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]
