"""The rows that set the training data, and how much of it is in host memory."""

from __future__ import annotations

from typing import Any

from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import (
    HOST_MEMORY,
    Optimization,
    Reach,
    RemedyRule,
    Result,
    always,
    fixed,
    unchanged,
)
from memconsole.plan.toggles.sizes import none_or


def _stride_values(plan: Plan) -> tuple[Any, ...]:
    """Strides without overlap, with half overlap and with three-quarter overlap between consecutive rows."""
    length = plan.data.sequence_length
    return none_or({length // 2, length // 4}, plan.data.stride)


STRIDE = Optimization(
    key="data.stride",
    keyboard="O",
    label="stride of rows",
    short="stride of rows",
    help="tokens between the starts of two rows; none: as many as a row has, so that rows do not overlap",
    costs="rows that overlap make an epoch longer",
    values=_stride_values,
    size=True,
    conflicts={},
    result=always(Result.DATA),
    reach=Reach.NOTHING,
    touches=(HOST_MEMORY,),
    remedy=None,  # it shortens an epoch and saves no memory
    says=None,
    evaluating=unchanged,
)

ISOLATE_DOCUMENTS = Optimization(
    key="data.isolate_documents",
    keyboard="p",
    label="isolated documents",
    short="isolated documents",
    help="a token attends only to its own document, also where a row holds several; positions start again in each",
    costs="torch needs a mask for every row; no context from other documents",
    values=fixed(False, True),
    conflicts={},
    result=always(Result.DATA),
    reach=Reach.STEP,
    touches=("activations",),
    remedy=RemedyRule(rank=72, values=fixed(False)),
    says=None,
    evaluating=unchanged,
)

STREAMING = Optimization(
    key="data.streaming",
    keyboard="i",
    label="streaming data",
    short="streaming data",
    help="tokenizes during training; memory holds only the shuffle buffer",
    costs="the first epoch tokenizes while it trains",
    values=fixed(True, False),
    conflicts={},
    result=always(Result.DATA),
    reach=Reach.NOTHING,
    touches=(HOST_MEMORY,),
    remedy=RemedyRule(rank=10),
    says=None,
    evaluating=unchanged,
)


def _buffer_values(plan: Plan) -> tuple[Any, ...]:
    return tuple(sorted({1_000, 5_000, 10_000, 50_000, 100_000, plan.data.shuffle_buffer}))


def _smaller_buffers(plan: Plan) -> tuple[Any, ...]:
    return tuple(n for n in _buffer_values(plan) if n < plan.data.shuffle_buffer)


SHUFFLE_BUFFER = Optimization(
    key="data.shuffle_buffer",
    keyboard="z",
    label="shuffle buffer",
    short="shuffle buffer",
    help="rows in memory from which streaming draws at random",
    costs="a small buffer shuffles less",
    values=_buffer_values,
    size=True,
    conflicts={},
    result=always(Result.DATA),
    reach=Reach.NOTHING,
    touches=(HOST_MEMORY,),
    remedy=RemedyRule(rank=85, values=_smaller_buffers),
    says=None,
    evaluating=unchanged,
)


def _limit_values(plan: Plan) -> tuple[Any, ...]:
    return none_or({1_000, 10_000, 50_000, 100_000}, plan.data.max_examples)


def _fewer_documents(plan: Plan) -> tuple[Any, ...]:
    """Limits to offer. There are none while streaming, because only the buffer's documents are held."""
    limit = plan.data.max_examples
    return () if plan.data.streaming else tuple(n for n in (50_000, 10_000) if not limit or n < limit)  # fmt: skip


MAX_EXAMPLES = Optimization(
    key="data.max_examples",
    keyboard="A",
    label="dataset limit",
    short="dataset limit",
    help="trains on the first documents of the dataset only; none: on all",
    costs="there is less to learn from",
    values=_limit_values,
    size=True,
    conflicts={},
    result=always(Result.DATA),
    reach=Reach.NOTHING,
    touches=(HOST_MEMORY,),
    remedy=RemedyRule(rank=90, values=_fewer_documents),
    says=None,
    evaluating=unchanged,
)
