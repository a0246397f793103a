"""Cells of CSV tables are text as the file has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from memconsole.plan.check import check
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.text.blocks import token_key
from tests.unit.data.opened import opened

CELLS = ["true", "007", "3.10", "NA", "None", "null", "nan", "N/A", "2024-01-01", "1e3", " x"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_cells_are_read_as_they_are_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    between = "\t" if suffix == ".tsv" else ","
    for cell in CELLS:  # alone in its column, so that its type would be guessed
        path.write_text(f"n{between}text\n1{between}{cell}\n2{between}{cell}\n")
        assert opened(path).read(0, 2) == [cell, cell]
        assert opened(path, template="{{ n }}={{ text }}").read(0, 1) == [f"1={cell}"]


@pytest.mark.parametrize("between", [";", "\t"])
def test_a_header_without_commas_tells_the_separator(between: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f'id{between}text\n1{between}"a, b{between} c"\n2{between}d, e\n')
    check(replace(Plan(), {"data.source": str(path)}))
    assert opened(path).read(0, 2) == [f"a, b{between} c", "d, e"]
    assert opened(path, template="{{ id }}={{ text }}").read(1, 2) == ["2=d, e"]
    (tmp_path / "u.csv").write_text("id,text\n3,f; g\n")
    assert opened(tmp_path).read(1, 3) == ["d, e", "f; g"]


def test_a_comma_at_the_end_of_rows_moves_no_cell(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,label\nhello one,yes,\nhello two,no,\n")
    assert opened(path).read(0, 2) == ["hello one", "hello two"]


def test_a_column_may_hold_numbers_first_and_words_later(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    words = [str(number) if number < 11_000 else f"word{number}" for number in range(12_000)]
    path.write_text("text,n\n" + "".join(f"{word},1\n" for word in words))
    found = opened(path)
    assert found.read(10_999, 11_001) == ["10999", "word11000"]
    assert opened(path, template="{{ text }}").read(11_000, 11_001) == ["word11000"]


def test_an_empty_cell_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("q,text\na,\nb,c\n")
    assert opened(path).read(0, 2) == ["", "c"]
    with pytest.raises(DataError, match='row 1 field "text" is null'):
        opened(path, template="{{ q }} {{ text }}").read(0, 1)


def test_tokens_that_were_made_of_guessed_cells_are_not_used() -> None:
    assert token_key._readers([Path("a.csv.gz"), Path("b.tsv")]) == [("csv", 2)]
    assert token_key._readers([Path("a.jsonl"), Path("b.parquet"), Path("c.txt")]) == []
