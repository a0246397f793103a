"""The pages have the tables of settings that are made from the settings, and every setting is on a page."""

from __future__ import annotations

import pytest

from tests.pages import settings


@pytest.mark.parametrize(("page", "name"), settings.TABLES)
def test_the_tables_of_settings_are_what_the_plan_says(page: str, name: str) -> None:
    text = (settings.DOCS / page).read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{settings.TABLES[page, name]()}\n<!-- /{name} -->" in text


def test_what_jax_refuses_is_said() -> None:
    rows = dict(line.split(" | ", 1) for line in settings.optimizations().splitlines())
    assert "`cpu`: JAX reaches only host memory that is pinned" in rows["| optimizer offload"]
    assert rows["| mixed precision"].endswith("|  |")
