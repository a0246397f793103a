"""``python -m memconsole_trainer RUN_DIR ATTEMPT``: one attempt of one run.

If the plan trains in several processes, this process starts them, each with the same command, and waits
for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from memconsole.plan.plan import PlanError
from memconsole.plan.processes import processes
from memconsole.plan.tasks import task_of
from memconsole.runs.act import together
from memconsole.runs.act.trainer.attempt import STOPPING, Attempt
from memconsole.runs.act.trainer.member import Member
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures.failure import ExitCode, failure_of, words_of
from memconsole.runs.record.log import events
from memconsole.runs.record.records import ERROR, FINAL, ErrorRecord, FinalRecord
from memconsole_trainer.backends import Launch, launcher, rank

if TYPE_CHECKING:
    from memconsole_trainer.loop.setup import Job
    from memconsole_trainer.loop.tensorboard import TensorBoard


def run(attempt: Attempt) -> int:
    """Train, record how the attempt ended, and return the exit code."""
    from memconsole_trainer.data.sources.documents import DataError
    from memconsole_trainer.engine import WeightsError
    from memconsole_trainer.host.memory_limit import lift_limit
    from memconsole_trainer.loop.announcing import StopRequestedError
    from memconsole_trainer.loop.setup import set_up
    from memconsole_trainer.loop.training import NonFiniteLossError, Trainer
    from memconsole_trainer.process_group import OtherProcessError
    from memconsole_trainer.weights.checkpoint import FencedError

    job = trainer = board = None
    code, reason = ExitCode.DONE, "finished"
    try:
        job = set_up(attempt)
        board = _board(attempt, job) if job.plan.train.tensorboard and not attempt.rank else None
        trainer = Trainer(attempt, job)
        trainer.train()
    except StopRequestedError:
        code, reason = ExitCode.STOPPED, "stopped"
        step = job.progress.step if job else attempt.step
        minutes = job.progress.elapsed_seconds / 60 if job else None
        said = events.Stopped(step=step, reason="stop requested", total_minutes=minutes)
        attempt.emit(said, durable=True)
        print(f"Stopped at step {step:,}; resumable", flush=True)
    except OtherProcessError as error:
        code, reason = ExitCode.FAILED, "crashed"
        print(f"memconsole: {error}", file=sys.stderr, flush=True)
    except FencedError as error:
        code, reason = ExitCode.FENCED, "fenced"
        print(f"memconsole: {error}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 (reported as an event and in the log)
        lift_limit()
        if attempt.shared and attempt.asked and trainer is None:
            # The other processes were asked to stop, too, and have left.
            attempt.finish(ExitCode.STOPPED, attempt.step, "stopped", attempt.checkpoint)
            return 0
        failure = failure_of(attempt.report(error))
        code, reason = failure.code, failure.reason
        known = isinstance(error, PlanError | DataError | WeightsError | NonFiniteLossError)
        if known or words_of(error) != str(error):
            print(f"memconsole: {words_of(error)}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
    finally:
        lift_limit()
        if job is not None:
            job.stream.close()
        if board is not None:
            board.close()
    saved = trainer.saver.last if trainer else attempt.checkpoint
    step = job.progress.step if job else attempt.step
    attempt.finish(code, step, reason, str(saved) if saved else None)
    # The agent that started several processes must not count a process that stopped on request as failed.
    return 0 if attempt.shared and code == ExitCode.STOPPED else int(code)


def run_together(run: RunDirectory, number: int, count: int, launch: Launch) -> int:
    """Run an attempt in `count` processes. Returns its exit code; dies of the signal that ended one
    of them."""
    path = run.attempt_path(number)
    arguments = ["-P", "-m", "memconsole_trainer", str(run.path), str(number)]
    failed = launch(count, arguments, path / "processes", path / STOPPING)
    if failed < 0:
        with contextlib.suppress(OSError):
            (path / ERROR).unlink()  # written after the other one died
        _die_of(-failed)
    if not failed and together.here().node:
        return 0  # the first node records how the run ended
    final = files.read_struct(path / FINAL, FinalRecord)
    error = files.read_struct(path / ERROR, ErrorRecord)
    if failed and error is not None and (final is None or final.exit_code != ExitCode.STOPPED):
        return int(failure_of(error.cause).code)
    return failed if final is None else final.exit_code


def _die_of(number: int) -> None:
    """End this process by a signal, without a core file."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


def _leave(code: int) -> None:
    """End this process at once: libraries would wait for the others, which have not failed yet."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _launcher(run: RunDirectory) -> tuple[int, Launch] | None:
    """How many processes an attempt of the run needs and what starts them; None for one.

    None also for a plan that cannot be used: the attempt says why.
    """
    try:
        plan = run.read_plan()
        count = processes(plan)
        found = launcher(plan.backend) if count > 1 else None
    except PlanError:
        return None
    return (count, found) if found is not None else None


def _board(attempt: Attempt, job: Job) -> TensorBoard:
    """Open the attempt's TensorBoard file and subscribe it to the attempt's events."""
    from memconsole_trainer.loop.tensorboard import FOLDER, TensorBoard

    folder = attempt.run.path / FOLDER
    units = task_of(job.plan).units
    board = TensorBoard(folder, attempt.number, job.progress.step + 1, time.time(), units)
    attempt.listeners.append(board.see)
    print(f"  TensorBoard: tensorboard --logdir {folder}", flush=True)
    return board


def main() -> int:
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        print("usage: python -m memconsole_trainer RUN_DIR ATTEMPT", file=sys.stderr)
        return 2
    directory, number, place = RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), rank()
    several = _launcher(directory) if place is None else None
    if several is not None:
        return run_together(directory, number, *several)
    made = Member(directory, number, place) if place else Attempt(directory, number)
    made.shared = place is not None
    with made as attempt:
        code = run(attempt)
    if made.shared and code:
        _leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
