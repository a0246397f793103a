"""Why a run ended, if its Slurm job ended and the supervisor recorded nothing."""

from __future__ import annotations

from memconsole.runs.read.life.slurm import GONE, SlurmJob
from memconsole.runs.read.life.verdict import classify, gather, last_output
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.records import JobRecord
from memconsole.runs.record.states import Verdict
from memconsole.sanitize import clean_line

_WORDS = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost its node",
    "BOOT_FAIL": "lost its node",
    "OUT_OF_MEMORY": "used more memory than it had asked for",
    "DEADLINE": "reached its deadline",
}
_REASONS = {
    "OUT_OF_MEMORY": "host_out_of_memory",
    "FAILED": "crashed",
    "COMPLETED": "crashed",
    GONE.state: "unknown",
}


def before_it_began(run: RunDirectory, job: JobRecord, found: SlurmJob | None) -> Verdict:
    """The verdict on a job that ended before its supervisor made an attempt.

    `found` is None if a user cancelled it with memconsole.
    """
    if found is None:
        words = f"{job.words} was cancelled by {job.cancelled_by} before it began"
        return Verdict(reason="stopped", evidence=words, resumable=True)
    if found.state == "CANCELLED":
        words = f"{job.words} was cancelled before it began"
        return Verdict(reason="stopped", evidence=words, resumable=True)
    said = last_output(run.job_log).strip().splitlines()
    why = (
        clean_line(said[-1], 300)
        if said
        else f"it wrote nothing to {run.job_log}, which may not exist on its node: do the nodes share this folder?"
    )
    words = f"{job.words} {_ended(found)} before it began to train: {why}"
    reason = "unknown" if found is GONE else "crashed"
    return Verdict(reason=reason, evidence=words, resumable=True)


def without_record(run: RunDirectory, attempt: int, job: JobRecord, found: SlurmJob) -> Verdict:
    """The verdict on an attempt whose job is over and whose supervisor recorded nothing."""
    evidence = gather(run, attempt)
    if evidence.final is not None or evidence.error is not None or evidence.killed_by is not None:
        return classify(evidence)
    return Verdict(
        reason=_REASONS.get(found.state, "killed"),
        evidence=f"{job.words} {_ended(found)}; last seen {evidence.where}",
        resumable=evidence.has_checkpoint,
    )


def _ended(found: SlurmJob) -> str:
    """How a job ended, in words."""
    if found is GONE:
        return "is no longer known to Slurm, and ended"
    words = _WORDS.get(found.state, f"ended as {found.state}")
    why = f" ({found.reason})" if found.reason and found.state not in _WORDS else ""
    return f"{words}{why}"
