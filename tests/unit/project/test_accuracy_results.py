"""The accuracy table: what meets a bar, what is stored, and that its page quotes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accuracy import results
from tests.accuracy.key_press import walk
from tests.accuracy.results import Bar, Case, Errors, Latency, Part


def row(bar: Bar, *errors_percent: int) -> Errors:
    cases = tuple(
        Case(plan=str(e), estimated_bytes=100 + e, measured_bytes=100) for e in errors_percent
    )
    return Errors(estimate="~", truth="a trace", bar=bar, cases=cases)


@pytest.mark.parametrize(
    ("bar", "errors", "met"),
    [
        (Bar(median=0.03, under=0.08), (-7, 1, 2, 2, 30), True),
        (Bar(median=0.03, under=0.08), (-9, 1, 2), False),
        (Bar(median=0.03), (4, 4, -4), False),
        (Bar(within=0.10), (-9, 9), True),
        (Bar(within=0.10), (-10, 11), False),
        (Bar(within=0.10), (), False),
    ],
)
def test_a_bar_is_met_only_where_every_part_of_it_is(
    bar: Bar, errors: tuple[int, ...], met: bool
) -> None:
    assert row(bar, *errors).met is met


def test_under_and_over_are_told_apart() -> None:
    found = row(Bar(), -5, 2, 7)
    assert (found.under, found.median, found.over) == pytest.approx((-0.05, 0.05, 0.07))
    assert row(Bar(), 2).cells()[4] == "none"


def test_a_part_is_stored_and_put_between_the_markers_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "estimates.md"
    page.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(results, "PAGE", page)
    part = Part(name="one", command="python one.py", rows=(row(Bar(within=0.1), 5),))
    results.write(part, packages=("msgspec",))
    results.into_page(results.stored(), page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| ~ | a trace | 1 plans | 5.00% | none | +5.0% | all within 10 % | yes |" in text
    (stored,) = results.stored()
    assert stored.rows == part.rows
    assert stored.versions.keys() == {"python", "msgspec"}


def test_the_page_quotes_what_is_stored() -> None:
    text = results.PAGE.read_text(encoding="utf-8")
    for part in results.stored():
        for one in part.rows:
            assert "| " + " | ".join(one.cells()) + " |" in text, part.name


def test_the_stored_torch_formula_row_is_the_grid_that_was_asked_for() -> None:
    (part,) = (p for p in results.stored() if p.name == "torch-formula")
    (found,) = part.rows
    assert isinstance(found, Errors)
    assert len(found.cases) == 200
    assert found.bar == Bar(median=0.03, under=0.08)


def test_a_walk_over_toggles_prices_every_press_and_some_picks() -> None:
    pressed, picked = walk(36, seed=3)
    assert len(pressed) == 36
    assert len(picked) == 1
    assert min(pressed) > 0


def test_a_latency_meets_its_limit_by_its_ninety_ninth_percentile() -> None:
    def of(p99: float) -> Latency:
        return Latency(
            estimate="a", truth="b", count=100, median_seconds=0.001, p99_seconds=p99,
            worst_seconds=1.0, limit_seconds=0.016,
        )  # fmt: skip

    assert of(0.015).met
    assert not of(0.016).met
