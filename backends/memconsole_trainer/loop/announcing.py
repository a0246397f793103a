"""Tells what set-up is doing, and interrupts it when a stop is requested."""

from __future__ import annotations

import time
from collections.abc import Callable

from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.log import events

PAUSE_POLL_SECONDS = 0.2


class StopRequestedError(Exception):
    """A stop was requested. This is not a failure."""


def warn(attempt: Attempt, message: str) -> None:
    """Report a problem that does not end the run, in the log and as an event."""
    print(f"warning: {message}", flush=True)
    attempt.emit(events.Warning(message=message))


class Announcer:
    """Reports what set-up is doing as events of the attempt, and checks for stop requests."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._phase = "import"
        self.report_memory: Callable[[str], None] | None = None
        """Called with the phase at each `tick`, once the model is built."""

    def phase(
        self,
        phase: str,
        detail: str = "",
        *,
        parameters: int | None = None,
        trainable_parameters: int | None = None,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        weights: str = "",
    ) -> None:
        """Enter a phase. Raises `StopRequestedError`."""
        self._phase = phase
        self._attempt.emit(
            events.Phase(
                phase=phase,
                detail=detail,
                parameters=parameters,
                trainable_parameters=trainable_parameters,
                total_steps=total_steps,
                steps_per_epoch=steps_per_epoch,
                weights=weights,
            )
        )
        self.tick()

    def tick(self) -> None:
        """Record that the process is alive. Raises `StopRequestedError`."""
        self._attempt.progress(self._phase, self._attempt.step)
        if self.report_memory is not None:
            self.report_memory(self._phase)
        if self._attempt.stop_requested or self._attempt.asked:
            raise StopRequestedError

    def wait_while_paused(self) -> None:
        """Wait while the run is paused, in a phase of its own. Raises `StopRequestedError`."""
        if not self._attempt.paused:
            return
        before = self._phase
        self.phase("paused")
        print(f"paused in the phase {before}", flush=True)
        while self._attempt.paused:
            time.sleep(PAUSE_POLL_SECONDS)
            self.tick()
        self.phase(before)

    def warning(self, message: str) -> None:
        warn(self._attempt, message)
