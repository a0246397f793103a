"""The lines of `memconsole plan` about the data that a run keeps on disk."""

from __future__ import annotations

from pathlib import Path

from memconsole.memory.state.data import cache_bytes
from memconsole.memory.table import Tier
from memconsole.plan import catalog
from memconsole.plan.catalog.folders import PACKED
from memconsole.plan.data.mixture import sources
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole.units import GIB, format_bytes
from memconsole.user_folders import NoHomeError, cache_folder


def disk_lines(plan: Plan) -> list[str]:
    """Lines on unpacked data and on the tokens that a run keeps on disk; none if it keeps neither."""
    return [*_unpacked(plan), *_tokens(plan)]


def _unpacked(plan: Plan) -> list[str]:
    """A line on the disk space of unpacked data."""
    size = 0.0
    for entry in map(catalog.dataset, sources(plan)):
        ratio = PACKED.get(Path(entry.where).suffix.lower(), 0.0) if entry.kind == "file" else 0.0
        size += ratio * (entry.bytes or 0)
    if not size:
        return []
    words = f"{Tier.FORMULA}{format_bytes(round(size))}"
    return [f"disk {words} for the data, unpacked in {_folder()}"]


def _tokens(plan: Plan) -> list[str]:
    """A line on the tokens that a run keeps, or on what it costs to keep none of a stream."""
    model, entry = catalog.model(plan), catalog.dataset(plan)
    if not isinstance(model, Architecture) or entry.format == "hdf5":
        return []
    size = cache_bytes(plan, model)
    hub = entry.kind == "hub"
    if not plan.data.cache_gib:
        if hub and plan.data.streaming:
            return [
                "disk: data.cache_gib = 0 keeps no tokens: a resumed run reads the stream again from its beginning"
            ]
        return []
    if size == 0:
        return []
    most = format_bytes(plan.data.cache_gib * GIB)
    amount = f"up to {most}" if size is None else f"{Tier.FORMULA}{format_bytes(size)}"
    where = "attempts in the run's folder" if hub else f"runs in {_folder()}"
    return [f"disk {amount} for tokens, kept between epochs and {where}"]


def _folder() -> str:
    try:
        return str(cache_folder() / "data")
    except NoHomeError as error:
        return f"the cache ({error})"
