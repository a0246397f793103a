"""``python -m memconsole_trainer.data [--lengths] SOURCE [KEY=VALUE]...``: print an `Inspection` as
JSON.

It runs in its own process because the parsers of tables and HDF5 are C code and may crash on a
damaged file. On failure it prints ``{"error": …}`` and exits with the trainer's exit code for that
failure.
"""

from __future__ import annotations

import sys

import msgspec

from memconsole.plan.plan import Plan, PlanError, apply_settings, replace
from memconsole.runs.record.failures.failure import ExitCode
from memconsole_trainer.data.inspect import inspect
from memconsole_trainer.data.sources.documents import DataError


def main() -> int:
    words = sys.argv[1:]
    lengths = words[:1] == ["--lengths"]
    if lengths:
        words = words[1:]
    if not words:
        usage = "python -m memconsole_trainer.data [--lengths] SOURCE [KEY=VALUE]..."
        print(f"usage: {usage}", file=sys.stderr)
        return 2
    try:
        plan = apply_settings(replace(Plan(), {"data.source": words[0]}), words[1:])
        found = inspect(plan, lengths=lengths)
    except (PlanError, DataError) as error:
        print(msgspec.json.encode({"error": str(error)}).decode())
        return int(ExitCode.BAD_PLAN if isinstance(error, PlanError) else ExitCode.BAD_DATA)
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
