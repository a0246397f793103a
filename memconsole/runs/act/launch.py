"""Starts, resumes and adopts runs: on this machine, or as jobs of a Slurm cluster."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

import msgspec

from memconsole import regular_file, typed_json
from memconsole.plan import plan_file
from memconsole.plan.machine.packages import check_packages
from memconsole.plan.machine.trackers import check_trackers
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.runs.act import restart, slurm, waiting
from memconsole.runs.act.environment import trainer_environment
from memconsole.runs.act.family import wake
from memconsole.runs.act.reserves import free_reserves
from memconsole.runs.act.trackers import start_trackers
from memconsole.runs.read.life import ladder
from memconsole.runs.read.life.liveness import liveness, refusal, settled
from memconsole.runs.record import consent
from memconsole.runs.record.checkpoints import base, borrowed
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.files import write_atomic
from memconsole.runs.record.processes.identity import user_name
from memconsole.runs.record.records import StartRecord
from memconsole.runs.record.redaction import recorded_environment
from memconsole.runs.record.run_store import create_run
from memconsole.user_folders import NoHomeError, cache_folder

START_SECONDS = 60.0
"""How long a supervisor may take to start on an overloaded machine."""
# -P: a file in the current folder must not shadow a module.
SUPERVISOR_COMMAND = (sys.executable, "-P", "-m", "memconsole.runs.act.supervise.supervisor")


def launch(
    plan: Plan,
    name: str | None = None,
    estimate: bytes | None = None,
    by_recipe: Iterable[str] = (),
    after: RunDirectory | None = None,
) -> RunDirectory:
    """Create a run and start it. Returns once its supervisor and its trainer are started, or its job
    is submitted. Its trainer starts once the run `after` has ended, if that is live.

    `by_recipe` are the settings of the plan that the recipe chose. `estimate` is the memory estimate as JSON.
    It is stored as estimate.json for the run's receipt. Raises `RunError` if the run cannot be started, and
    `PlanError` for a job that cannot be described.
    """
    if after is not None:
        waiting.check_after(plan, after)
    _check_cache(plan)
    environment = recorded_environment(trainer_environment(plan, os.environ))
    free_reserves()
    run = create_run(plan, name, environment, by_recipe)
    try:
        restart.check_room(run)
        _copy_base_model(run, plan)
        if estimate is not None:
            _write_estimate(run, estimate)
        _link_frozen_weights(run, plan)
        if after is not None:
            waiting.wait_for(run, after)
        if plan.launch.on == "slurm":
            slurm.submit(run, plan)
        else:
            start_supervisor(run, "--start")
    except (RunError, PlanError):
        if run.newest_attempt() is None:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    start_trackers(run)
    return run


def _check_cache(plan: Plan) -> None:
    """Raise `RunError` if the trainer would have no folder for its cache. A Slurm job has that of its node."""
    try:
        if plan.launch.on != "slurm":
            cache_folder()
    except NoHomeError as error:
        raise RunError(str(error)) from None


def _write_estimate(run: RunDirectory, estimate: bytes) -> None:
    path = run.path / "estimate.json"
    try:
        write_atomic(path, estimate)
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror}") from None


def _copy_base_model(run: RunDirectory, plan: Plan) -> None:
    """Copy the files of the model that is fine-tuned into the run. Raises `RunError`."""
    try:
        base.keep(run, plan)
    except OSError as error:
        raise RunError(
            f"model.name = {quote(plan.model.name)}: its files cannot be copied for the new run: {error.strerror}"
        ) from None


def _link_frozen_weights(run: RunDirectory, plan: Plan) -> None:
    """Link frozen weights of another run into this one, and make the run's plan refer to them. Raises `RunError`."""
    try:
        changed = borrowed.keep(run, plan)
        if changed != plan:
            run.write_plan(changed)
    except (OSError, PlanError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(
            f"model.weights = {quote(str(plan.model.weights))}: its frozen weights cannot be kept for "
            f"the new run: {why}"
        ) from None


def resume(
    run: RunDirectory,
    *,
    changed_data: bool = False,
    from_scratch: bool = False,
    changed: Plan | None = None,
    after: RunDirectory | None = None,
) -> int:
    """Start the next attempt of a run that has ended. Returns the attempt's number.

    A run of a cluster is submitted as a job. With `after`, the attempt starts once that run has ended. With
    `changed_data` the user agrees to continue although the data have changed; with `from_scratch`, to begin again
    if no intact checkpoint is left. A `changed` plan differs in settings that `plan.training.resuming` allows. It
    replaces the run's plan; the first plan is kept beside it.

    Raises `RunError` if the run or an orphan of it is alive, if the run is finished and the plan is
    not changed, if its plan was refused before anything was trained, if its disk is full, and if no
    intact checkpoint is left.
    """
    wake(run)
    with restart.alone(run):
        number = _resume_alone(run, changed_data, from_scratch, changed, after)
    start_trackers(run)
    return number


def _resume_alone(
    run: RunDirectory,
    changed_data: bool,
    from_scratch: bool,
    changed: Plan | None,
    after: RunDirectory | None,
) -> int:
    """`resume`, while nobody else resumes the run."""
    _check_resumable(run, changed)
    plan = changed or run.read_plan()
    check_packages(plan)
    if after is not None:
        waiting.check_after(plan, after, run)
    _check_cache(plan)
    check_trackers(plan)
    restart.check_room(run)
    if from_scratch:
        restart.set_damaged_aside(run)
    else:
        restart.check_checkpoint(run)
    if changed is not None:
        _change_plan(run, changed)
    if changed_data:
        _agree_to_changed_data(run)
    if after is None:
        waiting.stop_waiting(run)
    else:
        waiting.wait_for(run, after)
    if plan.launch.on == "slurm":
        return slurm.submit(run, plan).attempts_before + 1
    with contextlib.suppress(FileNotFoundError):
        run.job_path.unlink()
    return start_supervisor(run, "--resume")


def _check_resumable(run: RunDirectory, changed: Plan | None) -> None:
    """Raise `RunError` if the run lives, if it is finished and its plan is not `changed`, or if its plan was refused."""
    now = settled(run)
    if now.live:
        raise RunError(f"run {run.id} is {now.state}; attach to it, or stop it first")
    if now.state == "orphaned":
        raise RunError(
            f"run {run.id}: children of its last trainer still hold memory; "
            f"memconsole stop {run.id} --kill ends them"
        )
    if now.state == "finished" and changed is None:
        length = "epochs" if run.read_plan().train.max_steps is None else "max_steps"
        raise RunError(
            f"run {run.id} is finished; to train it longer: memconsole resume {run.id} --set train.{length}=…"
        )
    why = refusal(run, now.verdict)
    if why:
        raise RunError(
            f"run {run.id} trained nothing: {why}; to train it, changed where needed: "
            f"memconsole train --plan {run.plan_path} --set KEY=VALUE"
        )


def _agree_to_changed_data(run: RunDirectory) -> None:
    """Record that the user continues although the data have changed. Raises `WriteError`."""
    try:
        consent.agree(run, user_name())
    except OSError as error:
        raise WriteError(
            f"run {run.id}: {run.control_path} cannot be written: {error.strerror}"
        ) from None


def _change_plan(run: RunDirectory, changed: Plan) -> None:
    """Replace the run's plan; the first one is kept beside it. Raises `WriteError`."""
    try:
        if not run.first_plan_path.exists():
            write_atomic(
                run.first_plan_path, regular_file.read(run.plan_path, plan_file.PLAN_BYTES)
            )
        ladder.note_resized(run, run.read_plan(), changed)
        run.write_plan(changed)
    except OSError as error:
        raise WriteError(
            f"run {run.id}: {run.plan_path} cannot be written: {error.strerror}"
        ) from None


def adopt(run: RunDirectory) -> None:
    """Start a new supervisor for a run that lost its own. Does nothing if it has one by then."""
    try:
        start_supervisor(run, "--adopt")
    except RunError:
        if liveness(run).supervisor_pid is None:
            raise


def attend(run: RunDirectory) -> None:
    """Make sure that a supervisor serves the requests to a living run: start or wake one if needed."""
    wake(run)
    now = liveness(run)
    if now.live and now.attempt is not None and now.supervisor_pid is None:
        adopt(run)


def start_supervisor(
    run: RunDirectory, mode: str, command: Sequence[str] = SUPERVISOR_COMMAND
) -> int:
    """Start a supervisor that is detached from this process. Returns the attempt it watches.

    The pipe between them carries one message and is closed before this returns.
    """
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, str(run.path), mode, "--ready-fd", str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[writer],
            start_new_session=True,
        )
    except OSError as error:
        os.close(reader)
        raise RunError(f"run {run.id}: no supervisor could be started: {error}") from None
    finally:
        os.close(writer)
    stderr = b""
    try:
        message = _read_message(reader)
        if message is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                stderr = process.communicate(timeout=5.0)[1]
    finally:
        os.close(reader)
        # The process started here exits at once; the supervisor is its grandchild.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        if process.stderr is not None:
            process.stderr.close()
    if message is None:
        lines = stderr.decode("utf-8", "replace").strip().splitlines() or ["no answer"]
        raise RunError(f"run {run.id}: no supervisor could be started: {lines[-1]}")
    if message.error:
        raise RunError(message.error)
    return message.attempt


def _read_message(reader: int) -> StartRecord | None:
    """The supervisor's message; None if it died or took too long."""
    poller = select.poll()
    poller.register(reader, select.POLLIN | select.POLLHUP)
    if not poller.poll(START_SECONDS * 1000):
        return None
    content = os.read(reader, 65536)
    try:
        return typed_json.decode(content, StartRecord)
    except msgspec.DecodeError:
        return None
