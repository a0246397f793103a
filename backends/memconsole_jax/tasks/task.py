"""The interface between the engine and a task: its loss, the weight of a batch, and its evaluation
sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from jax import Array

from memconsole.plan.plan import Plan
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_trainer.engine import OnTokens, Sampling

Tree = dict[str, Array]
"""Arrays by name: stacked weights (see `layout.stacking`), or the arrays of a batch."""
Loss = Callable[..., Array]
"""The loss of one micro-batch: (trained, frozen, arrays, `accumulation.Sums` or None, share) -> the
summed loss times `share`, a scalar. Only the `trained` weights are differentiated."""
Evaluation = Callable[[Tree, Tree, Tree], Array]
"""(trained, frozen, arrays) of one micro-batch -> its summed loss, then the sums of the task's
measures, (1 + measures,)."""


class Head(NamedTuple):
    """A weight outside the blocks whose gradients are summed inside the loss."""

    name: str
    shared: bool
    """Whether the model also uses it elsewhere. Gradients from there are added after the backward
    pass."""


class Sampler(Protocol):
    """Continues a row of tokens. Its programs are compiled once for each size."""

    def prepare(self, tokens: int) -> Callable[[], None]:
        """Trace the program for samples of `tokens` tokens. Returns what compiles it."""
        ...

    def __call__(
        self,
        weights: Tree,
        prompt: list[int],
        tokens: int,
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        """See `Engine.generate`."""
        ...


class Task(Protocol):
    """A task in JAX: its loss, evaluation and samples. Each task has one file in this folder."""

    def weight(self, arrays: Tree) -> Array:
        """The weight of a batch or a part of one. The loss is divided by it."""
        ...

    def loss(self, plan: Plan, model: Any, disk: Disk | None = None) -> Loss:
        """The loss that `plan` trains. `disk` holds offloaded activations on a CPU."""
        ...

    def evaluation(self, plan: Plan, model: Any) -> Evaluation:
        """The function whose results an evaluation of `plan` sums."""
        ...

    def head(self, weights: Iterable[str]) -> Head | None:
        """The one of the model's `weights` whose gradients are summed inside the loss; None if
        there is none."""
        ...

    def sampler(self, plan: Plan, model: Any, weights: Any, place: Any) -> Sampler | None:
        """A sampler of a model with `weights` of these shapes and `place`, a sharding; None if the
        task has no samples."""
        ...

    def outputs(self, plan: Plan, model: Any, weights: Tree, arrays: Tree) -> Array:
        """The model's outputs for the arrays of one micro-batch, in float32, computed as an
        evaluation of `plan` computes them."""
        ...
