"""Rows of token ids from a file: what is padding or masked is not learned, in training and in validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tokenizers as library
from tokenizers import models

from memconsole.plan.models.sizing import size
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data.sources import hdf5
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text import portion
from memconsole_trainer.data.text.opened import open_text
from memconsole_trainer.data.text.prepared import Prepared, prepare
from memconsole_trainer.data.text.rows.batches import TextRows
from memconsole_trainer.data.text.run_tokenizer import make_tokenizer

PAD, END = 0, 1
LENGTH = 8


def tokenizer(folder: Path, pad: str | None) -> Path:
    """A tokenizer of words, whose bytes are those of their names, with this pad token."""
    names = {"<pad>": PAD, "</s>": END, **{f"w{number}": number for number in range(2, 89)}}
    inner = library.Tokenizer(models.WordLevel(names | {"<unk>": 89}, unk_token="<unk>"))
    inner.add_special_tokens(["<pad>", "</s>"])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>"} | ({} if pad is None else {"pad_token": pad})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def prepared(
    folder: Path,
    rows: Sequence[Sequence[int]],
    pad: str | None = None,
    vocabulary: int = 90,
    length: int = LENGTH,
    **changes: Any,
) -> Prepared:
    """Train on `rows`, and validate on the same ones, in another file."""
    for name, more in (("train", 1), ("held", 2)):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["tokens"] = np.array(rows, np.int32)
            file["unused"] = np.zeros(more)
    settings: dict[str, Any] = {
        "data.source": str(folder / "train.h5"),
        "data.validation": str(folder / "held.h5"),
        "data.sequence_length": length,
        **{f"data.{key}": value for key, value in changes.items()},
    }
    if pad is not None:
        settings["data.tokenizer"] = str(tokenizer(folder / "tokenizer", pad or None))
    plan, architecture = replace(Plan(), settings), size(50_000_000, vocabulary, 64)
    opened = open_text(plan, vocabulary)
    own = make_tokenizer(plan, architecture, opened, folder / "tokenizer.json", None)
    return prepare(plan, architecture, opened, own, folder / "data.json", lambda: None)


def batches(found: Prepared, rows: int, length: int = LENGTH) -> list[tuple[Any, Any, int, int]]:
    """Inputs and targets (rows, length), targets counted and units of a training batch and of a validation
    batch, both with the rows in the order of their inputs."""
    shape, (part,) = BatchShape(1, rows, length), found.portions
    trained = TextRows(part.blocks, 1, 0, part.held)
    iterator = trained.epoch(1)
    made, units = trained.batch(trained.join([next(iterator) for _ in range(rows)]), shape)
    held = next(iter(found.validation.batches(shape, 0)))
    result = []
    for batch, count in ((made, units), (held, units)):
        inputs, targets = batch["inputs"][0], batch["targets"][0]
        order = np.lexsort(inputs.T[::-1])
        result.append((inputs[order], targets[order], int(batch.weight), count))
    return result


@pytest.mark.parametrize("streaming", [True, False])
def test_pad_tokens_at_the_end_of_rows_are_not_learned(streaming: bool, tmp_path: Path) -> None:
    whole = [6, PAD, *range(8, 15)]
    rows = [[5, 6, 7, END] + [PAD] * 5, whole, [7, 8, END] + [PAD] * 6]
    found = prepared(tmp_path, rows, pad="<pad>", streaming=streaming)
    for _, targets, weight, units in batches(found, 3):
        assert targets.tolist() == [
            [6, 7, END] + [MASKED] * 5,
            whole[1:],
            [8, END] + [MASKED] * 6,
        ]
        assert weight == units == 3 + 8 + 2
    assert found.counts[PAD] == 1
    assert found.validation.tokens == found.counts.sum() == 4 + 9 + 3
    assert found.validation.prompt == [5, 6, 7, END]
    assert found.validation.target_bytes(BatchShape(1, 2, LENGTH), 0) == 2 * 5 + 3 * 5
    assert found.steps_per_epoch(BatchShape(1, 1, LENGTH)) == 3


def test_the_first_of_the_pad_tokens_that_also_end_a_text_is_learned(tmp_path: Path) -> None:
    rows = [[5, 6] + [END] * 7, [6, END, *range(8, 14), END]]
    found = prepared(tmp_path, rows, "</s>")
    for _, targets, _, _ in batches(found, 2):
        assert targets.tolist() == [[6, END] + [MASKED] * 6, rows[1][1:]]


@pytest.mark.parametrize(("pad", "read"), [("<pad>", PAD), ("", END), (None, 0)])
def test_a_masked_token_is_read_as_another_and_not_learned(
    pad: str | None, read: int, tmp_path: Path
) -> None:
    rows = [[MASKED, 6, MASKED, MASKED, 7] + [MASKED] * 4, list(range(5, 14))]
    found = prepared(tmp_path, rows, pad)
    for inputs, targets, weight, units in batches(found, 2):
        assert inputs[0, :5].tolist() == [read, 6, read, read, 7]
        assert targets[0].tolist() == [6, MASKED, MASKED, 7] + [MASKED] * 4
        assert (weight, units) == (2 + 8, 4 + 8)  # what is only read counts for the speed


def test_other_negative_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1 of tokens holds token -1, .* -100 stands for"):
        prepared(tmp_path, [[2] * 9, [2] * 8 + [-1]])


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_with_and_without_marks_keep_ids_that_fill_16_bits(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5, "_BLOCK_BYTES", 1)  # each row is a block
    monkeypatch.setattr(portion, "JOINED_BYTES", 1)
    rows = [[9, *range(65_528, 65_536)], [2, 65_534, MASKED, *range(60_000, 60_006)]]
    found = prepared(
        tmp_path, [*rows, [7, *range(40_000, 40_008)]], None, 65_536, streaming=streaming
    )
    for _, targets, _, _ in batches(found, 3):
        assert targets.tolist() == [rows[1][1:], list(range(40_000, 40_008)), rows[0][1:]]


@pytest.mark.parametrize("pad", [None, "<pad>"])
@pytest.mark.parametrize("width", [17, 18, 20, 24])
def test_each_target_of_a_wide_row_is_learned_once(
    width: int, pad: str | None, tmp_path: Path
) -> None:
    rows = [list(range(first, first + width)) for first in (2, 30, 60)]
    if pad:
        rows[0][-2:] = [PAD, PAD]
    found = prepared(tmp_path, rows, pad)
    wanted = sorted(token for row in rows for token in row[1:] if token != PAD)
    shape = BatchShape(1, 1, LENGTH)
    count = found.steps_per_epoch(shape)
    for inputs, targets, weight, _ in batches(found, count):
        assert sorted(targets[targets != MASKED].tolist()) == wanted
        assert weight == len(wanted)
        reads = targets[:, :-1] != MASKED
        assert (targets[:, :-1][reads] == inputs[:, 1:][reads]).all()
    assert found.validation.tokens == len(wanted) + 3


def test_windows_of_nothing_but_padding_teach_nothing(tmp_path: Path) -> None:
    found = prepared(tmp_path, [[5, 6, 7, END] + [PAD] * 13, list(range(20, 37))], pad="<pad>")
    for inputs, targets, weight, _ in batches(found, 4):
        assert inputs.max() < 90
        assert weight == 3 + 16
        assert (targets[0] == MASKED).all()


@pytest.mark.parametrize(("pad", "warned"), [(None, True), ("", True), ("<pad>", False)])
def test_what_may_be_padding_is_told_unless_it_is_named(
    pad: str | None, warned: bool, tmp_path: Path
) -> None:
    rows = [[5, 6, 7, END] + [PAD] * 9, *(list(range(n, n + 13)) for n in (20, 30, 40, 50, 60))]
    found = prepared(tmp_path, rows, pad, length=12)
    said = [
        f"{tmp_path}/train.h5: 12% of the tokens looked at repeat token 0 at the ends of rows, and are trained "
        "on; if that is padding, name it as pad_token in the tokenizer_config.json of data.tokenizer"
    ]
    assert list(found.warnings) == (said if warned else [])


def test_short_repeats_at_the_ends_of_rows_are_no_padding(tmp_path: Path) -> None:
    assert not prepared(tmp_path, [[5, 6, 7, END] + [9] * 8] * 4, length=11).warnings
