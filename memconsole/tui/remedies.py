"""What would have saved a run that ran out of memory, as rows to pick from."""

from __future__ import annotations

from memconsole.devices.reading import Devices
from memconsole.memory.advice import Remedy
from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.screens.pick import Choice
from memconsole.units import format_bytes


def remedies_of(plan: Plan, devices: Devices | None) -> tuple[tuple[Remedy, ...], str]:
    """Everything that lowers the plan's memory on its device, in the order to try, or why there is nothing."""
    from memconsole.devices.budget import budget
    from memconsole.memory.advice import remedies

    try:
        return remedies(plan, budget(plan, devices)), ""
    except PlanError as error:
        return (), str(error)


def choices_of(found: tuple[Remedy, ...]) -> list[Choice]:
    """A row per remedy: what it saves by the estimate, and what it costs."""
    return [
        Choice(
            str(n),
            remedy.label,
            f"saves ~{format_bytes(remedy.saves_bytes)} · ×{remedy.time_factor:.2f} · "
            + ("✓ fits" if remedy.fits else "✗ too little"),
            label_width=36,
        )
        for n, remedy in enumerate(found)
    ]
