"""Maps the optimizer's state, a tree of arrays over stacked weights, to the tensor names of
checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from memconsole_jax.layout.stacking import Stack
from memconsole_jax.releasing import Released


@dataclass(frozen=True)
class OptimizerLeaf:
    """One array of the optimizer state: that of one weight's stack, or a scalar."""

    prefix: str
    stack: Stack | None
    array: jax.Array | Released

    def names(self) -> Iterator[str]:
        """Checkpoint names of the array's parts."""
        if self.stack is None:
            yield self.prefix
        else:
            yield from (f"{self.prefix}.{p.name}" for p in self.stack.members)

    def split(self, array: NDArray[np.generic]) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield checkpoint names and the parts of `array`, as views."""
        if self.stack is None:
            yield self.prefix, array
        else:
            for canonical, row in self.stack.split(array):
                yield f"{self.prefix}.{canonical}", row


def leaves(state: Any, stacks: Mapping[str, Stack]) -> list[OptimizerLeaf]:
    """Every array of the optimizer's `state`, in the order of `jax.tree`."""
    found = []
    for path, array in jax.tree_util.tree_flatten_with_path(state)[0]:
        words = [_word(key) for key in path]
        own = next((stacks[w] for w in words[-2:] if w in stacks), None)
        if own is None:
            found.append(OptimizerLeaf(".".join(["optimizer", *words]), None, array))
            continue
        before = words.index(own.name)
        layer = words[before + 1 :]  # present if the state is on the host
        stack = own.layer(int(layer[0])) if layer else own
        found.append(OptimizerLeaf(".".join(["optimizer", *words[:before]]), stack, array))
    return found


def as_stored(row: NDArray[Any]) -> NDArray[Any]:
    """A part of the optimizer's state as checkpoints store it: uint16 arrays hold the bits of
    bfloat16."""
    return row.view(jnp.bfloat16) if row.dtype == np.uint16 else row


def _word(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))
