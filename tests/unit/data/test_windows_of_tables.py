"""Tables of steps in time become windows of a regressor: against a plain loop, in blocks of any size, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from memconsole.cli.main import cli
from memconsole.plan.plan import PlanError
from memconsole_trainer.data.cutting import cutting
from memconsole_trainer.data.cutting.cutting import cut
from memconsole_trainer.data.cutting.request import Cut
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.windows.column_names import (
    ColumnNames,
    check_inputs,
    read_names,
    write_names,
)

COLUMNS = ("x", "v", "u", "w")
SERIES = (7, 40, 3, 25)
"""Rows of each series."""


class Silent:
    """A terminal that nobody reads."""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...


def rows() -> list[dict[str, Any]]:
    """Numbers of which some are missing."""
    draw = np.random.default_rng(3)
    found: list[dict[str, Any]] = []
    for number, count in enumerate(SERIES):
        for step in range(count):
            values = dict(
                zip(COLUMNS, map(float, draw.normal(size=4).astype(np.float32)), strict=True)
            )
            found.append({"run": f"run {number}", "step": step, **values})
    found[20]["x"] = found[30]["u"] = found[60]["u"] = found[60]["w"] = None
    return found


def write_table(path: Path) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows()), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    else:
        lines = [",".join(rows()[0])]
        lines += [",".join("" if v is None else str(v) for v in row.values()) for row in rows()]
        path.write_text("\n".join(lines) + "\n")
    return path


def expected(request: Cut) -> tuple[dict[str, list[Any]], int]:
    """The datasets of the windows, row by row, and how many windows are left out."""
    table = rows()
    starts = np.cumsum([0, *SERIES]) if request.group else np.array([0, sum(SERIES)])
    found: dict[str, list[Any]] = {}
    left_out = 0
    for number, (begin, end) in enumerate(pairwise(starts)):
        for start in range(begin, end - request.rows + 1, request.stride):
            window = [
                [row[n] for n in request.inputs] for row in table[start : start + request.length]
            ]
            target = [table[start + request.rows - 1][n] for n in request.outputs]
            known = [value is not None for value in target]
            if any(None in row for row in window) or (request.outputs and not any(known)):
                left_out += 1
                continue
            found.setdefault("input_sequences", []).append(window)
            found.setdefault("controls", []).append([value or 0.0 for value in target])
            found.setdefault("control_masks", []).append(known)
            found.setdefault("trajectory_ids", []).append(number)
    if not request.outputs:
        del found["controls"], found["control_masks"]
    if request.group is None:
        del found["trajectory_ids"]
    return found, left_out


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
@pytest.mark.parametrize(
    "settings",
    [
        {"outputs": ("u", "w"), "length": 4},
        {"outputs": ("u", "w"), "length": 3, "stride": 2, "group": "run"},
        {"outputs": ("u",), "length": 3, "stride": 5, "ahead": 4, "group": "run"},
        {"length": 2, "stride": 7, "group": "run"},
    ],
)
def test_windows_are_those_of_a_plain_loop_in_blocks_of_any_size(
    suffix: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LEAST_ROWS", 5)
    table = write_table(tmp_path / f"table{suffix}")
    request = Cut(table=str(table), out=str(tmp_path / "w.h5"), inputs=("x", "v"), **settings)
    wanted, left_out = expected(request)
    for block_bytes in (1, 1 << 20):
        monkeypatch.setattr(cutting, "BLOCK_BYTES", block_bytes)
        facts = cut(request, Path(request.out), Bar("windows", "rows", Silent()))  # type: ignore[arg-type]
        assert facts["windows"] == len(wanted["input_sequences"])
        assert facts.get("left_out", "0 ").split()[0] == str(left_out)  # type: ignore[union-attr]
        with h5py.File(request.out) as file:
            assert file.keys() == wanted.keys()
            for name, values in wanted.items():
                np.testing.assert_allclose(file[name], np.asarray(values), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": ("x", "vv")}, 'no column "vv" — did you mean "v"?; it has run, step, x, v, u, w'),
        ({"inputs": ("x", "run")}, 'column "run" holds "run 0" in row 1, expected a number'),
        ({"group": "step"}, 'the rows with step = 0 are not together: row 8 has it again; sort the table by step'),
        ({"length": 41, "group": "run"}, "its longest group has 40 rows; a window of 41 takes 41"),
        ({"length": 70, "ahead": 9}, "the table has 75 rows; a window of 70 and its outputs 9 rows ahead take 79"),
        ({"length": 75}, "every window lacks an input or all outputs (1 in all)"),
        ({"table": "a.txt"}, "is no table"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "table": str(write_table(tmp_path / "table.jsonl")),
        "inputs": ("x", "v"),
        "outputs": ("u",),
        "length": 4,
        **changes,
    }
    request = Cut(out=str(tmp_path / "w.h5"), **settings)
    with pytest.raises(DataError) as raised:
        cut(request, Path(request.out), Bar("windows", "rows", Silent()))  # type: ignore[arg-type]
    assert words in str(raised.value)


def test_numbers_that_python_writes_in_other_ways_are_read(tmp_path: Path) -> None:
    moments = [1_700_000_000_000_000_001 + n for n in range(4)]
    whole = pa.table({"x": pa.array(moments, pa.int64())})
    assert cutting._numbers(whole.column("x"), "x", 0).tolist() == [float(m) for m in moments]
    words = pa.table({"x": pa.array(["+1.5", " 2 ", "", None, "-3e2"])})
    found = cutting._numbers(words.column("x"), "x", 0)
    assert found[[0, 1, 4]].tolist() == [1.5, 2.0, -300.0]
    assert np.isnan(found[2:4]).all()


@pytest.mark.parametrize(
    ("cell", "words"), [("1_000", "expected a number"), ("+1e400", "too large"), ("+one", "row 7")]
)
def test_cells_that_are_no_number_are_refused(cell: str, words: str) -> None:
    column = pa.table({"x": pa.array(["1", cell])}).column("x")
    with pytest.raises(DataError, match=words):
        cutting._numbers(column, "t.csv: column x", 5)


def test_the_command_writes_a_file_that_inspect_knows(tmp_path: Path) -> None:
    table, out = write_table(tmp_path / "table.csv"), tmp_path / "w.h5"
    words = [
        "data",
        "windows",
        str(table),
        str(out),
        "--inputs",
        "x, v",
        "--outputs",
        "u",
        "--length",
        "4",
    ]
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["inputs"], facts["outputs"], facts["steps"]) == (2, 1, 4)
    shown = CliRunner().invoke(cli, ["data", "inspect", str(out), "--json"])
    found = json.loads(shown.stdout)
    assert (found["kind"], found["documents"]) == ("windows", facts["windows"])
    lines = found["sample"].splitlines()
    assert [line.partition(":")[0] for line in lines[1:4]] == ["x", "v", "u"]
    no_windows = ["data", "windows", str(table), str(tmp_path / "w.npz"), "--inputs", "x"]
    for refused, told in (
        (words, "replace it with --force"),
        ([*words[:4], "--inputs", "x,x"], 'holds "x" twice'),
        (no_windows, "whose name ends with .h5 or .hdf5"),
    ):
        error = CliRunner().invoke(cli, refused).exception
        assert isinstance(error, PlanError)
        assert told in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "w.h5"]


def test_windows_with_other_inputs_are_not_predicted(tmp_path: Path) -> None:
    """A model knows its inputs by their order alone."""
    files = {}
    for name, inputs in (("learned", ("x", "v")), ("same", ("x", "v")), ("other", ("v", "x"))):
        files[name] = tmp_path / f"{name}.h5"
        with h5py.File(files[name], "w") as file:
            write_names(file, inputs, ("u",))
    with h5py.File(files["same"]) as file:
        same = read_names(file)
    assert same == ColumnNames(("x", "v"), ("u",))
    check_inputs(files["same"], same, files["learned"])
    check_inputs(files["same"], same, tmp_path / "gone.h5")
    check_inputs(files["same"], ColumnNames(), files["other"])
    with pytest.raises(
        DataError, match="its inputs are x, v; the run learned from v, x, in this order"
    ):
        check_inputs(files["same"], same, files["other"])
    with h5py.File(files["other"], "w") as file:
        file.attrs["inputs"] = "not JSON"
        assert read_names(file) == ColumnNames()
