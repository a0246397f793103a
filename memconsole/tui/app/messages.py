"""What workers tell the app. Each carries one frozen value; newer ones replace older ones."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from memconsole.memory.table import Estimate
from memconsole.runs.read.snapshot import RunSnapshot


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
