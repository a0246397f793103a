"""A regressor has as many features and outputs as its data file, whose shapes are read without h5py."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.memory.answers.receipts import setup_of
from memconsole.memory.estimate import model_of
from memconsole.plan import catalog
from memconsole.plan.catalog.hdf5_shapes import damage, dataset_shapes
from memconsole.plan.catalog.windows import DATASETS, window_sizes
from memconsole.plan.check import check
from memconsole.plan.data.rows import training_rows
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.inspect import inspect

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
    assert dataset_shapes(path, DATASETS) == (None if dense else SHAPES)
    assert damage(path) is None


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
        assert set(dataset_shapes(path, DATASETS) or ()) <= set(DATASETS)
        damage(path)


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
    ("changes", "problem"),
    [
        ({"input_sequences": (20, 7)}, "input_sequences has shape (20, 7); expected (windows, st"),
        ({"controls": (20,)}, "controls has shape (20,); expected (windows, outputs)"),
        (
            {"controls": (20, 0), "control_masks": (20, 0)},
            "controls has shape (20, 0); expected (w",
        ),
        ({"controls": (19, 3)}, "controls has 19 rows and input_sequences 20; expected as many"),
        ({"control_masks": (20,)}, "control_masks has shape (20,); expected (20, 3), as controls"),
        ({name: (0, *shape[1:]) for name, shape in SHAPES.items()}, "holds no windows"),
        ({"controls": None}, "lacks controls; expected input_sequences (windows, steps, features)"),
    ],
)
def test_a_file_that_holds_no_windows_to_learn_from_is_refused_before_a_run(
    changes: dict[str, tuple[int, ...] | None], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, shape in {**SHAPES, **changes}.items():
            if shape is not None:
                file[name] = np.zeros(shape)
    assert window_sizes(str(path)) is None
    with pytest.raises(PlanError, match=re.escape(f"{path}: {problem}")):
        check(plan(path))
    assert problem in inspect(plan(path)).problem


@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("left", [20, 3000])
def test_a_file_that_was_cut_is_refused_with_what_it_should_hold(
    version: str, left: int, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.h5", libver=version)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    of = f"of {len(whole):,} " if left > 64 else ""
    with pytest.raises(PlanError, match=f"truncated: it has {left:,} {of}bytes"):
        check(plan(path))


def test_rows_of_tokens_are_refused_for_a_regressor(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"] = np.zeros((20, 8), "i4")
    with pytest.raises(PlanError, match="lacks input_sequences and controls; expected "):
        check(plan(tmp_path / "a.h5"))


def test_a_file_that_is_no_hdf5_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_text("state,control\n" * 1000)
    with pytest.raises(PlanError, match=re.escape(f"{path}: not an HDF5 file")):
        check(plan(path))


def test_a_file_that_only_h5py_understands_is_left_to_the_trainer(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "behind-a-block.h5", "w", userblock_size=1024) as file:
        file["controls"] = np.zeros((20, 3))
    with h5py.File(tmp_path / "with-a-link.h5", "w") as file:
        file["elsewhere"] = np.zeros((20, 8, 7))
        file["input_sequences"] = h5py.SoftLink("/elsewhere")
        file["controls"] = np.zeros((20, 3))
    for path in tmp_path.iterdir():
        check(plan(path))
