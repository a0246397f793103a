"""Decides how long a trainer may take to stop, from the durations its heartbeats show."""

from __future__ import annotations

from collections import deque

from memconsole.runs.record.processes.heartbeat import Heartbeat

SHORTEST_SECONDS = 60.0
URGENT_SECONDS = 20.0
LONGEST_SECONDS = 900.0
"""The limit after the first request, even if the trainer makes progress."""


class SeenDurations:
    """Durations of steps and saves, seen in heartbeats. Times are seconds since boot."""

    def __init__(self) -> None:
        self.save_seconds = 0.0
        """Duration of the last finished save."""
        self._steps: deque[float] = deque(maxlen=200)
        self._beat: Heartbeat | None = None
        self._step_since = 0.0
        self._save_since: float | None = None

    @property
    def slow_step_seconds(self) -> float:
        """The longest of the recent steps."""
        return max(self._steps, default=0.0)

    def see(self, beat: Heartbeat, now: float) -> bool:
        """Record a heartbeat. Returns whether checkpoint bytes were written since the last one."""
        before, self._beat = self._beat, beat
        if before is None:
            self._step_since = now
            return False
        if beat.step > before.step:
            self._steps.append((now - self._step_since) / (beat.step - before.step))
            self._step_since = now
        elif beat.phase != before.phase:
            self._step_since = now
        if beat.phase == "checkpoint" and self._save_since is None:
            self._save_since = now
        elif beat.phase != "checkpoint" and self._save_since is not None:
            self.save_seconds, self._save_since = now - self._save_since, None
        return beat.bytes_written != before.bytes_written

    def patience_seconds(self, urgent: bool = False) -> float:
        """How long a stop may take: a save and, unless urgent, the current step."""
        if urgent:
            return max(URGENT_SECONDS, 3 * self.save_seconds)
        return max(SHORTEST_SECONDS, 3 * self.save_seconds + 2 * self.slow_step_seconds)


class StopDeadline:
    """The time at which a requested stop becomes a kill."""

    def __init__(self, now: float, patience_seconds: float) -> None:
        self._latest = now + LONGEST_SECONDS
        self._patience = min(patience_seconds, LONGEST_SECONDS)
        self.at = now + self._patience

    def hurry(self, now: float, patience_seconds: float) -> None:
        """Shorten the wait, after a second request."""
        self._patience = min(self._patience, patience_seconds)
        self.at = min(self.at, now + self._patience)

    def hold(self, now: float) -> None:
        """Restart the deadline, because the checkpoint cannot be written and the trainer waits."""
        self.at = now + self._patience
        self._latest = max(self._latest, self.at)

    def moved(self, now: float) -> None:
        """Extend the deadline, because the checkpoint has grown."""
        self.at = min(self._latest, max(self.at, now + self._patience))
