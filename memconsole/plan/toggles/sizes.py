"""The rows that set how many rows and tokens a step has."""

from __future__ import annotations

from typing import Any

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimization import (
    Length,
    Optimization,
    Reach,
    RemedyRule,
    Result,
    always,
    unchanged,
)


def none_or(numbers: set[int], present: int | None) -> tuple[Any, ...]:
    """None (no limit) first, then the usual limits and the present one."""
    return (None, *sorted(numbers if present is None else {*numbers, present}))


def _batch_values(plan: Plan) -> tuple[Any, ...]:
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n % plan.rows_together == 0]
    return tuple(sorted({*sizes, plan.train.batch_size}))


BATCH_SIZE = Optimization(
    key="train.batch_size",
    keyboard="b",
    label="micro-batch",
    short="micro-batch",
    help="rows that one forward and backward pass takes",
    costs="the effective batch changes",
    values=_batch_values,
    size=True,
    conflicts={},
    result=always(Result.DATA),
    reach=Reach.SIZES,
    touches=("activations", "logits and loss"),
    remedy=None,  # the accumulation remedy reduces it and keeps the effective batch
    says=None,
    evaluating=unchanged,
)


def _evaluation_values(plan: Plan) -> tuple[Any, ...]:
    return none_or({plan.rows_together, 4, 16, 64}, plan.train.evaluation_batch_size)


def _fewer_rows(plan: Plan) -> tuple[Any, ...]:
    return tuple(n for n in _evaluation_values(plan) if n and n < plan.evaluation_batch)


EVALUATION_BATCH_SIZE = Optimization(
    key="train.evaluation_batch_size",
    keyboard="E",
    label="evaluation batch",
    short="evaluation batch",
    help="rows that one pass of an evaluation takes; none: as many as a micro-batch",
    costs="small batches evaluate slower",
    values=_evaluation_values,
    size=True,
    conflicts={},
    result=always(Result.SAME),
    reach=Reach.SIZES,
    touches=("activations",),
    remedy=RemedyRule(rank=15, values=_fewer_rows),
    says=None,
    evaluating=unchanged,
)


def _length_values(plan: Plan) -> tuple[Any, ...]:
    """Usual lengths, up to the maximum of a model with learned positions."""
    from memconsole.plan import catalog

    present = plan.data.sequence_length
    lengths = {64, 128, 256, 512, 1024, 2048, 4096}
    try:
        model = catalog.model(plan)
    except PlanError:
        return tuple(sorted({*lengths, present}))
    if not isinstance(model, Architecture) or model.positions == "learned":
        lengths = {n for n in lengths if n <= model.max_positions}
    return tuple(sorted({*lengths, present}))


def _length_notes(plan: Plan, kind: str, length: Length) -> tuple[str, ...]:
    """Notes on rows that are longer than a decoder with rotary positions was made for."""
    from memconsole.plan import catalog

    model, tokens = catalog.model(plan), plan.data.sequence_length
    if not isinstance(model, Architecture):
        return ()
    notes = []
    scaling = model.rope_scaling
    if (
        scaling is not None
        and scaling.kind == "longrope"
        and tokens > scaling.original_positions
        and plan.data.isolate_documents
    ):
        notes.append(
            f"data.sequence_length = {tokens:,}: in rows longer than {scaling.original_positions:,} tokens LongRoPE "
            "turns positions by its factors for long texts, also those of short documents in such a row"
        )
    if tokens > model.max_positions:
        notes.append(
            f"data.sequence_length = {tokens:,}: {plan.model.name} was made for {model.max_positions:,} positions; it "
            f"trains on longer rows, but samples, answers and exports hold {model.max_positions:,}"
        )
    return tuple(notes)


def _shorter(plan: Plan) -> tuple[Any, ...]:
    return tuple(n for n in _length_values(plan) if n < plan.data.sequence_length)


SEQUENCE_LENGTH = Optimization(
    key="data.sequence_length",
    keyboard="x",
    label="sequence length",
    short="sequence length",
    help="tokens in a row",
    costs="the model sees a shorter context",
    values=_length_values,
    size=True,
    conflicts={},
    result=always(Result.DATA),
    reach=Reach.SIZES,
    touches=("activations", "logits and loss"),
    remedy=RemedyRule(rank=70, values=_shorter),
    says=None,
    evaluating=unchanged,
    notes=_length_notes,
)
