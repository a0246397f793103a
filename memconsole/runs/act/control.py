"""Asks a run's supervisor to stop, pause, profile or kill its trainer."""

from __future__ import annotations

import time

from memconsole.runs.act import launch, slurm
from memconsole.runs.act.family import wake
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import requests
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.requests import Order, Reply, Request, pause_asked, reply_to
from memconsole.sanitize import clean_line

ANSWER_SECONDS = 10.0
"""How long a supervisor may take to reply."""


def request_stop(run: RunDirectory, who: str) -> str:
    """Ask the trainer to finish its step, save and stop. A second request shortens the deadline.

    Past the deadline the trainer is killed. Returns the request's id. Starts a supervisor if the
    run has none. A job that waits in the queue is cancelled, and the id is empty. Raises `RunError` if
    the run is not live.
    """
    return _request(run, "stop", who)


def request_kill(run: RunDirectory, who: str) -> str:
    """Kill the trainer and its remaining children at once; work since the last checkpoint is lost.

    Returns the request's id. Raises `RunError` if no process of the run is alive.
    """
    return _request(run, "kill", who)


def request_pause(run: RunDirectory, who: str) -> str:
    """Ask the trainer to wait between two steps and keep its memory.

    Returns the request's id. Raises `RunError` if the run is not live.
    """
    return _request(run, "pause", who)


def request_continue(run: RunDirectory, who: str) -> str:
    """Let a paused trainer go on. Returns the request's id. Raises `RunError` if it is not live."""
    return _request(run, "continue", who)


def request_profile(run: RunDirectory, who: str, steps: int) -> str:
    """Ask the trainer to profile its next `steps` steps.

    Returns the request's id; the `Profile` event repeats it once they are recorded. Raises
    `RunError` if the run is not live, or is paused.
    """
    if pause_asked(run) and liveness(run).live:
        raise RunError(f"run {run.id} is paused; resume it first (memconsole resume {run.id})")
    return _request(run, "profile", who, steps)


def _request(run: RunDirectory, command: Order, who: str, steps: int = 0) -> str:
    wake(run)
    now = liveness(run)
    job = run.job()
    if job is not None and now.state == "queued" and command in ("stop", "kill"):
        slurm.cancel(run, job, clean_line(who, 200))
        return ""
    if now.attempt is None or not (now.live or (now.state == "orphaned" and command == "kill")):
        hint = "; only a kill ends its children" if now.state == "orphaned" else ""
        raise RunError(f"run {run.id} is not running: it is {now.state}{hint}")
    request = Request(
        id=requests.new_id(),
        command=command,
        who=clean_line(who, 200),
        attempt=now.attempt,
        time_wall=time.time(),
        steps=steps,
    )
    try:
        requests.write(run, request)
    except OSError as error:
        raise WriteError(f"run {run.id}: the request cannot be written: {error.strerror}") from None
    if now.supervisor_pid is None:
        launch.adopt(run)
    return request.id


def wait_answer(run: RunDirectory, request_id: str) -> Reply | None:
    """Wait for the supervisor's reply; None if it does not come in time."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while (found := reply_to(run, request_id)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def wait_accepted(run: RunDirectory, request_id: str) -> Reply:
    """The supervisor's reply. Raises `RunError` if it refuses or does not reply in time."""
    found = wait_answer(run, request_id)
    if found is None or not found.accepted:
        raise RunError(f"run {run.id}: {found.note if found else 'its supervisor does not reply'}")
    return found
