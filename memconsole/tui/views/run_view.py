"""What the run screen shows: the watched run, its prediction, and how the person looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memconsole.devices.reading import Devices
from memconsole.memory.table import Estimate
from memconsole.runs.read.snapshot import RunSnapshot
from memconsole.runs.record.states import LIVE, OUT_OF_MEMORY
from memconsole.tui.keys.table import KeyTable

Pane = Literal["output", "sample", "summary", "closed"]
PANES: tuple[Pane, ...] = ("output", "sample", "summary", "closed")
"""Of the run screen's lower pane, in the order its key goes through them."""


@dataclass(frozen=True)
class RunView:
    """The run screen."""

    snapshot: RunSnapshot | None = None
    prediction: Estimate | None = None
    prediction_problem: str = ""
    devices: Devices | None = None
    pane: Pane = "output"
    logarithmic: bool = False
    recent: bool = False
    glyphs: str = "braille"
    scroll: int = 0
    """Rows the lower pane is moved up from its end."""
    problem: str = ""
    keys: KeyTable = KeyTable()

    @property
    def live(self) -> bool:
        return self.snapshot is not None and self.snapshot.state in LIVE

    @property
    def paused(self) -> bool:
        """Whether the run waits, or will after its present step."""
        return self.live and self.snapshot is not None and self.snapshot.pause_requested

    @property
    def out_of_memory(self) -> bool:
        """Whether the run ended because memory did."""
        run = self.snapshot
        verdict = run.verdict if run is not None and not self.live else None
        return verdict is not None and verdict.reason in OUT_OF_MEMORY

    @property
    def resumable(self) -> bool:
        """Whether the run has ended and can go on."""
        run = self.snapshot
        return run is not None and not self.live and bool(run.verdict and run.verdict.resumable)
