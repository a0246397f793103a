"""Asks Slurm for the state of this user's jobs with `squeue`, at most once in `ASK_SECONDS` for all runs together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memconsole.sanitize import clean_line
from memconsole.slurm_command import SlurmError, output_of

ASK_SECONDS = 5.0
"""How long an answer of `squeue` is used."""
TROUBLE_SECONDS = 30.0
"""How long to wait before a controller that did not answer is asked again."""
TIMEOUT_SECONDS = 10.0
FIELDS = ("JobID", "State", "Reason", "RestartCnt", "NodeList", "StartTime")
SQUEUE = (
    *("squeue", "--me", "--noheader", "--states=all"),
    *("-O", ",".join(f"{name}:|" for name in FIELDS)),
)
WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
ACTIVE = frozenset(
    {
        "RUNNING",
        "CONFIGURING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "SIGNALING",
        "STAGE_OUT",
        "RESIZING",
    }
)


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm shows it."""

    id: str
    state: str
    """As `squeue` writes it: PENDING, RUNNING, COMPLETED, TIMEOUT, NODE_FAIL …"""
    reason: str = ""
    """Why it waits, or how it ended."""
    restarts: int = 0
    nodes: str = ""
    start: str = ""
    """When it began, or is expected to begin; Slurm's own text."""

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


GONE = SlurmJob("", "gone")
"""A job that Slurm does not know, or no longer knows."""


@dataclass(frozen=True)
class JobList:
    """Every job of this user, or the reason why Slurm did not answer."""

    jobs: Mapping[str, SlurmJob]
    trouble: str = ""

    def job(self, job_id: str) -> SlurmJob | None:
        """The job with this id; `GONE` if there is none, None if Slurm did not answer."""
        return None if self.trouble else self.jobs.get(job_id.partition(";")[0], GONE)


class Queue:
    """Keeps Slurm's newest list of jobs, for all threads of a process."""

    def __init__(
        self,
        ask: Callable[[], JobList],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._monotonic = monotonic
        self._asking = threading.Lock()
        self._jobs = JobList({})
        self._until = float("-inf")

    def jobs(self) -> JobList:
        with self._asking:
            if self._monotonic() >= self._until:
                self._jobs = self._ask()
                patience = TROUBLE_SECONDS if self._jobs.trouble else ASK_SECONDS
                self._until = self._monotonic() + patience
            return self._jobs

    def forget(self) -> None:
        """Ask anew at the next question, because a job was submitted or cancelled."""
        with self._asking:
            self._until = float("-inf")


def ask_squeue(command: Sequence[str] = SQUEUE) -> JobList:
    """What `squeue` says of this user's jobs."""
    environment = os.environ | {"SLURM_TIME_FORMAT": "%Y-%m-%d %H:%M"}
    try:
        return JobList(parse(output_of(command, TIMEOUT_SECONDS, environment)))
    except SlurmError as error:
        return JobList({}, str(error))


def parse(output: str) -> dict[str, SlurmJob]:
    """The jobs in the output of the command `SQUEUE`, by id. Lines with too few fields are left out."""
    found = {}
    for line in output.splitlines():
        words = [clean_line(word.strip(), 200) for word in line.split("|")]
        if len(words) < len(FIELDS) or not words[0]:
            continue
        number, state, reason, restarts, nodes, start = words[: len(FIELDS)]
        found[number] = SlurmJob(
            number,
            state,
            "" if reason == "None" else reason,
            int(restarts) if restarts.isdecimal() else 0,
            nodes,
            "" if start == "N/A" else start,
        )
    return found


def waiting_words(job: SlurmJob) -> str:
    """Why a job waits and when it is expected to begin."""
    why = f" ({job.reason})" if job.reason else ""
    when = f", expected to begin at {job.start}" if job.start else ""
    return f"waits in the queue{why}{when}"


QUEUE = Queue(ask_squeue)
