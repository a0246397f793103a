"""Arrays by the name of their weight."""

from __future__ import annotations

from collections.abc import Container

from jax import Array

Tree = dict[str, Array]


def divided(tree: Tree, names: Container[str]) -> tuple[Tree, Tree]:
    """The arrays of the weights in `names`, and those of all others."""
    inside = {name: x for name, x in tree.items() if name in names}
    return inside, {name: x for name, x in tree.items() if name not in names}
