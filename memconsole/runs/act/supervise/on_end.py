"""A program of the user that is started when a run has ended: it sends a message, or begins the next piece of work.

The program is the file ``on-end`` in the folder of memconsole's settings, like a hook of git. A plan cannot name it,
so that a plan file from somebody else starts nothing.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

from memconsole.runs.read.follow import Follower
from memconsole.runs.read.shown.ended import ended_line
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes.identity import host_name
from memconsole.runs.record.states import LIVE
from memconsole.user_folders import config_folder

MOST_SECONDS = 60.0
"""How long the program may run."""


def program() -> Path:
    """``$XDG_CONFIG_HOME/memconsole/on-end``, by default under ``~/.config``."""
    return config_folder() / "on-end"


def trouble(path: Path) -> str | None:
    """Why the program cannot be started; empty if it can, None if there is none."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISREG(mode):
        return f"{path}: not a file"
    if not os.access(path, os.X_OK):
        return f"{path}: not executable; make it so with chmod +x"
    return ""


def tell_end(run: RunDirectory) -> str:
    """Start the user's program for a run that has ended, and wait until it is done. Returns what went wrong; empty
    if nothing did, or if there is no program or the run lives again."""
    path = program()
    why = trouble(path)
    if why is None or why:
        return why or ""
    snapshot = Follower(run).poll()
    if snapshot.state in LIVE:
        return ""
    try:
        started = subprocess.Popen(
            [path, ended_line(snapshot, host_name())],
            cwd=Path.home(),
            env=os.environ | variables(run, snapshot),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, RuntimeError) as error:
        return f"{path}: {error}"
    try:
        code = started.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        return f"{path}: ended after {MOST_SECONDS:.0f} seconds, which is the most that it may take"
    return f"{path}: exit code {code}" if code else ""


def variables(run: RunDirectory, snapshot: RunSnapshot) -> dict[str, str]:
    """The environment variables that tell the program of the run."""
    return {
        "MEMCONSOLE_RUN": run.id,
        "MEMCONSOLE_RUN_NAME": snapshot.name,
        "MEMCONSOLE_RUN_FOLDER": str(run.path),
        "MEMCONSOLE_STATE": snapshot.state,
        "MEMCONSOLE_ENDED_BY": snapshot.ended_by,
    }
