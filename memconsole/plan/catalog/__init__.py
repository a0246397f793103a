"""The catalogs of models, devices, datasets and presets, and the lookup of the names in a plan.

Tables are read on first use. Nothing here uses the network or reads a large dataset's contents. A hub model is
looked up in the local Hugging Face cache; a file's size comes from its directory entry, the widths of windows from
its headers, and the items of a small file of ratings from its rows.
"""

from __future__ import annotations

from memconsole.plan.catalog.choices import choose, dropped
from memconsole.plan.catalog.entries import (
    CatalogDevice,
    DatasetEntry,
    ModelEntry,
    PresetEntry,
)
from memconsole.plan.catalog.plan_model import (
    architecture,
    assumed_items,
    is_sized,
    model,
    model_directory,
    ratings_to_count,
    with_all_sizes,
    with_sizes,
)
from memconsole.plan.catalog.sources import resolve
from memconsole.plan.catalog.tables import (
    LOCAL_DEVICES,
    catalog_device,
    datasets,
    default_plan,
    devices,
    models,
    preset,
    presets,
)
from memconsole.plan.plan import Plan

__all__ = [
    "LOCAL_DEVICES",
    "CatalogDevice",
    "DatasetEntry",
    "ModelEntry",
    "PresetEntry",
    "architecture",
    "assumed_items",
    "catalog_device",
    "choose",
    "dataset",
    "datasets",
    "default_plan",
    "devices",
    "dropped",
    "is_sized",
    "model",
    "model_directory",
    "models",
    "preset",
    "presets",
    "ratings_to_count",
    "with_all_sizes",
    "with_sizes",
]


def dataset(plan: Plan) -> DatasetEntry:
    """The plan's dataset, with sizes if they are known without reading it. Raises `PlanError`."""
    return resolve(plan.data, datasets())
