"""The page on hybrid training has the tables that the estimator makes."""

from __future__ import annotations

from tests.accuracy import seven_billion


def test_the_table_of_a_7b_model_is_what_the_estimator_says() -> None:
    page = seven_billion.PAGE.read_text()
    assert seven_billion.written(page) == page
