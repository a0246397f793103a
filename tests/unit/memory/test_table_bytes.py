"""The libraries that read tables: which sources make a run load them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memconsole.devices.budget import budget
from memconsole.memory.estimate import table_of
from memconsole.memory.state.data import LINES_BYTES, TABLE_LIBRARIES_BYTES, table_bytes
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.data.sources.json_texts import MOST_BYTES


def plan(source: object, **changes: object) -> Plan:
    settings = {f"data.{key}": value for key, value in changes.items()}
    return replace(Plan(), {"data.source": str(source), "device.name": "cpu", **settings})


@pytest.mark.parametrize(
    ("name", "as_texts", "as_records"),
    [
        ("a.txt", False, False),
        ("a.jsonl", False, False),
        ("a.json", True, False),
        ("a.csv", True, True),
        ("a.tsv.gz", True, True),
        ("a.parquet", True, True),
    ],
)
def test_runs_on_tables_load_their_libraries(
    name: str, as_texts: bool, as_records: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("text\nrow\n")
    for source in (tmp_path / name, tmp_path):
        for template, expected in ((None, as_texts), ("{{ text }}", as_records)):
            found = table_bytes(plan(source, template=template))
            assert found == (TABLE_LIBRARIES_BYTES if expected else 0), (source, template)


def test_large_json_lines_and_hub_datasets_are_tables(tmp_path: Path) -> None:
    assert LINES_BYTES == MOST_BYTES
    large = tmp_path / "a.jsonl"
    large.touch()
    os.truncate(large, LINES_BYTES + 1)
    assert table_bytes(plan(large))
    assert not table_bytes(plan(large, template="{{ text }}"))
    assert table_bytes(plan("hf://owner/name"))


def test_another_source_counts_and_the_host_estimate_holds_them(tmp_path: Path) -> None:
    text, table = tmp_path / "a.txt", tmp_path / "b.csv"
    text.write_text("some text\n" * 50)
    table.write_text("text\nrow\n")
    alone, mixed = plan(text), plan(text, mix=f"{table}=0.25")
    assert not table_bytes(alone)
    assert table_bytes(mixed)
    hosts = [table_of(p, budget(p, None)).host.training for p in (alone, plan(table))]
    assert abs(hosts[1] - hosts[0] - TABLE_LIBRARIES_BYTES) < 1 << 20
