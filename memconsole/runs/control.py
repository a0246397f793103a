"""Requests to a run's supervisor and its answers, as files only their owner can plant.

`control/cmd/<id>.json` holds a request until the supervisor has written `control/ack/<id>.json`. A file `paused`
in the attempt's folder is the pause itself: the trainer waits while it is there. A request to profile is handed to the
trainer as `profile.json` in the same place, which it takes away.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Literal

import msgspec

from memconsole import typed_json
from memconsole.runs import files
from memconsole.runs.directory import RunDirectory, RunError
from memconsole.sanitize import clean_line

COMMAND_BYTES = 4096
Order = Literal["stop", "kill", "pause", "continue", "profile"]
PROFILE = "profile.json"
_COMMAND_ID = re.compile(r"[0-9a-f]{16}-[0-9a-f]{10}")


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, bound to the attempt it was meant for."""

    id: str
    command: Order
    who: str
    attempt: int
    time_wall: float
    steps: int = 0
    """To be profiled."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor did with a request."""

    id: str
    command: str
    who: str
    attempt: int
    accepted: bool
    note: str = ""
    time_wall: float = 0.0
    deadline_boot: float | None = None
    """Boot clock at which a stop becomes a kill; moves while a checkpoint is being written."""


def request_stop(run: RunDirectory, who: str) -> str:
    """Ask the trainer to finish its step, save and stop; asked twice, it is killed sooner if it does not.

    Returns the request's id. Starts a supervisor when the run has lost its own. Raises `RunError`
    when the run does not live.
    """
    return _request(run, "stop", who)


def request_kill(run: RunDirectory, who: str) -> str:
    """End the trainer, and what is left of its children, at once; work since the last checkpoint is
    lost. Returns the request's id. Raises `RunError` when nothing of the run lives."""
    return _request(run, "kill", who)


def request_pause(run: RunDirectory, who: str) -> str:
    """Ask the trainer to wait between two steps, keeping its memory. Returns the request's id. Raises `RunError`
    when the run does not live."""
    return _request(run, "pause", who)


def request_continue(run: RunDirectory, who: str) -> str:
    """Let a paused trainer go on. Returns the request's id. Raises `RunError` when the run does not live."""
    return _request(run, "continue", who)


def request_profile(run: RunDirectory, who: str, steps: int) -> str:
    """Ask the trainer to record its next `steps` steps. Returns the request's id, which the `Profile` event tells
    when they are recorded. Raises `RunError` when the run does not live."""
    return _request(run, "profile", who, steps)


def pause_asked(run: RunDirectory) -> bool:
    """Whether the newest attempt is to wait, or does."""
    attempt = run.newest_attempt()
    return attempt is not None and files.exists(run.attempt_path(attempt) / "paused")


def _request(run: RunDirectory, command: Order, who: str, steps: int = 0) -> str:
    from memconsole.runs.launch import local
    from memconsole.runs.liveness import liveness

    now = liveness(run)
    if now.attempt is None or not (now.live or (now.state == "orphaned" and command == "kill")):
        hint = "; only a kill ends its children" if now.state == "orphaned" else ""
        raise RunError(f"run {run.id} is not running: it is {now.state}{hint}")
    request = Command(
        id=f"{time.time_ns():016x}-{secrets.token_hex(5)}",
        command=command,
        who=clean_line(who, 200),
        attempt=now.attempt,
        time_wall=time.time(),
        steps=steps,
    )
    try:
        files.write_struct(run.control_path / "cmd" / f"{request.id}.json", request)
    except OSError as error:
        raise RunError(f"run {run.id}: the request cannot be written: {error.strerror}") from None
    if now.supervisor_pid is None:
        local.adopt(run)
    return request.id


def answer(run: RunDirectory, request_id: str) -> Answer | None:
    """The supervisor's answer to a request; None while there is none."""
    return files.read_struct(run.control_path / "ack" / f"{request_id}.json", Answer)


def wait_answer(run: RunDirectory, request_id: str, seconds: float = 10.0) -> Answer | None:
    """Wait for the supervisor's answer; None when it does not come in time."""
    deadline = time.monotonic() + seconds
    while (found := answer(run, request_id)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def wait_accepted(run: RunDirectory, request_id: str) -> Answer:
    """The supervisor's answer. Raises `RunError` where it does not come in time, or refuses."""
    found = wait_answer(run, request_id)
    if found is None or not found.accepted:
        raise RunError(f"run {run.id}: {found.note if found else 'its supervisor is silent'}")
    return found


def stop_requests(run: RunDirectory, attempt: int) -> list[Command | Answer]:
    """The requests to stop or end this attempt, oldest first, answered or not."""
    asked: dict[str, Command | Answer] = {}
    for given in answers(run):
        ends = given.command in ("stop", "kill")
        if given.attempt == attempt and given.accepted and ends:
            asked[given.id] = given
    for request, _ in pending(run):
        ends = request is not None and request.command in ("stop", "kill")
        if request is not None and ends and request.attempt == attempt:
            asked.setdefault(request.id, request)
    return [asked[key] for key in sorted(asked)]


def answers(run: RunDirectory) -> list[Answer]:
    """Every answer given so far, oldest first."""
    folder = run.control_path / "ack"
    found = [files.read_struct(folder / f"{name}.json", Answer) for name in _ids(folder)]
    return [item for item in found if item is not None]


def pending(run: RunDirectory) -> list[tuple[Command | None, Path]]:
    """Requests not yet answered, oldest first, with their files; None where a file is not one."""
    folder = run.control_path / "cmd"
    return [
        (read_command(path), path) for path in (folder / f"{name}.json" for name in _ids(folder))
    ]


def settle(run: RunDirectory, path: Path, given: Answer) -> None:
    """Write the answer to the request in `path`, then drop the request. Raises `OSError`."""
    files.write_struct(run.control_path / "ack" / path.name, given)
    path.unlink(missing_ok=True)


def read_command(path: Path) -> Command | None:
    """A request, if this user wrote it: a regular file of theirs with one link, small, well-formed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        trusted = (
            stat.S_ISREG(status.st_mode)
            and status.st_uid == os.geteuid()
            and status.st_nlink == 1
            and not status.st_mode & 0o022
            and status.st_size <= COMMAND_BYTES
        )
        if not trusted:
            return None
        content = os.read(descriptor, COMMAND_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        request = typed_json.decode(content, Command)
        if request.id == path.stem:
            return request
    return None


def read_profile_request(path: Path) -> Command | None:
    """What a supervisor handed to its trainer."""
    return files.read_struct(path, Command)


def _ids(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(stem for stem in stems if _COMMAND_ID.fullmatch(stem))
