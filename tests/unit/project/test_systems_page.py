"""The page of the systems has the tables that the estimator makes, and what it says beside them is true."""

from __future__ import annotations

import pytest

from tests.accuracy import platforms
from tests.accuracy.results import MIB, Errors, stored

PAGE = platforms.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", platforms.SECTIONS)
def test_the_tables_of_documented_hardware_are_what_the_estimator_says(name: str) -> None:
    text = platforms.SECTIONS[name]()
    assert f"<!-- {name} -->\n{text}\n<!-- /{name} -->" in PAGE


def test_logits_are_a_quarter_of_the_peak_where_the_page_says_so() -> None:
    assert "a quarter of the peak on the RTX 3060" in PAGE
    found = platforms.table(platforms.preset("nvidia"))
    logits = next(c for c in found.components if c.name == "logits and loss")
    assert logits.at(found.peak_phase) / found.peak_bytes == pytest.approx(0.25, abs=0.03)


def measured(estimate: str) -> tuple[list[int], int, int]:
    """What the runs of lqr measured, in MiB; and what was estimated for the first and for later ones."""
    rows = {row.estimate: row for part in stored() if part.name == "systems" for row in part.rows}
    row = rows[f"{estimate} of lqr and efficientids"]
    assert isinstance(row, Errors)
    cases = [case for case in row.cases if case.plan.startswith("lqr ")]
    estimated = [round(case.estimated_bytes / MIB) for case in cases]
    return [round(case.measured_bytes / MIB) for case in cases], estimated[0], estimated[-1]


def later_runs(measured: list[int]) -> str:
    """``61 to 64``: what the runs after the first one measured."""
    return f"{min(measured[1:])} to {max(measured[1:])}"


def test_the_memory_of_lqr_is_what_its_runs_measured() -> None:
    torch, formula, _ = measured("torch ~ peak")
    jax, jax_formula, _ = measured("jax ~ peak")
    host, host_formula, _ = measured("torch host bytes")
    jax_host, first, later = measured("jax host bytes")
    assert (
        f"{min(torch)} to {max(torch)} MiB in torch, estimated {formula}, "
        f"traced {measured('torch = peak')[1]}; JAX: {jax[0]} while the first run compiles its evaluation, "
        f"and {later_runs(jax)} in later runs, estimated {jax_formula}, compiled {measured('jax = peak')[1]} |"
    ) in PAGE
    assert (
        f"{min(host)} to {max(host)} MiB in torch, estimated {host_formula}; JAX: {jax_host[0]} while the first "
        f"run compiles, estimated {first}, and {later_runs(jax_host)} in later runs, estimated {later} |"
    ) in PAGE
