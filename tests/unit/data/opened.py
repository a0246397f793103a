"""Opens a source of data as a run does."""

from pathlib import Path
from typing import Any

from memconsole.plan.plan import Plan, replace
from memconsole_trainer.data.sources.opening import open_source


def opened(path: Path, **changes: Any) -> Any:
    """The documents of `path`, with `changes` of the settings of the data."""
    named = {f"data.{key}": value for key, value in changes.items()}
    return open_source(replace(Plan(), {"data.source": str(path), **named}), 300)
