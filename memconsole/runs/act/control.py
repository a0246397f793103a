"""Asks a run's supervisor to stop, pause, profile or kill its trainer."""

from __future__ import annotations

import time

from memconsole.runs.act import launch, slurm, waiting
from memconsole.runs.act.family import wake
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import requests
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.requests import Order, Reply, Request, pause_asked, reply_to
from memconsole.sanitize import clean_line

ANSWER_SECONDS = 10.0
"""How long a supervisor may take to reply."""


def request_profile(run: RunDirectory, who: str, steps: int) -> str:
    """Ask the trainer to profile its next `steps` steps.

    Returns the request's id; the `Profile` event repeats it once they are recorded. Raises
    `RunError` if the run is not live, or is paused.
    """
    if pause_asked(run) and liveness(run).live:
        raise RunError(f"run {run.id} is paused; resume it first (memconsole resume {run.id})")
    return request(run, "profile", who, steps)


def request(run: RunDirectory, order: Order, who: str, steps: int = 0) -> str:
    """Send an order to the supervisor of a run, and start one if it has none. Returns the request's id.

    - stop: the trainer finishes its step, saves and stops. Past a deadline, which a second request shortens, it is
      killed. A job that waits in the queue, and a run that waits for another one, is cancelled, and the id is empty.
    - kill: the trainer and its remaining children end at once; work since the last checkpoint is lost.
    - pause: the trainer waits between two steps and keeps its memory.
    - continue: a paused trainer goes on.
    - profile: the trainer records its next `steps` steps; see `request_profile`.

    Raises `RunError` if the run is not live. A kill is also for a run whose trainer is dead while children of it live.
    """
    wake(run)
    now = liveness(run)
    if now.state == "queued" and order not in ("stop", "kill"):
        raise RunError(f"run {run.id} is not running: it is queued")
    if now.state == "queued":
        if _cancel(run, clean_line(who, 200)):
            return ""
        now = liveness(run)
    if now.attempt is None or not (now.live or (now.state == "orphaned" and order == "kill")):
        hint = "; only a kill ends its children" if now.state == "orphaned" else ""
        raise RunError(f"run {run.id} is not running: it is {now.state}{hint}")
    made = Request(
        id=requests.new_id(),
        command=order,
        who=clean_line(who, 200),
        attempt=now.attempt,
        time_wall=time.time(),
        steps=steps,
    )
    try:
        requests.write(run, made)
    except OSError as error:
        raise WriteError(f"run {run.id}: the request cannot be written: {error.strerror}") from None
    if now.supervisor_pid is None:
        launch.adopt(run)
    return made.id


def _cancel(run: RunDirectory, who: str) -> bool:
    """Take a run out of its queue. False if it has begun meanwhile. Raises `RunError`."""
    job, wait = run.job(), run.waiting()
    if job is not None:
        slurm.cancel(run, job, who)
        return True
    return wait is not None and waiting.cancel(run, wait, who)


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
