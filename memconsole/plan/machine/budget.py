"""The memory that a plan may use on one device."""

from __future__ import annotations

import msgspec

SEVERAL = ("gpu", "rocm", "tpu")
"""The kinds of device of which a plan can have several, each with memory of its own."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The device a plan is priced against."""

    name: str
    kind: str
    """cpu | gpu | rocm | apple | tpu"""
    memory_label: str
    """VRAM | HBM | unified memory | host RAM"""
    total_bytes: int
    usable_bytes: int
    why: str
    """The source of usable_bytes, as one phrase: "free now", "75 % of total (JAX)" …"""
    local: bool = False
    """True for a device of this machine, False for a catalog device."""
    catalog_name: str = ""
    """The name of the same product in the catalog; empty if it has none."""
    bandwidth_bytes_per_second: float | None = None
    peak_flops: dict[str, float] = {}
    """Dense peak per precision (fp32, tf32, bf16, fp16), FLOP/s."""
    link_bytes_per_second: float | None = None
    """To other devices of its kind in the same machine, in each direction."""
