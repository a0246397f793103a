"""The lines that are printed on the terminal when the console closes, and whether the terminal can draw Unicode."""

from __future__ import annotations

import os
import sys

from memconsole.runs.read.shown.words import ended_words, resume_command
from memconsole.sanitize import clean_line
from memconsole.tui.draw.lines import cleaned
from memconsole.tui.views.run_view import RunView


def closing_words(view: RunView, ascii_only: bool = False) -> list[str]:
    """The lines printed after the console: whether the run goes on, and how to come back."""
    run = view.snapshot
    if run is None:
        return []
    run_id = clean_line(run.id)
    if view.live:
        name = f"{run.name} ({run_id})" if run.name and run.name != run.id else run_id
        lines = [
            f"The run goes on: {name}, {run.facts.phase}, step {run.facts.step:,}",
            f"  memconsole attach {run_id}   shows it again",
            f"  memconsole stop {run_id}     saves a checkpoint and stops it",
        ]
    else:
        lines = [f"Run {run_id}: {ended_words(run)}, step {run.facts.step:,}"]
        lines.append(f"  memconsole report {run_id}   shows its figures")
        if view.resumable:
            lines.append(
                f"  {resume_command(run_id, run.ended_by)}   goes on from its last checkpoint"
            )
    return [cleaned(line, ascii_only) for line in lines]


def draws_unicode() -> bool:
    """Whether the terminal can probably draw more than ASCII."""
    encoding = (getattr(sys.__stdout__, "encoding", "") or "").lower().replace("-", "")
    return encoding == "utf8" and os.environ.get("TERM", "") not in ("linux", "dumb", "vt100")
