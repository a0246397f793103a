"""The page of the systems has the tables that the estimator makes, and what it says beside them is true."""

from __future__ import annotations

import pytest

from tests.accuracy import platforms

PAGE = platforms.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", platforms.SECTIONS)
def test_the_tables_of_documented_hardware_are_what_the_estimator_says(name: str) -> None:
    text = platforms.SECTIONS[name]()
    assert f"<!-- {name} -->\n{text}\n<!-- /{name} -->" in PAGE


def test_logits_are_half_of_the_peak_where_the_page_says_so() -> None:
    assert "half of the peak on the RTX 3060" in PAGE
    found = platforms.table(platforms.preset("nvidia"))
    logits = next(c for c in found.components if c.name == "logits and loss")
    assert logits.at(found.peak_phase) / found.peak_bytes == pytest.approx(0.5, abs=0.03)
