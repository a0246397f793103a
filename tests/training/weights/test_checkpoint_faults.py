"""A checkpoint survives a kill at any moment of a save, and a disk that cannot be read for a moment."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memconsole import regular_file
from memconsole.regular_file import open_descriptor
from memconsole.runs.record.checkpoints import manifest
from memconsole_trainer.weights.checkpoint import Checkpoints

KILLED = 9
OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "rmdir", "unlink")


def save(checkpoints: Checkpoints, step: int, value: float) -> None:
    def tensors() -> Iterator[tuple[str, NDArray[np.generic]]]:
        yield "model.a", np.full(3, value, dtype=np.float32)
        yield "optimizer.m", np.full(3, value, dtype=np.float32)

    state = {"validation_loss": value}
    checkpoints.save(step, tensors(), state, lambda: True, lambda size: None)
    checkpoints.retain()


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Do `work` in a child that dies before its file operation of this number; whether it died."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    left = [number]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(KILLED)
            return real(*arguments, **named)

        return operation

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    work()
    os._exit(0)


@pytest.mark.parametrize("steps", [(2, 2), (2, 4)], ids=["the same step again", "the next step"])
def test_a_kill_at_any_file_operation_of_a_save_leaves_one_of_the_two(
    steps: tuple[int, int], tmp_path: Path
) -> None:
    first, second = steps
    number, died, found = 0, True, set()
    while died:
        folder = tmp_path / str(number)
        checkpoints = Checkpoints(folder, 1)
        save(checkpoints, first, 1.0)
        died = killed_at(number, lambda checkpoints=checkpoints: save(checkpoints, second, 0.5))
        checkpoints.sweep()
        stored = checkpoints.newest(pytest.fail, lambda: None)
        assert stored is not None, f"nothing is left after a kill before operation {number}"
        value = float(stored.tensor("model.a")[0])
        assert (stored.step, value) in {(first, 1.0), (second, 0.5)}
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        found.add(value)
        shutil.rmtree(folder)
        number += 1
    assert number > 20
    assert found == {1.0, 0.5}


class Flaky:
    """Files that cannot be read the next few times."""

    def __init__(self) -> None:
        self.left = 0

    def open(self, path: Path, *, follow: bool = True) -> int:
        if self.left:
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_descriptor(path, follow=follow)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    """Makes reads of a checkpoint's files fail."""
    found = Flaky()
    monkeypatch.setattr(manifest, "READ_AGAIN_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(regular_file, "open_descriptor", found.open)
    return found


def test_a_read_error_that_passes_costs_nothing(flaky: Flaky, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2):
        save(checkpoints, step, 1.0)
    flaky.left = 3
    stored = checkpoints.newest(pytest.fail, lambda: None)
    assert stored is not None
    assert stored.step == 2
    assert not flaky.left


def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_kept(
    flaky: Flaky, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2):
        save(checkpoints, step, 1.0)
    flaky.left = 4
    said: list[str] = []
    stored = checkpoints.newest(said.append, lambda: None)
    assert stored is not None
    assert stored.step == 1
    assert said == [
        "step-000000002 cannot be read (Input/output error); using the checkpoint before it"
    ]
    assert not flaky.left
    again = checkpoints.newest(pytest.fail, lambda: None)
    assert again is not None
    assert again.step == 2
