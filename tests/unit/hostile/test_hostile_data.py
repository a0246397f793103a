"""Data and weights that are damaged, endless or no files: one line that names the file, and the line in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.plan.models.tensor_header import TensorFileError
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.record.checkpoints.manifest import MANIFEST, STATE, verify
from memconsole_trainer.data.sources import hdf5
from memconsole_trainer.data.sources.documents import DataError, FileDocuments
from memconsole_trainer.data.sources.opening import open_path, open_source
from memconsole_trainer.data.sources.tables import load_table
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.data.text.tokens.tokenizer import load
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.loop.resuming import resumed
from memconsole_trainer.weights.checkpoint import Checkpoints
from memconsole_trainer.weights.huggingface import tensor_files
from memconsole_trainer.weights.tensorfile import TensorFile

Put = Callable[[Path], Path]
ROWS = [json.dumps({"text": f"row {number}"}) for number in range(5)]
BAD_LINES = {
    '{"text": "unfinished': "line 3, column 10: not JSON: Unterminated string",
    "[1, 2]": "line 3: holds no object",
    "\0\0": "line 3, column 1: not JSON: Expecting value",
    '{"text": ' + "[" * 9999: "line 3: not JSON: nested too deeply",
    '{"text": Infinity': "line 3: not JSON: Infinity is no JSON value",
}


def opened(path: Path) -> Any:
    return open_source(replace(Plan(), {"data.source": str(path)}), 300)


def lines_of(path: Path, third: str) -> Path:
    path.write_text("\n".join([*ROWS[:2], third, *ROWS[2:]]) + "\n")
    return path


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_malformed_line_of_json_is_named(bad: str, tmp_path: Path) -> None:
    path = lines_of(tmp_path / "rows.jsonl", bad)
    with pytest.raises(DataError, match=BAD_LINES[bad]) as refused:
        opened(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("content", "line"), [("null", 1), ("\ufeffnull\n", 1), ("\ufeff\n null\n" + ROWS[0] + "\n", 2)]
)
def test_a_file_that_begins_with_null_is_refused(
    name: str, content: str, line: int, tmp_path: Path
) -> None:
    """pyarrow's reader would end this process."""
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=f"line {line}: holds no object with fields") as refused:
        opened(path)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("blanks", ["", " \t"])
@pytest.mark.parametrize("before", [2, 60_000, 130_000])
def test_null_in_a_later_line_or_element_is_refused_by_its_number(
    before: int, blanks: str, tmp_path: Path
) -> None:
    """pyarrow's reader ends this process if one of its blocks begins with null. The file is longer than what is read at a
    time, and 60,000 rows end near such a bound."""
    rows = [f'{{"text": "row {number:,}"}}' for number in range(before)]
    rows += [f"{blanks}null{blanks}"] * 40_000
    lines, array = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\n".join(rows))
    array.write_text(f"[{','.join(rows)}]")
    for path, place in ((lines, "line"), (array, "row")):
        with pytest.raises(DataError) as refused:
            opened(path)
        words = f"{path}: {place} {before + 1:,}: holds no object with fields"
        assert str(refused.value) == words


def test_null_inside_of_objects_is_no_missing_object(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for content in (
        '[{"text": "a", "tags": [\nnull\n]}, {"text": "b", "tags": [null, null]}]',
        '{\n"text": "a", "tags":\nnull\n}\n{"text": "b"}\n',
        '{"text": "a", "tags": [null]}\n{"text": "b", "tags": null}\n',
    ):
        path.write_text(content)
        assert opened(path).read(0, 2) == ["a", "b"]
    path.write_text('["a", null, "b"]')
    assert opened(path).read(0, 3) == ["a", "", "b"]


def test_one_lone_surrogate_costs_one_character_and_no_file(tmp_path: Path) -> None:
    path = lines_of(tmp_path / "rows.jsonl", '{"text": "lone \\ud800, a pair \\ud83d\\ude00"}')
    texts = opened(path).read(0, 6)
    assert texts == ["row 0", "row 1", "lone \ufffd, a pair \U0001f600", "row 2", "row 3", "row 4"]


def test_bytes_that_are_no_text_cost_one_character_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text":"a"}\n{"text":"x\xff\xfey"}\n{"text":"b"}\n')
    assert opened(path).read(0, 3) == ["a", "x\ufffd\ufffdy", "b"]


def test_data_that_is_no_file_is_refused(no_file: Put, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.h5", "rows.txt"):
        path = no_file(tmp_path / name)
        if path.is_file():  # a terabyte of data is possible
            continue
        with pytest.raises(PlanError, match=r"data\.source"):
            check_and_open(path)
        # It may be put there after the plan was checked.
        with pytest.raises((DataError, OSError)):
            load_table("jsonl", [path])
        with pytest.raises(DataError, match=name):
            hdf5.describe(path)
        with pytest.raises(DataError, match=name):
            FileDocuments([path])


def check_and_open(path: Path) -> None:
    if path.is_dir():
        raise PlanError("data.source: a folder is opened as one", "data.source")
    opened(path)


def test_a_damaged_hdf5_file_is_named_in_one_line(tmp_path: Path) -> None:
    chance, path = random.Random(26), tmp_path / "rows.h5"
    said: dict[str, str] = {}
    with h5py.File(path, "w") as file:
        file["ids"] = np.arange(400).reshape(20, 20)
        file.create_dataset("z", data=np.arange(400).reshape(20, 20), compression="gzip")
    whole = path.read_bytes()
    for number in range(60):
        changed = bytearray(whole)
        for _ in range(chance.choice((1, 4))):
            changed[chance.randrange(min(len(whole), 2500))] = chance.choice((0, 255, 1))
        damaged = tmp_path / f"damaged-{number}.h5"
        damaged.write_bytes(changed)
        try:
            rows = open_path(damaged, "ids", 1 << 40, Plan().data)
            assert isinstance(rows, hdf5.TokenRows)
            rows.rows(0, 3)
        except (DataError, PlanError) as error:
            said[damaged.name] = str(error)
    assert 5 < len(said) < 60
    for name, words in said.items():
        assert name in words
        assert "\n" not in words


def tensors(path: Path, header: Any, data: bytes = b"\0" * 64) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[Any], first: Any, last: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, "a and b lie in the same bytes"),
        ({"a": entry([8], 0, 32), "b": entry([4], 8, 24)}, "a and b lie in the same bytes"),
        ({"a": entry([2**62] * 5000, 0, 16)}, "does not lie inside"),
        ({"a": entry([1] * 99, 0, 4)}, "does not lie inside"),
        ({"a": entry([2**80], 0, 16)}, "unreadable header entry"),
        ({"a": entry(["4"], 0, 16)}, "unreadable header entry"),
        ({"a": entry([4.0], 0, 16)}, "unreadable header entry"),
        ({"a": entry([-4], 0, 16)}, "unreadable header entry"),
        ({"a": entry([True], 0, 4)}, "unreadable header entry"),
        ({"\x1b[2J": entry([5], 0, 16)}, r"\\x1b\[2J does not lie inside"),
        (b"[" * 100_000, "damaged safetensors header"),
        (b'{"a": ' + b"9" * 9999 + b"}", "damaged safetensors header"),
        (b"\0\0", "damaged safetensors header"),
        ([1], "damaged safetensors header"),
    ],
)
def test_impossible_weights_are_refused(header: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match=words):
        TensorFile(tensors(tmp_path / "model.safetensors", header))


def test_neighbouring_and_empty_tensors_are_read(tmp_path: Path) -> None:
    header = {"b": entry([2], 8, 16), "none": entry([0, 3], 8, 8), "a": entry([2], 0, 8)}
    data = np.arange(4, dtype="<f4").tobytes()
    file = TensorFile(tensors(tmp_path / "model.safetensors", header, data))
    assert file.tensor("a").tolist() == [0.0, 1.0]
    assert file.tensor("b").tolist() == [2.0, 3.0]
    assert file.tensor("none").shape == (0, 3)


def test_weights_that_are_no_file_are_refused(no_file: Put, tmp_path: Path) -> None:
    no_file(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        tensor_files(tmp_path)
    no_file(tmp_path / "model.safetensors.index.json")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        tensor_files(tmp_path)


@pytest.mark.parametrize(
    "index",
    [b"[" * 100_000, b"\xff", b"[]", b'{"weight_map": 1}', b'{"weight_map": {"a": "../b"}}',
     b'{"weight_map": {"a": "b\\u0000"}}', b'{"weight_map": {"a": ["b"]}}', b""],
)  # fmt: skip
def test_an_impossible_index_is_refused(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(WeightsError) as refused:
        tensor_files(tmp_path)
    assert "\0" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_tokenizer_that_is_no_file_is_refused(no_file: Put, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"tokenizer\.json"):
        load(no_file(tmp_path / "tokenizer.json"), 300)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    array = np.ones(3, np.float32)
    checkpoints = Checkpoints(folder, keep=2)
    return checkpoints.save(7, [("model.a", array)], state, lambda: True, lambda size: None).path


@pytest.mark.parametrize("file", [MANIFEST, STATE, "model-00001.safetensors"])
def test_a_checkpoint_with_something_else_in_place_of_a_file_is_damaged(
    file: str, no_file: Put, tmp_path: Path
) -> None:
    path = saved(tmp_path, {"validation_loss": 1.0})
    assert verify(path) is None
    no_file(path / file)
    assert verify(path) is not None
    said: list[str] = []
    assert Checkpoints(tmp_path, keep=2).newest(said.append, lambda: None, owned=False) is None
    assert "step-000000007 is damaged" in said[0]
    Checkpoints(tmp_path, keep=2).retain()


def test_a_state_that_parses_but_lacks_its_parts_is_named(tmp_path: Path) -> None:
    saved(tmp_path, {"fingerprints": ["plan"], "control": {}})
    stored = Checkpoints(tmp_path, keep=2).newest(print, lambda: None)
    assert stored is not None
    assert stored.part("control", dict[str, Any]) == {}
    with pytest.raises(DataError, match=r"step-000000007/state\.json: fingerprints: "):
        _ = stored.fingerprints
    with pytest.raises(DataError, match=r"step-000000007/state\.json: progress: "):
        stored.part("progress", dict[str, Any])


def test_a_state_of_another_step_than_its_checkpoints_is_refused(tmp_path: Path) -> None:
    progress = {"total_steps": 9, "steps_per_epoch": 9}
    saved(tmp_path, {"fingerprints": {"plan": "one"}, "progress": progress})
    stored = Checkpoints(tmp_path, keep=2).newest(print, lambda: None)
    assert stored is not None
    with pytest.raises(
        DataError, match=r"step-000000007/state\.json: progress: step = 0, expected 7"
    ):
        resumed(stored, {"plan": "one"})


class Numbers:
    """Rows of one number each, whose place is a number too."""

    row_bytes = 8
    shuffle_buffer = 0
    at_hand = True

    def epoch(self, epoch: int) -> Any:
        raise AssertionError("no rows are asked for")


@pytest.mark.parametrize(
    "place", [{}, {"epoch": 1}, {"epoch": 0, "rows": None}, {"epoch": "1", "rows": 1}]
)
def test_a_place_in_the_data_that_cannot_be_read_is_told(place: dict[str, Any]) -> None:
    stream = BatchStream(Numbers(), BatchShape(1, 1, 8), place or {"other": 1})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="does not say where in the data"):
        stream.next()
    stream.close()
