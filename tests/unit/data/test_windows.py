"""Files of windows: the split, the order of an epoch, baselines, and what is said of damaged ones."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.plan import catalog
from memconsole.plan.data.made import Size, kind, parse_options
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.inspect import inspect
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.hdf5 import Hdf5Dataset
from memconsole_trainer.data.windows.file import WindowFile, Windows
from memconsole_trainer.data.windows.order import Row, WindowOrder, gathered
from memconsole_trainer.data.windows.split import HELD, TRAIN, UNSEEN, WindowSplit
from memconsole_trainer.tasks.linear_maps import LinearMaps, last_step, predicted
from memconsole_trainer.tasks.regression import open_data
from tests.unit.data.quiet import Quiet

FAMILIES = "yaw_stability,two_masses,cart_pendulum,lane_keeping,dc_motor,path_tracking"
FEATURES, OUTPUTS = 19, 6


def still() -> None: ...


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("windows") / "lqr.h5"
    options = parse_options(kind("lqr"), [f"families={FAMILIES}", "variants=3"])
    make(Request("lqr", out, Size(6000, None), 0, options))
    return out


def opened(path: Path, length: int = 32, most: int | None = None) -> WindowFile:
    return WindowFile(path, FEATURES, OUTPUTS, length, most)


def copied(path: Path, out: Path, *leave_out: str) -> Path:
    with h5py.File(path) as source, h5py.File(out, "w") as file:
        for name in source:
            if name not in leave_out:
                source.copy(name, file)
    return out


def test_no_trajectory_and_no_held_out_family_is_on_two_sides(path: Path) -> None:
    file = opened(path)
    split = WindowSplit(file, 0.2, still)
    sides, groups = split.sides(0, file.count), file.groups(0, file.count)
    numbers = file.family_numbers(0, file.count)
    for group in np.unique(groups):
        assert len(set(sides[groups == group])) == 1
    assert [len(split.unseen), len(set(numbers))] == [1, 6]
    np.testing.assert_array_equal(sides == UNSEEN, np.isin(numbers, list(split.unseen)))
    counts = [int((sides == side).sum()) for side in (TRAIN, HELD, UNSEEN)]
    assert counts == [split.train_rows, split.held_rows, split.unseen_rows]
    assert 0.1 < counts[1] / (counts[0] + counts[1]) < 0.3
    # A part of the file is on the same sides as in the whole.
    np.testing.assert_array_equal(split.sides(1000, 1300), sides[1000:1300])


def test_families_are_known_by_name_where_the_file_has_no_systems(
    path: Path, tmp_path: Path
) -> None:
    file = opened(copied(path, tmp_path / "a.h5", "systems", "variant_ids", "trajectory_ids"))
    whole = opened(path)
    assert file.families == tuple(sorted(whole.families))
    assert not file.systems
    assert not file.has_trajectories
    names = [file.families[i] for i in file.family_numbers(0, file.count)]
    assert names == [whole.families[i] for i in whole.family_numbers(0, whole.count)]
    split, expected = WindowSplit(file, 0.2, still), WindowSplit(whole, 0.2, still)
    np.testing.assert_array_equal(
        split.sides(0, file.count) == UNSEEN, expected.sides(0, file.count) == UNSEEN
    )


@pytest.mark.parametrize("buffer", [0, 2048, 10_000])
def test_an_epoch_has_every_train_row_once_and_reads_each_block_once(
    buffer: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(path)
    split = WindowSplit(file, 0.2, still)
    reads: Counter[tuple[str, int, int]] = Counter()
    read = Hdf5Dataset.read_into

    def counted(self: Hdf5Dataset, start: int, stop: int, *rest: Any) -> None:
        reads[self.name, start, stop] += 1
        read(self, start, stop, *rest)

    monkeypatch.setattr(Hdf5Dataset, "read_into", counted)
    order = WindowOrder(file, split, seed=1, epoch=1, shuffle_buffer=buffer)
    found = gathered(list(order))
    assert set(reads.values()) == {1}
    assert len(reads) == 3 * -(-file.count // 1024)
    expected = file.read(0, file.count).take(np.flatnonzero(split.sides(0, file.count) == TRAIN))
    for got, wanted in zip(found, expected, strict=True):
        flat, own = (a.reshape(len(a), -1) for a in (got, wanted))
        np.testing.assert_array_equal(flat[np.lexsort(flat.T)], own[np.lexsort(own.T)])
    assert not np.array_equal(found.windows, expected.windows)
    again = gathered(list(WindowOrder(file, split, 1, 2, buffer)))
    assert not np.array_equal(found.windows, again.windows)


def test_an_order_continues_exactly_from_its_state(path: Path) -> None:
    file = opened(path)
    split = WindowSplit(file, 0.2, still)

    def rest(order: WindowOrder) -> np.ndarray:
        return gathered(list(order)).windows

    whole = rest(WindowOrder(file, split, 1, 3, 2048))
    for taken in (0, 700, 2000, 3333):
        order = WindowOrder(file, split, 1, 3, 2048)
        for _ in range(taken):
            next(order)
        other = WindowOrder(file, split, 1, 3, 2048)
        other.set_state(order.get_state())
        np.testing.assert_array_equal(rest(other), whole[taken:])


def test_one_buffer_exists_at_a_time_and_a_batch_over_its_end_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, buffers = opened(path), list[weakref.ref[Any]]()
    split, empty = WindowSplit(file, 0.2, still), WindowFile.empty
    order = WindowOrder(file, split, 1, 3, 1024)
    whole = gathered(list(order))

    def counted(self: WindowFile, rows: int) -> Windows:
        assert not [ref for ref in buffers if ref() is not None]
        found = empty(self, rows)
        buffers.append(weakref.ref(found.windows.base))
        return found

    monkeypatch.setattr(WindowFile, "empty", counted)
    order, batches = WindowOrder(file, split, 1, 3, 1024), []
    while rows := list(itertools.islice(order, 100)):
        order.get_state()
        batches.append(gathered(rows))
        del rows  # as the stream does; they hold the buffer
    assert len(buffers) > 3
    np.testing.assert_array_equal(Windows.joined(batches).windows, whole.windows)


def test_an_inspection_counts_windows_and_names_families(path: Path) -> None:
    found = inspect(replace(Plan(), {"data.source": str(path)}))
    assert (found.kind, found.documents) == ("windows", opened(path).count)
    first, features, *outputs, done = found.sample.splitlines()[: 2 + OUTPUTS + 1]
    assert first == "32 steps of 19 features to 6 controls"
    assert features.startswith("19 features: -1")
    assert outputs[-1] == "output 6: counts in no row"
    assert done.endswith("trains on them as they are: the file says that they are normalized")
    assert set(found.sample.splitlines()[9:]) == set(FAMILIES.split(","))


def test_shorter_windows_are_the_last_steps(path: Path) -> None:
    long, short = opened(path).read(5, 50), opened(path, length=8).read(5, 50)
    np.testing.assert_array_equal(short.windows, long.windows[:, -8:])
    np.testing.assert_array_equal(short.targets, long.targets)


def test_rows_of_several_buffers_are_gathered_in_order() -> None:
    buffers = [Windows(*(np.full((3, 1), 10.0 * b + np.arange(3)[:, None]),) * 3) for b in (1, 2)]
    rows = [Row(buffers[0], 2), Row(buffers[0], 0), Row(buffers[1], 1), Row(buffers[0], 1)]
    np.testing.assert_array_equal(gathered(rows).targets[:, 0], [12, 10, 21, 11])


def test_linear_maps_are_those_of_least_squares(path: Path) -> None:
    file = opened(path)
    split = WindowSplit(file, 0.2, still)
    maps = LinearMaps(file, split, still)
    rows, sides = file.read(0, file.count), split.sides(0, file.count)
    numbers = file.family_numbers(0, file.count)
    last = np.hstack([rows.windows[:, -1], np.ones((file.count, 1))]).astype(np.float64)

    def residue(chosen: np.ndarray, guess: np.ndarray) -> float:
        wanted, mask = rows.targets[chosen], rows.mask[chosen]
        return float((mask * (guess - wanted) ** 2).sum() / mask.sum())

    for place in range(6):
        chosen = (sides != HELD) & (numbers == place)
        best, *_ = np.linalg.lstsq(last[chosen], rows.targets[chosen], rcond=None)
        own = predicted(maps.of_families[place], last_step(rows.windows[chosen]))
        assert residue(chosen, own) == pytest.approx(residue(chosen, last[chosen] @ best), rel=1e-2)
    trained = sides == TRAIN
    for output in range(2):
        counted = trained & (rows.mask[:, output] > 0)
        best, *_ = np.linalg.lstsq(last[counted], rows.targets[counted, output], rcond=None)
        np.testing.assert_allclose(
            (last @ maps.of_all)[counted, output], last[counted] @ best, atol=5e-3
        )


def test_a_row_of_an_unknown_system_is_named(path: Path, tmp_path: Path) -> None:
    spoiled = copied(path, tmp_path / "a.h5")
    with h5py.File(spoiled, "a") as file:
        file["variant_ids"][123] = 99
    with pytest.raises(DataError, match="row 123 of variant_ids is 99, which the file does not"):
        opened(spoiled).family_numbers(0, 500)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the file does not exist; it may have been moved or deleted"),
        (b"", "the file is empty"),
        (b"no HDF5 at all", "not a readable HDF5 file"),
    ],
)
def test_a_file_that_cannot_be_opened_is_named(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.h5"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(DataError, match=f"{bad}: {message}"):
        opened(bad)


def test_a_truncated_or_damaged_file_is_named_with_its_rows(path: Path, tmp_path: Path) -> None:
    bytes_, bad = path.read_bytes(), tmp_path / "bad.h5"
    bad.write_bytes(bytes_[: len(bytes_) // 2])
    with pytest.raises(DataError, match=rf"truncated: it has [\d,]+ of {len(bytes_):,} bytes"):
        opened(bad)
    with h5py.File(path) as file:
        chunk = file["input_sequences"].id.get_chunk_info(4)
    spoiled = bytearray(bytes_)
    spoiled[chunk.byte_offset + 500] ^= 0xFF
    bad.write_bytes(spoiled)
    file = opened(bad)
    with pytest.raises(DataError, match="rows 4,096 to 5,119 of input_sequences cannot be read"):
        file.read(4096, 5120)


def test_a_file_that_gets_shorter_while_it_is_read_is_named(path: Path, tmp_path: Path) -> None:
    whole = copied(path, tmp_path / "a.h5")
    file = opened(whole)
    with open(whole, "r+b") as handle:
        handle.truncate(200_000)
    with pytest.raises(DataError, match=r"a\.h5: rows 4,096 to 5,119 of .* cannot be read"):
        file.read(4096, 5120)


def test_a_file_that_is_deleted_is_read_to_its_end_and_then_missed(
    path: Path, tmp_path: Path
) -> None:
    gone = copied(path, tmp_path / "a.h5")
    file = opened(gone)
    gone.unlink()
    whole = opened(path)
    for start in range(0, file.count, 1024):
        stop = min(start + 1024, file.count)
        np.testing.assert_array_equal(
            file.read(start, stop).targets, whole.read(start, stop).targets
        )
    with pytest.raises(DataError, match="the file does not exist"):
        opened(gone)


def test_text_in_place_of_numbers_is_refused(path: Path, tmp_path: Path) -> None:
    bad = copied(path, tmp_path / "a.h5", "controls")
    with h5py.File(bad, "a") as file:
        file["controls"] = np.full((len(file["control_masks"]), OUTPUTS), b"left")
    with pytest.raises(PlanError, match=r"controls holds \|S4; expected numbers"):
        opened(bad)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("systems/two_masses/A", lambda v: v * np.nan, "systems/two_masses/A holds what is not a finite number"),
        ("systems/two_masses/K", lambda v: v[..., :1], r"K of system two_masses has shape \(3, 2, 1\); expected \(3, 2, 4\)"),
        ("systems/two_masses/R", None, "lacks systems/two_masses/R"),
        ("normalization/two_masses/state_max", lambda v: v[:2], r"state_max of system two_masses has shape \(2,\)"),
        ("control_masks", lambda v: np.where(np.arange(len(v))[:, None] == 17, -3, v), "row 17 of control_masks holds a number that is not from 0 to 1"),
        ("controls", lambda v: v.astype("f8") * np.where(np.arange(len(v))[:, None] == 9, 1e300, 1), "row 9 of controls holds a number that is not finite, and control_masks counts it"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_used_is_named_with_its_place(
    name: str, change: Any, message: str, path: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "a.h5"
    bad.write_bytes(path.read_bytes())
    with h5py.File(bad, "a") as file:
        values = file[name][:]
        del file[name]
        if change is not None:
            file[name] = change(values)
    with pytest.raises(DataError, match=f"{bad}: {message}"):
        opened(bad).read(0, 64)


def test_systems_that_no_control_keeps_stable_are_bad_data(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "a.h5"
    bad.write_bytes(path.read_bytes())
    with h5py.File(bad, "a") as file:
        for system in file["systems"].values():
            system["A"][...] = np.eye(system["A"].shape[-1])
            system["B"][...] = 0
    plan = replace(
        Plan(), {"model.name": "lqr", "data.source": str(bad), "data.sequence_length": 32}
    )
    with pytest.raises(DataError, match=f"{bad}: its systems cannot be controlled"):
        open_data(plan, catalog.model(plan), tmp_path, Quiet(), {})


def test_a_file_without_controls_tells_its_rows_and_not_every_system(
    path: Path, tmp_path: Path
) -> None:
    bad = copied(path, tmp_path / "a.h5", "controls")
    with pytest.raises(PlanError, match="lacks controls; the file holds control_masks") as caught:
        opened(bad)
    assert "systems/" not in str(caught.value)
