"""Starts the processes of a run on several devices with torchrun's agent, and waits for them.

The agent restarts nothing: a run's supervisor starts a whole new attempt from the last checkpoint.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from memconsole.plan.machine.processor import process_cpus
from memconsole.runs.act import together
from memconsole.runs.record.failures import failed_process
from memconsole_trainer.backends import MEMBER
from memconsole_trainer.stopping import pass_on

RENDEZVOUS_SECONDS = 900
"""How long the first node waits for the others."""
STARTED_SECONDS = 2
"""If two processes die within this many seconds, the first death may have caused the second."""


def launch(count: int, arguments: Sequence[str], folder: Path, stopping: Path) -> int:
    """Run `python ARGUMENTS` in `count` processes until all have ended. Their output goes to files in
    `folder`, that of rank 0 to this process's. On several nodes, each starts its share of them.

    SIGTERM is passed on to all of them. The file `stopping` passes it on to processes that are still
    starting and to those on other nodes. Returns 0, or the exit code of the process that failed first;
    negative if a signal killed it.
    """
    place = together.here()
    own = count // place.nodes
    os.environ[MEMBER] = "1"
    os.environ.update(_settings(own, place.nodes, os.environ))
    redirects = dict.fromkeys(range(0 if place.node else 1, own), Std.ALL)
    several = place.nodes > 1
    config = LaunchConfig(
        min_nodes=place.nodes,
        max_nodes=place.nodes,
        nproc_per_node=own,
        run_id=folder.parent.name if several else uuid.uuid4().hex,
        # Static: rank 0 is on node 0, where the supervisor is.
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=f"{place.address}:{place.port}",
        rdzv_configs={"rank": place.node, "timeout": RENDEZVOUS_SECONDS} if several else {},
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
        signals_to_handle="SIGQUIT",  # the others are handled here
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    pass_on(stopping, watch=several)
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, code = first_of(error.failures)
        failed_process.keep(folder, place.node * own + rank, code)
        return code
    return 0


def first_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Rank on this node and exit code of the failure that caused the others. A process killed by a signal is taken before
    processes that failed because they lost the connection to it."""
    began = min(f.timestamp for f in failures.values())
    early = [(rank, f) for rank, f in failures.items() if f.timestamp <= began + STARTED_SECONDS]
    rank, first = min(early, key=lambda each: (each[1].exitcode >= 0, each[1].timestamp))
    return rank, first.exitcode


def _settings(own: int, nodes: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that the processes need, unless the user set them."""
    wanted = {"OMP_NUM_THREADS": str(max(1, process_cpus() // own))}
    if (
        nodes == 1 and Path("/sys/class/net/lo").exists()
    ):  # the name of this host may lead to no address
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in inherited}
