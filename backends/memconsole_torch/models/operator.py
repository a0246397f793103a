"""Operators of this package: functions that torch sees as one operation.

They are registered as `torch.library.custom_op` does, except that calling one of its operators loads the modules of
`torch.compile`, which take about 75 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("memconsole", "DEF")


class Operator:
    """``torch.ops.memconsole.<name>``, which computes `function`."""

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        _LIBRARY.define(f"{name}{schema}", tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self.function = function
        self._name = f"memconsole::{name}"
        self.overload: Any = getattr(torch.ops.memconsole, name).default

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """`function` gives results without content, for tensors without content."""
        torch.library.register_fake(self._name, function, lib=_LIBRARY)

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        torch.library.register_autograd(
            self._name, backward, setup_context=setup_context, lib=_LIBRARY
        )


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of the decorated function."""
    return lambda function: Operator(name, schema, function)
