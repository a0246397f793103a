"""Submits a run as a Slurm job, cancels it, and puts it back into the queue."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from memconsole.plan.check import device_kind
from memconsole.plan.jobs.host_memory import memory_options
from memconsole.plan.jobs.on_node import check_job, sbatch_options
from memconsole.plan.plan import Plan
from memconsole.plan.processes import nodes
from memconsole.runs.read.life.slurm import QUEUE
from memconsole.runs.read.report.report import StoredEstimate
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.records import JobPlace, JobRecord
from memconsole.slurm_command import NotInstalled, Refused, SlurmError, output_of

SCRIPT = "job.sh"
TIMEOUT_SECONDS = 60.0
JOB_ID = re.compile(r"\d+(;[A-Za-z0-9_.-]+)?")
_OF_THE_RUN = (
    "SBATCH_ARRAY_INX",
    "SBATCH_EXPORT",
    "SBATCH_NO_REQUEUE",
    "SBATCH_OPEN_MODE",
    "SBATCH_SIGNAL",
    "SBATCH_WAIT",
)
"""Variables that would overrule what the script says."""
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_NO_SUCH_MEMORY = ("Memory specification", "node configuration is not available")
"""Of sbatch's answers to a job that asks for more memory than the cluster knows of."""


def options_of(run: RunDirectory, plan: Plan, host_bytes: int | None = None) -> list[str]:
    """The options of sbatch for a run. `host_bytes` is the estimate of one process, if there is one. Raises `PlanError`."""
    count, node_count = plan.device.count, nodes(plan)
    options = [
        f"--job-name=memconsole-{run.id}",
        f"--output={_pattern(str(run.job_log))}",
        "--open-mode=append",
        "--requeue",
        # B: only the batch script, which is the supervisor, hears of the time limit.
        f"--signal=B:USR1@{plan.launch.save_seconds}",
        f"--nodes={node_count}",
        "--ntasks-per-node=1",
    ]
    if device_kind(plan.device.name) != "cpu":
        options.append(f"--gres=gpu:{count // node_count}")
    if plan.launch.partition:
        options.append(f"--partition={plan.launch.partition}")
    if plan.launch.time_limit:
        options.append(f"--time={plan.launch.time_limit}")
    if host_bytes is not None:
        options += memory_options(plan, host_bytes)
    return options + sbatch_options(plan)


def script(run: RunDirectory, options: Sequence[str], python: str = sys.executable) -> str:
    """The batch script of a run, which holds the options that it is submitted with."""
    lines = [f"#SBATCH {_word(option)}" for option in options]
    command = " ".join(
        map(shlex.quote, (python, "-P", "-m", "memconsole.runs.act.in_job", str(run.path)))
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "# The supervisor is the job: Slurm's signals reach it, and its exit code is the job's.",
            f"exec {command}",
            "",
        ]
    )


def submit(run: RunDirectory, plan: Plan) -> JobRecord:
    """Submit the run's next attempt. Raises `PlanError` and `RunError`."""
    check_job(plan)
    path = run.path / SCRIPT
    try:
        options = options_of(run, plan, _host_bytes(run, plan))
        files.write_atomic(path, script(run, options).encode(), 0o700)
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror}") from None
    before = run.newest_attempt() or 0
    try:
        # As arguments, they come before variables of the user such as SBATCH_PARTITION; lines of a script do not.
        own = ("--parsable", f"--chdir={run.path}", *options)
        answer = _ask(run, "sbatch", *own, str(path)).strip()
    except RunError as error:
        if any(words in str(error) for words in _NO_SUCH_MEMORY):
            remedy = (
                'if the cluster does not know the memory of its nodes: launch.options = "--mem=0"'
            )
            raise RunError(f"{error}; {remedy}") from None
        raise
    if not JOB_ID.fullmatch(answer):
        raise RunError(
            f"run {run.id}: sbatch answered without the number of a job: {answer[:200]!r}"
        )
    job = JobRecord(id=answer, attempts_before=before, submitted_wall=time.time())
    try:
        files.write_struct(run.job_path, job)
    except OSError as error:
        _ask(run, "scancel", *_named(job))
        raise WriteError(f"{run.job_path}: cannot be written: {error.strerror}") from None
    QUEUE.forget()
    return job


def _host_bytes(run: RunDirectory, plan: Plan) -> int | None:
    """The estimated host memory of a process of the run; None if it was made for another number of devices."""
    stored = files.read_struct(run.path / "estimate.json", StoredEstimate)
    if stored is None or run.read_first_plan().device.count != plan.device.count:
        return None
    return stored.table.host_bytes


def cancel(run: RunDirectory, job: JobRecord, who: str) -> None:
    """Take a waiting job out of the queue. A job that has begun meanwhile saves and stops. Raises `RunError`."""
    _ask(run, "scancel", *_named(job))
    try:
        files.write_struct(run.job_path, msgspec.structs.replace(job, cancelled_by=who))
    except OSError as error:
        raise WriteError(f"{run.job_path}: cannot be written: {error.strerror}") from None
    QUEUE.forget()


def requeue(run: RunDirectory, job_id: str) -> None:
    """Put the job that this process is part of back into the queue. Raises `RunError`."""
    _ask(run, "scontrol", "requeue", job_id)


def place(environment: Mapping[str, str] = os.environ) -> JobPlace | None:
    """The job that this process is part of."""
    job_id = environment.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return JobPlace(
        id=job_id,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        nodes=environment.get("SLURM_JOB_NODELIST", ""),
    )


def submission_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` without the variables of a job that this process may be part of."""
    return {
        name: value
        for name, value in inherited.items()
        if name not in _OF_THE_RUN and (not name.startswith("SLURM_") or name in _OF_THE_CLUSTER)
    }


def _ask(run: RunDirectory, *command: str) -> str:
    """What a command of Slurm prints. Raises `RunError` with the last line of its error output."""
    try:
        return output_of(command, TIMEOUT_SECONDS, submission_environment(os.environ))
    except NotInstalled as error:
        raise RunError(
            f"run {run.id}: {error}; launch.on = slurm works on a machine that submits to a Slurm cluster"
        ) from None
    except Refused as error:
        raise RunError(f"run {run.id}: {command[0]} refuses: {error}") from None
    except SlurmError as error:
        raise RunError(f"run {run.id}: {error}") from None


def _named(job: JobRecord) -> list[str]:
    """The arguments that name a job."""
    number, _, cluster = job.id.partition(";")
    return [*([f"--clusters={cluster}"] if cluster else []), number]


def _pattern(path: str) -> str:
    """A path escaped for `--output`, where % begins a field."""
    return path.replace("%", "%%")


def _word(option: str) -> str:
    """An option as sbatch reads it from a line of the script."""
    if re.fullmatch(r"[\w@%+=:,./-]+", option, re.ASCII):
        return option
    quoted = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'
