"""Checkpoints: whole or absent, verified before use, bounded in number, written in standard safetensors."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from memconsole.runs.record.checkpoints.manifest import DAMAGED, step_of, verify
from memconsole.runs.record.directory import RunDirectory
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.host.host_memory import resident
from memconsole_trainer.weights import checkpoint, tensorfile
from memconsole_trainer.weights.checkpoint import (
    Checkpoints,
    FencedError,
    NotFiniteError,
)
from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint
from memconsole_trainer.weights.trained import NothingTrainedError, choose

STATE = {"progress": {"step": 3}, "validation_loss": None}


def tensors(value: float = 1.0) -> Iterator[tuple[str, NDArray[np.generic]]]:
    yield "model.a", np.full((3, 4), value, dtype=np.float32)
    yield "optimizer.step", np.array(7, dtype=np.int64)
    yield "model.b", np.arange(10, dtype=np.float16)
    yield "optimizer.m.a", np.arange(12, dtype=np.uint8).reshape(3, 4)
    yield "optimizer.empty", np.zeros((0, 4), dtype=np.float32)


def save(checkpoints: Checkpoints, step: int, **changes: Any) -> checkpoint.Saved:
    arguments: dict[str, Any] = {
        "tensors": tensors(step),
        "state": STATE,
        "is_newest": lambda: True,
        "written": lambda size: None,
    }
    return checkpoints.save(step, **(arguments | changes))


def newest(checkpoints: Checkpoints) -> tuple[LoadedCheckpoint | None, list[str]]:
    said: list[str] = []
    return checkpoints.newest(said.append, lambda: None), said


def test_a_checkpoint_gives_back_every_tensor_and_the_state(tmp_path: Path) -> None:
    sizes: list[int] = []
    saved = save(Checkpoints(tmp_path, 2), 3, written=sizes.append)
    stored, said = newest(Checkpoints(tmp_path, 2))
    assert stored is not None
    assert (stored.step, stored.state, said) == (3, STATE, [])
    assert set(stored.names()) == {name for name, _ in tensors()}
    for name, array in tensors(3):
        loaded = stored.tensor(name)
        assert loaded.dtype == array.dtype
        np.testing.assert_array_equal(loaded, array)
    assert saved.size_bytes == sum(f.stat().st_size for f in saved.path.iterdir()) == sizes[-1]
    assert sizes == sorted(sizes)


def test_the_files_are_safetensors_to_everyone_else(tmp_path: Path) -> None:
    saved = save(Checkpoints(tmp_path, 2), 3)
    theirs = safetensors.numpy.load_file(saved.path / "model-00001.safetensors")
    np.testing.assert_array_equal(theirs["model.b"], np.arange(10, dtype=np.float16))
    safetensors.numpy.save_file({"x": np.ones((2, 3), dtype=np.int32)}, tmp_path / "x.safetensors")
    ours = tensorfile.TensorFile(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(ours.tensor("x"), np.ones((2, 3), dtype=np.int32))


def test_bfloat16_tensors_keep_their_bits(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.linspace(-3, 3, 7).astype(ml_dtypes.bfloat16)
    tensorfile.write(tmp_path / "x.safetensors", [("x", array)])
    file = tensorfile.TensorFile(tmp_path / "x.safetensors")
    assert file.tensor("x").tobytes() == array.tobytes()
    np.testing.assert_array_equal(file.tensor("x", widen=True), array.astype(np.float32))


def test_large_states_are_split_into_shards(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1000)
    many = [(f"model.{i}", np.full(60, i, dtype=np.float32)) for i in range(20)]
    saved = save(Checkpoints(tmp_path, 1), 1, tensors=iter(many))
    assert len(list(saved.path.glob("model-*.safetensors"))) == 4
    stored, _ = newest(Checkpoints(tmp_path, 1))
    assert stored is not None
    assert [int(stored.tensor(name)[0]) for name, _ in many] == list(range(20))


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "delete", "grow"])
@pytest.mark.parametrize(
    "name",
    ["model-00001.safetensors", "optimizer-00001.safetensors", "state.json", "MANIFEST.json"],
)
def test_any_damage_is_found_named_and_passed_over(name: str, how: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 3)
    save(checkpoints, 1)
    file = save(checkpoints, 2).path / name
    data = bytearray(file.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 16
    changed = {"truncate": data[:-1], "empty": b"", "grow": data + b" "}.get(how, data)
    file.unlink()
    if how != "delete":
        file.write_bytes(changed)
    if (name, how) == ("MANIFEST.json", "grow"):
        assert verify(file.parent) is None  # a space more in JSON says nothing else
        return
    stored, said = newest(checkpoints)
    assert stored is not None
    assert stored.step == 1
    assert len(said) == 1
    assert "step-000000002 is damaged" in said[0]
    assert name in said[0] or name == "MANIFEST.json"
    assert [p.name for p in checkpoints.committed()] == ["step-000000001"]
    assert save(checkpoints, 2).path.name == "step-000000002"


def test_who_only_reads_passes_damage_over_and_leaves_it_where_it_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 5)
    save(checkpoints, 1)
    (save(checkpoints, 2).path / "state.json").write_bytes(b"{}")
    said: list[str] = []
    stored = checkpoints.newest(said.append, lambda: None, owned=False)
    assert stored is not None
    assert stored.step == 1
    assert "step-000000002 is damaged" in said[0]
    assert [step_of(p) for p in checkpoints.committed()] == [2, 1]


def test_folders_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    save(Checkpoints(run.checkpoints_path, 5), 1)
    (run.checkpoints_path / "step-5").mkdir()
    assert [step_of(p) for p in run.committed_checkpoints()] == [1]


def test_with_every_checkpoint_damaged_there_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 3)
    for step in (1, 2):
        (save(checkpoints, step).path / "state.json").write_text("{}")
    stored, said = newest(checkpoints)
    assert stored is None
    assert len(said) == 2


def test_a_link_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    saved = save(Checkpoints(tmp_path / "c", 3), 1)
    outside = tmp_path / "outside"
    shutil.move(saved.path / "state.json", outside)
    (saved.path / "state.json").symlink_to(outside)
    assert verify(saved.path) == "state.json is missing"


@pytest.mark.parametrize("moment", ["fence", "tensor", "disk"])
def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_nothing_else(
    moment: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1)

    def broken() -> Iterator[tuple[str, NDArray[np.generic]]]:
        yield "model.a", np.array([1.0, np.nan], dtype=np.float32)

    def full(size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    changes: dict[str, tuple[dict[str, Any], type[Exception]]] = {
        "fence": ({"is_newest": lambda: False}, FencedError),
        "tensor": ({"tensors": broken()}, NotFiniteError),
        "disk": ({"written": full}, OSError),
    }
    arguments, expected = changes[moment]
    with pytest.raises(expected):
        save(checkpoints, 2, **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]
    assert newest(checkpoints)[0] is not None


def test_too_little_room_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    needed = 2 * shutil.disk_usage(tmp_path).free
    with pytest.raises(OSError, match="iB free") as caught:
        save(Checkpoints(tmp_path, 2), 1, expected_bytes=needed)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("guess", [0, 600_000])
def test_a_full_disk_is_told_how_much_a_checkpoint_takes(
    guess: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the disk turns out to be full before the first byte or in the middle. Then no more is asked for."""
    real, free = checkpoint.tensorfile.write, [500_000]

    def write(path: Path, shard: list[tuple[str, NDArray[np.generic]]]) -> tuple[int, str]:
        if path.name.startswith("optimizer"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, shard)

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free[0])

    def many() -> Iterator[tuple[str, NDArray[np.generic]]]:
        for name in ("model.a", "optimizer.m.a", "optimizer.v.a"):
            yield name, np.zeros(1 << 18, dtype=np.float32)

    checkpoints = Checkpoints(tmp_path, 2)
    monkeypatch.setattr(checkpoint.tensorfile, "write", write)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", usage)
    for _ in range(2):
        with pytest.raises(OSError, match=r"488 KiB free, a checkpoint needs 3\.00 MiB"):
            save(checkpoints, 1, tensors=many(), expected_bytes=guess)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(checkpoint.tensorfile, "write", real)
    free[0] = 3 << 20
    save(checkpoints, 1, tensors=many(), expected_bytes=guess)
    assert len(list(tmp_path.iterdir())) == 1


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 2.5}
    for step, loss in losses.items():
        save(checkpoints, step, state=STATE | {"validation_loss": loss})
        checkpoints.retain()
    assert [step_of(p) for p in checkpoints.committed()] == [5, 4, 2]
    assert checkpoints.best() == (tmp_path / "best").resolve() == tmp_path / "step-000000002"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_checkpoint_is_kept_beside_a_later_one_that_could_not_be_read(tmp_path: Path) -> None:
    before = Checkpoints(tmp_path, 1)
    for step in (80, 100):
        save(before, step)
    after = Checkpoints(tmp_path, 1)  # of a run that was resumed from step 80
    save(after, 90)
    after.retain()
    assert [step_of(p) for p in after.committed()] == [90]
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(DAMAGED)] == [
        f"step-000000100{DAMAGED}"
    ]


def test_the_measure_of_the_task_chooses_the_best_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    for step, (loss, recall) in {
        1: (3.0, 0.1),
        2: (3.5, 0.4),
        3: (1.0, 0.2),
        4: (0.5, None),
    }.items():
        scores = [{"key": "loss", "value": loss}]
        if recall is not None:
            scores.insert(0, {"key": "recall", "value": recall, "lower_is_better": False})
        save(checkpoints, step, state=STATE | {"validation_loss": loss, "scores": scores})
        checkpoints.retain()
    assert [step_of(p) for p in checkpoints.committed()] == [4, 2]
    assert (tmp_path / "best").resolve() == tmp_path / "step-000000002"
    found = choose(checkpoints, "best-or-last")
    assert found is not None
    assert found.step == 2
    save(checkpoints, 5, state=STATE | {"validation_loss": 9.0, "scores": "not a list"})
    assert checkpoints.best() == tmp_path / "step-000000002"


def test_a_checkpoint_is_chosen_by_its_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    assert choose(checkpoints, "best") is None
    save(checkpoints, 3)
    with pytest.raises(
        ValueError, match=r"none was saved right after an evaluation; there are last, step-3$"
    ):
        choose(checkpoints, "best")
    for step, loss in {4: 1.0, 5: 2.0}.items():
        save(checkpoints, step, state=STATE | {"validation_loss": loss})
    found = {which: choose(checkpoints, which) for which in ("last", "best", "step-3", "5")}
    assert [c.step for c in found.values() if c] == [5, 4, 3, 5]
    with pytest.raises(ValueError, match="there are last, best, step-3, step-4, step-5"):
        choose(checkpoints, "step-9")
    next(checkpoints.best().glob("*.safetensors")).write_bytes(b"")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="step-000000004 is damaged"):
        choose(checkpoints, "best")


def test_a_folder_that_is_half_deleted_is_a_deleted_checkpoint(tmp_path: Path) -> None:
    saved = save(Checkpoints(tmp_path, 2), 3).path
    next(saved.glob("*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError):
        LoadedCheckpoint(saved)


@pytest.mark.parametrize("which", ["last", "best", "best-or-last"])
def test_a_checkpoint_is_read_while_its_run_saves_and_deletes_others(
    which: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints, ended = Checkpoints(tmp_path, 1), threading.Event()

    def train() -> None:
        """Each checkpoint is better than the one before, so only the newest is kept."""
        for step in itertools.count(2):
            save(checkpoints, step, state=STATE | {"validation_loss": 1 / step})
            checkpoints.retain()
            if ended.is_set():
                return

    save(checkpoints, 1, state=STATE | {"validation_loss": 1.0})
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        try:
            steps: list[int] = []
            # On a slow disk 40 reads may end before one save does.
            while len(steps) < 40 or steps[-1] == steps[0]:
                assert not training.done()
                try:
                    found = choose(checkpoints, which)
                except NothingTrainedError as error:
                    assert "deleted 5 checkpoints in a row" in str(error)  # noqa: PT017
                    continue
                assert found is not None
                for name, value in tensors(found.step):
                    np.testing.assert_array_equal(found.tensor(name), value)
                steps.append(found.step)
        finally:
            ended.set()
        training.result()
    assert steps == sorted(steps)
    assert capfd.readouterr().err == ""  # none was called damaged


def test_a_run_that_deletes_every_checkpoint_that_is_chosen_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    steps = itertools.count(1)

    def verified(path: Path, beat: Any = None) -> str | None:
        """The run saves another checkpoint while this one is verified."""
        problem = verify(path)
        save(checkpoints, next(steps))
        checkpoints.retain()
        return problem

    save(checkpoints, next(steps))
    monkeypatch.setattr(checkpoint, "verify", verified)
    with pytest.raises(NothingTrainedError, match="deleted 5 checkpoints in a row"):
        choose(checkpoints, "last")


def test_a_checkpoint_that_is_read_can_be_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1)
    held, named = (
        choose(checkpoints, "last"),
        LoadedCheckpoint(tmp_path / "step-000000001"),
    )
    assert held is not None
    save(checkpoints, 2)
    checkpoints.retain()
    np.testing.assert_array_equal(held.tensor("model.a"), np.full((3, 4), 1, np.float32))
    with pytest.raises(DataError, match="step-000000001 was deleted while it was read"):
        named.tensor("model.a")


def test_left_overs_of_an_interrupted_save_are_swept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1)
    (tmp_path / ".tmp-2-99").mkdir()
    (tmp_path / ".tmp-2-99" / "model-00001.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-step-000000000-1-1").mkdir()
    checkpoints.sweep()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]


def test_a_manifest_that_leads_outside_is_refused(tmp_path: Path) -> None:
    saved = save(Checkpoints(tmp_path / "c", 2), 1)
    manifest = json.loads((saved.path / "MANIFEST.json").read_text())
    manifest["files"]["../../secret"] = {"size": 1, "sha256": ""}
    (tmp_path / "secret").write_text("x")
    (saved.path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "secret is missing" in str(verify(saved.path))


def test_reading_a_file_through_holds_one_tensor_of_it_at_a_time(tmp_path: Path) -> None:
    mib = 2**20
    path = tmp_path / "large.safetensors"
    tensorfile.write(path, [(f"t{n}", np.full(4 * mib, n, np.uint8)) for n in range(16)])
    opened = tensorfile.TensorFile(path)
    before, most = resident(), 0
    for name in opened.names():
        array = opened.tensor(name)
        assert int(array.sum()) == int(name[1:]) * 4 * mib
        now = resident()
        most = max(most, now.mapped - before.mapped)
        assert now.anonymous - before.anonymous < 3 * mib  # mapped, not read
        del array
    assert 3 * mib < most < 16 * mib
