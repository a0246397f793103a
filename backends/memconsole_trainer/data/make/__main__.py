"""``python -m memconsole_trainer.data.make REQUEST``: make data as a JSON `Request` says.

Prints its facts as JSON, or ``{"error": …}`` and exits with the trainer's code for that failure.
The data are written beside `out` and renamed when they are complete, so an interrupted command
leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec

from memconsole.plan.data.made import kind
from memconsole.plan.machine.packages import missing_words
from memconsole.plan.plan import PlanError
from memconsole.runs.record.failures.failure import ExitCode
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts, Request, maker


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m memconsole_trainer.data.make REQUEST", file=sys.stderr)
        return 2
    request = msgspec.json.decode(
        sys.argv[1], type=Request, dec_hook=lambda type, value: type(value)
    )
    try:
        facts = make(request)
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
        return _failed(f"{request.out}: {error.strerror or error}", ExitCode.FAILED)
    print(msgspec.json.encode(facts).decode())
    return 0


def make(request: Request) -> Facts:
    """Make what `request` says and put it at `request.out`, replacing what is there."""
    out = request.out
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    bar = Bar(request.kind, kind(request.kind).units, sys.stderr)
    before = signal.signal(signal.SIGINT, lambda number, frame: bar.interrupt())
    try:
        facts = maker(request.kind)(msgspec.structs.replace(request, out=partial), bar)
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


if __name__ == "__main__":
    sys.exit(main())
