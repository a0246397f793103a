"""The two halves of a batch: a jump is measured on one and confirmed on the other."""

from __future__ import annotations

from memconsole_trainer.engine import Batch


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Halves by micro-batches if there are several, else by rows. A half's weight is its share of
    the rows."""
    first = next(iter(batch.arrays.values()))
    axis = 0 if first.shape[0] > 1 else 1
    whole = first.shape[axis]
    cut = whole // 2

    def part(rows: slice, count: int) -> Batch:
        index = (rows,) if axis == 0 else (slice(None), rows)
        arrays = {name: array[index] for name, array in batch.arrays.items()}
        return Batch(arrays, batch.weight * count / whole)

    return part(slice(cut, None), whole - cut), part(slice(cut), cut)
