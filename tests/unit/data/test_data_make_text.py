"""`memconsole data make text`: what it writes, and how it is read."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from memconsole.plan import catalog
from memconsole.plan.data.made import Size, kind, parse_size
from memconsole.plan.plan import DataChoice
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Facts, Request
from memconsole_trainer.data.make.text import SIZES, STORY_BITS, story
from memconsole_trainer.data.sources.documents import FileDocuments
from memconsole_trainer.data.sources.opening import open_path

BYTES = 1_500_000


def made(out: Path, size: int = BYTES, seed: int = 0) -> Facts:
    return make(Request("text", out, Size(size, None), seed, {}))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "stories.txt"
    made(path)
    return path


def test_the_same_seed_tells_the_same_stories_and_a_larger_file_goes_on(
    path: Path, tmp_path: Path
) -> None:
    text = path.read_text("ascii")
    made(tmp_path / "again", BYTES // 2)
    again = (tmp_path / "again").read_text("ascii")
    assert len(again) < len(text)
    assert text.startswith(again)
    made(tmp_path / "other", 2000, seed=1)
    assert not text.startswith((tmp_path / "other").read_text("ascii"))


@pytest.mark.parametrize("size", [1, 600, 700_000])
def test_a_file_ends_with_the_story_that_reaches_its_size(tmp_path: Path, size: int) -> None:
    facts = made(tmp_path / "text", size)
    text = (tmp_path / "text").read_text("ascii")
    stories = text.removesuffix("\n\n").split("\n\n")
    assert facts["size_bytes"] == len(text)
    assert facts["stories"] == len(stories)
    assert size <= len(text) < size + len(stories[-1]) + 2
    assert facts["least_bits_per_byte"] == round(STORY_BITS * len(stories) / len(text), 4)


def test_every_draw_can_be_seen_in_the_story() -> None:
    for base in np.random.default_rng(3).integers(0, SIZES, (10, len(SIZES))).tolist():
        for place, size in enumerate(SIZES):
            told = {story([*base[:place], other, *base[place + 1 :]]) for other in range(size)}
            assert len(told) == size


def test_no_story_is_cut_where_the_file_is_cut_into_documents(path: Path) -> None:
    documents = open_path(path, "text", 1024, DataChoice())
    assert isinstance(documents, FileDocuments)
    pieces = documents.read(0, documents.count or 0)
    assert len(pieces) > 10
    assert all(piece.endswith(".\n\n") or piece.endswith('"\n\n') for piece in pieces)


def test_every_dataset_that_is_made_names_the_command_that_makes_it() -> None:
    entries = [entry for entry in catalog.datasets().values() if entry.kind == "made"]
    assert {entry.name for entry in entries} == {"equipment", "lqr", "ratings", "stories"}
    for entry in entries:
        words = shlex.split(entry.made_by or "")
        assert words[:3] == ["memconsole", "data", "make"]
        assert kind(words[3])
        assert words[4:6] == [Path(entry.where).parts[0], "--size"]
        assert parse_size(words[6])
