"""Requests to a run's supervisor and its replies, as files that only their owner can create.

`control/cmd/<id>.json` holds a request until the supervisor has written `control/ack/<id>.json`.
The trainer is paused while a file `paused` is in the attempt's folder. A profile request is passed
to the trainer as `profile.json` in that folder; the trainer deletes it.
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
from memconsole.runs.record import files, spares
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.records import PAUSED

COMMAND_BYTES = 4096
Order = Literal["stop", "kill", "pause", "continue", "profile"]
PROFILE = "profile.json"
_COMMAND_ID = re.compile(r"[0-9a-f]{16}-[0-9a-f]{10}")


def new_id() -> str:
    """An id for a request or a reply; ids sort by the time at which they were made."""
    return f"{time.time_ns():016x}-{secrets.token_hex(5)}"


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, valid only for the attempt it names."""

    id: str
    command: Order
    who: str
    attempt: int
    time_wall: float
    steps: int = 0
    """How many steps to profile."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor did with a request."""

    id: str
    command: str
    who: str
    attempt: int
    accepted: bool
    note: str = ""
    time_wall: float = 0.0
    deadline_boot: float | None = None
    """Time since boot at which a stop becomes a kill; extended while a checkpoint is written."""


def pause_asked(run: RunDirectory) -> bool:
    """Whether the newest attempt is paused or asked to pause."""
    attempt = run.newest_attempt()
    return attempt is not None and files.exists(run.attempt_path(attempt) / PAUSED)


def reply_to(run: RunDirectory, request_id: str) -> Reply | None:
    """The supervisor's reply to a request; None if there is none yet."""
    return files.read_struct(run.control_path / "ack" / f"{request_id}.json", Reply)


def stop_requests(run: RunDirectory, attempt: int) -> list[Request | Reply]:
    """The requests to stop or kill this attempt, oldest first, answered or not."""
    asked: dict[str, Request | Reply] = {}
    for given in replies(run):
        ends = given.command in ("stop", "kill")
        if given.attempt == attempt and given.accepted and ends:
            asked[given.id] = given
    for request, _ in pending(run):
        ends = request is not None and request.command in ("stop", "kill")
        if request is not None and ends and request.attempt == attempt:
            asked.setdefault(request.id, request)
    return [asked[key] for key in sorted(asked)]


def replies(run: RunDirectory) -> list[Reply]:
    """All replies so far, oldest first."""
    folder = run.control_path / "ack"
    found = [files.read_struct(folder / f"{name}.json", Reply) for name in _ids(folder)]
    return [item for item in found if item is not None]


def pending(run: RunDirectory) -> list[tuple[Request | None, Path]]:
    """Unanswered requests, oldest first, with their files; None for an invalid file."""
    folder = run.control_path / "cmd"
    return [
        (read_command(path), path) for path in (folder / f"{name}.json" for name in _ids(folder))
    ]


def write(run: RunDirectory, request: Request) -> None:
    """Write a request for the run's supervisor; make the folders of requests and replies if somebody has removed them.
    Raises `OSError`."""
    for folder in (run.control_path, run.control_path / "cmd", run.control_path / "ack"):
        folder.mkdir(mode=0o700, exist_ok=True)
    path = run.control_path / "cmd" / f"{request.id}.json"
    spares.write_struct(run.spares_path, path, request)


def settle(run: RunDirectory, path: Path, given: Reply) -> None:
    """Write the reply to the request in `path`, then delete the request. Raises `OSError`."""
    spares.write_struct(run.spares_path, run.control_path / "ack" / path.name, given)
    path.unlink(missing_ok=True)


def read_command(path: Path) -> Request | None:
    """The request in a file; None unless the file can be trusted.

    It must be a small, well-formed regular file that belongs to this user and has one link.
    """
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
        request = typed_json.decode(content, Request)
        if request.id == path.stem:
            return request
    return None


def read_profile_request(path: Path) -> Request | None:
    """The profile request that a supervisor passed to its trainer."""
    return files.read_struct(path, Request)


def _ids(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(stem for stem in stems if _COMMAND_ID.fullmatch(stem))
