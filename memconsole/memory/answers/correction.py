"""An estimate corrected by the run that ran out of memory under it."""

from __future__ import annotations

import msgspec

from memconsole.memory.table import MemoryTable


class OutOfMemoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured that ran out of memory, in bytes of the allocated column."""

    needed_bytes: int
    """It needed at least so much."""
    held_bytes: int
    """It did hold so much."""
    phase: str = ""
    """Of the estimate, in which it died; empty for a training step."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """What an estimate is multiplied by, and what room there is."""

    factor: float = 1.0
    room_bytes: int
    """Device bytes that a plan may take."""

    def device_bytes(self, table: MemoryTable) -> int:
        """The device column with its tensors corrected."""
        return int(table.peak_bytes * self.factor) + table.device_bytes - table.peak_bytes

    def fits(self, table: MemoryTable) -> bool:
        return self.device_bytes(table) <= self.room_bytes and not table.out_of_memory


def correction(table: MemoryTable, died: OutOfMemoryRun | None) -> Correction:
    """By a run of `table`'s own plan; by the budget alone without one.

    The estimate is raised where the run needed more than was estimated for the phase it died in. Where the
    budget has room even for that, it is wrong: then only what the run did hold is known to be there.
    """
    room = table.budget.usable_bytes
    if died is None:
        return Correction(room_bytes=room)
    estimated = table.phases.get(died.phase) or table.peak_bytes
    found = Correction(factor=max(1.0, died.needed_bytes / max(1, estimated)), room_bytes=room)
    if not found.fits(table):
        return found
    held = died.held_bytes + table.device_bytes - table.peak_bytes
    return msgspec.structs.replace(found, room_bytes=held)
