"""The state of the run screen: the watched run, its prediction, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memconsole.devices.reading import Devices
from memconsole.memory.table import Estimate
from memconsole.runs.read.shown.snapshot import RunSnapshot, Symptom
from memconsole.runs.record.states import LIVE, OUT_OF_MEMORY
from memconsole.tui.keys.table import KeyTable

Pane = Literal["output", "sample", "summary", "closed"]
PANES: tuple[Pane, ...] = ("output", "sample", "summary", "closed")
"""The lower pane's contents, in the order its key switches them."""


@dataclass(frozen=True)
class RunView:
    """Everything the run screen shows."""

    snapshot: RunSnapshot | None = None
    prediction: Estimate | None = None
    prediction_problem: str = ""
    devices: Devices | None = None
    pane: Pane = "output"
    chart: int = 0
    """Which chart is the large one, as an index into `charts_of`."""
    logarithmic: bool | None = None
    """Whether the large chart has a logarithmic axis; None: decided by its values."""
    recent: bool = False
    glyphs: str = "braille"
    scroll: int = 0
    """How many rows the lower pane is scrolled up from its end."""
    sample: int = 0
    """Which sampled text is shown, as the number of newer ones."""
    problem: str = ""
    keys: KeyTable = KeyTable()

    @property
    def live(self) -> bool:
        return self.snapshot is not None and self.snapshot.state in LIVE

    @property
    def paused(self) -> bool:
        """Whether the run is paused, or will be after its current step."""
        return self.live and self.snapshot is not None and self.snapshot.pause_requested

    @property
    def out_of_memory(self) -> bool:
        """Whether the run ended because it ran out of memory."""
        run = self.snapshot
        verdict = run.verdict if run is not None and not self.live else None
        return verdict is not None and verdict.reason in OUT_OF_MEMORY

    @property
    def symptom(self) -> Symptom | None:
        """The first thing that goes wrong in the run; None if it ran out of memory, which has
        remedies of its own."""
        run = self.snapshot
        return (
            run.symptoms[0] if run is not None and run.symptoms and not self.out_of_memory else None
        )

    @property
    def resumable(self) -> bool:
        """Whether the run has ended and can be resumed."""
        return self.snapshot is not None and self.snapshot.resumable
