"""An HDF5 file is read as that file alone: what lies in other files is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.plan.plan import DataChoice
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.hdf5 import TokenRows, describe
from memconsole_trainer.data.sources.opening import open_path
from memconsole_trainer.data.windows.file import WindowFile

SHAPE = (4, 8)


def stored_outside(file: Any, other: Path) -> None:
    file.create_dataset("tokens", SHAPE, "u1", external=[(str(other), 0, 32)])


def linked(file: Any, other: Path) -> None:
    file["tokens"] = h5py.ExternalLink(str(other), "tokens")


def linked_below(file: Any, other: Path) -> None:
    file["group/tokens"] = h5py.ExternalLink(str(other), "tokens")
    file["tokens"] = h5py.SoftLink("/group/tokens")


def made_of_others(file: Any, other: Path) -> None:
    layout = h5py.VirtualLayout(SHAPE, "u1")
    layout[:] = h5py.VirtualSource(str(other), "tokens", SHAPE)
    file.create_virtual_dataset("tokens", layout)


@pytest.mark.parametrize("reaches", [stored_outside, linked, linked_below, made_of_others])
def test_data_of_another_file_are_refused_by_both_names(
    reaches: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["tokens"] = np.ones(SHAPE, "u1")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        reaches(file, other)
        file["more"] = np.zeros(SHAPE, "u1")
    for read in (
        lambda path: open_path(path, "tokens", 300, DataChoice()),
        lambda path: open_path(path, "more", 300, DataChoice()),
        lambda path: WindowFile(path, 4, 2, 8, None),
        describe,
    ):
        with pytest.raises(DataError, match="another file") as refused:
            read(tmp_path / "data.h5")
        assert str(tmp_path / "data.h5") in str(refused.value)
        assert str(other) in str(refused.value)
        assert "\n" not in str(refused.value)


def test_links_and_virtual_datasets_within_the_file_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["parts/first"] = np.full(SHAPE, 3, "i4")
        file["parts/again"] = h5py.SoftLink("/parts/first")
        layout = h5py.VirtualLayout(SHAPE, "i4")
        layout[:] = h5py.VirtualSource(file["parts/first"])
        file.create_virtual_dataset("whole", layout)
    found = open_path(tmp_path / "data.h5", "whole", 300, DataChoice())
    assert isinstance(found, TokenRows)
    assert (found.rows(0, 4) == 3).all()
