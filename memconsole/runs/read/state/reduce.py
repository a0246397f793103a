"""Folds a run's events into its state. It uses only the records: no files, no clocks."""

from __future__ import annotations

import math

import msgspec

from memconsole.runs.read.curves.history import History
from memconsole.runs.read.curves.series import GaugeHistory, StepSeries
from memconsole.runs.read.state.facts import FactsSoFar
from memconsole.runs.read.state.ranks import MOST_RANKS, highest, merged, readings_of
from memconsole.runs.read.state.stages import StageMark, first_step_detail, marked
from memconsole.runs.record.log import events
from memconsole.runs.record.states import WAIT_DISK
from memconsole.sanitize import clean, clean_line

STATE_VERSION = 3
MAX_WARNINGS = 20
MAX_EVALUATIONS = 128
MAX_EPOCHS = 256
TEXT_CHARACTERS = 16_384
"""The most characters kept of the newest sample or of a traceback."""
MAX_SAMPLES = 32
SAMPLE_CHARACTERS = 2_000
"""Earlier samples are kept too, each cut to this many characters."""
RATE_RECORDS = 64
"""The speed is averaged over this many step records."""
PROFILING = "profile"
"""The phase in which steps are profiled. Memory of the profiler does not belong to the plan."""
UNTRAINED_PHASES = frozenset(
    {
        "starting",
        "import",
        "data",
        "tokenizer",
        "build",
        "reference",
        "preflight",
        "paused",
        WAIT_DISK,
    }
)
"""The phases that a trainer does not count as training time."""
WARMING_PHASES = frozenset({"import", "build", "reference", "preflight", "compile"})
"""The phases after which the first step record includes warm-up, so that it does not count towards the speed."""


class EpochMark(msgspec.Struct, array_like=True):
    """A finished epoch and the step at which it was reported."""

    step: int
    event: events.Epoch


class RunState(FactsSoFar, kw_only=True):
    """Everything kept of the events read so far; stored in `state.json`."""

    version: int = STATE_VERSION
    attempt: int = 0
    train: History = msgspec.field(default_factory=History)
    validation: History = msgspec.field(default_factory=History)
    epochs: list[EpochMark] = msgspec.field(default_factory=list)
    evaluations: list[events.Evaluation] = msgspec.field(default_factory=list)
    gauges: GaugeHistory = msgspec.field(default_factory=GaugeHistory)
    series: StepSeries = msgspec.field(default_factory=StepSeries)
    samples: list[events.Sample] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)
    odd: int = 0
    """Records with impossible numbers, such as negative steps."""
    first_boot: float | None = None
    """`time_boot` of the attempt's first record, in seconds; `last_boot` is that of its newest."""
    last_boot: float | None = None
    earlier_seconds: float = 0.0
    """Total duration of the attempts before this one."""
    warming: bool = True
    """The next step record includes compilation or warm-up."""
    stages: list[StageMark] = msgspec.field(default_factory=list)
    """What this attempt did before its first step."""
    trained: bool = False
    """Whether this attempt has recorded a step."""
    phase_since: float | None = None
    """When the phase began, in seconds of the machine's clock."""
    step_times: list[tuple[int, float]] = msgspec.field(default_factory=list)
    """(steps, seconds per step) of the newest records, without warm-up."""
    data_waits: list[float] = msgspec.field(default_factory=list)
    """Seconds of a step spent waiting for data, in the newest of these records."""
    side_seconds: float = 0.0
    """Time spent on evaluating, sampling and saving in this attempt since `side_from_step`."""
    side_from_step: int = 0
    evaluation_limit: int = MAX_EVALUATIONS
    epoch_limit: int = MAX_EPOCHS
    """How many epochs and evaluations are kept: the newest ones, and the best evaluation."""

    @property
    def attempt_seconds(self) -> float:
        if self.first_boot is None or self.last_boot is None:
            return 0.0
        return max(0.0, self.last_boot - self.first_boot)

    @property
    def elapsed_seconds(self) -> float:
        return self.earlier_seconds + self.attempt_seconds


def begin_attempt(state: RunState, attempt: int) -> RunState:
    """Continue with the next attempt of the same run: keep its curves, clear how it ended."""
    # An attempt has not trained before its first step.
    state.trained_until = state.training_seconds(state.elapsed_seconds)
    state.earlier_seconds += state.attempt_seconds
    state.untrained_seconds = state.earlier_seconds - state.trained_until
    state.attempt = attempt
    state.first_boot = state.last_boot = None
    state.phase, state.phase_detail = "starting", ""
    state.error = state.stopped = state.ended = None
    state.tokens_per_second = state.step_seconds = None
    state.warming, state.step_times, state.data_waits = True, [], []
    state.stages, state.trained, state.phase_since = [], False, None
    state.side_seconds, state.side_from_step = 0.0, state.step
    return state


def forget_memory(state: RunState) -> RunState:
    """Continue with other sizes: clear the peaks, which belong to those before."""
    state.memory, state.peaks_by_phase = None, {}
    state.peak_bytes = state.peak_device_bytes = state.peak_reserved_bytes = None
    state.peak_host_bytes = None
    state.peak_host_anonymous_bytes = state.peak_host_shared_bytes = None
    state.gauges = GaugeHistory()
    state.ranks = ()
    return state


def reduce(state: RunState, record: events.Record) -> RunState:
    """Add one record to the state.

    `state` is changed in place and returned. Copying its curves for each record would make reading
    a long run quadratic. The same records give the same state, even if reading was interrupted.
    """
    if 0 < record.time_boot < 1e12:
        if state.first_boot is None:
            state.first_boot = record.time_boot
        state.last_boot = max(state.last_boot or 0.0, record.time_boot)
    match record:
        case events.Step():
            _step(state, record)
        case events.Memory():
            _memory(state, record)
        case events.Ranks():
            _ranks(state, record)
        case events.Phase():
            _phase(state, record)
        case events.Jump():
            _jump(state, record)
        case events.Evaluation():
            _evaluation(state, record)
        case events.Epoch():
            _epoch(state, record)
        case events.Checkpoint():
            state.checkpoint = msgspec.structs.replace(record, path=clean_line(record.path))
            state.side_seconds += _positive(record.seconds)
        case events.Sample():
            _sample(state, record)
        case events.Warning():
            state.warnings = [*state.warnings, clean_line(record.message, 500)][-MAX_WARNINGS:]
        case events.Error():
            _add_peak(state, state.phase, record.held_bytes, record.peak_bytes)
            if _plausible(record.peak_host_bytes or 0):
                state.peak_host_bytes = highest(state.peak_host_bytes, record.peak_host_bytes)
            state.error = msgspec.structs.replace(
                record,
                cause=clean_line(record.cause, 80),
                message=clean_line(record.message),
                traceback=clean(record.traceback[-TEXT_CHARACTERS:]),
            )
        case events.Stopped():
            state.stopped = msgspec.structs.replace(record, reason=clean_line(record.reason))
            if _plausible(record.step):
                state.step = record.step
        case events.Ended():
            state.ended = msgspec.structs.replace(record, early=clean_line(record.early))
            if _plausible(record.step):
                state.step = record.step
        case events.Started():
            _started(state, record)
    return state


def _started(state: RunState, record: events.Started) -> None:
    state.started = msgspec.structs.replace(
        record,
        backend=clean_line(record.backend, 80),
        versions={clean_line(k, 80): clean_line(v, 80) for k, v in record.versions.items()},
        device_id=clean_line(record.device_id, 80),
        device_name=clean_line(record.device_name, 200),
        device_kind=clean_line(record.device_kind, 80),
        memory_label=clean_line(record.memory_label, 80),
        platform_lines=tuple(clean_line(line) for line in record.platform_lines),
    )
    if record.ranks != state.rank_count:  # readings of other ranks than there are now
        state.rank_count, state.ranks = min(max(1, record.ranks), MOST_RANKS), ()
    _go_back_to(state, record.resumed_step if _plausible(record.resumed_step) else 0)


def _go_back_to(state: RunState, resumed: int) -> None:
    """Forget what came after the step `resumed`: the attempt continues from a checkpoint of that step."""
    if resumed < state.step or state.train.last_step > resumed:
        state.train.truncate(resumed)
        state.validation.truncate(resumed)
        state.series.truncate(resumed)
        state.samples = [s for s in state.samples if s.step <= resumed]
        state.evaluations = [e for e in state.evaluations if e.step <= resumed]
        state.epochs = [mark for mark in state.epochs if _epoch_step(state, mark) <= resumed]
        state.loss = state.train.values[-1] if state.train.values else None
        state.epoch = max((mark.event.epoch for mark in state.epochs), default=0)
    if state.checkpoint is not None and state.checkpoint.step > resumed:
        state.checkpoint = None
    if state.jump is not None and state.jump.step > resumed:
        state.jump = None
    state.gauges.truncate(resumed)
    last = max(state.step, state.repeats_to)
    state.repeats_to = last if last > resumed else 0
    state.step = state.side_from_step = resumed


def _epoch_step(state: RunState, mark: EpochMark) -> int:
    if state.steps_per_epoch:
        return mark.event.epoch * state.steps_per_epoch
    return mark.step


def _phase(state: RunState, record: events.Phase) -> None:
    since = state.first_boot if state.phase_since is None else state.phase_since
    if state.phase in UNTRAINED_PHASES and since is not None and state.last_boot is not None:
        state.untrained_seconds += state.last_boot - since
    before = state.training_seconds(state.elapsed_seconds)
    state.phase = clean_line(record.phase, 40)
    if state.trained:
        state.trained_until = before if state.phase in UNTRAINED_PHASES else None
    state.phase_detail = clean_line(record.detail)
    if state.phase == "compile":
        state.phase_detail = first_step_detail(state.stages)
    state.phase_since = state.last_boot
    if not state.trained and state.last_boot is not None:
        state.stages = marked(state.stages, state.phase, state.phase_detail, state.last_boot)
    if state.phase in WARMING_PHASES:
        state.warming = True
    if record.parameters is not None and _plausible(record.parameters):
        state.parameters = record.parameters
    if record.weights:
        state.weights = clean_line(record.weights)
    trainable = record.trainable_parameters
    if trainable is not None and _plausible(trainable):
        state.trainable_parameters = trainable
    if record.total_steps is not None and _plausible(record.total_steps):
        state.total_steps = record.total_steps
    if record.steps_per_epoch and _plausible(record.steps_per_epoch):
        state.steps_per_epoch = record.steps_per_epoch


def _step(state: RunState, record: events.Step) -> None:
    step = record.step
    if not _plausible(step, record.epoch, record.tokens):
        state.odd += 1
        return
    taken = step - state.step if step > state.step else 1
    state.step = step
    if not state.trained:
        state.trained, state.trained_until = True, None
        state.stages = marked(state.stages, "train", "", state.last_boot or 0.0)
    state.epoch = record.epoch
    state.tokens = record.tokens
    state.tokens_per_second = _finite(record.tokens_per_second)
    state.step_seconds = _finite(record.step_seconds)
    state.learning_rate = _finite(record.learning_rate)
    state.gradient_norm = _finite(record.gradient_norm)
    state.loss = _finite(record.loss)
    if state.loss is not None:
        state.train.add(step, state.loss)
    state.series.take(record)
    seconds = state.step_seconds
    if state.warming:
        # Saving and evaluating during warm-up does not count towards the speed either.
        state.warming = False
        state.side_seconds, state.side_from_step = 0.0, step
    elif seconds is not None and 0 < seconds < 1e9:
        if state.tokens_per_second is not None:
            state.trained_units += state.tokens_per_second * taken * seconds
            state.trained_seconds += taken * seconds
        state.step_times.append((taken, seconds))
        state.data_waits.append(_positive(record.data_wait_seconds))
        for newest in (state.step_times, state.data_waits):
            del newest[:-RATE_RECORDS]


def _sample(state: RunState, record: events.Sample) -> None:
    state.sample = msgspec.structs.replace(
        record,
        prompt=clean(record.prompt[:TEXT_CHARACTERS]),
        text=clean(record.text[:TEXT_CHARACTERS]),
    )
    short = msgspec.structs.replace(
        state.sample,
        prompt=state.sample.prompt[-SAMPLE_CHARACTERS:],
        text=state.sample.text[:SAMPLE_CHARACTERS],
    )
    earlier = [s for s in state.samples if s.step < record.step]
    state.samples = [*earlier, short][-MAX_SAMPLES:]
    state.side_seconds += _positive(record.seconds)


def _jump(state: RunState, record: events.Jump) -> None:
    counts = (record.step, record.horizon, record.tried, record.kept, record.undone)
    if not _plausible(*counts) or not math.isfinite(record.confidence + record.steps_saved):
        state.odd += 1
        return
    state.jump = record


def _epoch(state: RunState, record: events.Epoch) -> None:
    if not _plausible(record.epoch):
        state.odd += 1
        return
    epochs = state.epochs
    while epochs and epochs[-1].event.epoch >= record.epoch:
        epochs.pop()
    epochs.append(EpochMark(state.step, record))
    del epochs[: -state.epoch_limit]
    state.epoch = record.epoch


def _evaluation(state: RunState, record: events.Evaluation) -> None:
    if not _plausible(record.step, record.tokens):
        state.odd += 1
        return
    metrics = {clean_line(k, 80): v for k, v in record.metrics.items() if math.isfinite(v)}
    record = msgspec.structs.replace(record, metrics=metrics)
    evaluations = state.evaluations
    while evaluations and evaluations[-1].step >= record.step:
        evaluations.pop()
    if len(evaluations) >= state.evaluation_limit:
        # Drop the oldest one, but neither that of the lowest loss nor the best one by the task's measure.
        lowest = min((e for e in evaluations if e.loss is not None), key=_loss, default=None)
        best = next((e for e in reversed(evaluations) if e.best), None)
        evaluations.remove(next(e for e in evaluations if e is not lowest and e is not best))
    evaluations.append(record)
    state.side_seconds += _positive(record.seconds)
    loss = _finite(record.loss)
    if loss is not None:
        state.validation.add(record.step, loss)


def _memory(state: RunState, record: events.Memory) -> None:
    numbers = (n for n in msgspec.structs.astuple(record) if isinstance(n, int))
    if not _plausible(*numbers):
        state.odd += 1
        return
    phase = clean_line(record.phase, 40)
    # A trainer resets its peak at each phase, so a peak belongs to the phase that reports it.
    _add_peak(state, phase, record.allocated_bytes, record.peak_bytes)
    if phase == PROFILING:
        return
    state.peak_device_bytes = highest(state.peak_device_bytes, record.device_bytes)
    state.peak_host_bytes = highest(
        state.peak_host_bytes, record.host_bytes, record.peak_host_bytes
    )
    state.peak_reserved_bytes = highest(
        state.peak_reserved_bytes, record.reserved_bytes, record.peak_reserved_bytes
    )
    state.peak_host_anonymous_bytes = highest(
        state.peak_host_anonymous_bytes, record.peak_host_anonymous_bytes
    )
    state.peak_host_shared_bytes = highest(
        state.peak_host_shared_bytes, record.peak_host_shared_bytes
    )
    state.memory = msgspec.structs.replace(record, phase=phase)
    state.gauges.take(record)


def _ranks(state: RunState, record: events.Ranks) -> None:
    """Add the readings of ranks. The run's peaks are those of its fullest rank."""
    readings = readings_of(record, state.rank_count)
    if readings is None:
        state.odd += 1
        return
    state.ranks = merged(state.ranks, readings)
    for reading in readings:
        for phase, peak in reading.peaks_by_phase.items():
            _add_peak(state, phase, peak)
        state.peak_device_bytes = highest(state.peak_device_bytes, reading.peak_device_bytes)
        state.peak_reserved_bytes = highest(state.peak_reserved_bytes, reading.peak_reserved_bytes)
        state.peak_host_bytes = highest(state.peak_host_bytes, reading.peak_host_bytes)


def _add_peak(state: RunState, phase: str, *values: int | None) -> None:
    """Raise the peak of a phase, and that of the run, to the highest of `values`: live tensor bytes."""
    peak = highest(*values)
    if peak is not None and _plausible(peak):
        state.peaks_by_phase[phase] = max(state.peaks_by_phase.get(phase, 0), peak)
        if phase != PROFILING:
            state.peak_bytes = highest(state.peak_bytes, peak)


def _plausible(*counts: int) -> bool:
    """Whether these can be counts of a real run; a damaged or forged record can have others."""
    return all(0 <= count < 1 << 63 for count in counts)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _positive(value: float) -> float:
    return value if 0 < value < 1e9 else 0.0


def _loss(evaluation: events.Evaluation) -> float:
    return math.inf if evaluation.loss is None else evaluation.loss
