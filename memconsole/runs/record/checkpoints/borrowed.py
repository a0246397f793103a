"""Keeps frozen weights that a run got from another run, because that run may delete its checkpoint or be deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from memconsole.plan import catalog, plan_file
from memconsole.plan.models import tokenizer_config
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.models.recommender import ITEMS_JSON
from memconsole.plan.plan import Plan, replace
from memconsole.plan.training.origin import checkpoint_of
from memconsole.plan.training.trained import frozen_names
from memconsole.runs.record.checkpoints import base
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.files import sync_directory, write_atomic

FOLDER = "source"
"""The folder inside a run with the checkpoints of other runs whose weights are frozen in it."""


def keep(run: RunDirectory, plan: Plan) -> Plan:
    """`plan` of `run`, with the checkpoint that its frozen weights come from inside the run's directory.

    Files are linked and take no room while the other run has them too; a file system without links gets copies.
    Without frozen weights nothing is kept, because the run's own checkpoints hold everything. Raises OSError, and
    `PlanError` if the other run's plan cannot be read.
    """
    return _kept(run.path / FOLDER, plan)


def _kept(folder: Path, plan: Plan) -> Plan:
    checkpoint = checkpoint_of(plan)
    if checkpoint is None or not frozen_names(plan, catalog.model(plan)):
        return plan
    other = RunDirectory(checkpoint.resolve().parents[1])
    own = folder / other.id
    into = own / "checkpoints" / checkpoint.resolve().name
    into.mkdir(mode=0o700, parents=True)
    for file in sorted(checkpoint.iterdir()):
        _linked(file, into / file.name)
    changes: dict[str, object] = {"model.weights": str(into)}
    for name in (TOKENIZER_JSON, tokenizer_config.CONFIG, ITEMS_JSON):
        if (other.path / name).is_file():
            _linked(other.path / name, own / name)
    if (other.path / base.FOLDER).is_dir():
        shutil.copytree(other.path / base.FOLDER, own / base.FOLDER)
    tokenizer = other.path / TOKENIZER_JSON
    if tokenizer.is_file() and plan.data.tokenizer == str(tokenizer):
        changes["data.tokenizer"] = str(own / TOKENIZER_JSON)
    # The other run's weights may in turn be adapters on those of a third run.
    write_atomic(
        own / "plan.toml", plan_file.dumps(_kept(folder, other.read_plan()), full=True).encode()
    )
    for path in (into, own / "checkpoints", own, folder):
        sync_directory(path)
    return replace(plan, changes)


def _linked(file: Path, into: Path) -> None:
    try:
        os.link(file, into)
    except OSError:
        shutil.copyfile(file, into)
