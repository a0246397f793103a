"""``python -m memconsole_trainer.trackers RUN_DIR wandb|mlflow``: sends a run's figures, detached."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from memconsole.plan.machine.trackers import KINDS, Kind
from memconsole.runs.act.supervise.daemon import detach
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import locks
from memconsole.runs.record.trackers import FOLDER, lock_path
from memconsole_trainer.trackers.forward import AFTER_END_SECONDS, forward
from memconsole_trainer.trackers.tracker import Told, Tracker

NICENESS = 10
"""Training comes first."""
WAIT_SECONDS = 900.0
"""How long the process of an earlier attempt may take to finish."""


def connect(kind: Kind, told: Told) -> Tracker:
    if kind == "wandb":
        from memconsole_trainer.trackers.wandb_tracker import WandbTracker

        return WandbTracker(told)
    from memconsole_trainer.trackers.mlflow_tracker import MlflowTracker

    return MlflowTracker(told)


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[2] not in KINDS:
        print(f"usage: python -m memconsole_trainer.trackers RUN_DIR {'|'.join(KINDS)}")
        return 2
    run, kind = RunDirectory(Path(sys.argv[1])), next(k for k in KINDS if k == sys.argv[2])
    detach(run.path / FOLDER / f"{kind}.log")
    os.nice(NICENESS)
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            lock = locks.take(lock_path(run.path, kind))
            break
        except locks.LockHeld:
            if time.monotonic() > deadline:
                return 1
            time.sleep(1.0)
    threading.Thread(target=end_in_time, args=(run,), daemon=True).start()
    try:
        forward(run, kind, lambda told: connect(kind, told))
    finally:
        lock.release()
    return 0


def end_in_time(run: RunDirectory) -> None:
    """End this process some time after the run: a library may wait for a server that never answers."""
    ended: float | None = None
    while True:
        time.sleep(10.0)
        if liveness(run).live:
            ended = None
        elif ended is None:
            ended = time.monotonic()
        elif time.monotonic() - ended > 2 * AFTER_END_SECONDS:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
