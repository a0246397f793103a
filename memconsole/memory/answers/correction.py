"""Corrects an estimate with a run of the same plan that ran out of memory."""

from __future__ import annotations

import msgspec

from memconsole.memory.table import MemoryTable
from memconsole.memory.verdict import Verdict, verdict_of


class OutOfMemoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a run that ran out of memory, in allocated bytes."""

    needed_bytes: int
    """A lower limit of what the run needed."""
    held_bytes: int
    """What the run had allocated."""
    phase: str = ""
    """The phase of the estimate in which it failed; empty for a training step."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """The factor for an estimate, and the memory that is available."""

    factor: float = 1.0
    room_bytes: int
    """Device bytes that a plan may take."""

    def device_bytes(self, table: MemoryTable) -> int:
        """The table's device bytes with the correction applied to its tensors."""
        return int(table.peak_bytes * self.factor) + table.device_bytes - table.peak_bytes

    def at_most_bytes(self, table: MemoryTable) -> int:
        """The high end of the table's band, moved by the correction."""
        return self.device_bytes(table) + table.at_most_bytes - table.device_bytes

    def verdict(self, table: MemoryTable) -> Verdict:
        """Whether the corrected plan fits the room."""
        needed, at_most = self.device_bytes(table), self.at_most_bytes(table)
        return verdict_of(needed, at_most, self.room_bytes, refused=table.out_of_memory)


def correction(table: MemoryTable, died: OutOfMemoryRun | None) -> Correction:
    """The correction from a run of `table`'s own plan; without a run, the budget alone.

    If the run needed more than the estimate of the phase it failed in, the estimate is raised. If the corrected plan
    would still fit the budget, the budget is wrong, and only what the run held counts as available.
    """
    room = table.budget.usable_bytes
    if died is None:
        return Correction(room_bytes=room)
    estimated = table.peak_bytes
    if phase := table.phases.get(died.phase):  # finished runs correct the peak alone
        estimated = phase * table.peak_bytes // table.phases[table.peak_phase]
    found = Correction(factor=max(1.0, died.needed_bytes / max(1, estimated)), room_bytes=room)
    if found.verdict(table) is Verdict.DOES_NOT_FIT:
        return found
    held = died.held_bytes + table.device_bytes - table.peak_bytes
    return msgspec.structs.replace(found, room_bytes=held)
