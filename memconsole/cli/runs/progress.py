"""The progress lines and the final summary of a run, as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.plan.sections.hybrid import PHASES
from memconsole.plan.tasks import task_of
from memconsole.runs.read.shown.jumps import counts_word, jump_words
from memconsole.runs.read.shown.missing import marked, missing_words
from memconsole.runs.read.shown.ranks import each_per_second, slow_words
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.words import NOTHING_LEARNED, ended_words, resume_command
from memconsole.runs.read.state.facts import RunFacts
from memconsole.runs.read.state.figures import best_evaluation, figures
from memconsole.runs.read.state.ranks import highest
from memconsole.runs.read.state.stages import stage_words
from memconsole.runs.record.states import LIVE, WAIT_DISK
from memconsole.units import (
    format_bytes,
    format_count,
    format_duration,
    format_measure,
    format_rate,
)

WIDTH = 80
SECONDS_BETWEEN_STEPS = 5.0
_STEADY = ("queued", "train", *PHASES, "evaluate", "checkpoint", "sample", WAIT_DISK)
"""Phases that alternate all the time; a change between them gets no line."""


class ProgressLines:
    """Turns successive snapshots into new lines."""

    def __init__(self) -> None:
        self._phase = ""
        self._built = False
        self._attempt = 0
        self._step = -1
        self._step_at = float("-inf")
        self._epoch = 0
        self._evaluated = -1
        self._sample = -1
        self._checkpoint = -1
        self._unsaved = ""
        self._job = self._waits = ""
        self._warned: tuple[str, ...] = ()
        self._missing = 0

    def new(self, run: RunSnapshot) -> Iterator[str]:
        """Lines for what happened since the last call."""
        facts = run.facts
        if run.job and run.job != self._job:
            self._job = run.job
            yield run.job
        if run.waits and run.waits != self._waits:
            self._waits = run.waits
            yield run.waits
        if facts.started and facts.started.attempt != self._attempt:
            self._attempt = facts.started.attempt
            yield from facts.started.platform_lines
            if facts.started.resumed_step:
                yield f"resumed from step {facts.started.resumed_step:,}{_repeats(facts)}"
        if facts.parameters and not self._built:
            self._built = True
            trainable = facts.trainable_parameters or facts.parameters
            yield f"{format_count(facts.parameters)} parameters, {format_count(trainable)} trainable"
            if facts.weights:
                yield facts.weights
        begun = facts.started is not None or run.state in LIVE
        if facts.phase != self._phase and begun:
            self._phase = facts.phase
            if facts.phase not in _STEADY:
                yield stage_words(facts.phase, facts.phase_detail, run.plan)
        if run.unsaved and not self._unsaved:
            yield f"the run {run.unsaved}"
        self._unsaved = run.unsaved
        for warning in run.warnings:
            if warning not in self._warned:
                yield f"warning: {warning}"
        self._warned = run.warnings
        if run.missing_records > self._missing:
            self._missing = run.missing_records
            yield f"warning: {missing_words(run.missing_records)}"
        due = run.elapsed_seconds - self._step_at >= SECONDS_BETWEEN_STEPS
        if due and facts.step > self._step and facts.loss is not None:
            self._step, self._step_at = facts.step, run.elapsed_seconds
            yield step_line(run)
        for evaluation in run.evaluations:
            if evaluation.step <= self._evaluated:
                continue
            self._evaluated = evaluation.step
            more = [f.words for f in figures(task_of(run.plan), evaluation)]
            if evaluation.train_loss is not None:
                more.insert(0, f"{format_measure(evaluation.train_loss)} on training rows")
            words = [f"step {evaluation.step:,}", f"validation loss {_loss(evaluation.loss)}"]
            yield "  ".join([*words, *more])
        for epoch in run.epochs:
            if epoch.epoch <= self._epoch:
                continue
            self._epoch = epoch.epoch
            words = [f"epoch {epoch.epoch}", f"train loss {_train_loss(epoch.train_loss)}"]
            if epoch.validation_loss is not None:
                words.append(f"validation loss {format_measure(epoch.validation_loss)}")
            yield "  ".join([*words, f"{epoch.minutes:.2f} min"])
        if facts.sample and facts.sample.step > self._sample:
            self._sample = facts.sample.step
            text = " ".join((facts.sample.prompt + facts.sample.text).split())
            yield f"sample  {text[: WIDTH * 2]}"
        if facts.checkpoint and facts.checkpoint.step > self._checkpoint:
            self._checkpoint = facts.checkpoint.step
            yield (
                f"checkpoint at step {facts.checkpoint.step:,}  "
                f"{format_bytes(facts.checkpoint.size_bytes)}"
            )


def _repeats(facts: RunFacts) -> str:
    """How many steps since the checkpoint were lost; empty if none were."""
    resumed = facts.started.resumed_step if facts.started else 0
    lost = facts.repeats_to - resumed
    return f", repeats {lost:,} steps that were not saved" if lost > 0 else ""


def step_line(run: RunSnapshot) -> str:
    """One line with the current step, loss, speed and memory."""
    facts = run.facts
    total = f"/{facts.total_steps:,}" if facts.total_steps else ""
    parts = [f"step {facts.step:,}{total}", f"epoch {facts.epoch}", f"loss {_loss(facts.loss)}"]
    if facts.tokens_per_second:
        each = each_per_second(run.plan, facts.tokens_per_second)
        share = "" if each is None else f" ({each:,.0f} each device)"
        parts.append(f"{format_rate(facts.tokens_per_second)} {task_of(run.plan).units}/s{share}")
    held = [one.reading.allocated_bytes for one in facts.ranks]
    held.append(facts.memory.allocated_bytes if facts.memory else None)
    most = highest(*held)
    if most is not None:
        at_most = "at most " if facts.ranks else ""
        parts.append(f"memory {at_most}{format_bytes(most)}")
    if facts.jump is not None:
        parts.append(f"jumps {counts_word(facts.jump)}")
    if run.eta_seconds is not None:
        parts.append(f"{format_duration(run.eta_seconds)} left")
    if slow := slow_words(facts):
        parts.append(slow)
    return "  ".join(parts)


def summary(run: RunSnapshot) -> str:
    """The summary of an ended run: how it ended, losses, times, memory, device."""
    lines = ["=" * WIDTH, _headline(run).center(WIDTH).rstrip(), "=" * WIDTH]
    rows: list[tuple[str, str]] = []
    facts = run.facts
    ended = facts.ended
    if run.verdict is not None and run.state != "finished":
        rows.append(("Why", run.verdict.evidence))
    if run.unsaved:
        rows.append(("Now", f"the run {run.unsaved}"))
    loss = task_of(run.plan).loss
    last = run.evaluations[-1] if run.evaluations else None
    least = run.best_validation_loss
    best_one = best_evaluation(task_of(run.plan), run.evaluations)
    by_loss = best_one is not None and best_one.measure == loss
    if least is not None:
        best = loss.told(least)
        if best_one is not None and by_loss and best_one.value == least:
            best += f" at step {best_one.step:,}"
        best = marked(best, "best_validation_loss", run.uncertain)
        rows.append(("Best validation loss", best))
    if best_one is not None and not by_loss:
        rows.append(("Best evaluation", marked(best_one.words, "evaluations", run.uncertain)))
    train = run.final_train_loss
    if facts.loss is not None or train is not None:
        told = NOTHING_LEARNED if train is None else loss.told(train)
        rows.append(("Final training loss", marked(told, "final_train_loss", run.uncertain)))
    if least is not None or last is not None:
        final = loss.told(run.final_validation_loss)
        final = marked(final, "final_validation_loss", run.uncertain)
        rows.append(("Final validation loss", final))
    if last is not None:
        if last.train_loss is not None:
            rows.append(("Final loss on some training rows", loss.told(last.train_loss)))
        for found in figures(task_of(run.plan), last, summary=True):
            title = f"{found.title[0].upper()}{found.title[1:]}"
            rows.append((title, format_measure(found.value)))
    if ended is not None and ended.early:
        rows.append(("Ended", ended.early))
    time = f"{run.minutes:.2f} minutes ({run.minutes / 60:.2f} hours)"
    rows.append(("Total training time", marked(time, "total_minutes", run.uncertain)))
    average = run.average_epoch_minutes
    if average is not None:
        one = marked(f"{average:.2f} minutes", "average_epoch_minutes", run.uncertain)
        rows.append(("Average epoch time", one))
        rows.append(("Total epochs", marked(f"{run.epoch_count:,}", "epoch_count", run.uncertain)))
    rows.append(("Steps", f"{facts.step:,}"))
    if run.units_per_second is not None:
        units = task_of(run.plan).units
        each = each_per_second(run.plan, run.units_per_second)
        share = "" if each is None else f" ({each:,.0f} each device)"
        words = f"{format_rate(run.units_per_second)}{share}"
        rows.append((f"{units[0].upper()}{units[1:]} per second", words))
    if facts.jump is not None:
        rows.append(("Jumps", jump_words(facts.jump)))
    if facts.peak_bytes is not None:
        peak = marked(format_bytes(facts.peak_bytes), "memory.measured", run.uncertain)
        rows.append(("Peak memory", peak))
    if slow := slow_words(facts):
        rows.append(("Slowest", slow))
    if facts.started:
        rows.append(("Device", f"{facts.started.device_name} ({facts.started.device_id})"))
    if facts.weights:
        rows.append(("Weights", facts.weights))
    rows += run.tracked
    rows.append(("Run", run.id))
    if run.missing_records:
        rows.append(("Records", missing_words(run.missing_records)))
    width = max(len(label) for label, _ in rows) + 2
    lines += [f"  {label + ':':<{width}} {value}" for label, value in rows]
    if run.verdict is not None and run.resumable:
        lines.append(f"  resume with: {resume_command(run.id, run.verdict.reason)}")
    return "\n".join(lines)


def _headline(run: RunSnapshot) -> str:
    if run.state == "finished":
        return "TRAINING COMPLETE"
    word, _, reason = ended_words(run).partition(": ")
    return f"TRAINING {word.upper()}" + (f": {reason}" if reason else "")


def _train_loss(value: float | None) -> str:
    return NOTHING_LEARNED if value is None else _loss(value)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else format_measure(value)
