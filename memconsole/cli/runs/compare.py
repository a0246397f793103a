"""`memconsole compare`: runs side by side."""

from __future__ import annotations

import json as json_module
from typing import Any

import click
import msgspec

from memconsole.cli.completing import run_names
from memconsole.cli.tables import in_blocks, terminal_width
from memconsole.plan.differences import differing
from memconsole.plan.plan import Plan, PlanError, written
from memconsole.plan.sections.hybrid import PHASES
from memconsole.plan.tasks import TASKS
from memconsole.plan.tasks.judging import measure_of
from memconsole.runs.read.follow import status
from memconsole.runs.read.report.report import Report, report
from memconsole.runs.read.shown.jumps import saved_word
from memconsole.runs.read.shown.missing import marked, missing_words
from memconsole.runs.read.shown.words import ended_words
from memconsole.runs.read.state.figures import figures, loss_units
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import find_run
from memconsole.units import format_bytes, format_measure, format_rate

_MOST = 24
"""Characters of a setting that a terminal shows."""


@click.command()
@click.argument("runs", nargs=-1, required=True, shell_complete=run_names)
@click.option("--json", "as_json", is_flag=True, help="Print a list of reports.")
def command(runs: tuple[str, ...], as_json: bool) -> None:
    """Put RUNS side by side: the settings that differ, losses, speed and memory."""
    found = [find_run(run) for run in runs]
    reports = [report(run) for run in found]
    if as_json:
        click.echo(json_module.dumps(msgspec.to_builtins(reports), indent=2))
        return
    names = _names(found)
    rows = [["", *names], *_settings(found)]
    for label, values in (
        ("state", [ended_words(status(run)) for run in found]),
        ("steps", [str(made.steps[-1].step) if made.steps else "0" for made in reports]),
        ("final training loss", _told(reports, "final_train_loss")),
        ("best validation loss", _told(reports, "best_validation_loss")),
        *_judged(reports),
        *_figures(reports),
        _speeds(reports),
        ("minutes", [f"{made.total_minutes:.2f}" for made in reports]),
        ("peak memory", [_peak(made) for made in reports]),
        *_hybrid(reports),
    ):
        rows.append([label, *values])
    click.echo("\n".join(in_blocks(rows)))
    if best := _best(reports, names):
        click.echo(best)
    for made, name in zip(reports, names, strict=True):
        if made.missing_records:
            click.echo(f"{name}: {missing_words(made.missing_records)}")


def _names(found: list[RunDirectory]) -> list[str]:
    """The names of the runs; the ids of those whose name another one has."""
    names = [run.name for run in found]
    return [
        name if names.count(name) == 1 else run.id for run, name in zip(found, names, strict=True)
    ]


def _figures(reports: list[Report]) -> list[tuple[str, list[str]]]:
    """The measures of the runs' tasks at their last evaluations, one row per measure."""
    found = [
        {f.title: f for f in figures(TASKS[made.task], made.evaluations[-1])}
        if made.evaluations
        else {}
        for made in reports
    ]
    units = _loss_units(reports)
    titles = dict.fromkeys(title for own in found for title in own)
    return [
        (
            title,
            [
                _figure(f.value, unit if f.baseline else "") if (f := own.get(title)) else "n/a"
                for own, unit in zip(found, units, strict=True)
            ],
        )
        for title in titles
    ]


def _judged(reports: list[Report]) -> list[tuple[str, list[str]]]:
    """The best evaluation of each run. No rows if the loss judges all of them."""
    if not any(made.best and made.best.measure != TASKS[made.task].loss.key for made in reports):
        return []
    words = [
        f"{measure_of(TASKS[made.task], best.measure).told(best.value)} at step {best.step:,}"
        if (best := made.best)
        else "n/a"
        for made in reports
    ]
    return [("best evaluation", words)]


def _settings(found: list[RunDirectory]) -> list[list[str]]:
    """The settings in which the runs differ; n/a for a run whose plan is damaged."""
    read = [_plan(run) for run in found]
    rows = []
    for key, values in differing([plan for plan in read if plan is not None]).items():
        known = iter(values)
        rows.append([key, *("n/a" if plan is None else _value(next(known)) for plan in read)])
    return rows


def _value(value: Any) -> str:
    """A setting as a plan file has it; in a terminal only the end of a long path or text."""
    text = written(value)
    return f"…{text[1 - _MOST :]}" if terminal_width() and len(text) > _MOST else text


def _plan(run: RunDirectory) -> Plan | None:
    try:
        return run.read_plan()
    except PlanError:
        return None


def _told(reports: list[Report], figure: str) -> list[str]:
    """A loss of each run."""
    return [
        marked(_figure(getattr(made, figure), unit), figure, made.uncertain)
        for made, unit in zip(reports, _loss_units(reports), strict=True)
    ]


def _loss_units(reports: list[Report]) -> list[str]:
    """The unit of each run's loss, if it must be told."""
    return loss_units([TASKS[made.task] for made in reports])


def _figure(value: float | None, unit: str = "") -> str:
    return "n/a" if value is None else f"{format_measure(value)} {unit}".rstrip()


def _speeds(reports: list[Report]) -> tuple[str, list[str]]:
    """The average speeds. The label names the unit if all runs count the same, else each speed does."""
    units = [f"{TASKS[made.task].units}/s" for made in reports]
    one = len(set(units)) == 1
    found = [_speed(made) for made in reports]
    shown = [
        speed if one or speed == "n/a" else f"{speed} {unit}"
        for speed, unit in zip(found, units, strict=True)
    ]
    return (units[0] if one else "speed"), shown


def _speed(made: Report) -> str:
    speed = made.average_units_per_second
    return "n/a" if speed is None else format_rate(speed)


def _best(reports: list[Report], names: list[str]) -> str:
    """Which run was fastest, and which one took the least memory, of those that trained a step. Empty if nothing differs,
    or if they learned several tasks."""
    named = [(made, name) for made, name in zip(reports, names, strict=True) if made.steps]
    if len({made.task for made, _ in named}) > 1:
        return ""
    speeds = [(made.average_units_per_second, name) for made, name in named]
    peaks = [(made.memory.measured.peak_bytes, name) for made, name in named]
    known = [(speed, run) for speed, run in speeds if speed is not None]
    sizes = [(size, run) for size, run in peaks if size is not None]
    words = []
    if len(known) == len(named) > 1:
        fast, slow = max(known), min(known)
        if fast[0] > slow[0] > 0:
            words.append(f"fastest: {fast[1]}, x{fast[0] / slow[0]:.2f} the slowest")
    if len(sizes) == len(named) > 1 and min(sizes)[0] < max(sizes)[0]:
        least, most = min(sizes), max(sizes)
        words.append(f"leanest: {least[1]}, {format_bytes(most[0] - least[0])} less than the most")
    return "; ".join(words)


def _hybrid(reports: list[Report]) -> list[tuple[str, list[str]]]:
    """The jumps of hybrid runs, and the measured peak of each of their phases. No rows without such a run."""
    rows = []
    if any(made.jumps for made in reports):
        words = [
            f"{j.kept:,} of {j.tried:,}, {saved_word(j.steps_saved)}"
            if (j := made.jumps)
            else "n/a"
            for made in reports
        ]
        rows.append(("jumps kept", words))
    for phase in PHASES:
        peaks = [made.memory.by_phase.get(phase) for made in reports]
        if any(peaks):
            rows.append((f"peak in {phase}", [format_bytes(n) if n else "n/a" for n in peaks]))
    return rows


def _peak(made: Report) -> str:
    measured = made.memory.measured
    if measured is None or measured.peak_bytes is None:
        return "n/a"
    return marked(format_bytes(measured.peak_bytes), "memory.measured", made.uncertain)
