"""Fixtures of the screens' tests: folders of their own, and the console on a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.plan import Plan
from tests.tui.harness import Console


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees or makes runs outside its own directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    # Pricing ahead would be waited for after each key.
    monkeypatch.setattr("memconsole.tui.plan.ahead.AHEAD_SECONDS", 1e6)


@pytest.fixture
def make_console() -> Callable[..., Console]:
    """A console on a given plan (the default plan if none)."""

    def make(plan: Plan | None = None, **options: Any) -> Console:
        return Console(plan or Plan(), **options)

    return make
