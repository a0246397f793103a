"""Which settings of a run may change when it is resumed."""

from __future__ import annotations

import os
from pathlib import Path

from memconsole.given_path import given_path
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError, get, quote, replace
from memconsole.plan.training.origin import RANDOM, checkpoint_of
from memconsole.plan.training.trained import frozen_names

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
        "train.evaluation_train_batches",
        "train.evaluation_batch_size",
        "train.early_stopping_patience",
        "train.early_stopping_minimum",
        "train.checkpoint_every",
        "train.checkpoint_minutes",
        "train.save_only_best",
        "train.keep_checkpoints",
        "train.sample_tokens",
        "train.answered_records",
        "data.cache_gib",
        "launch.on",
        "launch.partition",
        "launch.time_limit",
        "launch.devices_per_node",
        "launch.save_seconds",
        "launch.options",
    }
)
"""Settings that do not change what is trained."""
LATER = frozenset({"train.answered_records"})
"""Settings of `ELSEWHERE` that count in the fingerprints of older checkpoints."""
CHANGEABLE = ELSEWHERE | {
    "train.epochs",
    "train.max_steps",
    "train.learning_rate",
    "train.warmup_steps",
    "train.warmup_ratio",
    "train.schedule",
    "train.decay_share",
    "train.decay_until",
    "train.minimum_learning_rate",
}
"""Settings that may change when a run is resumed. Weights, optimizer state and the position in the
data fit any value of them."""

MAY_CHANGE = (
    "length, learning rate, logging, samples, evaluations, early stopping, checkpoints, what follows when memory runs out, "
    "the cache of tokens, the job and the number of devices"
)
"""The settings of `CHANGEABLE` and `DEVICES`, in groups."""

DEVICES = frozenset({"device.count", "optimize.sharding"})
"""How many devices a resumed run has, and what each holds. The number of rows per step stays the same."""
OF_WEIGHTS = frozenset(
    {"data.tokenizer", "data.vocab_size", "data.characters", "data.lowercase", "data.code_field"}
)
"""Settings of the data that the weights of a run depend on."""
EVALUATED = (
    "train.evaluation_batches",
    "train.evaluation_train_batches",
    "train.evaluation_batch_size",
)
"""Settings that say how many rows an evaluation has: two numbers of batches, and the rows of a batch."""


def changed(plan: Plan, changes: dict[str, object]) -> Plan:
    """`plan` with `changes`. Raises `PlanError` for a setting that a resumed run cannot change."""
    for key, value in changes.items():
        if key not in CHANGEABLE | DEVICES and get(plan, key) != value:
            raise PlanError(
                f"{key} = {quote(value)}: a resumed run keeps its {quote(get(plan, key))}; {MAY_CHANGE} may change. "
                + _new_run(key),
                key,
            )
    if changes.get("device.count") == 1:
        changes = {"optimize.sharding": "none", **changes}
    return with_rows_of(plan, replace(plan, changes), frozenset(changes))


def _new_run(key: str) -> str:
    """How a person gets what a resumed run cannot have."""
    if key == "backend" or key.startswith("model.") or key in OF_WEIGHTS:
        return f"memconsole train --plan RUN/plan.toml --set {key}=… begins a new run"
    return (
        f"memconsole train --from RUN --set {key}=… begins a new run with the weights of this one"
    )


def with_rows_of(before: Plan, after: Plan, asked: frozenset[str]) -> Plan:
    """`after`, which has another number of devices, with the same rows in a step as `before`. Micro-batches keep their size
    or become smaller, and their number is changed to match. So are those of evaluations, unless one of them was `asked` for.
    Raises `PlanError`."""
    if before.device.count == after.device.count:
        return after
    rows, count, together = before.effective_batch, after.device.count, before.rows_together
    if rows % (count * together):
        parts = f"{rows:,} rows" if together == 1 else f"{rows // together:,} pairs"
        raise PlanError(
            f"device.count = {count:,}: a step of this run has {parts}, which {count:,} devices cannot share equally",
            "device.count",
        )
    sizes = range(before.train.batch_size, 0, -together)
    batch = next(size for size in sizes if rows // count % size == 0)
    steps = rows // count // batch
    plan = replace(after, {"train.batch_size": batch, "optimize.accumulation_steps": steps})
    if asked & {*EVALUATED} or plan.train.evaluation_batch_size is None:
        return plan
    return _with_evaluated_rows_of(before, plan)


def _with_evaluated_rows_of(before: Plan, after: Plan) -> Plan:
    """`after` with as many rows in an evaluation as `before`, or as near as the number of devices allows. Batches have
    their own size, and keep it or become smaller."""
    rows_per_batch = before.evaluation_batch * before.device.count
    limited = [key for key in EVALUATED[:2] if get(before, key)]
    rows: dict[str, int] = {key: get(before, key) * rows_per_batch for key in limited}

    def batches(key: str, size: int) -> int:
        return max(1, round(rows[key] / (size * after.device.count)))

    def missed(size: int) -> int:
        return sum(abs(rows[key] - batches(key, size) * size * after.device.count) for key in rows)

    size = min(range(after.evaluation_batch, 0, -after.rows_together), key=missed)
    changes: dict[str, object] = {key: batches(key, size) for key in rows}
    if size != after.evaluation_batch:
        changes["train.evaluation_batch_size"] = size
    return replace(after, changes)


def without_lost_source(plan: Plan, own_tokenizer: Path) -> Plan:
    """`plan` for a run that has a checkpoint of its own, and maybe a tokenizer in `own_tokenizer`.

    The other run that it started from may have deleted that checkpoint by then, or may be gone. Only frozen weights are
    read from it again. The tokenizer that was given may be gone too; the run's own one is compared with the checkpoint.
    """
    changes: dict[str, object] = {}
    source = checkpoint_of(plan)
    lost = source is not None and not os.path.isfile(source / "MANIFEST.json")
    if lost and not frozen_names(plan, catalog.model(plan)):
        changes["model.weights"] = RANDOM
    given = plan.data.tokenizer
    if given is not None and own_tokenizer.is_file() and not os.path.exists(given_path(given)):
        changes["data.tokenizer"] = str(own_tokenizer)
    return replace(plan, changes) if changes else plan


def words(before: Plan, after: Plan) -> str:
    """The settings that differ, with both values."""
    named = CHANGEABLE | DEVICES | {"train.batch_size", "optimize.accumulation_steps"}
    keys = [key for key in sorted(named) if get(before, key) != get(after, key)]
    return ", ".join(f"{k} {quote(get(before, k))} → {quote(get(after, k))}" for k in keys)
