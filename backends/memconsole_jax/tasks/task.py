"""What a training task needs of this backend: its loss, what a batch weighs, and what an evaluation adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from jax import Array

from memconsole.plan.plan import Plan
from memconsole_jax.techniques.activation_offload import Disk

Tree = dict[str, Array]
Loss = Callable[..., Array]
"""The loss of one micro-batch: (trained, kept, arrays, `accumulation.Sums` or None, share) -> its sum times the
share, a scalar. `trained` weights are differentiated, `kept` ones are not."""
Evaluation = Callable[[Tree, Tree, Tree], Array]
"""(trained, kept, arrays) of one micro-batch -> its summed loss and the sums of the task's measures, (1 + measures,)."""


class Head(NamedTuple):
    """A weight outside the blocks whose gradient the loss itself adds to its sum."""

    name: str
    shared: bool
    """Whether the model uses it elsewhere, too: gradients from there are added after the backward pass."""


class Sampler(Protocol):
    """Continues a row of tokens by programs that are compiled once for each size."""

    def prepare(self, tokens: int) -> None:
        """Compile what samples of so many `tokens` need."""
        ...

    def __call__(
        self,
        weights: Tree,
        prompt: list[int],
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
    ) -> list[int]:
        """See `Engine.generate`."""
        ...


class Task(Protocol):
    """What is learned, for this backend. One file of this folder implements it."""

    def weight(self, arrays: Tree) -> Array:
        """What the arrays of a batch, or of a part of one, count: the loss is divided by it."""
        ...

    def loss(self, plan: Plan, model: Any, disk: Disk | None = None) -> Loss:
        """The loss that `plan` trains. `disk`: for activations of a CPU."""
        ...

    def evaluation(self, plan: Plan, model: Any) -> Evaluation:
        """What an evaluation of `plan` adds up."""
        ...

    def head(self, weights: Iterable[str]) -> Head | None:
        """Which of the model's `weights` gets its gradients summed inside the loss, as those of blocks are."""
        ...

    def sampler(self, model: Any, weights: Any, place: Any) -> Sampler | None:
        """What samples from a model with `weights` of these shapes at a `place`, a sharding; None where there is
        nothing to sample."""
        ...

    def outputs(self, model: Any, weights: Tree, arrays: Tree) -> Array:
        """The model's outputs for the arrays of one micro-batch, in float32."""
        ...
