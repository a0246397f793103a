"""Asks the data reader about a source, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from memconsole.plan.plan import PlanError
from memconsole.sanitize import clean_line


def inspection(source: str, assignments: Sequence[str], *, lengths: bool) -> dict[str, Any]:
    """What `memconsole_trainer.data` reports about a source. Raises `PlanError`."""
    argv = [sys.executable, "-P", "-m", "memconsole_trainer.data"]
    argv += [*(["--lengths"] if lengths else []), source, *assignments]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise PlanError(
            clean_line(f"{source}: its reader ended with code {done.returncode}: {last}")
        ) from None
    if "error" in found:
        raise PlanError(clean_line(found["error"]))
    return found
