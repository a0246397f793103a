"""The processes of a JAX run on several nodes, and how they communicate."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.processes import processes
from memconsole.runs.act.environment import ATTEMPT
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.records import ERROR
from memconsole_trainer.backends import MEMBER
from memconsole_trainer.gang import Alone

MEETING_SECONDS = 900
"""How long the processes wait for one another at the start."""
HEARTBEAT_SECONDS = 60
"""Seconds of silence of one process after which JAX ends all processes: it hangs, or its node is gone."""
LEAVING_SECONDS = 60
SLICE_SECONDS = 1.0
"""How long a process waits for a message before it looks whether another one has failed."""
_FOLDER = "memconsole/"


class LostTouchError(RuntimeError):
    """Another process of the run has failed. That process recorded why."""


class MeetingError(RuntimeError):
    """The processes of the run do not find each other."""


class Processes:
    """Implements `Gang` by messages through JAX's coordination service, which is in process 0. No
    message waits for a device.

    Each round, process 0 hears all others and answers all of them at once.
    """

    exchange_seconds = None
    """Unknown: one compiled program computes and exchanges."""

    def __init__(self, error: Path | None = None) -> None:
        """`error` is the file in which a process that fails says why."""
        self.rank, self.size = jax.process_index(), jax.process_count()
        self._error = error
        self._client: Any = distributed.global_state.client
        self._round = 0

    def most(self, *numbers: int) -> tuple[int, ...]:
        said = " ".join(map(str, map(int, numbers)))
        if self.rank:
            return _numbers(self._exchange(said))
        heard = [_numbers(said), *map(_numbers, self._hear())]
        found = tuple(max(each) for each in zip(*heard, strict=True))
        self._answer(" ".join(map(str, found)))
        return found

    def tell(self, text: str = "") -> str:
        if self.rank:
            return self._exchange("")
        self._hear()
        self._answer(text)
        return text

    def _exchange(self, said: str) -> str:
        self._round += 1
        self._client.key_value_set(f"{_FOLDER}{self._round}/{self.rank}", said + ".")
        return self._wait(f"{_FOLDER}{self._round}")

    def _hear(self) -> list[str]:
        """The messages of all other processes. A process that sends one has read the answer of the last round."""
        self._round += 1
        names = [f"{_FOLDER}{self._round}/{rank}" for rank in range(1, self.size)]
        found = [self._wait(name) for name in names]
        for name in (*names, f"{_FOLDER}{self._round - 1}"):
            self._client.key_value_delete(name)
        return found

    def _answer(self, text: str) -> None:
        self._client.key_value_set(f"{_FOLDER}{self._round}", text + ".")

    def _wait(self, name: str) -> str:
        """A message. It ends with a period, because the service stores no empty one. Raises
        `LostTouchError`."""
        while True:
            try:
                text: str = self._client.blocking_key_value_get(name, int(1000 * SLICE_SECONDS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise LostTouchError("another process of this run has failed") from error
                if self._error is not None and self._error.exists():
                    raise LostTouchError("another process of this run has failed") from None
            else:
                return text[:-1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def join(plan: Plan, run_directory: Path | None = None) -> Processes | Alone:
    """Join the other processes of a run. Returns at once if the run has one process. Call it before JAX opens
    its devices.

    Raises `PlanError` if this process was not started with the others, and `MeetingError` if it does not
    find them.
    """
    count = processes(plan)
    if count == 1:
        return Alone()
    if not os.environ.get(MEMBER):
        raise PlanError(
            f"launch.devices_per_node = {plan.launch.devices_per_node}: this process trains alone",
            "launch.devices_per_node",
        )
    if distributed.global_state.client is None:
        _meet(plan, count)
    error = None
    if run_directory is not None and os.environ.get(ATTEMPT):
        error = RunDirectory(run_directory).attempt_path(int(os.environ[ATTEMPT])) / ERROR
    return Processes(error)


def _meet(plan: Plan, count: int) -> None:
    address = os.environ["MEMCONSOLE_MEETING"]
    if plan.device.name == "cpu":
        _check_own_name()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would handle SIGTERM, which asks a run to stop.
    jax.config.update("jax_enable_preemption_service", False)
    alone = os.environ.get("MEMCONSOLE_OWN_NODE") == "0"
    rank = int(os.environ["RANK"])
    if rank:
        _reach(address)
    try:
        jax.distributed.initialize(
            address,
            count,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=MEETING_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=LEAVING_SECONDS,
            # Processes of one machine: no other one should reach the port.
            coordinator_bind_address=address if alone else None,
        )
    except RuntimeError as error:
        raise MeetingError(
            f"the {count} processes of this run do not meet at {address}: {str(error).splitlines()[0]}"
        ) from error


def _reach(address: str) -> None:
    """Wait until the first process listens. Raises `MeetingError` if it does not; JAX would abort this process
    instead of raising an error."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise MeetingError(
                    f"the first process of this run is not reached at {address} within {MEETING_SECONDS} s: "
                    f"{error.strerror or error}; MASTER_ADDR names the address of the first node"
                ) from None
            time.sleep(0.2)
        else:
            return


def _check_own_name() -> None:
    """gloo connects processes by the names of their machines. Raises `PlanError`."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise PlanError(
            f"this machine's name, {name}, leads to no address, and JAX's processes find each other by it: "
            "add it to /etc/hosts",
            "device.count",
        ) from None
