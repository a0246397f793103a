"""``python -m memconsole_trainer.command NAME RUN_DIR …``: what ``memconsole sample``, ``chat``, ``predict`` and
``export`` do with a run's model. The module NAME does the work."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType

CHAT = "chat"


def main() -> int:
    signal.signal(signal.SIGINT, _interrupted)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupted)
    name = sys.argv.pop(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # `memconsole` reads the output and prints it. A chat, and a program whose output is a terminal, prints directly, in
        # the terminal's encoding.
        encoding = None if name == CHAT or sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    try:
        return int(importlib.import_module(f"memconsole_trainer.{name}").main())
    except ModuleNotFoundError:
        words = _missing_packages(Path(sys.argv[1]))
        if not words:
            raise
        print(f"memconsole: {words}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        os._exit(128 + next(iter(interrupt.args), signal.SIGINT))


def _missing_packages(run: Path) -> str:
    """Which packages of the run's backend are not installed; "" if none is missing."""
    from memconsole.plan.machine.packages import missing_words
    from memconsole.plan.plan import PlanError
    from memconsole.runs.record.directory import RunDirectory

    try:
        backend = RunDirectory(run).read_plan().backend
    except PlanError:
        backend = ""
    return missing_words(backend)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End by a signal, and say nothing more: Python reports an interrupt that it meets in an import or a callback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    sys.exit(main())
