"""Batches of text: token ids, the tokens after them, and which document each token is of."""

from __future__ import annotations

import numpy as np

from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.engine import Array, Batch


def language_batch(inputs: Array, targets: Array, documents: Array | None = None) -> Batch:
    """A batch of int32 (micro_batches, micro_batch, sequence_length); a target of -100 counts for nothing.

    `documents` number the documents of a row, rising, where they do not see one another: positions begin anew with
    each, and a query sees keys of its own alone.
    """
    arrays = {"inputs": inputs, "targets": targets}
    if documents is not None:
        arrays["documents"] = documents
    return Batch(arrays, int(np.count_nonzero(targets != MASKED)))
