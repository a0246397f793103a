"""Starts the processes of a run on several nodes, and waits for them.

It restarts nothing: a run's supervisor starts a whole new attempt from the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from memconsole.runs.act import together
from memconsole.runs.record.failures import failed_process
from memconsole_trainer.backends import MEMBER
from memconsole_trainer.stopping import pass_on

POLL_SECONDS = 0.1
GRACE_SECONDS = 15.0
"""How long the other processes may take to end after one has failed, before they are killed."""


def launch(count: int, arguments: Sequence[str], folder: Path, stopping: Path) -> int:
    """Run `python ARGUMENTS` in `count` processes until all have ended. Their output goes to files in
    `folder`, that of rank 0 to this process's. On several nodes, each starts one of them.

    SIGTERM is passed on to all of them. The file `stopping` passes it on to processes that are still
    starting and to those on other nodes. Returns 0, or the exit code of the process that failed first;
    negative if a signal killed it.
    """
    place = together.here()
    several = place.nodes > 1
    ranks = [place.node] if several else range(count)
    address = f"{place.address}:{place.port}" if several else f"127.0.0.1:{_free_port()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    pass_on(stopping, watch=several)
    running = {
        rank: _start(arguments, environment_of(rank, count, address, own=several), folder)
        for rank in ranks
    }
    rank, code = _wait(running)
    failed_process.keep(folder, rank, code)
    return code


def environment_of(rank: int, count: int, address: str, *, own: bool) -> dict[str, str]:
    """The environment variables that give a process its rank. `own`: it has a machine of its own."""
    return {
        MEMBER: "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MEMCONSOLE_COORDINATOR": address,
        "MEMCONSOLE_OWN_NODE": str(int(own)),
    }


def _start(
    arguments: Sequence[str], variables: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start the process with these environment variables."""
    rank = variables["RANK"]
    if rank == "0":
        return subprocess.Popen([sys.executable, *arguments], env=os.environ | variables)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    output = os.open(folder / f"{rank}.log", flags, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | variables,
            stdout=output,
            stderr=output,
        )
    finally:
        os.close(output)


def _wait(running: dict[int, subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait until all have ended. Once one has failed, the others must end soon. Returns rank and exit code of the one that
    failed first, or zeros."""
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while running:
        ended = {rank: p.returncode for rank, p in running.items() if p.poll() is not None}
        running = {rank: p for rank, p in running.items() if rank not in ended}
        codes = {rank: code for rank, code in ended.items() if code}
        if codes and failed is None:
            failed = first_of(codes)
            # Only after a process failed with an error of its own is there something for the others to report.
            deadline = time.monotonic() + (GRACE_SECONDS if failed[1] > 0 else 0)
        if time.monotonic() >= deadline:
            for process in running.values():
                process.kill()
        if running:
            time.sleep(POLL_SECONDS)
    return failed or (0, 0)


def first_of(codes: Mapping[int, int]) -> tuple[int, int]:
    """Rank and exit code of the process that failed first, if several ended at almost the same time. JAX aborts a process
    that loses the connection to another one; such an exit code is only a consequence."""
    return min(codes.items(), key=lambda each: (each[1] == -signal.SIGABRT, each[1] > 0))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
