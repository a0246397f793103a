"""The files of one run on disk."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from memconsole.errors import UserError
from memconsole.plan import catalog, plan_file
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.runs.record import files
from memconsole.runs.record.labels import NAME_CHARACTERS, read_labels
from memconsole.runs.record.records import (
    EXIT,
    AttemptRecord,
    ExitRecord,
    JobRecord,
    RunRecord,
    WaitRecord,
)
from memconsole.sanitize import clean_line

CHECKPOINT_NAME = re.compile(r"step-(\d{9,})")
RECEIPT = "receipt.json"


class RunError(UserError):
    """A problem with a run; the message is one line for the user."""


class WriteError(RunError):
    """A file or a folder of a run cannot be written, as on a full disk."""

    exit_code = 1


class RunDirectory:
    """The files of one run. Holds no state: every property reads the disk."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDirectory) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.toml"

    @property
    def first_plan_path(self) -> Path:
        """The plan that the run was launched with, once it was changed."""
        return self.path / "plan.first.toml"

    @property
    def record_path(self) -> Path:
        return self.path / "run.json"

    @property
    def state_path(self) -> Path:
        """A snapshot for instant attach, about one second old while a supervisor runs."""
        return self.path / "state.json"

    @property
    def receipt_path(self) -> Path:
        return self.path / RECEIPT

    @property
    def attempts_path(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def control_path(self) -> Path:
        return self.path / "control"

    @property
    def job_path(self) -> Path:
        return self.path / "job.json"

    @property
    def waiting_path(self) -> Path:
        return self.path / "waiting.json"

    @property
    def job_log(self) -> Path:
        """The output of a Slurm job apart from that of its trainer, as Slurm writes it."""
        return self.path / "job.log"

    @property
    def reserve_path(self) -> Path:
        """A reserve file, deleted when the disk is full so that the last records can be written."""
        return self.path / "reserve.bin"

    @property
    def spares_path(self) -> Path:
        """The folder of small files that `spares` writes records into on a full disk."""
        return self.path / "spares"

    @property
    def supervisor_lock(self) -> Path:
        return self.path / "supervisor.lock"

    @property
    def resume_lock(self) -> Path:
        """Held by the command that resumes the run, until the supervisor has its own lock."""
        return self.path / "resume.lock"

    @property
    def trainer_lock(self) -> Path:
        return self.path / "trainer.lock"

    @property
    def gang_lock(self) -> Path:
        return self.path / "gang.lock"

    def attempt_path(self, number: int) -> Path:
        return self.attempts_path / f"{number:04d}"

    def attempt_numbers(self) -> list[int]:
        """Every attempt, oldest first."""
        try:
            names = os.listdir(self.attempts_path)
        except OSError:
            return []
        return sorted(int(name) for name in names if re.fullmatch(r"\d{4,9}", name))

    def newest_attempt(self) -> int | None:
        """The attempt that owns the run."""
        numbers = self.attempt_numbers()
        return numbers[-1] if numbers else None

    def new_attempt(self) -> int:
        """Create the directory of the next attempt, which fences older ones. Returns its number."""
        number = (self.newest_attempt() or 0) + 1
        while True:
            try:
                os.mkdir(self.attempt_path(number), 0o700)
            except FileExistsError:
                number += 1
                continue
            files.sync_directory(self.attempts_path)
            return number

    def record(self) -> RunRecord | None:
        """The content of `run.json`; None if it is missing or damaged."""
        return files.read_struct(self.record_path, RunRecord)

    @property
    def created_wall(self) -> float:
        """When the run was created. If `run.json` is missing or damaged, the local time that begins the id."""
        record = self.record()
        if record is not None:
            return record.created_wall
        try:
            return time.mktime(time.strptime(self.id[:15], "%Y%m%d-%H%M%S"))
        except (ValueError, OverflowError):
            return 0.0

    def job(self) -> JobRecord | None:
        """The Slurm job that trains the run; None if this machine trains it."""
        return files.read_struct(self.job_path, JobRecord)

    def waiting(self) -> WaitRecord | None:
        """What the run waits for before its next attempt; None once that attempt has begun, or if it waits for nothing."""
        record = files.read_struct(self.waiting_path, WaitRecord)
        if record is None or (self.newest_attempt() or 0) > record.attempts_before:
            return None
        return record

    def attempt_record(self, number: int) -> AttemptRecord | None:
        return files.read_struct(self.attempt_path(number) / "attempt.json", AttemptRecord)

    def exit_record(self, number: int) -> ExitRecord | None:
        """How an attempt ended, as its supervisor recorded it."""
        return files.read_struct(self.attempt_path(number) / EXIT, ExitRecord)

    @property
    def name(self) -> str:
        """The name the user gave last, or the id."""
        renamed = read_labels(self.path).name
        if renamed:
            return renamed
        record = self.record()
        return clean_line(record.name, NAME_CHARACTERS) if record and record.name else self.id

    def read_plan(self) -> Plan:
        """The plan that this run trains, with the numbers that the recipe chose. Raises `PlanError`."""
        return self.read_settled_plan()[0]

    def read_settled_plan(self) -> tuple[Plan, frozenset[str]]:
        """`read_plan`, and the settings in it that the recipe chose. Raises `PlanError`."""
        return _read_settled(self.plan_path)

    def read_given_plan(self) -> Plan:
        """The plan as the user set it, for another run. Settings that the recipe chose are left unset. Raises
        `PlanError`."""
        return plan_file.load_run(self.plan_path)[0]

    def read_first_plan(self) -> Plan:
        """The plan that the run was launched with. Raises `PlanError`."""
        changed = self.first_plan_path.is_file()
        return _read_settled(self.first_plan_path if changed else self.plan_path)[0]

    def write_plan(self, plan: Plan) -> None:
        """Replace the plan. Numbers of the recipe stay the recipe's unless `plan` has others. Raises
        `OSError` and `PlanError`."""
        chosen = plan_file.load_run(self.plan_path)[1]
        by_recipe = [key for key, number in chosen.items() if plans.get(plan, key) == number]
        files.write_atomic(self.plan_path, plan_file.dumps_run(plan, by_recipe).encode())

    def committed_checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest step first; an incomplete one has another name."""
        try:
            names = os.listdir(self.checkpoints_path)
        except OSError:
            return []
        steps = sorted((int(m[1]), m[0]) for m in map(CHECKPOINT_NAME.fullmatch, names) if m)
        return [self.checkpoints_path / name for _, name in steps]


def _read_settled(path: Path) -> tuple[Plan, frozenset[str]]:
    """A stored plan with the numbers that the recipe chose, and the settings that it chose them for. Raises
    `PlanError`."""
    plan, chosen = plan_file.load_run(path)
    return catalog.with_all_sizes(plans.replace(plan, chosen)), frozenset(chosen)
