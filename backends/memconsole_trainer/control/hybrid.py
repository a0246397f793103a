"""Hybrid training: steps with gradients alternate with jumps of the weights along their recent path.

Each step takes one batch. In the phases warmup, full and correct it is an ordinary optimizer step.
In a predict phase it is a jump: the weights move along the predicted path if that lowers the loss
of the batch, which was not trained on. The length of the move is chosen with one half of the batch,
and the other half must confirm it significantly (`confirm`). The optimizer state may be off the device
meanwhile.

Nothing here depends on a clock unless `hybrid.reward` is seconds, so that a resumed run continues
bit for bit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import numpy as np

from memconsole import typed_json
from memconsole.plan.plan import Plan
from memconsole.plan.sections.hybrid import LEAST_MOVEMENTS
from memconsole.plan.training.recipe import peak_learning_rate
from memconsole.runs.record.log import events
from memconsole_trainer.control.bandit import Bandit
from memconsole_trainer.control.confirm import is_confirmed
from memconsole_trainer.control.halves import halves
from memconsole_trainer.control.monitor import Monitor, Reaction
from memconsole_trainer.control.phases import Confidence, Phases
from memconsole_trainer.control.predictor import predictor
from memconsole_trainer.control.tally import Tally
from memconsole_trainer.control.trend import Trend
from memconsole_trainer.engine import Batch, Engine, StepMetrics
from memconsole_trainer.host import heap
from memconsole_trainer.jumps import JumpingEngine, Path, phase_precision
from memconsole_trainer.schedule import learning_rate

SCALES = (0.5, 1.0, 2.0)
"""Multiples of the predicted path that are tried."""
FORWARD = 1 / 3
"""Work of a forward pass, as a share of a gradient step: the backward pass costs two (Kaplan et al.
2020, §2.1)."""
LEAST_KEPT = 2
"""The least number of movements for a standard error. A predict phase with fewer ends."""
TRIM_EVERY = 10
"""Number of gradient steps after which the heap of a CPU returns its free memory to the system. It would
grow otherwise, because snapshots between the arrays of steps leave gaps in it."""
RESIDUALS = 64
"""Jumps whose results are kept."""


class Residual(msgspec.Struct, frozen=True):
    """The predicted and the actual effect of a jump."""

    step: int
    horizon: int
    predicted: float
    """By how much the loss of the first half of the batch fell, in nats."""
    actual: float
    """By how much the loss of the other half fell."""
    accepted: bool


class _State(msgspec.Struct, kw_only=True):
    """The controller's state in a checkpoint, without that of the predictor and the bandit."""

    step: int = 0
    phases: Phases
    confidence: Confidence
    monitor: Monitor
    trend: Trend
    follows_jump: list[bool] = []
    """For each snapshot, whether a jump lies between it and the one before."""
    residuals: list[Residual] = []
    can_undo: bool = False
    tally: Tally = msgspec.field(default_factory=Tally)


@dataclass(frozen=True)
class _Tried:
    """A scale of the path, and the decreases of the loss with it."""

    scale: float
    predicted: float
    actual: float
    accepted: bool
    loss: float
    """Summed loss of the batch with the weights that stay."""
    forwards: float
    """Forward passes of whole batches that it took."""


class Hybrid:
    """Implements `Controller`."""

    def __init__(self, plan: Plan, total_steps: int) -> None:
        self._plan, self._choice, self._total = plan, plan.hybrid, total_steps
        phases = Phases.begin(self._choice)
        self._s = _State(phases=phases, confidence=Confidence(), monitor=Monitor(), trend=Trend())
        self._predictor = predictor(self._choice.predictor)
        self._bandit = Bandit(self._choice.lengths.horizon, len(self._context()))
        self._metrics: list[StepMetrics] = []
        self._events: list[events.Event] = []
        self._entered: tuple[str, int] | None = None
        """The phase whose transition was made, and its number."""

    @property
    def phase(self) -> str:
        """The phase of the next step. `restore` is the part of a predict phase in which the
        optimizer state is on its way back."""
        return "restore" if self._restoring else self._s.phases.phase

    @property
    def _restoring(self) -> bool:
        c, p = self._choice, self._s.phases
        away = c.memory != "none" and p.phase == "predict"
        return away and p.taken > 0 and p.left <= c.restore_ahead

    def prepare(self, engine: Engine) -> None:
        """Make the transition to `phase`, if it has just begun."""
        now = self.phase, self._s.phases.entered
        if self._entered == now:
            return
        self._entered, e = now, cast(JumpingEngine, engine)
        if self.phase == "restore":
            e.fetch("optimizer")
        elif self.phase == "predict":
            if self._choice.memory != "none":
                e.release("optimizer", self._choice.memory)
        else:
            e.restore("optimizer")
            e.compute_in(phase_precision(self._plan, self._s.phases.phase))
        if self.phase == "full" and not self._s.phases.taken:
            self._begin_full(e)

    def step(self, engine: Engine, batch: Batch) -> bool:
        """Take one step: of the optimizer, or a jump. Returns whether the batch was trained on."""
        e = cast(JumpingEngine, engine)
        trains = self._s.phases.phase != "predict"
        self._s.step += 1
        if trains:
            self._train(e, batch)
        else:
            self._jump(e, batch)
        return trains

    def take_metrics(self, engine: Engine) -> list[StepMetrics]:
        """The metrics of every step since the last call."""
        taken, self._metrics = self._metrics, []
        return taken

    def take_events(self) -> list[events.Event]:
        """The events to report since the last call."""
        taken, self._events = self._events, []
        return taken

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self._s)
        return {
            **found,
            "predictor": self._predictor.state(),
            "bandit": self._bandit.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        own = {name: state[name] for name in _State.__struct_fields__}
        self._s = typed_json.convert(own, _State)
        self._predictor.load_state(state["predictor"])
        self._bandit.load_state(state["bandit"])

    # Steps with gradients

    def _begin_full(self, engine: JumpingEngine) -> None:
        """Forget the snapshots of the phases before."""
        engine.jumps.forget(len(self._s.follows_jump))
        self._s.follows_jump = []
        self._snapshot(engine)

    def _train(self, engine: JumpingEngine, batch: Batch) -> None:
        s, choice = self._s, self._choice
        if s.phases.taken % TRIM_EVERY == 0:
            _trim(engine)
        engine.train_step(batch)
        (metrics,) = engine.take_metrics()
        judged = s.monitor.observe(metrics.loss, metrics.gradient_norm, choice)
        if judged.verdict is Reaction.ROLLBACK and s.can_undo:
            self._undo(engine, metrics, judged.reason)
            return
        self._metrics.append(metrics)
        if math.isfinite(metrics.loss):
            s.trend.add(metrics.loss)
        before = s.phases.phase
        if before != "warmup" and (s.phases.taken + 1) % choice.snapshot_stride == 0:
            self._snapshot(engine)
        if judged.verdict is Reaction.SHORTER:
            self._bandit.allowed = max(1, self._bandit.allowed - 1)
        if judged.verdict >= Reaction.FULL and before == "correct":
            self._tell(judged.reason, "a longer full phase follows")
            self._settle(engine)
            s.phases.force_full(choice, 2)
            return
        calm = judged.verdict < Reaction.FULL
        ready = calm and len(self._pairs()) >= LEAST_MOVEMENTS
        s.phases.after_step(choice, s.confidence.value, ready)
        if before == "full" and s.phases.taken == 0:
            s.confidence.recover()
            if self._pairs():
                self._predictor.learn(engine.jumps.products(self._pairs()))
        if before == "correct" and s.phases.phase != "correct":
            self._settle(engine)

    def _settle(self, engine: JumpingEngine) -> None:
        """Training did not diverge in the correct phase, so the weights before the latest jumps are forgotten."""
        engine.jumps.settle()
        self._s.tally.settle()
        self._s.can_undo = False

    def _undo(self, engine: JumpingEngine, metrics: StepMetrics, reason: str) -> None:
        """Undo the jumps since `_settle`: restore the weights from before them, and reset the optimizer state and
        the average of the weights, because the divergence may have spoiled them."""
        engine.jumps.undo()
        engine.restart_average()
        self._s.tally.undo()
        engine.release("optimizer", "reinitialize")
        engine.restore("optimizer")
        self._s.can_undo = False
        self._s.monitor = Monitor()
        last = self._s.residuals[-1]
        self._s.confidence.score(last.predicted, 0.0, False)
        self._bandit.allowed = 1
        self._s.phases.force_full(self._choice)
        self._metrics.append(replace(metrics, undone=True))
        self._tell(reason, "the latest jumps are undone and the optimizer starts anew")

    def _tell(self, reason: str, action: str) -> None:
        self._events.append(events.Warning(message=f"step {self._s.step:,}: {reason}; {action}"))

    # Jumps

    def _jump(self, engine: JumpingEngine, batch: Batch) -> None:
        s, began = self._s, time.monotonic()
        context = self._context()
        horizon = self._bandit.choose(context)
        tried = self._tried(engine, batch, horizon)
        work = FORWARD * tried.forwards
        if self._choice.reward == "seconds":
            work = time.monotonic() - began
        gained = tried.actual if tried.accepted else 0.0
        self._bandit.learn(horizon, context, s.trend.reward(gained, work), tried.accepted)
        s.confidence.score(tried.predicted, tried.actual, tried.accepted)
        found = Residual(s.step, horizon, tried.predicted, tried.actual, tried.accepted)
        s.residuals = [*s.residuals, found][-RESIDUALS:]
        engine.count_step(tried.loss / max(1.0, batch.weight))
        self._metrics += engine.take_metrics()
        s.tally.count(horizon * tried.scale, tried.accepted)
        self._events.append(
            events.Jump(
                step=s.step,
                horizon=horizon,
                scale=tried.scale,
                accepted=tried.accepted,
                predicted_decrease=tried.predicted,
                decrease=tried.actual,
                confidence=s.confidence.value,
                tried=s.tally.tried,
                kept=s.tally.kept,
                undone=s.tally.undone,
                steps_saved=s.tally.steps_saved,
            )
        )
        if tried.accepted:
            s.can_undo = True
            self._snapshot(engine, follows_jump=True)
        if not tried.accepted or len(self._pairs()) < LEAST_KEPT:
            s.phases.cut()
        s.phases.after_step(self._choice, s.confidence.value, ready=True)

    def _tried(self, engine: JumpingEngine, batch: Batch, horizon: int) -> _Tried:
        """Move the weights by the best scale of the path for one half of the batch, if the other half confirms it."""
        jumps, pairs = engine.jumps, self._pairs()
        movements = horizon / self._choice.snapshot_stride
        shares = self._predictor.shares(jumps.products(pairs), movements)
        first, second = halves(batch)
        jumps.begin(Path(pairs, shares))
        losses = {}
        for scale in (0.0, *SCALES):
            _trim(engine)
            losses[scale] = jumps.loss(first, scale)
        now = losses.pop(0.0)
        finite = {scale: loss for scale, loss in losses.items() if math.isfinite(loss)}
        scale = min(finite, key=finite.__getitem__, default=0.0)
        predicted = (now - finite[scale]) / max(1.0, first.weight) if scale else 0.0
        predicted = predicted if math.isfinite(predicted) else 0.0
        _trim(engine)
        before = jumps.losses(second, 0.0)
        after = jumps.losses(second, scale) if predicted > 0 else before
        weight = max(1.0, second.weight)
        fall, accepted = is_confirmed(before, after, predicted * weight)
        jumps.end(scale if accepted else 0.0)
        loss = finite[scale] + after.sum() if accepted else now + before.sum()
        halved = 2 + len(SCALES) + (predicted > 0)
        return _Tried(scale, predicted, fall / weight, accepted, float(loss), halved / 2)

    def _context(self) -> Any:
        """The bandit's context: the run's progress, its learning rate, the loss's trend, and the results
        of recent jumps."""
        s, total = self._s, max(1, self._total)
        rate = learning_rate(min(s.step, total - 1), self._plan, total)
        peak = peak_learning_rate(self._plan)
        last = s.residuals[-1].accepted if s.residuals else True
        return np.array(
            [1.0, s.step / total, rate / peak, s.trend.steepness, s.confidence.value, float(last)]
        )

    def _snapshot(self, engine: JumpingEngine, follows_jump: bool = False) -> None:
        s = self._s
        surplus = len(s.follows_jump) + 1 - self._choice.snapshots
        if surplus > 0:  # drop old ones first, so that there is never one snapshot more in memory
            engine.jumps.forget(surplus)
            s.follows_jump = s.follows_jump[surplus:]
        engine.jumps.snapshot()
        s.follows_jump = [*s.follows_jump, follows_jump]

    def _pairs(self) -> list[tuple[int, int]]:
        """The movements between snapshots with no jump between them."""
        jumped = self._s.follows_jump
        return [(i - 1, i) for i in range(1, len(jumped)) if not jumped[i]]


def _trim(engine: JumpingEngine) -> None:
    """Return the free memory of a CPU's heap to the system. What a jump frees is spread over the gaps that the arrays of
    steps left."""
    if engine.device.kind == "cpu":
        heap.trim()
