"""The rows that only a hybrid run has: its jumps, and the memory of each phase."""

from __future__ import annotations

from memconsole.plan.sections.hybrid import PHASES
from memconsole.runs.read.report.comparison import measured_phases
from memconsole.tui.views.run_view import RunView
from memconsole.units import format_bytes

Row = tuple[str, str]


def jump_rows(view: RunView) -> list[Row]:
    """How many jumps were kept, how many steps they saved, and the confidence in the next jump."""
    jump = view.snapshot.facts.jump if view.snapshot is not None else None
    if jump is None:
        return []
    kept = f"{jump.kept:,} of {jump.tried:,} · {jump.confidence:.0%} sure"
    saved = f"{jump.steps_saved:,.0f}" + (f" · {jump.undone:,} undone" if jump.undone else "")
    return [("jumps kept", kept), ("steps saved", saved)]


def phase_rows(view: RunView) -> list[Row]:
    """The measured peak of each phase and the predicted one. The present phase is marked."""
    run = view.snapshot
    if run is None or not run.plan.hybrid.on:
        return []
    seen = run.facts.peaks_by_phase
    guessed = view.prediction.table.phases if view.prediction is not None else {}
    measured_names = measured_phases((*seen, *guessed))
    rows = []
    for phase in PHASES:
        peak = max((seen[p] for p in measured_names.get(phase, ()) if p in seen), default=None)
        if peak is None and phase not in guessed:
            continue
        words = "—" if peak is None else format_bytes(peak)
        if phase in guessed:
            words += f"  (~{format_bytes(guessed[phase])})"
        mark = "▸ " if view.live and run.facts.phase == phase else "  "
        rows.append((mark + phase, words))
    return rows
