"""The messages from workers to the app. Each has one frozen value."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from textual.message import Message

from memconsole.memory.table import Estimate
from memconsole.runs.read.shown.snapshot import RunSnapshot


@dataclass
class OfFollower(Message, bubble=False):
    """What a follower's thread says."""

    stopped: threading.Event = field(default_factory=threading.Event, kw_only=True)
    """Set once another run is watched, which the message is not about."""


@dataclass
class SnapshotArrived(OfFollower, bubble=False):
    """The current state of the watched run."""

    snapshot: RunSnapshot

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, SnapshotArrived)


@dataclass
class FollowFailed(OfFollower, bubble=False):
    """The run could not be read; `reason` is one line."""

    reason: str


@dataclass
class ExactNews(Message, bubble=False):
    """There are new exact numbers for the plan or for plans one key press away."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, ExactNews)


@dataclass
class PredictionReady(Message, bubble=False):
    """The launch estimate of the watched run, or why it is unknown."""

    run_id: str
    estimate: Estimate | None
    problem: str


@dataclass
class LiveRunFound(Message, bubble=False):
    """A run was training when the console opened."""

    run_id: str


@dataclass
class Launched(Message, bubble=False):
    """A run was started (or resumed) and can be watched."""

    run_id: str
    words: str


@dataclass
class ActionFailed(Message, bubble=False):
    """An action failed; `reason` is one line."""

    reason: str
