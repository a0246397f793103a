"""The remedies for a run that ran out of memory, as rows to pick from."""

from __future__ import annotations

import contextlib

from memconsole.devices.reading import Devices
from memconsole.memory.answers.advice import Remedy
from memconsole.memory.verdict import Verdict
from memconsole.plan.plan import Plan, PlanError
from memconsole.remedies import remedies_of
from memconsole.runs.read.report.report import report
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.run_store import find_run
from memconsole.tui.draw.words import verdict_mark
from memconsole.tui.screens.pick import Choice
from memconsole.units import format_bytes

_NOT_ENOUGH = "not enough"


def found_remedies(
    run_id: str, plan: Plan, devices: Devices | None
) -> tuple[tuple[Remedy, ...], str]:
    """The changes that would have lowered this run's memory, in the order to try.

    If there are none, the second value may say why.
    """
    lacked = None
    with contextlib.suppress(RunError, OSError):  # no records: only the estimate is left
        lacked = report(find_run(run_id)).memory.shortfall
    try:
        return remedies_of(plan, lacked, devices), ""
    except PlanError as error:
        return (), str(error)


def first_that_fits(remedies: tuple[Remedy, ...]) -> str:
    """The row to start on: the first remedy that fits with its whole band, or else the first that is tight. Empty if
    there is neither."""
    for verdict in (Verdict.FITS, Verdict.TIGHT):
        for n, remedy in enumerate(remedies):
            if remedy.verdict is verdict:
                return str(n)
    return ""


def choices_of(remedies: tuple[Remedy, ...]) -> list[Choice]:
    """A row per remedy: whether it is enough, then what it would have saved in this run, and its cost."""
    return [
        Choice(
            str(n),
            remedy.label,
            f"{verdict_mark(remedy.verdict, _NOT_ENOUGH)} · ~{format_bytes(remedy.saves_bytes)} · "
            f"×{remedy.time_factor:.2f}"
            + (f" · changes: {remedy.result}" if remedy.result else ""),
            label_width=36,
            sentence=_sentence(remedy),
        )
        for n, remedy in enumerate(remedies)
    ]


def _sentence(remedy: Remedy) -> str:
    """``Alone it fits, saves ~217 MiB and takes ×1.20 the time; the result stays the same.``"""
    alone = {
        Verdict.FITS: "Alone it fits",
        Verdict.TIGHT: "Alone it is tight",
        Verdict.DOES_NOT_FIT: f"Alone it is {_NOT_ENOUGH}",
    }[remedy.verdict]
    changes = f"it changes: {remedy.result}" if remedy.result else "the result stays the same"
    saves = format_bytes(remedy.saves_bytes)
    return f"{alone}, saves ~{saves} and takes ×{remedy.time_factor:.2f} the time; {changes}."
