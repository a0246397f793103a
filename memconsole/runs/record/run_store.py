"""The folder of all runs: creates, lists and finds run directories."""

from __future__ import annotations

import base64
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from memconsole.plan import plan as plans
from memconsole.plan import plan_file
from memconsole.plan.data.paths import current_folder
from memconsole.plan.plan import Plan
from memconsole.private_files import private_folder
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.labels import NAME_CHARACTERS, shown_name
from memconsole.runs.record.processes.identity import host_name
from memconsole.runs.record.records import RunRecord
from memconsole.sanitize import clean_line, utf8
from memconsole.user_folders import NoHomeError, user_folder

RUN_ID = re.compile(r"\d{8}-\d{6}-[a-z2-7]{6}")
FUTURE_SECONDS = 60.0
"""How far in the future a run may be dated: the clocks of machines that share a disk differ."""
LATEST = "latest"
"""What commands call the newest run."""


def runs_root() -> Path:
    """The folder of all runs, which may not exist yet.

    Raises `RunError` if others could write to it, if there is no home folder, or if its name is not UTF-8. Makes nothing: a
    console that only looks calls it.
    """
    try:
        root = user_folder("state") / "runs"
    except NoHomeError as error:
        raise RunError(str(error)) from None
    if str(root) != utf8(str(root)):
        raise RunError(
            f"{utf8(str(root.parent))}: the name of this folder is not UTF-8; set XDG_STATE_HOME to another"
        )
    try:
        check_private(root)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RunError(f"{root}: cannot be looked at: {error.strerror}") from None
    return root


def make_runs_root() -> Path:
    """`runs_root`, made if it is missing. Raises `RunError`."""
    root = runs_root()
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        private_folder(root)
        for folder in missing:
            files.sync_directory(folder.parent)
    except OSError as error:
        raise WriteError(f"{root}: cannot be made: {error.strerror}") from None
    check_private(root)
    return root


def check_private(root: Path) -> None:
    """Raise `RunError` unless only this user can put files into `root`, and `OSError` if it cannot
    be looked at."""
    real = Path(os.path.realpath(root))
    status = real.stat()
    if status.st_uid != os.geteuid():
        raise RunError(
            f"{root}: belongs to user {status.st_uid}, not to you; runs are not kept there"
        )
    if status.st_mode & 0o022:
        raise RunError(f"{root}: others can write there; run chmod go-w {root}")
    parent = real.parent.stat()
    replaceable = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    if replaceable or parent.st_uid not in (0, os.geteuid()):
        raise RunError(f"{real.parent}: others can replace {real.name} there; run chmod go-w on it")


def create_run(
    plan: Plan,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
    by_recipe: Iterable[str] = (),
) -> RunDirectory:
    """Create a run directory with its plan and `run.json`. `name` is never part of a path. `by_recipe` are the
    settings of the plan that the recipe chose.

    A name that holds a token or password is kept without it, as everything that a run records. Raises `PlanError`
    if the current folder was deleted, and `RunError`.
    """
    import memconsole

    root, current = make_runs_root(), current_folder()
    created = time.time()
    while True:
        word = base64.b32encode(secrets.token_bytes(4)).decode()[:6].lower()
        path = root / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(created))}-{word}"
        try:
            path.mkdir(mode=0o700)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise WriteError(f"{path}: cannot be made: {error.strerror}") from None
    run = RunDirectory(path)
    record = RunRecord(
        id=run.id,
        name=shown_name(name or "", os.environ),
        created_wall=created,
        host=host_name(),
        directory=utf8(str(current)),
        python=utf8(sys.executable),
        memconsole=memconsole.__version__,
        environment={name: utf8(value) for name, value in (environment or {}).items()},
    )
    try:
        for folder in ("attempts", "checkpoints", "control", "control/cmd", "control/ack"):
            (path / folder).mkdir(mode=0o700)
        files.sync_directory(run.control_path)
        files.write_struct(run.record_path, record)
        files.write_atomic(run.plan_path, plan_file.dumps_run(plan, by_recipe).encode())
        files.sync_directory(root)
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise WriteError(f"{path}: cannot be written: {error.strerror}") from None
        raise
    return run


def list_runs() -> list[RunDirectory]:
    """Every run of this user, newest first, and last those dated in the future by a clock that was wrong.

    Ids would not do: they begin with local time, which is set back.
    """
    root = runs_root()
    try:
        with os.scandir(root) as entries:
            names = [e.name for e in entries if RUN_ID.fullmatch(e.name) and _own_directory(e)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{root}: cannot be read: {error.strerror}") from None
    latest = time.time() + FUTURE_SECONDS

    def age(run: RunDirectory) -> tuple[bool, float, str]:
        created = run.created_wall
        return created <= latest, created, run.id

    return sorted((RunDirectory(root / name) for name in names), key=age, reverse=True)


def _own_directory(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def find_run(reference: str) -> RunDirectory:
    """Find a run by its id, a unique prefix of the id, the id's random end, its name (the newest such run) or `latest`.
    A name comes before the prefix of another run's id.

    Raises `RunError`, which names `reference`.
    """
    runs = list_runs()
    if not runs:
        raise RunError("there are no runs yet; memconsole train starts one")
    if reference == LATEST:
        return runs[0]
    shown = clean_line(reference, NAME_CHARACTERS)
    if re.fullmatch(r"[0-9a-z-]+", reference):
        by_prefix = [run for run in runs if run.id.startswith(reference)]
        is_id = any(run.id == reference for run in by_prefix)
        is_name = bool(by_prefix) and not is_id and any(run.name == reference for run in runs)
        if len(by_prefix) == 1 and not is_name:
            return by_prefix[0]
        if by_prefix and not is_name:
            some = ", ".join(run.id for run in by_prefix[:3])
            raise RunError(
                f'"{shown}" is the start of {len(by_prefix)} runs ({some} …); type more of it'
            )
    # People remember the random end of an id.
    by_end = [run for run in runs if run.id.rpartition("-")[2] == reference]
    matches = by_end or [run for run in runs if run.name == shown]
    if matches:
        return matches[0]
    ids = [run.id for run in runs] + [run.name for run in runs]
    raise RunError(
        f'no run "{shown}"{plans.nearest(reference, ids) or "; memconsole runs lists them"}'
    )
