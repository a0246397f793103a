"""Rows of an epoch of windows and histories: guessed from the files, then as a run counted them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memconsole.memory.run_time import run_steps, steps_are_known
from memconsole.plan import catalog
from memconsole.plan.data import counted
from memconsole.plan.data.rows import keep_counted_rows
from memconsole.plan.plan import replace


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines(users: int, each: int) -> str:
    """Ratings of `users` users in MovieLens' layout, `each` of every user."""
    return "".join(f"{u}::{i}::5::{i}\n" for u in range(1, users + 1) for i in range(1, each + 1))


@pytest.mark.parametrize(("each", "rows"), [(20, 30), (70, 90)])
def test_histories_are_guessed_by_their_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: int, rows: int
) -> None:
    file = tmp_path / "ratings.dat"
    file.write_text(lines(30, each))
    plan = replace(
        catalog.preset("efficientids"),
        {"data.source": str(file), "data.sequence_length": 32, "train.batch_size": 1},
    )
    plan = replace(plan, {"train.max_steps": None, "train.epochs": 1})
    assert run_steps(plan, catalog.model(plan)) == rows
    assert not steps_are_known(plan)
    keep_counted_rows(plan, 77)
    assert run_steps(plan, catalog.model(plan)) == 77
    assert steps_are_known(plan)
    file.write_text(lines(31, each))
    monkeypatch.setattr(counted, "KNOWN_SECONDS", 0.0)
    assert not steps_are_known(plan)


def test_windows_are_guessed_by_the_size_of_their_file(tmp_path: Path) -> None:
    plan = catalog.preset("lqr")
    model = catalog.model(plan)
    file = tmp_path / "windows.h5"
    row = 4 * (plan.data.sequence_length * model.features + 2 * model.outputs)  # type: ignore[attr-defined]
    file.write_bytes(b"\0" * (row * 1_000))
    plan = replace(
        plan, {"data.source": str(file), "data.validation_fraction": 0.1, "train.batch_size": 1}
    )
    plan = replace(plan, {"train.max_steps": None, "train.epochs": 1})
    assert run_steps(plan, model) == 900
