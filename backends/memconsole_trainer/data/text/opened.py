"""Opens the text of a run: the sources that it is trained on, and those of its held-out rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

from memconsole.plan.data.mixture import parts, validation_plan
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole_trainer.data.sources.documents import DataError, Documents
from memconsole_trainer.data.sources.hashes import DataHashes, text_hash
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.data.sources.split import Everything, Split, split_of
from memconsole_trainer.data.text.rows.validation import held_out_texts

COMPARED_BYTES = 16 << 20
"""Text of `data.validation` that training documents are compared with: more than is evaluated."""


@dataclass(frozen=True)
class TextPart:
    """One source, opened."""

    plan: Plan
    """The run's plan with this source alone."""
    source: Documents | TokenRows
    split: Split
    share: float = 1.0
    """The share of the training rows that comes from this source."""


@dataclass(frozen=True)
class TextSources:
    """All sources of a run."""

    trained: tuple[TextPart, ...]
    """`data.source` first."""
    held: tuple[TextPart, ...]
    """The sources of the held-out rows: the same, or `data.validation`."""

    @property
    def first(self) -> TextPart:
        return self.trained[0]

    @property
    def own_validation(self) -> bool:
        """Whether the held-out rows come from `data.validation`."""
        return self.held is not self.trained

    @property
    def fingerprint(self) -> str:
        """A hash that changes when the fingerprint of any source changes."""
        if len(self.trained) == 1 and not self.own_validation:
            return self.first.source.fingerprint
        own = [part.source.fingerprint for part in (*self.trained, *self.held)]
        return hashlib.sha256(" ".join(own).encode()).hexdigest()

    @property
    def hashes(self) -> DataHashes:
        """Hashes of all that is read."""
        parts = (*self.trained, *self.held) if self.own_validation else self.trained
        if len(parts) == 1:
            return self.first.source.hashes
        return DataHashes.of([part.source.hashes for part in parts])

    def left_out(self) -> frozenset[int]:
        """Hashes of the texts of `data.validation`, which are not trained on."""
        if not self.own_validation or isinstance(self.held[0].source, TokenRows):
            return frozenset()
        found, size = set(), 0
        for _, text in held_out_texts(self.held[0].source, self.held[0].split):
            found.add(text_hash(text))
            size += len(text)
            if size >= COMPARED_BYTES:
                break
        return frozenset(found)


def open_text(plan: Plan, vocab_size: int, tick: Callable[[], None] = lambda: None) -> TextSources:
    """Open the sources of a plan. Raises `PlanError` and `DataError`."""
    apart = validation_plan(plan)
    fraction = 0.0 if apart is not None else plan.data.validation_fraction
    trained = []
    for part in parts(plan):
        source = open_source(part.plan, vocab_size, tick)
        trained.append(
            TextPart(part.plan, source, split_of(source, fraction, plan.data.held_out), part.share)
        )
    _check_alike("data.mix", trained[0], trained)
    if apart is None:
        both = tuple(trained)
        return TextSources(both, both)
    source = open_source(apart, vocab_size, tick)
    held = TextPart(apart, source, Everything(source.count))
    _check_alike("data.validation", trained[0], [held])
    for one in trained:
        _check_copies(held, one)
    return TextSources(tuple(trained), (held,))


def alone(plan: Plan, source: Documents | TokenRows, split: Split | None = None) -> TextSources:
    """The sources of a run that has only this one."""
    own = split or split_of(source, plan.data.validation_fraction, plan.data.held_out)
    both = (TextPart(plan, source, own),)
    return TextSources(both, both)


def _check_alike(key: str, first: TextPart, others: list[TextPart]) -> None:
    """Refuse rows of tokens together with texts: the tokens may be those of another tokenizer."""
    for part in others:
        if isinstance(part.source, TokenRows) != isinstance(first.source, TokenRows):
            kinds = {True: "rows of tokens", False: "texts"}
            raise PlanError(
                f"{key}: {quote(part.plan.data.source)} holds "
                f"{kinds[isinstance(part.source, TokenRows)]}, {quote(first.plan.data.source)} holds "
                f"{kinds[isinstance(first.source, TokenRows)]}; expected data of one kind",
                key,
            )


def _check_copies(held: TextPart, trained: TextPart) -> None:
    """Refuse a file for validation that is a copy of one that is trained on."""
    sizes: dict[int, list[Path]] = {}
    for path in trained.source.hashes.files:
        sizes.setdefault(path.stat().st_size, []).append(path)
    for path in held.source.hashes.files:
        for other in sizes.get(path.stat().st_size, ()):
            if cmp(path, other, shallow=False):
                raise DataError(
                    f"data.validation: {path} holds the same as {other}, which is trained on; give "
                    "other data"
                )
