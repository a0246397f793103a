"""A regressor has as many features and outputs as its data file, whose shapes are read without h5py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.memory.answers.receipts import setup_of
from memconsole.memory.estimate import model_of
from memconsole.plan import catalog
from memconsole.plan.catalog.hdf5_shapes import dataset_shapes
from memconsole.plan.catalog.windows import DATASETS, window_sizes
from memconsole.plan.check import check
from memconsole.plan.data.rows import training_rows
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, PlanError, replace

SHAPES = {"input_sequences": (20, 8, 7), "controls": (20, 3), "control_masks": (20, 3)}


def written(path: Path, others: int = 0, **options: Any) -> Path:
    """A file of windows, with other datasets beside them."""
    with h5py.File(path, "w", **options) as file:
        for number in range(others):
            file[f"other{number}"] = np.zeros(number)
        for name, shape in SHAPES.items():
            file.create_dataset(name, shape, "f4", maxshape=(None, *shape[1:]), compression="gzip")
            for number in range(20):  # the header goes on elsewhere
                file[name].attrs[f"note {number}"] = "x" * 100
        file.create_group("normalization/plant").attrs["dt"] = 0.02
    return path


def plan(source: object, **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(catalog.preset("lqr"), {"data.source": str(source), **settings})


def own_widths(made: Plan) -> tuple[int, int]:
    model = catalog.model(made)
    assert isinstance(model, Regressor)
    assert model == model_of(made)
    return model.features, model.outputs


@pytest.mark.parametrize("others", [0, 4, 100])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("version", ["earliest", "v108", "latest"])
def test_shapes_are_read_as_h5py_reads_them(
    version: str, ordered: bool, others: int, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.h5", others, libver=version, track_order=ordered)
    dense = others == 100 and (ordered or version != "earliest")
    assert dataset_shapes(path, DATASETS) == ({} if dense else SHAPES)


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_a_damaged_file_has_no_shapes_or_some_and_raises_nothing(
    version: str, tmp_path: Path
) -> None:
    whole = written(tmp_path / "a.h5", 3, libver=version).read_bytes()
    draw, path = random.Random(0), tmp_path / "b.h5"
    for _ in range(300):
        spoiled = bytearray(whole[: draw.choice((len(whole), draw.randrange(len(whole))))])
        for _ in range(draw.randrange(20)):
            if spoiled:
                spoiled[draw.randrange(min(len(spoiled), 4096))] = draw.randrange(256)
        path.write_bytes(spoiled)
        assert set(dataset_shapes(path, DATASETS)) <= set(DATASETS)


def test_a_regressor_has_the_widths_of_its_data(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5")
    assert own_widths(plan(path)) == (7, 3)
    assert own_widths(plan(path, model__outputs=5)) == (7, 5)
    assert own_widths(plan(tmp_path / "missing.h5")) == (19, 6)
    assert catalog.with_sizes(plan(path)).model.features == 7
    assert setup_of(plan(path)) == setup_of(catalog.with_sizes(plan(path)))
    chosen = catalog.choose(catalog.with_sizes(plan(path)), "data.source", "lqr")
    assert own_widths(chosen) == (19, 6)
    (tmp_path / "a.h5").write_bytes(b"windows")
    assert own_widths(plan(path)) == (19, 6)


def test_the_rows_of_a_compressed_file_are_known_before_a_run(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5")
    wanted = plan(path, data__validation_fraction=0.25)
    assert training_rows(wanted, model_of(wanted)) == 15
    few = plan(path, data__validation_fraction=0.25, data__max_examples=8)
    assert training_rows(few, model_of(few)) == 6


def test_rows_longer_than_the_windows_of_the_file_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5")
    check(plan(path, data__sequence_length=8))
    with pytest.raises(
        PlanError, match=f"= 9: the windows of {path} hold 8 steps; expected at most 8"
    ):
        check(plan(path, data__sequence_length=9))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("input_sequences", (20, 7)),
        ("controls", (20, 4)),
        ("control_masks", (20,)),
        ("controls", (20, 0)),
    ],
)
def test_windows_that_do_not_fit_their_outputs_have_no_widths(
    name: str, shape: Sequence[int], tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for each, own in {**SHAPES, name: shape}.items():
            file[each] = np.zeros(own)
    assert window_sizes(str(tmp_path / "a.h5")) is None
