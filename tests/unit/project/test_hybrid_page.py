"""The page on hybrid training has the tables that the estimator makes."""

from __future__ import annotations

import json

from tests.accuracy import hybrid, seven_billion
from tests.bench import hybrid as bench


def test_the_table_of_a_7b_model_is_what_the_estimator_says() -> None:
    page = seven_billion.PAGE.read_text()
    assert seven_billion.written(page) == page


def test_the_page_shows_what_each_phase_held() -> None:
    rows = hybrid.rows_stored()
    assert f"\n{hybrid.section(rows)}\n" in hybrid.PAGE.read_text()
    wanted = {
        " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in one.items()) for one in hybrid.VARIED
    }
    for row in rows:
        held = {case.plan: case.measured_bytes for case in row.cases}
        assert {plan.partition(" ")[2] for plan in held} == wanted
        defaults, less = "memory=none", "memory=compress predict_precision=same"
        assert held[f"predict {defaults}"] < held[f"full {defaults}"]
        assert held[f"predict {less}"] < 0.9 * held[f"predict {defaults}"]


def test_the_page_shows_what_the_bench_measured() -> None:
    tables = json.loads(bench.RESULTS.read_text())
    for mark, table in bench.TABLES.items():
        assert f"<!-- {mark} -->\n{table(tables)}\n<!-- /{mark} -->" in bench.PAGE.read_text()
