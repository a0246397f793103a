"""Finds the checkpoint that a run continues from, and checks that its plan and its data are still the same."""

from __future__ import annotations

import binascii
from collections.abc import Collection
from typing import Any

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError, get, replace
from memconsole.plan.training.resuming import CHANGEABLE, ELSEWHERE, LATER
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record import consent as consents
from memconsole.runs.record.checkpoints import verified
from memconsole.runs.record.checkpoints.manifest import damaged
from memconsole.runs.record.directory import RunDirectory
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.loop.announcing import Announcer
from memconsole_trainer.loop.fingerprint import difference_words, fingerprint
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.process_group import ProcessGroup
from memconsole_trainer.tasks.task import TaskData, Teller
from memconsole_trainer.weights.checkpoint import Checkpoints
from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint


class NoCheckpointError(Exception):
    """The run has checkpoints, and none of them can be used."""

    cause = "bad_data"


def newest_checkpoint(
    attempt: Attempt, checkpoints: Checkpoints, process_group: ProcessGroup, say: Announcer
) -> LoadedCheckpoint | None:
    """The newest intact checkpoint of the run; None if it has none at all. The leader of several processes finds it and
    tells the others its name.

    Raises `NoCheckpointError` if there are checkpoints and none can be used.
    """
    if process_group.rank:
        name = process_group.broadcast()
        return LoadedCheckpoint(attempt.run.checkpoints_path / name) if name else None
    checkpoints.sweep()
    stored = _newest(attempt, checkpoints, say)
    process_group.broadcast(stored.path.name if stored else "")
    return stored


def _newest(attempt: Attempt, checkpoints: Checkpoints, say: Announcer) -> LoadedCheckpoint | None:
    """The newest intact checkpoint; None if the run has none at all.

    Raises `NoCheckpointError` if it has some, and all are damaged or cannot be read.
    """
    problems: list[str] = []

    def problem(message: str) -> None:
        problems.append(message)
        say.warning(message)

    stored = checkpoints.newest(problem, say.tick, verified=verified.take(attempt.run))
    problems += [f"{path.name} was damaged" for path in damaged(attempt.run.checkpoints_path)]
    if stored is None and problems:
        raise NoCheckpointError(
            f"no intact checkpoint is left: {problems[0].partition(';')[0]}; put an intact copy of it back, or "
            f"begin again at step 0: memconsole resume {attempt.run.id} --from-scratch"
        )
    return stored


def older_fingerprints(run: RunDirectory, plan: Plan, model: Model) -> set[str]:
    """The fingerprints that checkpoints of older versions hold for `plan`, the plan of `run`."""
    first = run.read_first_plan()
    before = replace(plan, {key: get(first, key) for key in LATER})
    return {
        fingerprint(before, model, CHANGEABLE - LATER),
        fingerprint(before, model, CHANGEABLE - LATER, as_it_is=True),
        fingerprint(first, model, ELSEWHERE - LATER, as_it_is=True),
    }


def resumed(
    stored: LoadedCheckpoint,
    fingerprints: dict[str, str],
    older: Collection[str] = (),
    settings: dict[str, Any] | None = None,
) -> Progress:
    """Read the progress from a checkpoint.

    `fingerprints` are those of the plan and the data now, `older` the plan's fingerprints as checkpoints of older
    versions hold them, and `settings` the settings that the plan's fingerprint counts.

    Raises `PlanError` if the plan has changed, and `DataError` if something else than the data files has, such as the
    tokenizer, or if the checkpoint holds no progress of its own step.
    """
    before = stored.fingerprints
    if before.get("plan") not in {fingerprints["plan"], *older}:
        then = stored.part("settings", dict[str, Any] | None)  # older checkpoints have none
        words = difference_words(then, settings or {}) if then else ""
        raise PlanError(
            f"{stored.path.name} was made with other settings than the run's plan.toml has now"
            f"{words and f' ({words})'}; put plan.toml back as it was, or start a new run"
        )
    for what in fingerprints.keys() - {"plan", "data"}:
        if before.get(what) != fingerprints[what]:
            raise DataError(
                f"the {what} has changed since {stored.path.name}: the run cannot be continued "
                "exactly; start a new run"
            )
    found: Progress = stored.part("progress", Progress)
    if found.step != stored.step:
        raise DataError(
            f"{stored.path.name}/state.json: progress: step = {found.step}, expected {stored.step}; "
            "this checkpoint cannot be used"
        )
    return found


def check_unchanged(
    run: RunDirectory, stored: LoadedCheckpoint, data: TaskData, say: Teller
) -> None:
    """Raise `DataError` if the data files are not those that the checkpoint was made with, unless the user agreed to go
    on with them."""
    problem = ""
    if stored.fingerprints.get("data") != data.fingerprints["data"]:
        problem = "its files have other names, lengths or beginnings"
    elif "read" in stored.state:  # older checkpoints have only the fingerprint
        try:
            problem = data.hashes.difference(stored.part("read", dict[str, Any]), say.tick)
        except (LookupError, TypeError, binascii.Error):
            problem = f"{stored.path.name} does not record which of it had been read"
    if not problem:
        return
    changed = f"the data has changed since {stored.path.name}: {problem}"
    consent = consents.agreed(run)
    if consent is None:
        raise DataError(
            f"{changed}; the run cannot be continued exactly. Start a new run, or continue with the "
            f"data as it is: memconsole resume {run.id} --changed-data"
        )
    say.warning(f"{changed}; continuing with it, as {consent.who} agreed")
