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
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from memconsole import typed_json
from memconsole.plan.plan import Plan
from memconsole.plan.sections.hybrid import LEAST_MOVEMENTS
from memconsole.plan.training.recipe import peak_learning_rate
from memconsole.runs.record.log import events
from memconsole_trainer.control.bandit import Bandit
from memconsole_trainer.control.jump_trial import JumpTrial, trim_heap, try_jump
from memconsole_trainer.control.monitor import Monitor, Reaction
from memconsole_trainer.control.phases import Confidence, Phases
from memconsole_trainer.control.predictor import predictor
from memconsole_trainer.control.tally import Tally
from memconsole_trainer.control.trend import Trend
from memconsole_trainer.engine import Batch, Engine, StepMetrics
from memconsole_trainer.jumps import JumpingEngine, Path, phase_precision
from memconsole_trainer.schedule import learning_rate

FORWARD_WORK = 1 / 3
"""Work of a forward pass, as a share of a gradient step: the backward pass costs two (Kaplan et al.
2020, §2.1)."""
LEAST_PAIRS = 2
"""The least number of movements for a standard error. A predict phase with fewer ends."""
TRIM_EVERY = 10
"""Number of gradient steps after which the heap of a CPU returns its free memory to the system. It would
grow otherwise, because snapshots between the arrays of steps leave gaps in it."""
RECENT_JUMPS = 64
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


class Hybrid:
    """Implements `Controller`."""

    def __init__(self, plan: Plan, total_steps: int) -> None:
        self._plan, self._choice, self._total = plan, plan.hybrid, total_steps
        phases = Phases.begin(self._choice)
        self._state = _State(
            phases=phases, confidence=Confidence(), monitor=Monitor(), trend=Trend()
        )
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
        return "restore" if self._restoring else self._state.phases.phase

    @property
    def _restoring(self) -> bool:
        c, p = self._choice, self._state.phases
        away = c.memory != "none" and p.phase == "predict"
        return away and p.taken > 0 and p.left <= c.restore_ahead

    def prepare(self, engine: Engine) -> None:
        """Make the transition to `phase`, if it has just begun."""
        now = self.phase, self._state.phases.entered
        if self._entered == now:
            return
        self._entered, jumping = now, cast(JumpingEngine, engine)
        if self.phase == "restore":
            jumping.fetch("optimizer")
        elif self.phase == "predict":
            if self._choice.memory != "none":
                jumping.release("optimizer", self._choice.memory)
        else:
            jumping.restore("optimizer")
            jumping.compute_in(phase_precision(self._plan, self._state.phases.phase))
        if self.phase == "full" and not self._state.phases.taken:
            self._begin_full(jumping)

    def step(self, engine: Engine, batch: Batch) -> bool:
        """Take one step: of the optimizer, or a jump. Returns whether the batch was trained on."""
        jumping = cast(JumpingEngine, engine)
        trains = self._state.phases.phase != "predict"
        self._state.step += 1
        if trains:
            self._train(jumping, batch)
        else:
            self._jump(jumping, batch)
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
        own: dict[str, Any] = msgspec.to_builtins(self._state)
        return {
            **own,
            "predictor": self._predictor.state(),
            "bandit": self._bandit.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        own = {name: state[name] for name in _State.__struct_fields__}
        self._state = typed_json.convert(own, _State)
        self._predictor.load_state(state["predictor"])
        self._bandit.load_state(state["bandit"])

    # Steps with gradients

    def _begin_full(self, engine: JumpingEngine) -> None:
        """Forget the snapshots of the phases before."""
        engine.jumps.forget(len(self._state.follows_jump))
        self._state.follows_jump = []
        self._snapshot(engine)

    def _train(self, engine: JumpingEngine, batch: Batch) -> None:
        state, choice = self._state, self._choice
        if state.phases.taken % TRIM_EVERY == 0:
            trim_heap(engine)
        engine.train_step(batch)
        (metrics,) = engine.take_metrics()
        judged = state.monitor.observe(metrics.loss, metrics.gradient_norm, choice)
        if judged.reaction is Reaction.ROLLBACK and state.can_undo:
            self._undo(engine, metrics, judged.reason)
            return
        self._metrics.append(metrics)
        if math.isfinite(metrics.loss):
            state.trend.add(metrics.loss)
        before = state.phases.phase
        if before != "warmup" and (state.phases.taken + 1) % choice.snapshot_stride == 0:
            self._snapshot(engine)
        if judged.reaction is Reaction.SHORTER:
            self._bandit.allowed = max(1, self._bandit.allowed - 1)
        if judged.reaction >= Reaction.FULL and before == "correct":
            self._warn(judged.reason, "a longer full phase follows")
            self._settle(engine)
            state.phases.force_full(choice, 2)
            return
        ready = judged.reaction < Reaction.FULL and len(self._pairs()) >= LEAST_MOVEMENTS
        state.phases.after_step(choice, state.confidence.value, ready)
        if before == "full" and state.phases.taken == 0:
            state.confidence.recover()
            if self._pairs():
                self._predictor.learn(engine.jumps.products(self._pairs()))
        if before == "correct" and state.phases.phase != "correct":
            self._settle(engine)

    def _settle(self, engine: JumpingEngine) -> None:
        """Training did not diverge in the correct phase, so the weights before the latest jumps are forgotten."""
        engine.jumps.settle()
        self._state.tally.settle()
        self._state.can_undo = False

    def _undo(self, engine: JumpingEngine, metrics: StepMetrics, reason: str) -> None:
        """Undo the jumps since `_settle`: restore the weights from before them, and reset the optimizer state and
        the average of the weights, because the divergence may have spoiled them."""
        engine.jumps.undo()
        engine.restart_average()
        self._state.tally.undo()
        engine.release("optimizer", "reinitialize")
        engine.restore("optimizer")
        self._state.can_undo = False
        self._state.monitor = Monitor()
        last = self._state.residuals[-1]
        self._state.confidence.score(last.predicted, 0.0, False)
        self._bandit.allowed = 1
        self._state.phases.force_full(self._choice)
        self._metrics.append(replace(metrics, undone=True))
        self._warn(reason, "the latest jumps are undone and the optimizer starts anew")

    def _warn(self, reason: str, action: str) -> None:
        self._events.append(
            events.Warning(message=f"step {self._state.step:,}: {reason}; {action}")
        )

    # Jumps

    def _jump(self, engine: JumpingEngine, batch: Batch) -> None:
        state, began = self._state, time.monotonic()
        context = self._context()
        horizon = self._bandit.choose(context)
        trial = self._try_jump(engine, batch, horizon)
        work = FORWARD_WORK * trial.forwards
        if self._choice.reward == "seconds":
            work = time.monotonic() - began
        gained = trial.actual if trial.accepted else 0.0
        self._bandit.learn(horizon, context, state.trend.reward(gained, work), trial.accepted)
        state.confidence.score(trial.predicted, trial.actual, trial.accepted)
        residual = Residual(state.step, horizon, trial.predicted, trial.actual, trial.accepted)
        state.residuals = [*state.residuals, residual][-RECENT_JUMPS:]
        engine.count_step(trial.loss / max(1.0, batch.weight))
        self._metrics += engine.take_metrics()
        state.tally.count(horizon * trial.scale, trial.accepted)
        self._events.append(
            events.Jump(
                step=state.step,
                horizon=horizon,
                scale=trial.scale,
                accepted=trial.accepted,
                predicted_decrease=trial.predicted,
                decrease=trial.actual,
                confidence=state.confidence.value,
                tried=state.tally.tried,
                kept=state.tally.kept,
                undone=state.tally.undone,
                steps_saved=state.tally.steps_saved,
            )
        )
        if trial.accepted:
            state.can_undo = True
            self._snapshot(engine, follows_jump=True)
        if not trial.accepted or len(self._pairs()) < LEAST_PAIRS:
            state.phases.cut()
        state.phases.after_step(self._choice, state.confidence.value, ready=True)

    def _try_jump(self, engine: JumpingEngine, batch: Batch, horizon: int) -> JumpTrial:
        """Try a jump that stands for `horizon` gradient steps."""
        pairs = self._pairs()
        movements = horizon / self._choice.snapshot_stride
        shares = self._predictor.shares(engine.jumps.products(pairs), movements)
        return try_jump(engine, batch, Path(pairs, shares))

    def _context(self) -> Any:
        """The bandit's context: the run's progress, its learning rate, the loss's trend, and the results
        of recent jumps."""
        state, total = self._state, max(1, self._total)
        rate = learning_rate(min(state.step, total - 1), self._plan, total)
        peak = peak_learning_rate(self._plan)
        last = state.residuals[-1].accepted if state.residuals else True
        return np.array(
            [
                1.0,
                state.step / total,
                rate / peak,
                state.trend.steepness,
                state.confidence.value,
                float(last),
            ]
        )

    def _snapshot(self, engine: JumpingEngine, follows_jump: bool = False) -> None:
        state = self._state
        surplus = len(state.follows_jump) + 1 - self._choice.snapshots
        if surplus > 0:  # drop old ones first, so that there is never one snapshot more in memory
            engine.jumps.forget(surplus)
            state.follows_jump = state.follows_jump[surplus:]
        engine.jumps.snapshot()
        state.follows_jump = [*state.follows_jump, follows_jump]

    def _pairs(self) -> list[tuple[int, int]]:
        """The movements between snapshots with no jump between them."""
        jumped = self._state.follows_jump
        return [(i - 1, i) for i in range(1, len(jumped)) if not jumped[i]]
