"""A place for runs, and a run under test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_story import Story, end


@pytest.fixture
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def story(runs_folder: Path) -> Iterator[Story]:
    """A new run; whatever it started is gone afterwards."""
    made = Story(runs_folder)
    yield made
    end(made.run)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen small documents."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        words = f"the cat {number} sat on the mat while dogs ran over green hills "
        (folder / f"{number:02d}.txt").write_text(words * 40)
    return folder
