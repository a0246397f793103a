"""What workers tell the screens. Each carries one frozen value; newer ones replace older ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from memconsole.memory.table import Estimate
from memconsole.runs.read.snapshot import RunSnapshot
from memconsole.tui.plan.pricing import Priced

if TYPE_CHECKING:
    from memconsole.runs.read.follow import RunStatus


@dataclass
class SnapshotArrived(Message, bubble=False):
    """The run being watched, as it is now."""

    snapshot: RunSnapshot

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, SnapshotArrived)


@dataclass
class FollowFailed(Message, bubble=False):
    """The run could not be read; `reason` is one line."""

    reason: str


@dataclass
class PriceReady(Message, bubble=False):
    """A plan was priced off the event loop. `generation` tells which request it answers."""

    generation: int
    priced: Priced


@dataclass
class ExactNews(Message, bubble=False):
    """A tracer or the store told something about a plan or its neighbours."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, ExactNews)


@dataclass
class PredictionReady(Message, bubble=False):
    """What the run being watched was expected to need, or why that is not known."""

    run_id: str
    estimate: Estimate | None
    problem: str


@dataclass
class RunsListed(Message, bubble=False):
    """Every run, live first."""

    runs: tuple[RunStatus, ...]
    notes: tuple[str, ...]


@dataclass
class RunDeleted(Message, bubble=False):
    """A run's files are gone, or `problem` says why not."""

    run_id: str
    problem: str


@dataclass
class LiveRunFound(Message, bubble=False):
    """When the console opened, this run was training."""

    run_id: str


@dataclass
class Launched(Message, bubble=False):
    """A run was started (or resumed) and can be watched."""

    run_id: str
    words: str


@dataclass
class ActionFailed(Message, bubble=False):
    """Something a person asked for did not work; `reason` is one line."""

    reason: str
