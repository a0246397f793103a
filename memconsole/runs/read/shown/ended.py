"""How a run ended, in one line."""

from __future__ import annotations

from memconsole.plan.tasks import task_of
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.words import ended_words
from memconsole.units import format_duration


def ended_line(run: RunSnapshot, host: str) -> str:
    """``first on alpha: finished after 3 min 5 s, step 60 of 60, training loss 3.63, best validation loss 4.68``."""
    facts = run.facts
    total = f" of {facts.total_steps:,}" if facts.total_steps else ""
    loss = task_of(run.plan).loss
    parts = [
        f"{ended_words(run)} after {format_duration(run.elapsed_seconds)}",
        f"step {facts.step:,}{total}",
    ]
    if run.final_train_loss is not None:
        parts.append(f"training loss {loss.told(run.final_train_loss)}")
    if run.best_validation_loss is not None:
        parts.append(f"best validation loss {loss.told(run.best_validation_loss)}")
    if run.verdict is not None and run.state not in ("finished", "stopped"):
        parts.append(run.verdict.evidence)
    return f"{run.name or run.id} on {host}: {', '.join(parts)}"
