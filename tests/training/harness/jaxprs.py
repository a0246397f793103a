"""What a traced JAX program computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those inside loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                if hasattr(inner, "jaxpr") and hasattr(inner.jaxpr, "eqns"):
                    yield from equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from equations(inner)
