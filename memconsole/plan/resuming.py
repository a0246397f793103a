"""Which settings of a run may change when it is resumed."""

from __future__ import annotations

from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.origin import RANDOM, checkpoint_of
from memconsole.plan.plan import Plan, PlanError, get, quote, replace
from memconsole.plan.trained import frozen_names

ELSEWHERE = frozenset(
    {
        "train.preflight",
        "train.on_out_of_memory",
        "train.log_every",
        "train.tensorboard",
        "train.wandb",
        "train.mlflow",
        "train.evaluate_every",
        "train.evaluation_batches",
        "train.evaluation_batch_size",
        "train.early_stopping_patience",
        "train.early_stopping_minimum",
        "train.checkpoint_every",
        "train.checkpoint_minutes",
        "train.keep_checkpoints",
        "train.sample_tokens",
        "launch.on",
        "launch.partition",
        "launch.time_limit",
        "launch.devices_per_node",
        "launch.save_seconds",
        "launch.options",
    }
)
"""Settings that change nothing of what is trained."""
CHANGEABLE = ELSEWHERE | {
    "train.epochs",
    "train.max_steps",
    "train.learning_rate",
    "train.warmup_steps",
    "train.warmup_ratio",
    "train.schedule",
    "train.decay_share",
    "train.minimum_learning_rate",
}
"""Settings that a resumed run may have other values of. Weights, optimizer state and the place in
the data fit any value of them."""


def changed(plan: Plan, changes: dict[str, object]) -> Plan:
    """`plan` with `changes`. Raises `PlanError` for a setting that a resumed run cannot change."""
    for key, value in changes.items():
        if key not in CHANGEABLE and get(plan, key) != value:
            raise PlanError(
                f"{key} = {quote(value)}: a resumed run keeps its {quote(get(plan, key))}; it may change "
                f"{', '.join(sorted(CHANGEABLE))}. memconsole train --from RUN --set {key}=… begins a "
                "new run with the weights of this one",
                key,
            )
    return replace(plan, changes)


def without_lost_source(plan: Plan, own_tokenizer: Path) -> Plan:
    """`plan` for a run that has a checkpoint of its own, and maybe a tokenizer in `own_tokenizer`.

    The other run that it started from may have deleted that checkpoint by then, or may be gone.
    Only frozen weights are read from it again.
    """
    source = checkpoint_of(plan)
    if source is None or (source / "MANIFEST.json").is_file():
        return plan
    if frozen_names(plan, catalog.model(plan)):
        return plan
    changes: dict[str, object] = {"model.weights": RANDOM}
    tokenizer = plan.data.tokenizer
    if tokenizer is not None and not Path(tokenizer).expanduser().exists():
        changes["data.tokenizer"] = str(own_tokenizer)
    return replace(plan, changes)


def words(before: Plan, after: Plan) -> str:
    """The settings that differ, with both values."""
    keys = [key for key in sorted(CHANGEABLE) if get(before, key) != get(after, key)]
    return ", ".join(f"{k} {quote(get(before, k))} → {quote(get(after, k))}" for k in keys)
