"""Evaluations of some held-out rows use rows from all over the data."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from memconsole.plan import catalog
from memconsole.plan.data.made import Size, kind, parse_options
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks.recommendation import RANKED
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from memconsole_trainer.data.sources.documents import FileDocuments
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.sources.split import Everything
from memconsole_trainer.data.spread import evaluated_rows, spread_order
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.blocks.record_blocks import held_out_records
from memconsole_trainer.data.text.rows.validation import Validation, from_rows, from_texts
from memconsole_trainer.data.text.tokens.tokenizer import train
from memconsole_trainer.data.text.tokens.tokens import ArrayRows
from memconsole_trainer.engine import LossSum
from memconsole_trainer.tasks import recommendation, regression
from tests.unit.data.quiet import Quiet


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 10, 64, 1000, 4181])
def test_the_first_of_a_spread_order_are_spread_and_each_comes_once(count: int) -> None:
    order = spread_order(count).tolist()
    assert sorted(order) == list(range(count))
    assert order[:1] == [0][:count]
    for taken in (8, 50, 300):
        if taken < count:
            gaps = np.diff([*sorted(order[:taken]), count])
            assert gaps.max() <= 2 * count / taken


def test_a_limit_takes_rows_at_even_distances() -> None:
    assert [rows.tolist() for rows in evaluated_rows(5, 2, 0)] == [[0, 1], [2, 3], [4]]
    assert [rows.tolist() for rows in evaluated_rows(5, 2, 9)] == [[0, 1], [2, 3], [4]]
    assert [rows.tolist() for rows in evaluated_rows(12, 2, 2)] == [[0, 3], [6, 9]]
    assert not list(evaluated_rows(0, 2, 0))
    assert not list(evaluated_rows(0, 2, 3))


def test_batches_of_text_under_a_limit_are_rows_of_all_of_it() -> None:
    rows = ArrayRows(np.arange(12 * 4 + 1, dtype=np.int32), 5, 4)
    shape = BatchShape(3, 2, 4)
    held = Validation(rows, 49, rows, [])
    batches = list(held.batches(shape, 2))
    assert np.stack([b["inputs"] for b in batches])[..., 0].ravel().tolist() == [0, 12, 24, 36]
    targets = sum(int(b["targets"].sum()) for b in batches)
    assert held.target_bytes(shape, 2) == targets  # here a token's bytes are its number


def test_held_out_documents_over_the_limit_are_left_out_all_over(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:03d}.txt").write_text(f"{number:03d} ")
    source = FileDocuments(sorted(tmp_path.glob("*.txt")))
    tokenizer = train([f"{number:03d} " for number in range(100)], 260)
    found = from_texts(source, Everything(100), tokenizer, 4, most=60)
    text = tokenizer.decode(
        np.concatenate([found.rows[i][:-1] for i in range(len(found))]).tolist()
    )
    numbers = [int(part) for part in text.replace("<|endoftext|>", "").split()]
    assert numbers == sorted(numbers)
    assert len(numbers) < 50
    assert numbers[0] == 0
    assert numbers[-1] > 80
    assert np.diff(numbers).max() < 20
    packed = held_out_records(source, Everything(100), tokenizer, 8, False, most=60)
    ids = np.concatenate([packed.rows[row] for row in range(len(packed))])
    assert packed.tokens < 70
    assert "09" in tokenizer.decode(ids[ids >= 0].tolist())


def test_token_rows_over_the_limit_are_from_blocks_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["tokens"] = np.repeat(np.arange(1000), 8).reshape(1000, 8)
    source = TokenRows(path, "tokens", 1000, None)
    source.block_size = 10
    found = from_rows(source, Everything(1000), 1000, 8, most=10 * 10 * 8)
    numbers = [int(found.rows[i][0]) for i in range(len(found))]
    assert numbers == sorted(numbers)
    assert len(numbers) == 100
    assert numbers[0] == 0
    assert numbers[-1] >= 850
    assert np.diff(numbers).max() < 200


def test_an_evaluation_of_windows_has_every_family_of_a_sorted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, path = tmp_path / "made.h5", tmp_path / "sorted.h5"
    families = "yaw_stability,two_masses,cart_pendulum"
    make(
        Request(
            "lqr",
            made,
            Size(3000, None),
            0,
            parse_options(kind("lqr"), [f"families={families}", "variants=2"]),
        )
    )
    with h5py.File(made) as source, h5py.File(path, "w") as file:
        order = np.argsort(source["system_ids"][:], kind="stable")
        for name, part in source.items():
            if isinstance(part, h5py.Dataset) and len(part) == 3000:
                file[name] = part[:][order]
            else:
                source.copy(name, file)
    changes = {"model.name": "lqr", "data.source": str(path), "data.sequence_length": 32}
    plan = replace(Plan(), changes)
    with h5py.File(path) as file:
        windows = (row.tobytes() for row in file["input_sequences"][:, -32:])
        owners = dict(zip(windows, file["system_ids"][:].tolist(), strict=True))
    monkeypatch.setattr(regression, "HELD_BYTES", 60 * 4 * (32 * 19 + 12))
    data = regression.open_data(plan, catalog.model(plan), tmp_path, Quiet(), {})
    assert data.validation_rows == 60
    shape, total, weight, seen = BatchShape(1, 8, 32), 0.0, 0.0, set()
    for batch in data.validation(shape, 2):
        seen |= {owners[window.tobytes()] for window in batch["windows"][0]}
        total += float((batch["mask"] * batch["targets"] ** 2).sum())
        weight += float(batch["mask"].sum())
    assert seen == set(owners.values())
    # The baselines are those of the same rows.
    found = data._linear_losses(shape, 2)
    assert found["zero_loss"] == pytest.approx(total / weight)
    assert found["ridge_loss"] < found["zero_loss"]


def test_baselines_of_ratings_are_those_of_the_rows_that_the_model_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(
        Request("ratings", tmp_path, Size(1500, None), 0, {"items": 60, "genres": 5, "history": 12})
    )
    changes = {"data.source": str(tmp_path / "ratings.dat"), "data.sequence_length": 8}
    plan = replace(
        catalog.preset("efficientids"), changes | {"model.items": 60, "model.clusters": 6}
    )
    data = recommendation.open_data(plan, catalog.model(plan), tmp_path, Quiet(), {})
    shape, ranked = BatchShape(1, 4, 8), []
    monkeypatch.setattr(
        recommendation.Baselines, "measured", lambda self, held, tick: ranked.append(held) or {}
    )
    data.judged(LossSum(0.0, 0.0, (0.0,) * len(RANKED)), shape, 3, None, list)
    assert len(ranked[0]) == 12 < data.validation_rows
    items, rows = data._histories.items, [b["items"] for b in data.validation(shape, 3)]
    for (begin, _, end), row in zip(ranked[0], np.concatenate(rows, 1)[0], strict=True):
        assert row[: end - begin - 1].tolist() == items[begin : end - 1].tolist()
    assert ranked[0][-1][2] > 0.8 * len(items)
