"""Starts the processes of a run on several devices with torchrun's agent, and waits for them.

The agent restarts nothing: a run's supervisor starts a whole new attempt from the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from memconsole_trainer.backends import MEMBER

STARTED_SECONDS = 2
"""How far apart deaths are of which one may have caused the other."""


def launch(count: int, arguments: Sequence[str], folder: Path, stopping: Path) -> int:
    """Run `python ARGUMENTS` in `count` processes until all have ended. Their output goes to files in
    `folder`, that of rank 0 to this process's.

    SIGTERM is passed on to all of them, and `stopping` tells those that are still starting. Returns
    0, or the exit code of the process that failed first; negative if a signal killed it.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.touch(mode=0o600)
        for child in psutil.Process().children():
            child.terminate()

    os.environ[MEMBER] = "1"
    os.environ.update(_settings(count, os.environ))
    redirects = dict.fromkeys(range(1, count), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
        signals_to_handle="SIGQUIT",  # the others are handled here
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return first_of(error.failures)
    return 0


def first_of(failures: Mapping[int, ProcessFailure]) -> int:
    """The exit code of the failure that the others followed from. A process that a signal killed
    comes before those that lost touch with it."""
    began = min(f.timestamp for f in failures.values())
    early = [f for f in failures.values() if f.timestamp <= began + STARTED_SECONDS]
    return min(early, key=lambda f: (f.exitcode >= 0, f.timestamp)).exitcode


def _settings(count: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that the processes need, unless the user set them."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // count))}
    if Path("/sys/class/net/lo").exists():  # the name of this host may lead to no address
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in inherited}
