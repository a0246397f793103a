"""The records of a run's event log. Units are in the field names."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """A message from the trainer. The writer adds `time_wall` and `time_boot`, in seconds."""

    time_wall: float = 0.0
    time_boot: float = 0.0
    sequence: int = 0


class Started(Event, frozen=True, kw_only=True):
    """The trainer has read its plan and knows its device."""

    attempt: int
    backend: str
    versions: dict[str, str]
    device_id: str
    device_name: str
    device_kind: str
    memory_label: str
    platform_lines: tuple[str, ...]
    """The detected hardware and the active optimizations, as text."""
    resumed_step: int = 0
    ranks: int = 1
    """How many processes, or devices of its processes, report their memory in `Ranks`; 1: none does."""


class Phase(Event, frozen=True, kw_only=True):
    """The trainer has entered a phase.

    The phases are: import data tokenizer build preflight compile train evaluate checkpoint sample
    profile paused wait_disk stopping; in hybrid training warmup full predict restore correct instead of train.
    """

    phase: str
    detail: str = ""
    parameters: int | None = None
    trainable_parameters: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    weights: str = ""
    """Where the model's first weights came from, once they are read."""


class Step(Event, frozen=True, kw_only=True):
    """Optimizer steps since the last such record. `loss` is their mean; for language, nats per token."""

    step: int
    epoch: int
    loss: float | None
    """None if not finite."""
    learning_rate: float
    gradient_norm: float | None
    tokens: int
    """Tokens trained on since the run began, in all attempts."""
    tokens_per_second: float
    step_seconds: float
    data_wait_seconds: float = 0.0
    """Seconds of a step spent waiting for its batch. A device that computes on its own may have been
    busy meanwhile with steps still queued."""


class Jump(Event, frozen=True, kw_only=True):
    """In hybrid training: the weights were moved along their predicted path, or stayed."""

    step: int
    horizon: int
    """How many gradient steps the path stands for."""
    scale: float
    """The multiple of the path that lowered the loss most."""
    accepted: bool
    """Whether the weights moved. If not, they are as before, bit for bit."""
    predicted_decrease: float
    """By how much the loss of one half of the batch fell, in nats."""
    decrease: float
    """By how much the loss of the other half fell."""
    confidence: float
    """After this jump: how far recent jumps lowered the loss as predicted, from 0 to 1."""
    tried: int = 0
    """Jumps since the run began, in all attempts; `kept` and `undone` count some of them."""
    kept: int = 0
    """Jumps that were accepted and not undone."""
    undone: int = 0
    """Accepted jumps that were taken back, because training diverged after them."""
    steps_saved: float = 0.0
    """Gradient steps that the kept jumps stand for, less one step for each jump that was tried."""


class Epoch(Event, frozen=True, kw_only=True):
    """One pass over the data has ended. `epoch` counts from 1."""

    epoch: int
    train_loss: float | None
    validation_loss: float | None
    minutes: float


class Evaluation(Event, frozen=True, kw_only=True):
    """Mean loss over the held-out rows: for language, nats per token."""

    step: int
    loss: float | None
    bits_per_byte: float | None
    """The loss in bits per UTF-8 byte of the target text, which compares across tokenizers."""
    tokens: int
    seconds: float
    """Time of the whole evaluation: of held-out and training rows, measures and answers."""
    metrics: dict[str, float] = {}
    """unigram_loss: nats per token of the training tokens' unigram model on the same tokens, …"""
    best: bool = False
    train_loss: float | None = None
    """Mean loss over some training rows, the same ones each time, measured in the same way; None if
    not measured or not finite."""


class Memory(Event, frozen=True, kw_only=True):
    """Memory use as the trainer measures it. None: this device does not report it."""

    phase: str
    step: int
    allocated_bytes: int | None
    """Live tensor bytes now."""
    peak_bytes: int | None
    """Highest allocated bytes within this phase. The run's peak is the maximum over its records."""
    reserved_bytes: int | None
    device_bytes: int | None
    """What the driver charges this process, its context included."""
    device_total_bytes: int | None
    host_bytes: int | None
    """Resident memory of the trainer's process tree."""
    peak_host_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    """Highest reserved bytes within this phase."""
    peak_host_anonymous_bytes: int | None = None
    """Peak since the start of the trainer's process tree: heap and tensors, not files or shared
    memory.
    """
    peak_host_shared_bytes: int | None = None
    """Peak since it began, of the process that maps the most shared memory."""


class RankReading(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The measurements of one rank: a process of several, or one device of a process that has several.

    None: not reported. Peaks are the highest of this attempt; a reading is a list in the log, because
    there may be many.
    """

    rank: int
    step: int
    """The step after which this was measured."""
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    host_bytes: int | None = None
    """Resident memory of the process and its children."""
    peak_host_bytes: int | None = None
    peaks_by_phase: dict[str, int] = {}
    """Highest allocated bytes in each phase."""
    step_seconds: float | None = None
    """Seconds of a recent step."""
    exchange_seconds: float | None = None
    """Seconds of such a step in exchanges with the other ranks, the wait for them included. The slowest
    rank waits least."""


class Ranks(Event, frozen=True, kw_only=True):
    """The newest reading of each rank that has sent one. `Memory` is the reading of the first process."""

    step: int
    ranks: tuple[RankReading, ...]


class Checkpoint(Event, frozen=True, kw_only=True):
    """A checkpoint was committed."""

    step: int
    path: str
    size_bytes: int
    seconds: float


class Sample(Event, frozen=True, kw_only=True):
    """A prompt and the model's continuation."""

    step: int
    prompt: str
    text: str
    seconds: float = 0.0


class Profile(Event, frozen=True, kw_only=True):
    """Steps were profiled on request; `step` is the last of them."""

    step: int
    steps: int
    folder: str
    files: tuple[str, ...]
    request: str
    """The id of the request."""


class Warning(Event, frozen=True, kw_only=True):
    message: str


class Error(Event, frozen=True, kw_only=True):
    """The attempt failed.

    `cause` is a class of failure: out_of_memory bad_data bad_plan nan disk …
    """

    cause: str
    message: str
    traceback: str = ""
    held_bytes: int | None = None
    """Live tensor bytes when memory ran out; `peak_bytes` is the highest of that phase."""
    peak_bytes: int | None = None
    peak_host_bytes: int | None = None
    """Highest resident memory of the trainer's process, which the last record of memory may have missed."""
    requested_bytes: int | None = None
    """The size of the allocation that failed."""


class Stopped(Event, frozen=True, kw_only=True):
    """Stopped on request; resumable from `step`."""

    step: int
    reason: str
    total_minutes: float | None = None
    """Training time of all attempts, as in `Ended`; None if the attempt did not get to know it."""


class Ended(Event, frozen=True, kw_only=True):
    """Training has ended as planned, or early."""

    step: int
    best_validation_loss: float | None
    final_validation_loss: float | None
    final_train_loss: float | None
    total_minutes: float
    average_epoch_minutes: float | None
    epochs: int
    early: str = ""
    """Why training ended before the plan's last step; empty if it did not."""


Record = (
    Started
    | Phase
    | Step
    | Jump
    | Epoch
    | Evaluation
    | Memory
    | Ranks
    | Checkpoint
    | Sample
    | Profile
    | Warning
    | Error
    | Stopped
    | Ended
)
"""Every kind of event, for decoding."""
