"""The model that a plan names, with the sizes that the plan and its data give it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from memconsole.path_completion import looks_like_path
from memconsole.plan.catalog.entries import RecommenderEntry
from memconsole.plan.catalog.item_counts import item_count
from memconsole.plan.catalog.ratings import rating_file
from memconsole.plan.catalog.tables import datasets, list_names, models
from memconsole.plan.catalog.windows import window_sizes
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.configs.families import read_architecture
from memconsole.plan.models.finding import find_model
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.models.sizing import default_vocab_size, size
from memconsole.plan.models.tokenizer_file import tokenizer_vocab_size
from memconsole.plan.plan import Plan, PlanError, nearest, quote, replace
from memconsole.plan.sections.model import LEAST_ITEMS

SIZED_POSITIONS = 2048
"""Positions of sized models, or the plan's sequence length where that is more."""


def architecture(plan: Plan) -> Architecture:
    """The decoder that a plan names: a catalog model, a sized family, a directory or a cached hub model.

    A sized family's vocabulary is data.vocab_size, or that of data.tokenizer, or a default for the target
    size. Raises `PlanError`.
    """
    entry = models().get(plan.model.name)
    if entry is None:
        return read_architecture(_model_directory(plan.model.name))
    if entry.task != "language":
        raise PlanError(
            f"model.name = {quote(entry.name)}: learns {entry.task}, not language", "model.name"
        )
    if entry.architecture is not None:
        return entry.architecture
    target = plan.model.target_params or entry.default_target_params or 1_000_000
    vocab_size = plan.data.vocab_size
    if vocab_size is None and plan.data.tokenizer is not None:
        vocab_size = tokenizer_vocab_size(plan.data.tokenizer)
    return size(
        target,
        vocab_size or default_vocab_size(target),
        max(SIZED_POSITIONS, plan.data.sequence_length),
    )


def is_sized(plan: Plan) -> bool:
    """Whether the plan's model is a decoder whose sizes follow `model.target_params` and the vocabulary."""
    entry = models().get(plan.model.name)
    return entry is not None and entry.task == "language" and entry.architecture is None


def model(plan: Plan) -> Model:
    """The model that a plan names, for any task. Raises `PlanError`."""
    entry = models().get(plan.model.name)
    if entry is not None and entry.regressor is not None:
        return _regressor(plan, entry.regressor)
    if entry is not None and entry.recommender is not None:
        return _recommender(plan, entry.recommender)
    return architecture(plan)


def with_sizes(plan: Plan) -> Plan:
    """`plan` with the sizes that its data decide as settings, if the plan sets none: the widths of windows where the file
    has others than the catalog's regressor, and the items of ratings once they are counted."""
    entry, chosen = models().get(plan.model.name), plan.model
    if entry is not None and entry.recommender is not None:
        return _with_items(plan, entry.recommender)
    if entry is None or entry.regressor is None or (chosen.features and chosen.outputs):
        return plan
    windows = window_sizes(_where(plan))
    of_catalog = entry.regressor.features, entry.regressor.outputs
    if windows is None or (windows.features, windows.outputs) == of_catalog:
        return plan
    features, outputs = chosen.features or windows.features, chosen.outputs or windows.outputs
    return replace(plan, {"model.features": features, "model.outputs": outputs})


def with_all_sizes(plan: Plan) -> Plan:
    """`plan` of a run with all sizes of its model set. A run's model does not depend on its data: sizes of a recommender
    that the plan leaves open are those of the catalog."""
    entry, chosen = models().get(plan.model.name), plan.model
    if entry is None or entry.recommender is None:
        return plan
    items = chosen.items or entry.recommender.items
    clusters = chosen.clusters or entry.recommender.clusters
    return replace(plan, {"model.items": items, "model.clusters": clusters})


def ratings_to_count(plan: Plan) -> Path | None:
    """The file whose items decide the size of the plan's model; None if they do not, or it is not there."""
    entry = models().get(plan.model.name)
    if entry is None or entry.recommender is None or plan.model.items is not None:
        return None
    file = rating_file(_where(plan), plan.data)
    return file if file is not None and os.path.isfile(file) else None


def assumed_items(plan: Plan) -> int | None:
    """The catalog's number of items, if it stands for those of data that are not counted; else None."""
    entry = models().get(plan.model.name)
    if entry is None or entry.recommender is None or with_sizes(plan).model.items is not None:
        return None
    return entry.recommender.items


def _with_items(plan: Plan, entry: RecommenderEntry) -> Plan:
    items = plan.model.items
    if items is None:
        file = ratings_to_count(plan)
        count = None if file is None else item_count(file, plan.data)
        if count is None:
            return plan
        items = max(LEAST_ITEMS, count)
    clusters = entry.clusters if items == entry.items else round(math.sqrt(items))
    return replace(plan, {"model.items": items, "model.clusters": plan.model.clusters or clusters})


def _where(plan: Plan) -> str:
    """The path or the hub id of the plan's data."""
    known = datasets().get(plan.data.source)
    return plan.data.source if known is None else known.where


def _regressor(plan: Plan, entry: Regressor) -> Regressor:
    """The catalog's regressor with the sizes of the plan. Its MLPs stay as many times wider than the model."""
    chosen = with_sizes(plan).model
    width = chosen.hidden_size or entry.hidden_size
    return msgspec.structs.replace(
        entry,
        features=chosen.features or entry.features,
        outputs=chosen.outputs or entry.outputs,
        layers=chosen.layers or entry.layers,
        hidden_size=width,
        heads=chosen.heads or entry.heads,
        intermediate_size=width * entry.intermediate_size // entry.hidden_size,
    )


def _recommender(plan: Plan, entry: RecommenderEntry) -> Recommender:
    chosen = with_sizes(plan).model
    decoder: str | Architecture = chosen.decoder or entry.decoder
    if isinstance(decoder, str):
        known = models().get(decoder)
        if known is None:
            decoder = read_architecture(_model_directory(decoder, "model.decoder"))
        elif known.architecture is None:
            raise PlanError(
                f"model.decoder = {quote(decoder)}: expected a language model of a fixed size",
                "model.decoder",
            )
        else:
            decoder = known.architecture
    if decoder.experts:
        raise PlanError(
            f"model.decoder = {quote(chosen.decoder)}: has experts; expected a model with one MLP for all tokens",
            "model.decoder",
        )
    return Recommender(
        decoder=decoder,
        items=chosen.items or entry.items,
        clusters=chosen.clusters or entry.clusters,
        embedding_size=chosen.embedding_size or entry.embedding_size,
        adapter_size=chosen.adapter_size or entry.adapter_size,
    )


def model_directory(plan: Plan) -> str | None:
    """The directory holding the plan's pretrained weights (those of a recommender's decoder), or None for catalog
    models.

    Catalog models start from new weights. Raises `PlanError` if a named model is not found.
    """
    entry = models().get(plan.model.name)
    if entry is None:
        return _model_directory(plan.model.name)
    decoder = plan.model.decoder if entry.recommender is not None else None
    if decoder is None or decoder in models():
        return None
    return _model_directory(decoder, "model.decoder")


def _model_directory(name: str, key: str = "model.name") -> str:
    """The directory of a model that is not in the catalog. Raises `PlanError`, which names the setting `key`."""
    directory = find_model(name, key)
    if directory is None and looks_like_path(name):
        hint = nearest(Path(name).name, models())
        raise PlanError(f"{key} = {quote(name)}: no such directory{hint}", key)
    if directory is None:
        raise PlanError(
            f"{key} = {quote(name)}: not a catalog model, a directory with a config.json, "
            f"or a hub id like owner/name{nearest(Path(name).name, models()) or list_names(models())}",
            key,
        )
    return directory
