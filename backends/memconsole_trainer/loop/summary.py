"""Text of the trainer's log: platform, steps, epochs and the final summary."""

from __future__ import annotations

from collections.abc import Iterable

from memconsole.plan.tasks import Task
from memconsole.runs.read.state.figures import figures
from memconsole.runs.record.log.events import Ended, Epoch, Evaluation, Step
from memconsole.units import format_rate

WIDTH = 80
_RULE = "=" * WIDTH


def platform(lines: Iterable[str]) -> str:
    return "\n".join([_RULE, *(f"  {line}" for line in lines), _RULE])


def step_line(step: Step, total_steps: int, units: str, finite: bool = True) -> str:
    """The log line of a step; `units` is the name of what the task counts. A loss that is `finite` and None is that of
    steps without a token that is learned."""
    loss = _train_loss(step.loss) if finite else "not finite"
    norm = "" if step.gradient_norm is None else f"  norm {step.gradient_norm:.3f}"
    return (
        f"step {step.step:,}/{total_steps:,}  epoch {step.epoch}  loss {loss}"
        f"  lr {step.learning_rate:.3g}{norm}  {format_rate(step.tokens_per_second)} {units}/s"
    )


def evaluation_line(evaluation: Evaluation, task: Task) -> str:
    """The log line of an evaluation: the loss, the task's measures and baselines."""
    more = [figure.words for figure in figures(task, evaluation)]
    if evaluation.train_loss is not None:
        more.insert(0, f"{_loss(evaluation.train_loss)} on training rows")
    words = [f"step {evaluation.step:,}", f"validation loss {_loss(evaluation.loss)}", *more]
    return "  ".join(words)


def epoch_block(epoch: Epoch, epochs: int | None, elapsed_minutes: float) -> str:
    """The block printed at the end of an epoch; `epochs` is None if the run's length is given in
    steps."""
    title = f"Epoch {epoch.epoch}/{epochs}" if epochs else f"Epoch {epoch.epoch}"
    return "\n".join(
        [
            _RULE,
            f"{title} Summary",
            _RULE,
            f"  Train Loss:     {_train_loss(epoch.train_loss)} (mean of the epoch)",
            f"  Val Loss:       {_loss(epoch.validation_loss)}",
            f"  Epoch Time:     {epoch.minutes:.2f} min ({epoch.minutes * 60:.1f}s)",
            f"  Elapsed Time:   {elapsed_minutes:.2f} min",
        ]
    )


def final_block(ended: Ended, device: str, best_step: int | None, best_by: str = "") -> str:
    average = ended.average_epoch_minutes
    return "\n".join(
        [
            _RULE,
            "TRAINING COMPLETE!".center(WIDTH).rstrip(),
            _RULE,
            "",
            "FINAL RESULTS".center(WIDTH).rstrip(),
            _RULE,
            f"  Best Validation Loss:        {_loss(ended.best_validation_loss)}",
            *(
                []
                if best_step is None
                else [f"  Best Checkpoint:             step {best_step:,}{best_by}"]
            ),
            f"  Final Training Loss:         {_train_loss(ended.final_train_loss)} (last steps)",
            f"  Final Validation Loss:       {_loss(ended.final_validation_loss)}",
            *([f"  {ended.early[0].upper()}{ended.early[1:]}"] if ended.early else []),
            "",
            "TIMING STATISTICS".center(WIDTH).rstrip(),
            _RULE,
            f"  Total Training Time:         {ended.total_minutes:.2f} minutes "
            f"({ended.total_minutes / 60:.2f} hours)",
            "  Average Epoch Time:          "
            + ("n/a (no epoch was completed)" if average is None else f"{average:.2f} minutes"),
            f"  Total Epochs:                {ended.epochs}",
            f"  Device:                      {device}",
        ]
    )


def _loss(loss: float | None) -> str:
    return "n/a" if loss is None else f"{loss:.6f}"


def _train_loss(loss: float | None) -> str:
    return "n/a (nothing learned)" if loss is None else _loss(loss)
