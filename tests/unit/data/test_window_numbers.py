"""The numbers of window files: what the mask leaves out, kinds of numbers, statistics, and the maps that are fitted to them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.plan.catalog.windows import DATASETS, WindowSizes, window_sizes
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.inspect import inspect
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.measuring import measured
from memconsole_trainer.data.windows.split import HELD, TRAIN, UNSEEN, WindowSplit
from memconsole_trainer.data.windows.standardization import Standardization, out_of_scale
from memconsole_trainer.tasks.linear_maps import (
    LinearMaps,
    last_step,
    predicted,
    predicted_of_windows,
)

ROWS, LENGTH, FEATURES, OUTPUTS = 600, 4, 3, 2


def still() -> None: ...


def arrays(**changes: Any) -> dict[str, Any]:
    """Windows whose outputs are a linear map of the last two steps, with a little noise."""
    draw = np.random.default_rng(0)
    windows = draw.normal(size=(ROWS, LENGTH, FEATURES)).astype(np.float32)
    maps = draw.normal(size=(2, FEATURES, OUTPUTS))
    controls = windows[:, -1] @ maps[0] + windows[:, -2] @ maps[1]
    found = {
        "input_sequences": windows,
        "controls": (controls + 0.1 * draw.normal(size=controls.shape)).astype(np.float32),
        "control_masks": np.ones((ROWS, OUTPUTS), np.float32),
        "trajectory_ids": np.arange(ROWS) // 20,
    }
    return {name: values for name, values in (found | changes).items() if values is not None}


def opened(folder: Path, **changes: Any) -> WindowFile:
    path = folder / f"{len(list(folder.iterdir()))}.h5"
    with h5py.File(path, "w") as file:
        for name, values in arrays(**changes).items():
            file[name] = values
        for system in {f"s{n}" for n in range(6)} if "system_ids" in changes else ():
            file[f"normalization/{system}/control_max"] = [1.0, 2.0]
    return WindowFile(path, FEATURES, OUTPUTS, LENGTH, None)


def test_outputs_that_the_mask_leaves_out_may_be_anything(tmp_path: Path) -> None:
    whole = arrays()
    mask = (np.arange(ROWS * OUTPUTS).reshape(ROWS, OUTPUTS) % 3 > 0).astype(np.float32)
    spoiled = np.where(mask == 0, np.nan, whole["controls"])
    found = opened(tmp_path, controls=spoiled, control_masks=mask).read(10, 200)
    np.testing.assert_array_equal(found.targets, (whole["controls"] * mask)[10:200])
    mask[7] = 1
    spoiled[7] = np.nan
    with pytest.raises(
        DataError, match=r"row 7 of controls .* not finite, and control_masks counts"
    ):
        opened(tmp_path, controls=spoiled, control_masks=mask).read(0, 20)
    mask[9] = np.nan
    with pytest.raises(DataError, match="row 9 of control_masks holds a number that is not from 0"):
        opened(tmp_path, control_masks=mask).read(0, 20)


def test_without_a_mask_every_output_counts_and_whole_numbers_are_read(tmp_path: Path) -> None:
    numbers = np.arange(ROWS * LENGTH * FEATURES).reshape(ROWS, LENGTH, FEATURES) - 100
    file = opened(tmp_path, control_masks=None, input_sequences=numbers)
    found = file.read(30, 90)
    assert not file.has_mask
    assert found.mask.all()
    np.testing.assert_array_equal(found.targets, arrays()["controls"][30:90])
    np.testing.assert_array_equal(found.windows, numbers[30:90].astype(np.float32))
    assert window_sizes(str(file.path)) == WindowSizes(ROWS, LENGTH, FEATURES, OUTPUTS)
    assert inspect(replace(Plan(), {"data.source": str(file.path)})).kind == "windows"
    alone = WindowFile(file.path, FEATURES, OUTPUTS, LENGTH, None, DATASETS[:1])
    assert not alone.read(0, 50).mask.any()


def test_names_of_systems_may_have_one_length_or_several(tmp_path: Path) -> None:
    names = [f"s{row // 20 % 6}" for row in range(ROWS)]
    several = opened(tmp_path, system_ids=names)
    one = opened(tmp_path, system_ids=np.array(names, "S50"))
    assert several.families == one.families == tuple(f"s{n}" for n in range(6))
    np.testing.assert_array_equal(several.family_numbers(3, 500), one.family_numbers(3, 500))
    splits = [WindowSplit(file, 0.2, still) for file in (several, one)]
    assert splits[0].unseen_rows == splits[1].unseen_rows == 100
    with pytest.raises(PlanError, match="system_ids holds int64; expected strings"):
        opened(tmp_path, system_ids=np.arange(ROWS))


def test_a_trajectory_is_held_out_although_the_last_one_is_of_an_unseen_system(
    tmp_path: Path,
) -> None:
    order = sorted(range(6), key=lambda n: hashlib.sha256(f"s{n}".encode()).digest())
    unseen, *others = order
    systems = [*others, unseen, *others, unseen]
    ids = np.arange(ROWS) // 50
    file = opened(tmp_path, trajectory_ids=ids, system_ids=[f"s{systems[n]}" for n in ids])
    split = WindowSplit(file, 1e-9, still)  # no hash is as low
    assert (split.train_rows, split.held_rows, split.unseen_rows) == (450, 50, 100)
    sides = split.sides(0, ROWS)
    assert set(sides[ids == 10]) == {HELD}
    assert set(sides[ids == 11]) == {UNSEEN}


def test_statistics_are_those_of_numpy_over_training_rows_that_count(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    mask = (draw.random((ROWS, OUTPUTS)) < 0.5).astype(np.float32)
    scaled = arrays()["input_sequences"] * [1e-3, 50, 0] + [0, 1e4, 7]
    file = opened(tmp_path, input_sequences=scaled.astype(np.float32), control_masks=mask)
    split = WindowSplit(file, 0.2, still)
    trained = split.sides(0, ROWS) == TRAIN
    found = measured(file, split, still)
    windows = scaled.astype(np.float32)[trained].reshape(-1, FEATURES).astype(np.float64)
    np.testing.assert_allclose(found.features.mean, windows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.features.deviation, windows.std(0), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(found.features.most, windows.max(0))
    for output in range(OUTPUTS):
        own = arrays()["controls"][trained & (mask[:, output] > 0), output].astype(np.float64)
        assert found.outputs.mean[output] == pytest.approx(own.mean(), rel=1e-6)
        assert found.outputs.deviation[output] == pytest.approx(own.std(), rel=1e-6)
        assert found.outputs.least[output] == own.min()
    file.standardization = Standardization.of(found)
    rows = file.read(0, ROWS)
    own = rows.windows[trained].reshape(-1, FEATURES)
    np.testing.assert_allclose(own.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(own.std(0), [1, 1, 0], atol=1e-3)
    assert not rows.targets[mask == 0].any()
    back = file.standardization.in_units(rows.targets)
    np.testing.assert_allclose(back[mask > 0], arrays()["controls"][mask > 0], atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "shift", "found"),
    [(1, 0, False), (15, 0, False), (0.1, 0.2, False), (30, 0, True), (1e-3, 0, True), (1, 9, True), (0, 1, False), (0, 300, True)],
)  # fmt: skip
def test_numbers_far_from_zero_and_one_are_out_of_scale(
    scale: float, shift: float, found: bool, tmp_path: Path
) -> None:
    for name in ("input_sequences", "controls"):
        numbers = arrays()[name] * 1.0
        numbers[..., 1] = numbers[..., 1] / numbers[..., 1].std() * scale + shift
        file = opened(tmp_path, **{name: numbers})
        assert out_of_scale(measured(file, None, still)) is found


def test_linear_maps_do_not_depend_on_scales_and_that_of_the_window_is_the_best(
    tmp_path: Path,
) -> None:
    losses = []
    for scale, shift in ((1.0, 0.0), (1e-4, 0.0), (1e4, 1e6), ([1, 0, 1], 5.0)):
        inputs = arrays()["input_sequences"] * np.array(scale) + shift
        file = opened(tmp_path, input_sequences=inputs.astype(np.float64))
        split = WindowSplit(file, 0.2, still)
        maps = LinearMaps(file, split, still)
        held = file.read(0, ROWS).take(np.flatnonzero(split.sides(0, ROWS) == HELD))
        last = predicted(maps.of_all, last_step(held.windows))
        whole = predicted_of_windows(maps.of_windows, held.windows)
        losses.append([((guess - held.targets) ** 2).mean() for guess in (last, whole)])
    first, small, large, constant = losses
    assert small == pytest.approx(first, rel=1e-3)
    assert large == pytest.approx(first, rel=1e-2)  # float32 holds fewer digits of these
    assert first[1] == pytest.approx(0.01, rel=0.3)  # the noise
    assert 10 * first[1] < first[0]
    assert np.isfinite(constant).all()


def test_maps_weigh_each_output_by_its_mask(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    mask = draw.choice([0, 0.5, 1], (ROWS, OUTPUTS))
    file = opened(tmp_path, control_masks=mask)
    split = WindowSplit(file, 0.2, still)
    found = LinearMaps(file, split, still).of_all
    trained = split.sides(0, ROWS) == TRAIN
    rows = file.read(0, ROWS).take(np.flatnonzero(trained))
    x = last_step(rows.windows)
    for output in range(OUTPUTS):
        weights = np.sqrt(rows.mask[:, output, None].astype(np.float64))
        best, *_ = np.linalg.lstsq(weights * x, weights[:, 0] * rows.targets[:, output], rcond=None)
        np.testing.assert_allclose(found[:, output], best, atol=1e-4)
