"""Which settings of a run may change when it is resumed."""

from __future__ import annotations

from memconsole.plan.plan import Plan, PlanError, get, quote, replace

ELSEWHERE = frozenset(
    {
        "train.preflight",
        "train.on_out_of_memory",
        "train.log_every",
        "train.tensorboard",
        "train.evaluate_every",
        "train.evaluation_batches",
        "train.evaluation_batch_size",
        "train.early_stopping_patience",
        "train.early_stopping_minimum",
        "train.checkpoint_every",
        "train.checkpoint_minutes",
        "train.keep_checkpoints",
        "train.sample_tokens",
    }
)
"""Settings that change nothing of what is trained."""
CHANGEABLE = ELSEWHERE | {
    "train.epochs",
    "train.max_steps",
    "train.learning_rate",
    "train.warmup_steps",
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


def words(before: Plan, after: Plan) -> str:
    """The settings that differ, with both values."""
    keys = [key for key in sorted(CHANGEABLE) if get(before, key) != get(after, key)]
    return ", ".join(f"{k} {quote(get(before, k))} → {quote(get(after, k))}" for k in keys)
