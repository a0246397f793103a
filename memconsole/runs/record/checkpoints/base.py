"""Keeps the small files of the model that a run is fine-tuned from, because its folder may be moved or deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.models import tokenizer_config
from memconsole.plan.models.files import MERGES, SENTENCEPIECE, TOKENIZER_JSON, VOCABULARY
from memconsole.plan.plan import Plan, PlanError, printable, replace
from memconsole.plan.training.trained import frozen_names
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.files import sync_directory

FOLDER = "base"
"""The folder inside a run with the files of the model that it is fine-tuned from, without weights."""
FILES = (
    "config.json",
    "generation_config.json",
    TOKENIZER_JSON,
    SENTENCEPIECE,
    VOCABULARY,
    MERGES,
    tokenizer_config.CONFIG,
    tokenizer_config.SPECIAL,
    tokenizer_config.ADDED,
    tokenizer_config.CHAT_TEMPLATE,
)


def keep(run: RunDirectory, plan: Plan) -> None:
    """Copy the files of the plan's model into the run's directory, if it is no model of the catalog. Raises OSError and
    `PlanError`."""
    directory = catalog.model_directory(plan)
    if directory is None or plan.model.name in catalog.models():
        return
    kept = run.path / FOLDER
    kept.mkdir(mode=0o700)
    for name in FILES:
        if (file := Path(directory, name)).is_file():
            shutil.copyfile(file, kept / name)
    sync_directory(kept)


def present(run: RunDirectory, plan: Plan, trained: bool = True) -> Plan:
    """`plan` of `run`, whose model is the kept files if the folder that the run is fine-tuned from is gone.

    Raises `PlanError` if weights of that folder are needed: frozen ones, or all if the run has `trained` none.
    """
    name, weights = plan.model.name, plan.model.weights
    try:
        catalog.model_directory(plan)
        return plan
    except PlanError:
        kept = run.path / FOLDER
        if trained and (kept / "config.json").is_file():
            found = replace(plan, {"model.name": str(kept), "model.weights": weights})
            if weights is not None or not frozen_names(found, catalog.model(found)):
                return found
        if not Path(name).is_absolute():
            raise
    raise PlanError(
        f"the folder this run was fine-tuned from is gone: {printable(name)}; put it back there",
        "model.name",
    )
