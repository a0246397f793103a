"""Events that tests write as a trainer would."""

from __future__ import annotations

from typing import Any

from memconsole.runs.record.log import events


def started(attempt: int, resumed_step: int = 0, **changes: Any) -> events.Started:
    """The first event of an attempt on a CPU."""
    known: dict[str, Any] = {
        "attempt": attempt, "backend": "torch", "versions": {"torch": "2"}, "device_id": "cpu",
        "device_name": "a processor", "device_kind": "cpu", "memory_label": "host RAM",
        "platform_lines": (), "resumed_step": resumed_step,
    }  # fmt: skip
    return events.Started(**known | changes)
