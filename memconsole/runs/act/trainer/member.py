"""A process of an attempt other than the leader. It trains with the leader. The only file of the run that it writes is
the reason of its own failure."""

from __future__ import annotations

import time

import msgspec

from memconsole.plan.plan import PlanError
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log.events import Event
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import ERROR, ErrorRecord, FinalRecord
from memconsole.runs.record.requests import Request


class Member(Attempt):
    """The process of rank `rank`, which is at least 1. It holds a gang lock of its own."""

    def __init__(self, run_directory: RunDirectory, number: int, rank: int) -> None:
        super().__init__(run_directory, number)
        self.rank = rank
        self.shared = True

    def __enter__(self) -> Member:
        path = locks.member_lock(self.run.gang_lock, self.rank)
        try:
            self._locks.append(locks.take_gang(path, required=not self._in_job()))
        except locks.LockHeld as error:
            self._refuse(f"run {self.run.id}: {error}")
        self._prepare()
        return self

    def emit(self, event: Event, durable: bool = False) -> None:
        """The leader writes the event log."""

    def progress(self, phase: str, step: int, bytes_written: int = 0) -> None:
        self.step = step

    def take_profile_request(self) -> Request | None:
        """The leader is profiled."""
        return None

    def finish(
        self, exit_code: int, step: int, reason: str, checkpoint: str | None = None
    ) -> FinalRecord:
        """The leader writes the last record."""
        return FinalRecord(
            exit_code=int(exit_code), step=step, reason=reason, time_wall=time.time()
        )

    def report(self, exception: BaseException) -> str:
        """Record the exception if no other process has recorded one: the first failure is the cause.

        A refused plan is not recorded here, because the leader refuses it, too.
        """
        record = self._error_record(exception)
        path = self.path / ERROR
        if not isinstance(exception, PlanError) and files.read_struct(path, ErrorRecord) is None:
            message = f"process {self.rank}: {record.message}"
            self._write_last(ERROR, msgspec.structs.replace(record, message=message))
        return record.cause

    def free_reserve(self) -> None:
        """The leader keeps the reserve."""

    def keep_reserve(self) -> None:
        """The leader keeps the reserve."""
