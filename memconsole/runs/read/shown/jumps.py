"""The jumps of a hybrid run in words."""

from __future__ import annotations

from memconsole.runs.record.log import events


def counts_word(jump: events.Jump) -> str:
    """``12 of 20 kept, 1 undone``: how many jumps moved the weights for good."""
    undone = f", {jump.undone:,} undone" if jump.undone else ""
    return f"{jump.kept:,} of {jump.tried:,} kept{undone}"


def saved_word(steps: float) -> str:
    """``340 steps saved``: the gradient steps that jumps stand for, less those that tried ones took."""
    return f"{abs(steps):,.0f} steps {'lost' if steps <= -0.5 else 'saved'}"


def jump_words(jump: events.Jump) -> str:
    """All counts of a run's jumps, and the confidence after the last one."""
    return f"{counts_word(jump)}, {saved_word(jump.steps_saved)}, confidence {jump.confidence:.0%}"
