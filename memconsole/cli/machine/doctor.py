"""`memconsole doctor`: checks what works on this machine."""

from __future__ import annotations

import json as json_module
import locale
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata

import click

from memconsole.cli.machine import device_steps
from memconsole.cli.machine.reading import read_devices
from memconsole.cli.tables import columns
from memconsole.devices.cluster import ask_sinfo
from memconsole.devices.reading import Devices, Missing
from memconsole.errors import UserError
from memconsole.plan.machine.packages import NEEDS, missing_words
from memconsole.plan.machine.processor import missing_instructions, slow_vectors
from memconsole.plan.plan import installed_backends
from memconsole.runs.act.supervise import on_end
from memconsole.runs.record.run_store import make_runs_root
from memconsole.sanitize import clean_line
from memconsole.units import GIB, format_bytes

LOW_DISK = 2 * GIB

Finding = tuple[str, str, str]
"""What was checked; ok, warning, missing or info; what was found and what to do."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option(
    "--steps/--no-steps", default=True, help="Train a few steps on every device: 10 to 60 s each."
)
@click.pass_context
def command(ctx: click.Context, as_json: bool, steps: bool) -> None:
    """Check terminal, devices, frameworks and limits, then train a tiny model on every device.

    Exit code 1 if no backend can train here.
    """
    devices = read_devices()
    findings = [*_terminal(), *_keys(), *_python(), *_devices(devices)]
    findings += [_runs(), _on_end(), *_cluster(), *_bf16()]
    trains = any(not missing_words(name) for name in installed_backends())
    if not as_json:
        click.echo("\n".join(columns(findings, left=(0, 1, 2))))
    if steps:
        tried = list(_steps(devices, as_json))
        trains = any(what == "ok" for _, what, _ in tried)
        findings += tried
    if as_json:
        keys = ("what", "state", "found")
        click.echo(
            json_module.dumps(
                [dict(zip(keys, finding, strict=True)) for finding in findings], indent=2
            )
        )
    ctx.exit(0 if trains else 1)


def _steps(devices: Devices, silent: bool) -> Iterator[Finding]:
    """The findings of each device and backend; printed as they come unless `silent`."""
    for backend, device in device_steps.trials(devices):
        if missing_words(backend):
            continue
        findings = list(device_steps.findings(backend, device))
        if not silent:
            click.echo("\n".join(columns(findings, left=(0, 1, 2))))
        yield from findings


def _terminal() -> list[Finding]:
    """What the terminal is, and how it is reached."""
    environment, size = os.environ, shutil.get_terminal_size()
    size_words = f"{size.columns}x{size.lines}"
    small = size.columns < 80 or size.lines < 24
    encoding = locale.getpreferredencoding(False)
    unicode = "utf" in encoding.lower()
    colour = environment.get("COLORTERM") or "COLORTERM not set: 256 colours assumed"
    if environment.get("NO_COLOR"):
        colour = "NO_COLOR"
    remote = bool(environment.get("SSH_CONNECTION"))
    multiplexer = "screen" if environment.get("STY") else "none"
    if environment.get("TMUX"):
        multiplexer = "tmux"
    return [
        ("terminal", "info", environment.get("TERM", "not set")),
        ("size", "warning", f"{size_words}; 80x24 shows everything")
        if small
        else ("size", "ok", size_words),
        ("encoding", "ok", encoding)
        if unicode
        else ("encoding", "warning", f"{encoding}; use --ascii"),
        ("colour", "info", colour),
        ("link", "info", "SSH: slow-link mode; ssh -C helps" if remote else "local"),
        ("multiplexer", "info", multiplexer),
    ]


def _keys() -> list[Finding]:
    """The keymap file, and each of its rows that was rejected."""
    from memconsole.tui.keys.keymap import read_keymap

    keymap = read_keymap()
    path = clean_line(str(keymap.path), 300)
    if not keymap.there:
        return [("keys", "ok", f"built-in; `memconsole keys` prints a file to keep as {path}")]
    if not keymap.problems:
        return [("keys", "ok", f"{path}: {len(keymap.table.changes)} rows of screens changed")]
    return [("keys", "warning", f"{path}: {problem}") for problem in keymap.problems]


def _python() -> list[Finding]:
    """Python, and the frameworks of each backend."""
    findings: list[Finding] = [("python", "ok", f"{platform.python_version()} at {sys.prefix}")]
    for backend in installed_backends():
        lacking = missing_words(backend)
        if lacking:
            findings.append((f"{backend} backend", "missing", lacking))
        else:
            names = NEEDS.get(backend, ())
            versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
            findings.append((f"{backend} backend", "ok", versions or "installed"))
    return findings


def _devices(reading: Devices) -> list[Finding]:
    findings: list[Finding] = []
    for device in reading.devices:
        total = device.total_bytes
        size = f"n/a: {total.reason}" if isinstance(total, Missing) else format_bytes(total)
        findings.append((device.id, "ok", f"{device.name}, {size} {device.memory_label}"))
    findings += [("device", "info", note) for note in reading.notes]
    return findings


def _on_end() -> Finding:
    """The user's program for the end of a run."""
    path = on_end.program()
    why = on_end.trouble(path)
    if why is None:
        return "end of a run", "ok", clean_line(f"no program; {path} would be started", 300)
    if why:
        return "end of a run", "warning", clean_line(why, 300)
    return "end of a run", "ok", clean_line(f"starts {path}", 300)


def _cluster() -> list[Finding]:
    """The Slurm cluster that runs can be submitted to; empty where there is none."""
    if shutil.which("sbatch") is None:
        return []
    partitions = ask_sinfo()
    if not partitions:
        return [("slurm", "warning", "sbatch is here, but sinfo lists no partition")]
    return [
        ("slurm", "ok", f"partition {partition.name}: {partition.words}")
        for partition in partitions
    ]


def _runs() -> Finding:
    """The folder of runs, and the free space there."""
    try:
        root = make_runs_root()
        free = shutil.disk_usage(root).free
    except (UserError, OSError) as error:
        return "runs", "warning", str(error)
    try:
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        return "runs", "warning", f"{root}: no file can be written: {error.strerror}"
    words = f"{root}, {format_bytes(free)} free"
    if free < LOW_DISK:
        return "runs", "warning", f"{words}; checkpoints may not fit"
    return "runs", "ok", words


def _bf16() -> list[Finding]:
    """How fast the processor computes in bf16; empty where the system does not tell."""
    if platform.system() != "Linux":
        return []
    missing = missing_instructions("bf16")
    if missing:
        words = f"no {missing}: mixed precision is slow on this CPU, fp16 slowest of all"
        return [("bf16 on CPU", "warning", words)]
    if slow_vectors("bf16"):
        words = (
            "vectors, but no matrix unit (AMX): slower than fp32 in torch; JAX computes it in fp32"
        )
        return [("bf16 on CPU", "warning", words)]
    return [("bf16 on CPU", "ok", "native in torch; JAX computes it in fp32")]
