"""Records a few steps of a run on request: a trace and a memory profile, in the run directory."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path

from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.state.reduce import PROFILING
from memconsole.runs.record.log import events
from memconsole.runs.record.requests import Request
from memconsole_trainer.engine import Engine, Recording
from memconsole_trainer.loop.watch import Watch

FOLDER = "profiles"


class Profiling:
    """Starts and ends recordings between steps.

    Recorded steps are a phase of their own: their time and memory do not count as training's. A
    failed recording is reported and does not end the run.
    """

    def __init__(self, attempt: Attempt, engine: Engine, watch: Watch) -> None:
        self._attempt = attempt
        self._engine = engine
        self._watch = watch
        self._request: Request | None = None
        self._recording: Recording | None = None
        self._phase = ExitStack()

    def before(self, step: int) -> None:
        """Call before each step: starts a recording if one was requested."""
        if self._recording is not None:
            return
        self._request = self._attempt.take_profile_request()
        if self._request is None:
            return
        self._first, self._last = step, step - 1
        self._folder = self._attempt.run.path / FOLDER / f"step-{step:09d}-{self._attempt.number}"
        self._phase.enter_context(self._watch.outside_training(PROFILING))
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._recording = self._engine.profile(self._folder)
        except Exception as error:  # noqa: BLE001 (reported as a warning and in the log)
            self._failed(error)

    def after(self, step: int) -> None:
        """Call after each step: ends the recording if it has enough steps."""
        if self._recording is not None and self._request is not None:
            self._last = step
            if step - self._first + 1 >= self._request.steps:
                self.stop()

    def stop(self) -> None:
        """End the recording, if there is one, and write its files."""
        recording, request, self._recording = self._recording, self._request, None
        if recording is None or request is None:
            return
        try:
            self._engine.synchronize()
            recording.stop()
        except Exception as error:  # noqa: BLE001 (reported as a warning and in the log)
            self._failed(error)
            return
        del recording  # free its memory
        gc.collect()
        self._phase.close()
        self._report(self._files(), request)

    def _files(self) -> tuple[str, ...]:
        files = (p for p in self._folder.rglob("*") if p.is_file())
        return tuple(sorted(str(p.relative_to(self._folder)) for p in files))

    def _report(self, files: tuple[str, ...], request: Request) -> None:
        steps = self._last - self._first + 1
        which = f"step {self._last:,}" if steps == 1 else f"steps {self._first:,} to {self._last:,}"
        print(f"profile of {which}: {self._folder}: {', '.join(map(_name, files))}", flush=True)
        self._attempt.emit(
            events.Profile(
                step=self._last,
                steps=steps,
                folder=str(self._folder),
                files=files,
                request=request.id,
            )
        )

    def _failed(self, error: Exception) -> None:
        self._phase.close()
        self._watch.warn(f"the profile failed: {type(error).__name__}: {error}")
        assert self._request is not None
        self._report((), self._request)


def _name(file: str) -> str:
    return Path(file).name
