"""A jump is kept if the loss of rows that did not choose it falls by more than chance lets it."""

from __future__ import annotations

import numpy as np
import pytest

from memconsole_trainer.control.confirm import GROUPS, is_confirmed, rows_of_group


@pytest.mark.parametrize("groups", [2, 3, 8, 12])
def test_what_changes_nothing_is_confirmed_in_one_of_forty_cases(groups: int) -> None:
    random, cases = np.random.default_rng(groups), 4000
    before = random.normal(5.0, 1.0, (cases, groups))
    after = before + random.normal(0.0, 0.01, (cases, groups))
    kept = [is_confirmed(b, a, 1.0)[1] for b, a in zip(before, after, strict=True)]
    assert 0.01 < np.mean(kept) < 0.04
    better = [is_confirmed(b, a - 0.2, 1.0)[1] for b, a in zip(before, after, strict=True)]
    assert np.mean(better) > 0.95


def test_one_group_must_hold_half_of_what_was_promised() -> None:
    before = np.array([4.0])
    assert is_confirmed(before, np.array([3.5]), 1.0) == (0.5, True)
    assert is_confirmed(before, np.array([3.6]), 1.0)[1] is False
    assert is_confirmed(before, np.array([4.0]), 0.0)[1] is False


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_loss_that_is_not_finite_confirms_nothing(bad: float) -> None:
    for before, after in ((4.0, bad), (bad, 4.0), (bad, bad)):
        assert is_confirmed(np.full(4, before), np.full(4, after), 1.0) == (0.0, False)


@pytest.mark.parametrize(
    ("rows", "micro_batches", "size"),
    [(8, 1, 1), (9, 1, 2), (7, 2, 2), (4, 4, 2), (5, 40, 5), (1, 1, 1)],
)
def test_groups_are_about_as_many_whatever_the_batch(
    rows: int, micro_batches: int, size: int
) -> None:
    assert rows_of_group(rows, micro_batches) == size
    if micro_batches <= GROUPS:
        assert micro_batches * -(-rows // size) <= GROUPS
