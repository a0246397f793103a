"""The engine's tensors by the names of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from memconsole_torch.techniques.optimizer import optimizers
from memconsole_torch.techniques.sharding import LocalRows
from memconsole_torch.techniques.weights.average import Average
from memconsole_torch.techniques.weights.precision import LossScale
from memconsole_trainer.engine import Array, Part
from memconsole_trainer.techniques import average, loss_scale


@dataclass(frozen=True)
class Saved:
    """The tensors that a checkpoint of this engine contains, and those that can be released while it trains."""

    module: nn.Module
    rows: LocalRows | None
    """The rows of each weight that this process holds, if the weights are split."""
    optimizer: optimizers.Optimizer
    average: Average | None
    scale: LossScale | None
    based: bool
    """Whether there is a frozen base: it is not saved, because it stays where it came from."""

    @property
    def local_weights(self) -> optimizers.Weights:
        """The weights that this process updates."""
        return self.rows or self.module

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of a checkpoint, as this process holds it."""
        for name, tensor in self.local_weights.named_parameters():
            if not self.based or tensor.requires_grad:
                yield f"model.{name}", tensor
        for name, tensor in self._averages():
            yield f"{average.PREFIX}{name}", tensor
        for name, tensor in optimizers.slots(self.optimizer, self.local_weights):
            yield f"optimizer.{name}", tensor
        if self.scale is not None:
            yield loss_scale.NAME, self.scale.state

    def of(self, part: Part) -> Iterator[Tensor]:
        """Yield the tensors of `part` that can be released."""
        if part == "gradients":
            yield from (p.grad for p in self.local_weights.parameters() if p.grad is not None)
        elif part == "optimizer":
            yield from (
                tensor for _, tensor in optimizers.slots(self.optimizer, self.local_weights)
            )
        else:
            yield from self.module.parameters()
            yield from self.module.buffers()
            yield from (tensor for _, tensor in self._averages())

    def is_signed(self, state: Tensor) -> bool:
        """Whether a tensor of the optimizer's state has values of both signs."""
        return not any(state is s.get("exp_avg_sq") for s in self.optimizer.state.values())

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor `name`, gathered from all processes if each has some rows of it."""
        weight = self.rows.weight_of(name) if self.rows is not None else None
        return self.rows.whole(weight, tensor) if self.rows is not None and weight else tensor

    def local_part(self, name: str, array: Array) -> Array:
        """The part of `array`, the whole tensor `name`, that this process holds."""
        weight = self.rows.weight_of(name) if self.rows is not None else None
        return self.rows.local_part(weight, array) if self.rows is not None and weight else array

    def _averages(self) -> Iterator[tuple[str, Tensor]]:
        return self.average.named() if self.average is not None else iter(())
