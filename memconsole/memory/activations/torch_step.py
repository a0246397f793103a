"""The largest moment of each phase of a torch training step, and a cache of those that many plans share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memconsole.memory.activations.torch_recommender import RecommenderTimeline
from memconsole.memory.activations.torch_timeline import Timeline
from memconsole.memory.state.saving import gathered_to_save
from memconsole.memory.state.step_sizes import Moment, StepSizes
from memconsole.memory.step_key import step_settings
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.recommender import Recommender


def moments(step: StepSizes) -> Iterator[Moment]:
    """The largest moment of each phase of a step, of an evaluation and of a checkpoint."""
    resident, data = step.state.resident, step.data
    exchanged = step.gradients if step.copied else 0
    for m in _remembered(step):
        yield Moment(
            m.phase,
            step.weights + m.weights,
            max(m.gradients, exchanged),
            resident,
            m.activations,
            m.logits,
            m.workspace,
            data,
        )
    if step.plan.optimize.optimizer_in_backward:
        yield Moment("optimizer step", weights=step.weights, state=resident, data=data)
    else:
        yield _update(step)
    yield Moment(
        "checkpoint",
        weights=step.weights,
        gradients=exchanged,
        state=resident,
        workspace=gathered_to_save(step),
    )


def logits_after_forward(step: StepSizes, largest: Mapping[str, Moment]) -> int:
    """Bytes that torch's allocator maps on a GPU if it maps new memory for whole logits, in addition to all memory of the forward
    pass. Logits need one range of addresses, and what blocks have freed may be in pieces, or be smaller. 0 if they fit into
    what is free. `largest`: the largest moment of each phase."""
    o, model = step.plan.optimize, step.model
    on_gpu = step.plan.backend == "torch" and step.kind in ("gpu", "rocm")
    if not on_gpu or o.fused_loss or not isinstance(model, Architecture):
        return 0
    forward, loss = largest["forward"].total, largest["loss"]
    logits = step.compute * step.tokens * model.vocab_size
    return forward + logits if 0 < forward - loss.total + loss.logits < logits else 0


def _update(step: StepSizes) -> Moment:
    """The optimizer step after the backward pass."""
    return Moment(
        "optimizer step",
        weights=step.weights,
        gradients=max(step.gradients, step.standing),
        state=step.state.at_step,
        workspace=step.state.temporaries,
        data=step.data if step.kind == "cpu" else 0,
    )


def prepare(step: StepSizes) -> None:
    """Fill the cache that `moments` reads."""
    _remembered(step)


def _timeline(step: StepSizes) -> Timeline:
    if isinstance(step.model, Recommender):
        return RecommenderTimeline(step)
    return Timeline(step)


_moments: dict[tuple[object, ...], tuple[Moment, ...]] = {}
MOST_REMEMBERED = 8192


def structure(step: StepSizes) -> tuple[object, ...]:
    """The cache key of `_remembered`: everything that decides the phases without the optimizer, apart from stored
    weights, optimizer state and data."""
    return (
        step.model,
        step.frozen,
        step.shards,
        step.copied,
        step.tokens,
        step.evaluation_tokens,
        step.sequence,
        step.kind,
        *step_settings(step.plan, step.kind, update=step.plan.optimize.optimizer_in_backward),
    )


def _remembered(step: StepSizes) -> tuple[Moment, ...]:
    """The largest moments of the phases without the optimizer, cached. Weights, state and data are left out: they
    are constant over these phases, and many toggles change only them."""
    key = structure(step)
    found = _moments.get(key)
    if found is None:
        if len(_moments) >= MOST_REMEMBERED:
            _moments.clear()
        largest: dict[str, Moment] = {}
        for moment in _timeline(step).moments():
            present = largest.get(moment.phase)
            if present is None or moment.total > present.total:
                largest[moment.phase] = moment
        found = _moments[key] = tuple(largest.values())
    return found
