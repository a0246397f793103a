"""``python -m memconsole_trainer RUN_DIR ATTEMPT``: one attempt of one run."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from memconsole.plan.plan import PlanError
from memconsole.runs.act.attempt import Attempt
from memconsole.runs.record import events
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failure import ExitCode, exit_code_of

if TYPE_CHECKING:
    from memconsole_trainer.loop.setup import Job
    from memconsole_trainer.loop.tensorboard import TensorBoard

_REASONS = {"disk": "disk_full", "device_lost": "crashed"}


def run(attempt: Attempt) -> int:
    """Train, record how the attempt ended, and return the exit code."""
    from memconsole_trainer.data.sources.documents import DataError
    from memconsole_trainer.engine import WeightsError
    from memconsole_trainer.host.memory_limit import lift_limit
    from memconsole_trainer.loop.setup import StopRequestedError, set_up
    from memconsole_trainer.loop.training import NonFiniteLossError, Trainer
    from memconsole_trainer.weights.checkpoint import FencedError

    job = trainer = board = None
    code, reason = ExitCode.DONE, "finished"
    try:
        job = set_up(attempt)
        board = _board(attempt, job) if job.plan.train.tensorboard else None
        trainer = Trainer(attempt, job)
        trainer.train()
    except StopRequestedError:
        code, reason = ExitCode.STOPPED, "stopped"
        step = job.progress.step if job else attempt.step
        attempt.emit(events.Stopped(step=step, reason="stop requested"), durable=True)
        print(f"Stopped at step {step:,}; resumable", flush=True)
    except FencedError as error:
        code, reason = ExitCode.FENCED, "fenced"
        print(f"memconsole: {error}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 (reported as an event and in the log)
        lift_limit()
        cause = attempt.report(error)
        code, reason = exit_code_of(cause), _REASONS.get(cause, cause)
        if isinstance(error, PlanError | DataError | WeightsError | NonFiniteLossError):
            print(f"memconsole: {error}", file=sys.stderr, flush=True)
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
    return int(code)


def _board(attempt: Attempt, job: Job) -> TensorBoard:
    """Open the attempt's TensorBoard file and subscribe it to the attempt's events."""
    from memconsole_trainer.loop.tensorboard import FOLDER, TensorBoard

    folder = attempt.run.path / FOLDER
    board = TensorBoard(folder, attempt.number, job.progress.step + 1, time.time())
    attempt.listeners.append(board.see)
    print(f"  TensorBoard: tensorboard --logdir {folder}", flush=True)
    return board


def main() -> int:
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        print("usage: python -m memconsole_trainer RUN_DIR ATTEMPT", file=sys.stderr)
        return 2
    with Attempt(RunDirectory(Path(sys.argv[1])), int(sys.argv[2])) as attempt:
        return run(attempt)


if __name__ == "__main__":
    sys.exit(main())
