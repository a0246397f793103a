"""The plan's section on the model: which one, how large, and where its weights come from."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from memconsole.plan.sections.section import Section, about

LEAST_ITEMS = 2
"""The smallest number of items of a recommender."""
LEAST_WIDTH = 8
"""The smallest width of a regressor."""
SIZES = {
    "recommender": (
        "model.decoder",
        "model.items",
        "model.clusters",
        "model.embedding_size",
        "model.adapter_size",
    ),
    "regressor": (
        "model.layers",
        "model.hidden_size",
        "model.heads",
        "model.features",
        "model.outputs",
    ),
}
"""The settings that only one kind of model has. Other models refuse them."""


class ModelChoice(Section, frozen=True, kw_only=True):
    name: Annotated[
        str, about("catalog name, or a directory / hub id with a Hugging Face config.json")
    ] = "stories"
    target_params: Annotated[
        Annotated[int, Meta(ge=100_000, le=2_000_000_000)] | None,
        about("parameters to aim for, for sized families"),
    ] = None
    weights: Annotated[
        str | None,
        about("random: from scratch; a run's checkpoint; none: those in the model's directory"),
    ] = None
    decoder: Annotated[
        str | None,
        about("a recommender's decoder: catalog name, directory or hub id; none: its own"),
    ] = None
    items: Annotated[
        Annotated[int, Meta(ge=LEAST_ITEMS, le=100_000_000)] | None,
        about("items that a recommender can hold; none: those in the data"),
    ] = None
    clusters: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        about("clusters of a recommender's items; none: about the square root of items"),
    ] = None
    embedding_size: Annotated[
        Annotated[int, Meta(ge=1, le=16_384)] | None,
        about("numbers in a row of a recommender's item table; none: its own number"),
    ] = None
    adapter_size: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None,
        about("hidden width of the adapter between items and decoder; none: its own width"),
    ] = None
    layers: Annotated[
        Annotated[int, Meta(ge=1, le=128)] | None,
        about("blocks of a regressor; none: its own number"),
    ] = None
    hidden_size: Annotated[
        Annotated[int, Meta(ge=LEAST_WIDTH, le=8_192)] | None,
        about("width of a regressor; its MLPs grow along; none: its own width"),
    ] = None
    heads: Annotated[
        Annotated[int, Meta(ge=1, le=128)] | None,
        about("attention heads of a regressor, which share its width; none: its own number"),
    ] = None
    features: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None,
        about("numbers in a step of a regressor's windows; none: those in the data file"),
    ] = None
    outputs: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None,
        about("numbers that a regressor predicts; none: those in the data file"),
    ] = None
