"""Writes data for a command: beside their place, with a progress bar, and there only when they are complete."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from memconsole.plan.machine.packages import missing_words
from memconsole.plan.plan import PlanError
from memconsole.runs.record.failures.failure import ExitCode
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts


def answer(out: Path, write: Callable[[], Facts]) -> int:
    """Print the facts that `write` returns about `out` as JSON, or ``{"error": …}``. Returns the process's exit code."""
    try:
        facts = write()
    except KeyboardInterrupt:
        return 130
    except PlanError as error:
        return _failed(str(error), ExitCode.BAD_PLAN)
    except ModuleNotFoundError:
        words = missing_words()
        if not words:
            raise
        return _failed(words, ExitCode.BAD_PLAN)
    except OSError as error:
        return _failed(f"{out}: {error.strerror or error}", ExitCode.FAILED)
    print(msgspec.json.encode(facts).decode())
    return 0


def written(out: Path, bar: Bar, write: Callable[[Path], Facts]) -> Facts:
    """Let `write` make a file or folder, and put it at `out`, replacing what is there. An interruption reaches `bar`, and
    leaves nothing."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    before = signal.signal(signal.SIGINT, lambda number, frame: bar.interrupt())
    try:
        facts = write(partial)
        if out.is_dir() and not out.is_symlink():
            shutil.rmtree(out)
        os.replace(partial, out)
    finally:
        signal.signal(signal.SIGINT, before)
        bar.end()
        _remove(partial)
    return facts


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _failed(message: str, code: ExitCode) -> int:
    print(msgspec.json.encode({"error": message}).decode())
    return int(code)
