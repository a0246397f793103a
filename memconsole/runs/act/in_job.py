"""What a Slurm job executes: the supervisor of its run, in the foreground.

``python -m memconsole.runs.act.in_job RUN_DIRECTORY``. It works like the supervisor of any other run,
and also handles Slurm's signals: SIGUSR1 before the time limit, SIGTERM for a cancelled or preempted
job. Either is a request to stop, which saves a checkpoint. After SIGUSR1 the job goes back to the
queue, if it has taken a step, and later continues from that checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from memconsole.plan.processes import nodes
from memconsole.runs.act import slurm, together
from memconsole.runs.act.supervise import daemon
from memconsole.runs.act.supervise.spawn import TrainerCommand, trainer_command
from memconsole.runs.act.supervise.supervision import POLL_SECONDS, Supervisor, say
from memconsole.runs.act.supervise.supervisor import announce, watch_to_the_end
from memconsole.runs.act.trainer.attempt import STOPPING
from memconsole.runs.record import files, requests
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.failures.failure import ExitCode
from memconsole.runs.record.processes import locks
from memconsole.runs.record.processes.heartbeat import read_heartbeat
from memconsole.runs.record.records import ERROR, EXIT
from memconsole.runs.record.requests import Request
from memconsole.runs.record.states import Verdict

PREVIOUS_START_SECONDS = 90.0
"""How long a start waits for the processes of the job's previous start to end, before it fails."""
LEAVING_SECONDS = 120.0
"""How long Slurm may take to end this job after it was put back into the queue."""
TIME_LIMIT = "Slurm (the time limit is near)"
ENDING = "Slurm (the job is cancelled or preempted)"
_signalled: list[str] = []
"""Who asked to stop, by signals that have not been served yet."""


class JobSupervisor(Supervisor):
    """Turns Slurm's signals into requests to stop."""

    def __init__(
        self,
        run: RunDirectory,
        poll_seconds: float = POLL_SECONDS,
        lock: locks.Lock | None = None,
    ) -> None:
        super().__init__(run, poll_seconds, lock)
        self.place = slurm.place()
        self.by_itself = self.place is not None and self.place.restarts > 0
        self._nodes = 1
        self._first_step = 0
        self._asked: set[str] = set()

    def _tick(self) -> None:
        while _signalled:
            who = _signalled.pop(0)
            if who not in self._asked:
                self._asked.add(who)
                self._ask_to_stop(who)
        super()._tick()

    def _spawn(self, argv: Sequence[str]) -> None:
        """Start the trainer; on several nodes with srun, which is given the address of their rendezvous."""
        self._nodes = nodes(self.run.read_plan())
        saved = self.run.committed_checkpoints()
        self._first_step = step_of(saved[-1]) if saved else 0
        if self._nodes > 1:
            os.environ |= together.meeting(self._nodes)
            argv = together.on_every_node(self._nodes, argv)
        super()._spawn(argv)

    def _act(self, request: Request) -> None:
        """Act on a request. SIGTERM to srun would end every process at once, so on several nodes a file passes on a
        stop."""
        if request.command == "stop" and self._nodes > 1:
            (self.path / STOPPING).touch(mode=0o600)
        else:
            super()._act(request)

    def _exit_status(self) -> tuple[int | None, signal.Signals | None]:
        """How the trainer ended. srun reports the signal that ended one of its processes as 128 + number."""
        code, number = super()._exit_status()
        if self._nodes == 1 or code is None or code - 128 not in set(signal.Signals):
            return code, number
        with contextlib.suppress(OSError):
            # A process that lost its connection to the one that died has recorded that as an error.
            (self.path / ERROR).unlink()
        return None, signal.Signals(code - 128)

    def _ask_to_stop(self, who: str) -> None:
        request = Request(
            id=requests.new_id(),
            command="stop",
            who=who,
            attempt=self.attempt,
            time_wall=time.time(),
        )
        try:
            requests.write(self.run, request)
        except OSError as error:
            say(f"{request.id}: {error}")
            if self.handle is not None:
                self.handle.signal(signal.SIGTERM)

    def check_progress(self) -> None:
        """Raise `RunError` if the attempt took no step, because the next one would take none either."""
        beat = read_heartbeat(self.path)
        if beat is None or beat.step <= self._first_step:
            raise RunError("it took no step before its time limit; raise launch.time_limit")

    def _requeues(self, verdict: Verdict) -> bool:
        """Whether the job goes back to the queue: after the time limit's signal, unless a person or Slurm also asked to
        stop."""
        who = {name for name, _ in self.serving.stops}
        return verdict.reason == "stopped" and who == {TIME_LIMIT} and not self.killing


def main(command: TrainerCommand = trainer_command) -> int:
    """Train the run's next attempt. Returns the exit code of the job."""
    if len(sys.argv) != 2:
        print("usage: python -m memconsole.runs.act.in_job RUN_DIRECTORY", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR1, _on_signal)
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = RunDirectory(Path(sys.argv[1]).resolve(strict=True))
    os.umask(0o077)
    os.chdir("/")
    daemon.adopt_descendants()
    try:
        supervisor = _start_attempt(run, command)
    except (RunError, locks.LockHeld, OSError, ValueError) as error:
        say(str(error))
        return 1
    supervisor = watch_to_the_end(supervisor, command)
    try:
        code = _leave(supervisor)
    finally:
        supervisor.close()
    record = run.exit_record(supervisor.attempt)
    if record is None or not record.requeues:
        announce(run)
    return code


def _start_attempt(run: RunDirectory, command: TrainerCommand) -> JobSupervisor:
    """Start a new attempt and return its supervisor. Waits for processes of an earlier start that Slurm has not ended yet.

    Raises `RunError`, `locks.LockHeld` and `OSError`.
    """
    deadline = time.monotonic() + PREVIOUS_START_SECONDS
    while True:
        supervisor = None
        try:
            supervisor = JobSupervisor(run, lock=locks.take(run.supervisor_lock, required=False))
            supervisor.start(command)
            return supervisor
        except (RunError, locks.LockHeld):
            if supervisor is not None:
                supervisor.close()
            if time.monotonic() >= deadline or _signalled or not _still_held(run):
                raise
            time.sleep(1.0)


def _still_held(run: RunDirectory) -> bool:
    """Whether a process of an earlier start still lives."""
    held = locks.held(run.path)
    return held.gang or held.trainer is not None or held.supervisor is not None


def _leave(supervisor: JobSupervisor) -> int:
    """Put the job back into the queue if the run goes on there. Returns the exit code."""
    record = supervisor.run.exit_record(supervisor.attempt)
    if record is None:
        return 1
    if not record.requeues or supervisor.place is None:
        return {"finished": ExitCode.DONE, "stopped": ExitCode.STOPPED}.get(
            record.verdict.reason, 1
        )
    try:
        supervisor.check_progress()
        slurm.requeue(supervisor.run, supervisor.place.id)
    except RunError as error:
        say(str(error))
        words = f"{record.verdict.evidence}; the job was not put back into the queue: {error}"
        verdict = msgspec.structs.replace(record.verdict, evidence=words)
        path = supervisor.path / EXIT
        files.write_struct(path, msgspec.structs.replace(record, verdict=verdict, requeues=False))
        return ExitCode.STOPPED
    # Slurm ends this process; if it returned first, the job would count as ended.
    time.sleep(LEAVING_SECONDS)
    return ExitCode.STOPPED


def _on_signal(number: int, frame: FrameType | None) -> None:
    _signalled.append(TIME_LIMIT if number == signal.SIGUSR1 else ENDING)


if __name__ == "__main__":
    sys.exit(main())
