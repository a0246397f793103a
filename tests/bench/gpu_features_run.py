"""Runs of the trainer one after another, in one process that imports its framework once.

    python tests/bench/gpu_features_run.py      reads runs from standard input and answers each, as lines of JSON

A run is an object with `preset`, `assignments` as those of `--set`, and the `folder` where its data are. Its answer has
losses by step, the last evaluation and bytes; or says why it was `refused`, or its `problem`. Runs are kept where
XDG_STATE_HOME says, while they train.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import msgspec

from memconsole.cli.options import build_plan
from memconsole.devices.probe import read_once
from memconsole.devices.reading import Devices
from memconsole.plan import catalog
from memconsole.plan.data.paths import anywhere
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.training.recipe import settings_by_recipe, with_recipe
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.report.report import Report, report
from memconsole.runs.record import files
from memconsole.runs.record.checkpoints import base
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.records import ErrorRecord
from memconsole.runs.record.run_store import create_run
from memconsole.start import check_launch
from memconsole_trainer.__main__ import run as run_attempt


def created(plan: Plan, devices: Devices) -> RunDirectory:
    """A run as `memconsole train` makes it, with its estimate. Raises `PlanError` if it is refused."""
    estimate = check_launch(plan, devices)
    given = anywhere(catalog.with_sizes(plan))
    run = create_run(with_recipe(given), by_recipe=settings_by_recipe(given))
    base.keep(run, with_recipe(given))
    files.write_atomic(run.path / "estimate.json", msgspec.json.encode(estimate))
    return run


def answered(wanted: dict[str, Any], devices: Devices) -> dict[str, Any]:
    """The answer to one run."""
    os.chdir(wanted["folder"])
    plan = build_plan(wanted["preset"], None, tuple(wanted["assignments"]))
    run = created(plan, devices)
    try:
        with Attempt(run, run.new_attempt()) as attempt:
            code = run_attempt(attempt)
        made = report(run)
        if code or made.verdict.reason != "finished":
            return {"problem": _problem(run, f"exit code {code}: {made.verdict}")}
        return _figures(made, plan)
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def _figures(made: Report, plan: Plan) -> dict[str, Any]:
    """Losses, and bytes where a run's peak is its own: XLA's allocator cannot reset its peak, and a CPU's heap keeps pages
    of earlier runs."""
    found = {
        "losses": {str(s.step): s.loss for s in made.steps},
        "evaluation": made.evaluations[-1].loss,
        "device": made.device,
    }
    if plan.backend == "torch" and plan.device.name != "cpu":
        estimated, measured = made.memory.estimated, made.memory.measured
        found |= {
            "estimated_bytes": estimated.peak_bytes,
            "measured_bytes": measured.peak_bytes,
        }
    return found


def _problem(run: RunDirectory, otherwise: str) -> str:
    """The error of a run; its last line says the most."""
    error = files.read_struct(run.attempt_path(1) / "error.json", ErrorRecord)
    if error is None:
        return otherwise
    first = (error.message.splitlines() or [""])[0]
    return f"{error.traceback[-3000:]}\n{error.type}: {first}"


def free() -> None:
    """Free what the last run left, and begin to count the peak anew. JAX keeps its compiled programs: they hold no arrays
    of the run, and the next one has many small ones of them too."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # of many compilations of one function it keeps few
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # else the next run would have them from its start
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the trainer prints; the answers stay alone
    devices = read_once()
    for line in sys.stdin:
        start = time.monotonic()
        try:
            found = answered(json.loads(line), devices)
        except PlanError as error:
            found = {"refused": str(error)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- other runs go on
            found = {"problem": "".join(traceback.format_exception(error))[-3000:]}
        print(json.dumps({**found, "seconds": time.monotonic() - start}), file=answers, flush=True)
        with contextlib.suppress(Exception):  # a failed device; the next run says so
            free()


if __name__ == "__main__":
    main()
