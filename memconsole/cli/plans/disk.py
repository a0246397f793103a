"""The lines of `memconsole plan` that tell what a run keeps of its data on disk."""

from __future__ import annotations

from pathlib import Path

from memconsole.cache import cache_folder
from memconsole.memory.state.data import cache_bytes
from memconsole.memory.table import Tier
from memconsole.plan import catalog
from memconsole.plan.catalog.sources import PACKED
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole.units import GIB, format_bytes


def disk_lines(plan: Plan) -> list[str]:
    """What a run keeps of its text on disk; nothing if it keeps nothing and loses nothing by it."""
    return [*_unpacked(plan), *_tokens(plan)]


def _unpacked(plan: Plan) -> list[str]:
    """What compressed data take besides."""
    entry = catalog.dataset(plan)
    ratio = PACKED.get(Path(entry.where).suffix.lower()) if entry.kind == "file" else None
    if ratio is None or entry.bytes is None:
        return []
    size = f"{Tier.FORMULA}{format_bytes(round(entry.bytes * ratio))}"
    return [f"disk {size} for the data, unpacked in {cache_folder() / 'data'}"]


def _tokens(plan: Plan) -> list[str]:
    model, entry = catalog.model(plan), catalog.dataset(plan)
    if not isinstance(model, Architecture) or entry.format == "hdf5":
        return []
    size = cache_bytes(plan, model)
    hub = entry.kind == "hub"
    if not plan.data.cache_gib:
        if hub and plan.data.streaming:
            return [
                "disk: data.cache_gib = 0 keeps no tokens: a resumed run reads again all of the stream before its place"
            ]
        return []
    if size == 0:
        return []
    most = format_bytes(plan.data.cache_gib * GIB)
    much = f"up to {most}" if size is None else f"{Tier.FORMULA}{format_bytes(size)}"
    where = "the run's folder" if hub else str(cache_folder() / "data")
    return [f"disk {much} for tokens, kept between epochs and attempts in {where}"]
