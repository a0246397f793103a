"""Follows a run's event log to its end and sends each figure once, however often sending fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import msgspec

from memconsole.plan import plan_file
from memconsole.plan.machine.trackers import Kind
from memconsole.plan.plan import PlanError
from memconsole.plan.tasks import task_of
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.labels import read_labels
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.redaction import redact, secret_values
from memconsole.runs.record.trackers import Sent, read_sent, state_path
from memconsole.sanitize import clean_line
from memconsole_trainer.loop.scalars import scalars
from memconsole_trainer.trackers.tracker import Figures, Told, Tracker

POLL_SECONDS = 2.0
RETRY_SECONDS = 15.0
AFTER_END_SECONDS = 600.0
"""How long a tracker that fails is tried again after the run has ended."""
READ_BYTES = 1 << 20

Open = Callable[[Told], Tracker]


def forward(
    run: RunDirectory, kind: Kind, connect: Open, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Send the figures of `run` until it has ended, or its directory is gone."""
    Forwarding(run, kind, connect, sleep).run_to_end()


class Forwarding:
    """One tracker of one run. How far its figures were sent is recorded in the run's directory."""

    def __init__(
        self, run: RunDirectory, kind: Kind, connect: Open, sleep: Callable[[float], None]
    ) -> None:
        self._run, self._kind, self._connect, self._sleep = run, kind, connect, sleep
        self._sent = read_sent(run.path, kind)
        self._tracker: Tracker | None = None

    def run_to_end(self) -> None:
        left = AFTER_END_SECONDS
        while files.exists(self._run.plan_path):
            now = liveness(self._run)
            if not self._catch_up():
                left = AFTER_END_SECONDS if now.live else left - RETRY_SECONDS
                if left < 0:
                    return
                self._sleep(RETRY_SECONDS)
            elif now.live:
                self._sleep(POLL_SECONDS)
            else:
                self._finish(now.verdict.reason if now.verdict else "unknown")
                return

    def _catch_up(self) -> bool:
        """Send new figures. Returns whether that worked."""
        try:
            for figures, sent in self._batches():
                if figures:
                    self._open().send(figures)
                self._keep(sent)
        except Exception as error:  # noqa: BLE001 (whatever a tracker raises, it is tried again)
            self._failed(error)
            return False
        if self._sent.problem:
            self._keep(msgspec.structs.replace(self._sent, problem=""))
        return True

    def _batches(self) -> Iterator[tuple[list[Figures], Sent]]:
        """New figures, each batch with the record to store once it is sent. Raises `PlanError`."""
        units = task_of(self._run.read_plan()).units
        for number in self._run.attempt_numbers():
            if number < self._sent.attempt:
                continue
            begun = self._sent.position if number == self._sent.attempt else None
            reader = EventReader(self._run.attempt_path(number), begun)
            while records := reader.read(READ_BYTES):
                if self._sent.last and any(map(_begins, records)):
                    self._begin_again()
                last = dict(self._sent.last)
                figures = [f for record in records if (f := _new(record, units, last)) is not None]
                yield (
                    figures,
                    msgspec.structs.replace(
                        self._sent, attempt=number, position=reader.position, last=last
                    ),
                )

    def _begin_again(self) -> None:
        """Close the tracker's run; the figures that follow go to a new one."""
        self._finish("killed")
        self._tracker = None
        self._sent = msgspec.structs.replace(
            self._sent, tracked="", training=self._sent.training + 1, last={}
        )

    def _open(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._connect(told(self._run, self._sent))
        return self._tracker

    def _keep(self, sent: Sent) -> None:
        """Record how far figures were sent. If the disk is full, only this process remembers it."""
        if self._tracker is not None:
            where = redact(self._tracker.where, secret_values(os.environ))
            sent = msgspec.structs.replace(sent, tracked=self._tracker.tracked, where=where)
        self._sent = sent
        try:
            files.write_atomic(
                state_path(self._run.path, self._kind), msgspec.json.encode(sent), durable=False
            )
        except OSError as error:
            print(f"trackers/{self._kind}.json: {error}", flush=True)

    def _failed(self, error: Exception) -> None:
        words = redact(str(error) or type(error).__name__, secret_values(os.environ))
        print(f"{type(error).__name__}: {words}", flush=True)
        self._keep(msgspec.structs.replace(self._sent, problem=clean_line(words, 300)))

    def _finish(self, state: str) -> None:
        if self._tracker is not None:
            try:
                self._tracker.finish(state)
            except Exception as error:  # noqa: BLE001
                self._failed(error)


def told(run: RunDirectory, sent: Sent) -> Told:
    """What a tracker shows about `run`. Raises `PlanError`."""
    plan, labels = run.read_plan(), read_labels(run.path)
    secrets = secret_values(os.environ)
    try:
        document = plan_file.to_document(plan, full=True)
    except PlanError:
        document = {}
    settings = {
        f"{section}.{key}" if isinstance(values, dict) else section: value
        for section, values in document.items()
        for key, value in (values.items() if isinstance(values, dict) else (("", values),))
    }
    return Told(
        id=run.id if sent.training == 1 else f"{run.id}-{sent.training}",
        name=run.name,
        folder=run.path,
        settings={k: redact(v, secrets) if isinstance(v, str) else v for k, v in settings.items()},
        tags=labels.tags,
        note=labels.note,
        offline=plan.train.wandb == "offline",
        tracked=sent.tracked,
    )


def _begins(record: events.Record) -> bool:
    """Whether an attempt begins at step 0."""
    return isinstance(record, events.Started) and not record.resumed_step


def _new(record: events.Record, units: str, last: dict[str, int]) -> Figures | None:
    """The figures of a record whose steps were not sent; `last` is updated."""
    step, found = scalars(record, units)
    values = {tag: value for tag, value in found if step > last.get(tag, -1)}
    last.update(dict.fromkeys(values, step))
    return Figures(step, record.time_wall, values) if values else None
