"""Forks real trainers from a process that has imported a framework, and kills each at a given moment.

``python -P warm_trainer.py BACKEND`` reads one line of JSON per attempt and answers it with the exit
status. A forked trainer needs no seconds of importing; everything after that is its own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

_NAMES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.symlink"}
_DELETIONS = {"os.rmdir", "os.remove"}
_WRITING = os.O_WRONLY | os.O_RDWR


_FRAMEWORKS = {
    "torch": ("memconsole_torch.engine", "torch._inductor"),
    "jax": ("memconsole_jax.engine",),
}
_IMPORTED = ("grain", "tokenizers", "psutil", "memconsole_trainer.loop.training")


class Death(msgspec.Struct, frozen=True):
    """When a trainer is killed."""

    way: str
    """Counted in: `seconds` from its start, `steps` trained, `bytes` written to files, `operations` on
    files (opened for writing, written, synced, renamed, deleted), `deletions`, `saves`."""
    after: float
    """How many of these it survives."""
    within: int = 0
    """Of a save: how many operations of it are done."""


class Order(msgspec.Struct, frozen=True):
    """One attempt to train."""

    run: str
    attempt: int
    death: Death | None


class Fate:
    """Counts what its process does, and kills it when its death has come."""

    def __init__(self, death: Death) -> None:
        self._way, self._left, self._within = death.way, death.after, death.within

    def count(self, way: str, amount: float = 1) -> None:
        """Die before this, if enough was done."""
        if way != self._way:
            return
        if self._left >= amount:
            self._left -= amount
        elif way == "saves":
            self._way, self._left = "operations", self._within
        else:
            die()

    def install(self) -> None:
        """Count from here on."""
        from memconsole.runs.act.trainer.attempt import Attempt
        from memconsole_trainer.weights.checkpoint import Checkpoints

        self._before(Attempt, "progress", self._progress)
        self._before(Checkpoints, "save", lambda *_: self.count("saves"))
        for name in ("fsync", "fdatasync", "ftruncate", "pwrite"):
            self._before(os, name, lambda *_: self.count("operations"))
        self._write = os.write
        os.write = self._written
        sys.addaudithook(self._heard)
        self._step: int | None = None

    def _before(self, place: Any, name: str, what: Callable[..., None]) -> None:
        real = getattr(place, name)

        def replaced(*arguments: Any, **named: Any) -> Any:
            what(*arguments)
            return real(*arguments, **named)

        setattr(place, name, replaced)

    def _progress(self, attempt: Any, phase: str, step: int, *_: Any) -> None:
        if phase == "train" and step != self._step:
            if self._step is not None:
                self.count("steps")
            self._step = step

    def _written(self, descriptor: int, data: Any) -> int:
        self.count("operations")
        if self._way == "bytes" and len(data) > self._left:
            self._write(descriptor, memoryview(data)[: int(self._left)])
        self.count("bytes", len(data))
        return self._write(descriptor, data)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & _WRITING:
                self.count("operations")
        elif event in _NAMES:
            self.count("operations")
            if event in _DELETIONS:
                self.count("deletions")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def train(order: Order) -> NoReturn:
    """Be the trainer of one attempt."""
    from memconsole_trainer.__main__ import main

    output = Path(order.run) / f"attempts/{order.attempt:04d}/out.log"
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    if order.death is not None and order.death.way != "seconds":
        Fate(order.death).install()
    sys.argv = ["memconsole_trainer", order.run, str(order.attempt)]
    code = 1
    try:
        code = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, death: Death | None) -> int:
    """The exit status of a trainer; minus the signal that ended it."""
    if death is not None and death.way == "seconds":
        end = time.monotonic() + death.after
        while time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for name in (*_FRAMEWORKS[sys.argv[1]], *_IMPORTED):
        importlib.import_module(name)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        child = os.fork()
        if not child:
            train(order)
        print(json.dumps(wait(child, order.death)), flush=True)


if __name__ == "__main__":
    main()
