"""The states of a run, and why an attempt ended."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal[
    "starting",
    "running",
    "unsupervised",
    "stopping",
    "finished",
    "stopped",
    "failed",
    "orphaned",
    "lost",
]
"""starting: no trainer yet. unsupervised: the trainer lives, its supervisor does not. orphaned: the
trainer is dead, children of it still hold memory. lost: died with its supervisor, or in a reboot."""

LIVE: frozenset[str] = frozenset({"starting", "running", "unsupervised", "stopping"})


OUT_OF_MEMORY = ("out_of_memory", "host_out_of_memory")
"""Reasons of a verdict that a leaner plan mends."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run ended."""

    reason: str
    """finished stopped out_of_memory host_out_of_memory killed bad_data bad_plan nan disk_full crashed
    fenced rebooted unknown"""
    evidence: str
    """One sentence with what supports it."""
    exit_code: int | None = None
    signal: str | None = None
    resumable: bool = False
