"""Estimates that the pages show beside measured figures are those of the estimator."""

from __future__ import annotations

import pytest

from tests.pages import estimates


@pytest.mark.parametrize(("page", "name"), estimates.SECTIONS)
def test_the_estimates_of_a_page_are_what_the_estimator_says(page: str, name: str) -> None:
    text = (estimates.DOCS / page).read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{estimates.SECTIONS[page, name]()}\n<!-- /{name} -->" in text
