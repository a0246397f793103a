"""Fixtures of the tests on a real terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell import end_runs


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a person at a local terminal, whose runs are the test's own, and end with it."""
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SSH_", "NO_COLOR"))},
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }
    yield env
    end_runs(env)
