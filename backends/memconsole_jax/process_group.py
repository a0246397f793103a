"""The process group of a JAX run on several nodes."""

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
from memconsole_trainer.process_group import SingleProcess

RENDEZVOUS_SECONDS = 900
"""How long the processes wait for one another at the start."""
HEARTBEAT_SECONDS = 60
"""Seconds without a heartbeat of one process after which JAX ends all processes: it hangs, or its node is gone."""
SHUTDOWN_SECONDS = 60
POLL_SECONDS = 1.0
"""How long a process waits for a message before it looks whether another one has failed."""
_FOLDER = "memconsole/"
"""Prefix of the keys in the coordination service."""


class PeerFailedError(RuntimeError):
    """Another process of the run has failed. That process recorded why."""


class RendezvousError(RuntimeError):
    """The processes of the run do not find each other."""


class JaxProcessGroup:
    """Implements `ProcessGroup` with the key-value store of JAX's coordination service, which runs in process 0. No
    message waits for a device.

    In each round the others send to rank 0, and rank 0 replies to all of them at once.
    """

    exchange_seconds = None
    """Unknown: one compiled program computes and exchanges."""

    def __init__(self, error: Path | None = None) -> None:
        """`error` is the file in which a process that fails says why."""
        self.rank, self.size = jax.process_index(), jax.process_count()
        self._error = error
        self._client: Any = distributed.global_state.client
        self._round = 0

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        own = " ".join(map(str, map(int, numbers)))
        if self.rank:
            return _numbers(self._send(own))
        of_each_rank = [_numbers(own), *map(_numbers, self._receive())]
        largest = tuple(max(each) for each in zip(*of_each_rank, strict=True))
        self._reply(" ".join(map(str, largest)))
        return largest

    def broadcast(self, text: str = "") -> str:
        if self.rank:
            return self._send("")
        self._receive()
        self._reply(text)
        return text

    def _send(self, message: str) -> str:
        """Send a message to rank 0, and return its reply."""
        self._round += 1
        self._set(f"{_FOLDER}{self._round}/{self.rank}", message)
        return self._wait_for(f"{_FOLDER}{self._round}")

    def _receive(self) -> list[str]:
        """The messages of all other ranks. A rank that sends one has read the reply of the last round."""
        self._round += 1
        keys = [f"{_FOLDER}{self._round}/{rank}" for rank in range(1, self.size)]
        messages = [self._wait_for(key) for key in keys]
        for key in (*keys, f"{_FOLDER}{self._round - 1}"):
            self._client.key_value_delete(key)
        return messages

    def _reply(self, message: str) -> None:
        self._set(f"{_FOLDER}{self._round}", message)

    def _set(self, key: str, message: str) -> None:
        # With a period at the end, because the service stores no empty values.
        self._client.key_value_set(key, message + ".")

    def _wait_for(self, key: str) -> str:
        """The message of `key`. Raises `PeerFailedError`."""
        while True:
            try:
                message: str = self._client.blocking_key_value_get(key, int(1000 * POLL_SECONDS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerFailedError("another process of this run has failed") from error
                if self._error is not None and self._error.exists():
                    raise PeerFailedError("another process of this run has failed") from None
            else:
                return message[:-1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def join(plan: Plan, run_directory: Path | None = None) -> JaxProcessGroup | SingleProcess:
    """Join the other processes of a run. Returns at once if the run has one process. Call it before JAX opens
    its devices.

    Raises `PlanError` if this process was not started with the others, and `RendezvousError` if it does not
    find them.
    """
    count = processes(plan)
    if count == 1:
        return SingleProcess()
    if not os.environ.get(MEMBER):
        raise PlanError(
            f"launch.devices_per_node = {plan.launch.devices_per_node}: this process trains alone",
            "launch.devices_per_node",
        )
    if distributed.global_state.client is None:
        _initialize(plan, count)
    error = None
    if run_directory is not None and os.environ.get(ATTEMPT):
        error = RunDirectory(run_directory).attempt_path(int(os.environ[ATTEMPT])) / ERROR
    return JaxProcessGroup(error)


def _initialize(plan: Plan, count: int) -> None:
    """Connect this process to the coordination service. Raises `PlanError` and `RendezvousError`."""
    address = os.environ["MEMCONSOLE_COORDINATOR"]
    if plan.device.name == "cpu":
        _check_host_name()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would handle SIGTERM, which asks a run to stop.
    jax.config.update("jax_enable_preemption_service", False)
    one_machine = os.environ.get("MEMCONSOLE_OWN_NODE") == "0"
    rank = int(os.environ["RANK"])
    if rank:
        _wait_for_coordinator(address)
    try:
        jax.distributed.initialize(
            address,
            count,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=RENDEZVOUS_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            # If all processes are on one machine, no other one should reach the port.
            coordinator_bind_address=address if one_machine else None,
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"the {count} processes of this run do not meet at {address}: {str(error).splitlines()[0]}"
        ) from error


def _wait_for_coordinator(address: str) -> None:
    """Wait until the first process listens. Raises `RendezvousError` if it does not; JAX would abort this process
    instead of raising an error."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"the first process of this run is not reached at {address} within {RENDEZVOUS_SECONDS} s: "
                    f"{error.strerror or error}; MASTER_ADDR names the address of the first node"
                ) from None
            time.sleep(0.2)
        else:
            return


def _check_host_name() -> None:
    """Raise `PlanError` unless the name of this machine has an address: gloo connects processes by these names."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise PlanError(
            f"this machine's name, {name}, leads to no address, and JAX's processes find each other by it: "
            "add it to /etc/hosts",
            "device.count",
        ) from None
