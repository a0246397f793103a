"""Prices a plan at the lengths of its documents, and caches measured lengths."""

from __future__ import annotations

import msgspec

from memconsole import regular_file, typed_json
from memconsole.memory.answers.cards import Price
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.table import MemoryTable
from memconsole.plan.data.lengths import Lengths, lengths_key
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.private_files import keep
from memconsole.user_folders import cache_folder

FILE_BYTES = 1 << 20
STEP = 8
"""Rows are priced at lengths rounded up to a multiple of this."""


class LengthPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs if its rows hold a whole document of one length."""

    name: str
    """p50 | p99 | longest"""
    tokens: int
    """Tokens of the document."""
    sequence_length: int
    table: MemoryTable | None
    """None if the model has too few positions."""


def priced_lengths(
    plan: Plan, budget: Budget, lengths: Lengths, price: Price = table_of
) -> tuple[LengthPrice, ...]:
    """`plan` with rows as long as the p50, p99 and longest document. Raises `PlanError`.

    A plan's memory does not vary from batch to batch: the trainer packs documents into rows of
    `data.sequence_length`, pads the last one, and cuts wider rows.
    """
    most = model_of(plan).max_positions
    found = []
    for name, tokens in (
        ("p50", lengths.p50),
        ("p99", lengths.p99),
        ("longest", lengths.longest),
    ):
        length = max(STEP, -(-tokens // STEP) * STEP)
        table = None
        if length <= most:
            data = msgspec.structs.replace(plan.data, sequence_length=length)
            table = price(msgspec.structs.replace(plan, data=data), budget)
        found.append(LengthPrice(name=name, tokens=tokens, sequence_length=length, table=table))
    return tuple(found)


def known_lengths(plan: Plan) -> Lengths | None:
    """The cached lengths of this data in its current state, or None. Damaged files are ignored."""
    try:
        file = cache_folder() / "lengths" / f"{lengths_key(plan)}.json"
        return typed_json.decode(regular_file.read(file, FILE_BYTES), Lengths)
    except (OSError, PlanError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def keep_lengths(plan: Plan, lengths: Lengths) -> None:
    """Cache a measurement. If the cache cannot be written, the lengths are measured again next time."""
    try:
        file = cache_folder() / "lengths" / f"{lengths_key(plan)}.json"
        keep(file, msgspec.json.encode(lengths))
    except (OSError, PlanError):
        return
