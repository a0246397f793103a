"""Devices of a given size, for tests of prices."""

from __future__ import annotations

from memconsole.plan.machine.budget import Budget


def card(usable: int, kind: str = "gpu") -> Budget:
    return Budget(
        name=kind,
        kind=kind,
        memory_label="VRAM",
        total_bytes=usable,
        usable_bytes=usable,
        why="test",
        bandwidth_bytes_per_second=1e12,
        peak_flops={"fp32": 2e13, "bf16": 1e14},
    )
