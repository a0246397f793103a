"""What a plan says of the tokens that a run keeps on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memconsole.cli.plans.disk import disk_lines
from memconsole.memory.state.data import cache_bytes
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.units import GIB


def kept(path: Path | str, **changes: Any) -> int | None:
    named = {f"data.{key}": value for key, value in changes.items()}
    plan = replace(Plan(), {"data.source": str(path), "data.validation_fraction": 0.1, **named})
    return cache_bytes(plan, catalog.model(plan))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(36 * GIB)
    return path


def test_kept_tokens_take_two_bytes_each_up_to_the_limit(text: Path, tmp_path: Path) -> None:
    assert kept(text) == round(0.9 * 2 * 10 * GIB)
    assert kept(text, cache_gib=7) == 7 * GIB
    assert kept(text, cache_gib=0) == 0
    (tmp_path / "small.txt").write_text("some words")
    assert kept(tmp_path / "small.txt") == 0
    assert kept("hf://owner/name") is None


def test_the_plan_says_where_and_how_much(text: Path) -> None:
    def lines(**changes: Any) -> str:
        return " ".join(disk_lines(replace(Plan(), {f"data.{k}": v for k, v in changes.items()})))

    assert "disk ~19.0 GiB for tokens, kept between epochs" in lines(source=str(text))
    assert lines(source=str(text), cache_gib=0) == lines(max_examples=10) == ""
    packed = text.rename(text.with_suffix(".jsonl.gz"))
    assert "disk ~108 GiB for the data, unpacked in" in lines(source=str(packed))
    assert "disk ~108 GiB for the data" in lines(validation=str(packed))
    assert "up to 20.0 GiB for tokens" in lines(source="hf://owner/name")
    assert "the run's folder" in lines(source="hf://owner/name")
    assert "keeps no tokens" in lines(source="hf://owner/name", cache_gib=0)
