"""The figures of an event, as TensorBoard, W&B and MLflow show them."""

from __future__ import annotations

from memconsole.plan.sections.hybrid import PHASES
from memconsole.runs.record.log import events

Scalar = tuple[str, float]


def scalars(event: events.Event, units: str) -> tuple[int, list[Scalar]]:
    """The step and the (tag, value) pairs of an event; no pairs if it holds no figures. `units` is what
    the run's task counts, in the plural. Memory is in MiB."""
    found: list[tuple[str, float | None]] = []
    if isinstance(event, events.Step):
        found = [
            ("train/loss", event.loss),
            ("train/learning_rate", event.learning_rate),
            ("train/gradient_norm", event.gradient_norm),
            (f"train/{units}_per_second", event.tokens_per_second),
            (f"train/{units}", event.tokens),
        ]
    elif isinstance(event, events.Evaluation):
        found = [
            ("validation/loss", event.loss),
            ("validation/train_loss", event.train_loss),
            ("validation/bits_per_byte", event.bits_per_byte),
        ]
        found += [(f"validation/{name}", value) for name, value in event.metrics.items()]
    elif isinstance(event, events.Jump):
        found = [
            ("hybrid/confidence", event.confidence),
            ("hybrid/horizon", event.horizon),
            ("hybrid/accepted", float(event.accepted)),
            ("hybrid/decrease", event.decrease),
            ("hybrid/predicted_decrease", event.predicted_decrease),
            ("hybrid/steps_saved", event.steps_saved),
        ]
    elif isinstance(event, events.Epoch):
        # The step of these values is the number of the epoch.
        found = [("epoch/train_loss", event.train_loss), ("epoch/minutes", event.minutes)]
        return event.epoch, [(tag, value) for tag, value in found if value is not None]
    elif isinstance(event, events.Memory) and event.phase in ("train", *PHASES):
        # Each phase of a hybrid run has curves of its own.
        group = "memory" if event.phase == "train" else f"memory_{event.phase}"
        found = [
            (f"{group}/{name}_mib", None if size is None else size / 2**20)
            for name, size in (
                ("allocated", event.allocated_bytes),
                ("peak", event.peak_bytes),
                ("reserved", event.reserved_bytes),
                ("host", event.host_bytes),
            )
        ]
    else:
        return 0, []
    return event.step, [(tag, value) for tag, value in found if value is not None]
