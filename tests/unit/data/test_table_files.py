"""Tables are local files: no name is taken for a pattern, and reading one needs no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memconsole.plan.check import check
from memconsole.plan.plan import DataChoice, Plan, PlanError, replace
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.opening import open_path, open_source

OFFLINE = """
import socket, sys
from pathlib import Path

asked = []

def refused(*arguments, **_):
    asked.append(arguments)
    raise OSError("no network here")

socket.getaddrinfo = refused
socket.socket.connect = refused
from memconsole.plan.plan import DataChoice
from memconsole_trainer.data.sources.opening import open_path
for path in map(Path, sys.argv[1:]):
    print(open_path(path, "text", 300, DataChoice()).read(0, 1)[0])
print("asked", asked)
"""


def test_local_tables_of_every_format_are_read_without_a_network(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    files = [tmp_path / f"table{suffix}" for suffix in (".jsonl", ".csv", ".tsv", ".parquet")]
    files[0].write_text(json.dumps({"text": "of jsonl"}))
    files[1].write_text("text,other\nof csv,1\n")
    files[2].write_text("text\tother\nof tsv\t1\n")
    parquet.write_table(pyarrow.table({"text": ["of parquet"]}), files[3])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "DATASETS_"))}
    found = subprocess.run(
        [sys.executable, "-c", OFFLINE, *map(str, files)],
        env=environment | {"HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.splitlines() == ["of jsonl", "of csv", "of tsv", "of parquet", "asked []"]


@pytest.mark.parametrize("name", ["data[1].jsonl", "data*.jsonl", "data?.jsonl", "{data}.jsonl"])
def test_a_name_with_the_signs_of_a_pattern_is_that_file_alone(name: str, tmp_path: Path) -> None:
    for other in ("data1.jsonl", "data2.jsonl", "data.jsonl"):
        (tmp_path / other).write_text(json.dumps({"text": "another file"}))
    (tmp_path / name).write_text(json.dumps({"text": "this file"}))
    found = open_path(tmp_path / name, "text", 300, DataChoice())
    assert found.count == 1
    assert found.read(0, 1) == ["this file"]  # type: ignore[union-attr]


def test_a_name_that_the_library_cannot_open_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a::b.csv").write_text("text\nthis file\n")
    with pytest.raises(DataError, match=r'a::b\.csv: "::" in the name'):
        open_path(tmp_path / "a::b.csv", "text", 300, DataChoice())


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", "[]"), ("a.csv", "text\n"), ("a.tsv", "n\ttext\n")]
)
def test_a_table_without_rows_is_refused_by_name(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    for template in (None, "{{ text }}"):
        plan = replace(Plan(), {"data.source": str(path), "data.template": template})
        with pytest.raises(DataError, match=f"^{path}: holds no rows$"):
            open_source(plan, 300)


def test_a_table_that_datasets_has_saved_is_read_where_it_lies(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    table = Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    table.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    found = open_path(tmp_path / "saved", "text", 300, DataChoice())
    assert found.read(0, 2) == ["a", "b"]  # type: ignore[union-attr]
    assert len(found.hashes.files) == 2
    plan = replace(Plan(), {"data.source": str(tmp_path / "saved"), "data.template": "={{ text }}"})
    check(plan)
    assert open_source(plan, 300).read(0, 2) == ["=a", "=b"]  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r'data-00000-of-00002\.arrow: no column "body"'):
        open_path(tmp_path / "saved", "body", 300, DataChoice())
    for first in ("train", "train_sft"):
        both = tmp_path / f"both-{first}"
        DatasetDict({first: table, "test": table}).save_to_disk(str(both))
        words = rf"splits test, {first}: give one, as .*{first}/{first}; data\.validation may name another"
        with pytest.raises(PlanError, match=words):
            open_path(both, "text", 300, DataChoice())
    assert not list((tmp_path / "cache").rglob("*.arrow"))
