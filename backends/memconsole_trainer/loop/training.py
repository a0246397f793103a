"""The training loop of every backend: steps, evaluations, samples, checkpoints, and their
events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import msgspec

from memconsole.plan.errors import PlanError
from memconsole.plan.tasks import task_of
from memconsole.plan.tasks.judging import improves, scores_of
from memconsole.plan.tasks.task import Measure
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.log import events
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import Item
from memconsole_trainer.engine import Batch, StepMetrics
from memconsole_trainer.loop import summary
from memconsole_trainer.loop.announcing import StopRequestedError
from memconsole_trainer.loop.preflight import first_step, preflight
from memconsole_trainer.loop.profiling import Profiling
from memconsole_trainer.loop.saving import Saver
from memconsole_trainer.loop.setup import Job
from memconsole_trainer.loop.watch import Watch
from memconsole_trainer.process_group import OtherProcessError
from memconsole_trainer.techniques import loss_scale

_ADVICE = {
    "fp32": "Lower train.learning_rate, or lengthen train.warmup_steps",
    "bf16": "Lower train.learning_rate, or use optimize.precision = fp32",
    "bf16-sr": "Lower train.learning_rate, or use optimize.precision = bf16 or fp32",
    "fp16": "Lower train.learning_rate, or use optimize.precision = bf16 or fp32",
}
"""Advice when the loss is not finite, by precision."""


class NonFiniteLossError(ArithmeticError):
    """The loss is NaN or infinite, so further steps would only damage the weights."""

    cause = "nan"


class OtherProcessDataError(DataError, OtherProcessError):
    """Another process cannot read the data."""


class Trainer:
    """Trains one attempt's job until it is done or a stop is requested."""

    def __init__(self, attempt: Attempt, job: Job) -> None:
        self._attempt = attempt
        self._job = job
        self._engine = job.engine
        self._progress = job.progress
        self._plan = job.plan
        self._task = task_of(job.plan)
        self._watch = Watch(attempt, job.engine, job.progress)
        self.saver = Saver(attempt, job, self._watch)
        self._profiling = Profiling(attempt, job.engine, self._watch)
        self._unread: dict[int, tuple[int, float]] = {}
        """Units and weight of each step, by its number, whose loss is still on the device."""
        self._sampled_step: int | None = None
        """The step of the last sample."""
        self._compiled = False
        """Whether this attempt has taken a step. Its first one compiles."""
        self._step_is_rehearsal = False
        """Whether the next step is the one that the preflight would rehearse."""
        self._best_is_unsaved = False
        """Whether the last evaluation was the best and is not saved yet."""

    def train(self) -> events.Ended:
        """Train until the plan is done.

        Raises `StopRequestedError`, and `DataError` and `PlanError` of the data, after saving a checkpoint. Raises `PreflightError`,
        `NonFiniteLossError`, `FencedError` and OSError without saving one.
        """
        self._watch.report_memory()
        try:
            self._step_is_rehearsal = preflight(self._attempt, self._job, self._watch, self.saver)
            self._watch.clock.skip()  # a rehearsal is not training
            self._repeat_missed_evaluation()
            self._job.control.prepare(self._engine)
            while not self._progress.finished(self._plan):
                item = self._next()
                if item.batch is None:
                    self._end_epoch(item.state)
                else:
                    self._step(item.batch, item.units, item.state)
            return self._end()
        except StopRequestedError:
            self._profiling.stop()
            self._watch.enter("stopping")
            self._save()
            self._watch.clock.count()
            self._watch.ranks.last(self._progress.step)
            raise
        except (DataError, PlanError):
            self._save()  # the run goes on from here when its data can be read again
            raise

    def _next(self) -> Item:
        """The next item of the data. Raises `DataError` or `PlanError` in all processes if one cannot read it."""
        if self._engine.process_group.size == 1:
            return self._job.stream.next(self._watch.check_stop)
        error = item = None
        try:
            item = self._job.stream.next(self._watch.heartbeat)
        except (DataError, PlanError) as raised:
            error = raised
        failed = self._watch.agree(error is not None)
        self._watch.check_stop()
        if failed or item is None:
            raise error or OtherProcessDataError("another process could not read the data")
        return item

    def _repeat_missed_evaluation(self) -> None:
        """Evaluate now if a stop request cut the evaluation of this step short, so that a resumed run makes the same
        evaluations as one that never stopped."""
        p, every = self._progress, self._plan.train.evaluate_every
        if every and p.step and p.step % every == 0 and p.judged_step != p.step:
            self._evaluate()
            if self._best_is_unsaved:
                self._save()

    def _step(self, batch: Batch, units: int, state: dict[str, object]) -> None:
        """Train on `batch`, which counts `units`. Then report, evaluate and save as far as this step is due for it.
        `state` is that of the data after this batch."""
        p, t = self._progress, self._plan.train
        compiles = not self._compiled
        trained = self._take_step(batch)
        p.step += 1
        units = units if trained else 0
        p.tokens += units
        p.data = state
        self._unread[p.step] = (units, batch.weight)
        for event in self._job.control.take_events():
            self._attempt.emit(event)
        if compiles or p.step % t.log_every == 0:
            self._read_losses()
        self._watch.change_phase(self._job.control)
        self._watch.wait_while_paused()
        self._watch.check_stop()
        if t.evaluate_every and p.step % t.evaluate_every == 0:
            self._evaluate()
        # Saving after the first step reveals a full disk or a missing permission early.
        early = p.step == 1 and not p.finished(self._plan)
        regular = bool(t.checkpoint_every) and p.step % t.checkpoint_every == 0
        if early or self._should_save(regular) or self._should_save(self._checkpoint_is_old()):
            self._save()

    def _take_step(self, batch: Batch) -> bool:
        """Let the controller take the next step. Returns whether the batch was trained on."""
        number = self._progress.step + 1
        if not self._compiled:
            self._watch.enter("compile")
        self._watch.heartbeat()
        if self._compiled:
            self._profiling.before(number)
        rehearsal = first_step(self._job, self._watch) if self._step_is_rehearsal else nullcontext()
        with rehearsal:
            trained = self._job.control.step(self._engine, batch)
        self._step_is_rehearsal = False
        self._compiled = True
        self._profiling.after(number)
        return trained

    def _should_save(self, regular: bool) -> bool:
        """Whether to save now: after the best evaluation, or if it is a `regular` time and the plan does
        not ask for the best alone."""
        only_best = self._plan.train.save_only_best and self._job.data.validation_rows > 0
        return self._best_is_unsaved or (regular and not only_best)

    def _checkpoint_is_old(self) -> bool:
        """Whether the last checkpoint is older than `train.checkpoint_minutes` by the clock of any process."""
        minutes = self._plan.train.checkpoint_minutes
        return bool(
            minutes and self._engine.process_group.all_reduce_max(self.saver.due(minutes))[0]
        )

    def _read_losses(self) -> None:
        """Read the metrics of the steps since the last call from the device and report them. Raises
        `NonFiniteLossError` if a loss is NaN or infinite."""
        metrics = self._job.control.take_metrics(self._engine)
        if not metrics:
            return
        seconds, exchanged = self._watch.clock.lap()
        if self._watch.phase != "compile":
            self._watch.ranks.count(len(metrics), seconds, exchanged)
        p = self._progress
        counted = [(m, self._unread.pop(m.step)) for m in metrics]
        units = sum(count for _, (count, _) in counted)
        failed = [m.step for m in metrics if not (math.isfinite(m.loss) or m.undone)]
        finite = not failed
        if finite:
            for m, (_, weight) in counted:
                begins = (m.step - 1) % self._plan.train.log_every == 0
                p.add_loss(*((0.0, 0.0) if m.undone else (m.loss, weight)), begins)
        last = metrics[-1]
        norm = last.gradient_norm
        event = events.Step(
            step=last.step,
            epoch=p.epoch,
            loss=p.window_loss if finite else None,
            learning_rate=last.learning_rate,
            gradient_norm=norm if math.isfinite(norm) else None,
            tokens=p.tokens,
            tokens_per_second=units / seconds if seconds > 0 else 0.0,
            step_seconds=seconds / len(metrics),
            data_wait_seconds=self._job.stream.take_waited_seconds() / len(metrics),
        )
        self._attempt.emit(event)
        print(summary.step_line(event, p.total_steps, self._task.units, finite), flush=True)
        self._warn_of_skipped(metrics)
        if failed:
            raise NonFiniteLossError(
                f"the loss of step {failed[0]} is not finite; the last good checkpoint is "
                f"{self.saver.last.name if self.saver.last else 'none'}. "
                + _ADVICE[self._plan.optimize.precision]
            )
        self._watch.report_memory(rate_limited=True)

    def _warn_of_skipped(self, metrics: list[StepMetrics]) -> None:
        """Warn of steps that changed nothing because a gradient overflowed in fp16. Raises
        `NonFiniteLossError` when no loss scale would help."""
        p = self._progress
        skipped = [m for m in metrics if m.skipped]
        for m in metrics:
            p.skipped_in_a_row = p.skipped_in_a_row + 1 if m.skipped else 0
            if p.skipped_in_a_row >= loss_scale.MOST_SKIPPED:
                raise NonFiniteLossError(
                    f"the gradients of {p.skipped_in_a_row} steps in a row, up to step {m.step}, were not finite "
                    f"at any loss scale. {_ADVICE['fp16']}"
                )
        if not skipped:
            return
        p.skipped_steps += len(skipped)
        steps = ", ".join(f"{m.step:,}" for m in skipped)
        after = (skipped[-1].loss_scale or 0) * loss_scale.BACKOFF
        self._watch.warn(
            f"skipped step {steps}: gradients overflowed in fp16; the loss scale is now {after:,g} "
            f"({p.skipped_steps:,} of {p.step:,} steps skipped so far)"
        )

    def _end_epoch(self, state: dict[str, object]) -> None:
        """Evaluate, report the epoch and begin the next one, whose data begin at `state`."""
        p, t = self._progress, self._plan.train
        self._read_losses()
        if p.validation_step != p.step:
            self._evaluate()
        self._watch.clock.count()
        event = events.Epoch(
            epoch=p.epoch,
            train_loss=p.epoch_loss,
            validation_loss=p.validation_loss if p.validation_step == p.step else None,
            minutes=p.epoch_seconds / 60,
        )
        self._attempt.emit(event)
        epochs = None if t.max_steps else t.epochs
        print(summary.epoch_block(event, epochs, p.elapsed_seconds / 60), flush=True)
        steps = p.step - p.epoch_first_step
        if steps and steps != p.steps_per_epoch:
            self._correct_epoch_length(steps)
        p.end_epoch(state)
        if self._should_save(not t.checkpoint_every):
            self._save()

    def _correct_epoch_length(self, steps: int) -> None:
        """Report that an epoch was longer or shorter than estimated. The learning-rate schedule
        does not change."""
        p, t = self._progress, self._plan.train
        p.steps_per_epoch = steps
        total = t.max_steps or p.step + steps * (t.epochs - p.epoch)
        self._attempt.emit(
            events.Phase(phase=self._watch.phase, total_steps=total, steps_per_epoch=steps)
        )

    def _end(self) -> events.Ended:
        """Evaluate and save the last step, and report the end of training."""
        p = self._progress
        self._profiling.stop()
        self._read_losses()
        if p.validation_step != p.step or p.step == 0:
            self._evaluate()
        self._watch.clock.count()
        self._save()
        self._watch.ranks.last(p.step)
        ended = events.Ended(
            step=p.step,
            best_validation_loss=p.best_validation_loss,
            final_validation_loss=p.validation_loss,
            final_train_loss=p.window_loss,
            total_minutes=p.elapsed_seconds / 60,
            average_epoch_minutes=p.average_epoch_minutes,
            epochs=len(p.epoch_minutes),
            early=self._early_stop_reason(),
        )
        self._attempt.emit(ended, durable=True)
        device = self._engine.device
        best = self._job.checkpoints.best()
        step = None if best is None else step_of(best)
        measure = self._deciding_measure(p.best_scores)
        words = ""
        if measure is not self._task.loss:
            words = f", by {measure.label} {p.best_scores[measure.key]:.4f}"
        print(summary.final_block(ended, f"{device.id} ({device.name})", step, words), flush=True)
        return ended

    def _early_stop_reason(self) -> str:
        """Why training ends early; empty if it does not."""
        p, t = self._progress, self._plan.train
        if not p.stopped_early(self._plan):
            return ""
        by = f" by more than {t.early_stopping_minimum:g}" if t.early_stopping_minimum else ""
        scores = p.patience_scores
        measure = self._deciding_measure(scores)
        name = "the validation loss" if measure is self._task.loss else measure.label
        best = f"last improvement: {scores[measure.key]:.4f}" if scores else "none was finite"
        return (
            f"stopped early at step {p.step:,} of {p.total_steps:,}: {name} has not improved{by} "
            f"in {p.stale_evaluations:,} evaluations ({best})"
        )

    def _deciding_measure(self, scores: Mapping[str, float]) -> Measure:
        """The measure of `scores` that decides which evaluation is best."""
        return next((m for m in self._task.judges if m.key in scores), self._task.loss)

    def _evaluate(self) -> None:
        """Evaluate the held-out rows, if there are any, then make a sample."""
        job, p = self._job, self._progress
        if not job.data.validation_rows:
            if self._sampled_step != p.step:
                self._sample()
            return
        limit = self._plan.evaluation_batches(self._plan.train.evaluation_batches)
        with self._watch.outside_training("evaluate"):
            started = time.monotonic()
            shape = job.evaluation_shape
            total = self._engine.evaluate(self._checking_stop(job.data.validation(shape, limit)))
            train_loss = self._train_loss()
            judged = job.data.judged(total, shape, limit, self._engine, self._watch.check_stop)
        answered: dict[str, float] = {}
        if job.data.answered_records:
            with self._watch.outside_training("sample"):
                answered = job.data.answered(self._engine, self._watch.check_stop)
        finite = math.isfinite(total.mean)
        metrics = {**judged.metrics, **answered}
        event = events.Evaluation(
            step=p.step,
            loss=total.mean if finite else None,
            bits_per_byte=judged.bits_per_byte if finite else None,
            tokens=int(total.weight),
            seconds=time.monotonic() - started,
            metrics={key: value for key, value in metrics.items() if math.isfinite(value)},
            best=self._count_evaluation(total.mean, metrics),
            train_loss=train_loss,
        )
        self._attempt.emit(event, durable=True)
        print(summary.evaluation_line(event, self._task), flush=True)
        self._sample()

    def _count_evaluation(self, loss: float, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation in the progress. Returns whether it is the best one so far; one whose loss is not finite
        never is."""
        p, minimum = self._progress, self._plan.train.early_stopping_minimum
        if not math.isfinite(loss):
            p.judge(self._task, (), minimum)
            return False
        p.scores = scores_of(self._task, loss, metrics)
        if not p.best_scores and p.best_validation_loss is not None:
            # A checkpoint of an older version stores only the loss of the best evaluation.
            p.best_scores = {self._task.loss.key: p.best_validation_loss}
        self._best_is_unsaved = improves(self._task, p.best_scores, p.scores)
        p.validation_loss, p.validation_step = loss, p.step
        known = p.best_validation_loss
        p.best_validation_loss = loss if known is None else min(loss, known)
        p.judge(self._task, p.scores, minimum)
        return self._best_is_unsaved

    def _train_loss(self) -> float | None:
        """The loss of some training rows, measured as that of held-out rows; None if there are none,
        or it is not finite."""
        rows = self._job.train_rows
        if rows is None:
            return None
        loss = self._engine.evaluate(self._checking_stop(rows.batches())).mean
        return loss if math.isfinite(loss) else None

    def _sample(self) -> None:
        data, step = self._job.data, self._progress.step
        self._sampled_step = step
        if not data.room_for_sample():
            return
        with self._watch.outside_training("sample"):
            started = time.monotonic()
            made = data.sample(self._engine, step)
            seconds = time.monotonic() - started
        if made is not None:
            self._attempt.emit(msgspec.structs.replace(made, seconds=seconds))

    def _save(self) -> None:
        """Commit a checkpoint after checking that every loss up to it is finite."""
        self._read_losses()
        self.saver.save()
        self._best_is_unsaved = False

    def _checking_stop(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation. Raises `StopRequestedError` before one of them."""
        for batch in batches:
            self._watch.agree()
            self._watch.check_stop()
            yield batch
