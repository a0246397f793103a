"""What else changes in a plan when a user chooses a value for one of its settings."""

from __future__ import annotations

from memconsole.plan.catalog.tables import models
from memconsole.plan.plan import SETTINGS, Plan, get, replace, written
from memconsole.plan.sections.data import OF_RATINGS, OF_TEXT, OF_WINDOWS
from memconsole.plan.sections.model import SIZES

_RESET_WITH = {
    "model.name": (
        "model.target_params",
        "model.weights",
        *SIZES["recommender"],
        *SIZES["regressor"],
        *OF_RATINGS,
        *OF_WINDOWS,
    ),
    "train.warmup_steps": ("train.warmup_ratio",),
    "train.warmup_ratio": ("train.warmup_steps",),
    "data.source": (
        "data.max_examples",
        "data.mix",
        "data.validation",
        "model.features",
        "model.outputs",
        "model.items",
        "model.clusters",
        *OF_RATINGS,
        *OF_WINDOWS,
    ),
}
"""Settings that are reset when another value is chosen for the key."""
_LANGUAGE_SETTINGS = (
    *OF_TEXT,
    "data.stride",
    "data.isolate_documents",
    "optimize.fused_loss",
    "optimize.tiled_mlp",
    "train.objective",
    "train.dropout",
    "train.attention_dropout",
)
"""Settings that are reset when a model of another task than language is chosen."""

_NEW_WEIGHTS = (None, "random")
"""Values of `model.weights` that do not take the weights of a run."""


_NAMED_BY_A_PERSON = ("data.validation", "data.mix", "data.max_examples")
"""Settings of the data that a new dataset resets although they were set on purpose, so that a person is told."""


def dropped(before: Plan, after: Plan) -> str:
    """Says which settings of the data another `data.source` has reset; empty if none was set."""
    if before.data.source == after.data.source:
        return ""
    lost = [
        f"{key} = {written(get(before, key))}"
        for key in _NAMED_BY_A_PERSON
        if get(before, key) is not None and get(after, key) is None
    ]
    return f"data.source = {after.data.source} drops {', '.join(lost)}" if lost else ""


def choose(plan: Plan, key: str, value: object) -> Plan:
    """`plan` with one setting changed. Raises `PlanError`.

    A new value resets the settings that `_RESET_WITH` names for the key. A new dataset keeps those of a model that begins
    with the weights of a run. A catalog model of another task than language resets the settings of text.
    """
    changes = {key: value}
    if value == get(plan, key):
        return replace(plan, changes)
    changes |= {other: SETTINGS[other].default for other in _RESET_WITH.get(key, ())}
    if key == "data.source" and plan.model.weights not in _NEW_WEIGHTS:
        changes = {other: new for other, new in changes.items() if not other.startswith("model.")}
    chosen = models().get(str(value)) if key == "model.name" else None
    if chosen is not None and chosen.task != "language":
        changes |= {other: SETTINGS[other].default for other in _LANGUAGE_SETTINGS}
    return replace(plan, changes)
