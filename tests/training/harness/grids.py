"""Grids of settings: which of their combinations the gate tests, and which are left to `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def spread(*choices: Sequence[Any]) -> list[Any]:
    """Every combination. All are marked slow but as few as hold each choice once."""
    count = max(map(len, choices))
    gate = [tuple(choice[n % len(choice)] for choice in choices) for n in range(count)]
    return [
        pytest.param(*combination, marks=() if combination in gate else pytest.mark.slow)
        for combination in itertools.product(*choices)
    ]
