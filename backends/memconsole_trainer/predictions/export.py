"""Exports a recommender or a regressor: weights, sizes and a program that computes with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.recommender import ITEMS_JSON, Recommender
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.models.rotary import RopeScaling
from memconsole.plan.plan import PlanError
from memconsole.plan.tasks import task_of_model
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.standardization import (
    FINGERPRINT,
    STANDARDIZATION_JSON,
    of_checkpoint,
)
from memconsole_trainer.predictions.items import numbering_of
from memconsole_trainer.weights.export import DTYPES, cast_to, save
from memconsole_trainer.weights.trained import TrainedModel

STANDALONE = Path(__file__).parent / "standalone"
NORMALIZATION = "normalization.json"


def export_model(trained_model: TrainedModel, out: Path, dtype: str | None = None) -> list[str]:
    """Write into the folder `out` model.safetensors with all weights, frozen ones too, config.json and model.py; of a recommender
    items.json, the id of each row of its table; of a regressor `NORMALIZATION`, if the
    run's data are still there, and `STANDARDIZATION_JSON`, if the run standardizes. Returns remarks for the user.

    All weights are in memory at once. Raises `PlanError`, `DataError` and OSError.
    """
    task, model, dtype = (
        task_of_model(trained_model.model).name,
        trained_model.model,
        dtype or DTYPES[0],
    )
    remarks: list[str] = []
    beside: dict[str, Any] = {}
    length = trained_model.plan.data.sequence_length
    rotation: dict[str, Any] = {}
    if isinstance(model, Recommender):
        beside[ITEMS_JSON] = [None, *numbering_of(trained_model).ids()]  # row 0 is padding
        rotation = {"rotation": rotation_of(model.decoder, length)}
    else:
        try:
            beside[NORMALIZATION] = _normalization(trained_model)
        except (DataError, PlanError) as error:
            remarks = [f"without {NORMALIZATION}: {error}"]
        known = trained_model.checkpoint.fingerprints.get(FINGERPRINT)
        standardization = of_checkpoint(trained_model.directory, known)
        if standardization is not None:
            beside[STANDARDIZATION_JSON] = msgspec.to_builtins(standardization)
    named = {p.name: cast_to(trained_model.tensor(p.name), dtype) for p in model.parameters()}
    save(named, out / "model.safetensors")
    sizes = msgspec.to_builtins(model)
    described = {"task": task, "dtype": dtype, "sequence_length": length, **sizes, **rotation}
    beside["config.json"] = described
    for name, content in beside.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (out / name).write_text(text, encoding="utf-8")
    shutil.copyfile(STANDALONE / f"{task}.py", out / "model.py")
    return remarks


def rotation_of(a: Architecture, length: int) -> dict[str, Any]:
    """Radians per token of each pair that rotates, the factor of its cosine and sine, and by how much queries grow, in rows of
    `length` items: in most layers, and in those with a sliding window."""
    scaling = a.rope_scaling or RopeScaling()
    return {
        name: {
            "angles": list(a.angles(length, local=local)),
            "factor": a.rotation_factor(local=local),
            "query_beta": scaling.query_beta if a.scales_queries(length, local=local) else 0.0,
            "original_positions": scaling.original_positions,
        }
        for name, local in (("global", False), ("local", True))
    }


def _normalization(trained_model: TrainedModel) -> dict[str, dict[str, list[float]]]:
    """What the states and controls of each system were divided by, from the run's data. Raises `DataError`,
    `PlanError`."""
    plan, model = trained_model.plan, trained_model.model
    assert isinstance(model, Regressor)
    path = Path(catalog.dataset(plan).where).expanduser()
    length, most = plan.data.sequence_length, plan.data.max_examples
    file = WindowFile(path, model.features, model.outputs, length, most)
    if file.fingerprint != trained_model.checkpoint.fingerprints.get("data"):
        raise DataError(f"{path}: has changed since the run was trained")
    return file.normalization()
