"""How the trainers on several nodes of a job find one another."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NODES = "MEMCONSOLE_NODES"


@dataclass(frozen=True)
class Meeting:
    """The nodes of an attempt, as a process on one of them sees them."""

    nodes: int = 1
    node: int = 0
    """The number of this node. Node 0 has the supervisor."""
    address: str = "localhost"
    port: int = 0
    """The port of node 0 at which the processes meet; 0: any free one."""


def meeting(nodes: int, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that give every node the rendezvous: this node, at a free port.

    A user whose nodes do not find each other by their names sets MASTER_ADDR.
    """
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = inherited.get("MASTER_ADDR") or socket.gethostname()
    return {NODES: str(nodes), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def here(environment: Mapping[str, str] = os.environ) -> Meeting:
    """The rendezvous that `meeting` has put into `environment`, with this node's number from srun."""
    nodes = int(environment.get(NODES, "1"))
    if nodes == 1:
        return Meeting()
    return Meeting(
        nodes,
        int(environment["SLURM_NODEID"]),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
    )


def on_every_node(
    nodes: int, argv: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """The command that runs `argv` once on every node of this job, and ends all if one fails."""
    cores = environment.get("SLURM_CPUS_PER_TASK")
    return [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--kill-on-bad-exit=1", "--input=none"),
        *([f"--cpus-per-task={cores}"] if cores else []),
        *argv,
    ]
