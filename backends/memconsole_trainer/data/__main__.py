"""``python -m memconsole_trainer.data SOURCE [KEY=VALUE]...``: an `Inspection` as JSON.

A process of its own, because the parsers of tables and HDF5 are C and meet files from anywhere.
A failure is ``{"error": …}`` and the trainer's exit code for it.
"""

from __future__ import annotations

import sys

import msgspec

from memconsole.plan.plan import Plan, PlanError, apply_settings, replace
from memconsole.runs.failure import ExitCode
from memconsole_trainer.data.documents import DataError
from memconsole_trainer.data.inspect import inspect


def main() -> int:
    if len(sys.argv) < 2:
        print("usage: python -m memconsole_trainer.data SOURCE [KEY=VALUE]...", file=sys.stderr)
        return 2
    try:
        plan = apply_settings(replace(Plan(), {"data.source": sys.argv[1]}), sys.argv[2:])
        found = inspect(plan)
    except (PlanError, DataError) as error:
        print(msgspec.json.encode({"error": str(error)}).decode())
        return int(ExitCode.BAD_PLAN if isinstance(error, PlanError) else ExitCode.BAD_DATA)
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
