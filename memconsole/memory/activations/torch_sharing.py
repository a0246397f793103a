"""Bytes of the sharded weights that a torch process gathers from the other devices, and of their gradients."""

from __future__ import annotations

from memconsole.memory.state.step_sizes import StepSizes


class Sharing:
    """The bytes of one plan. All are 0 on one device, where nothing is gathered."""

    def __init__(self, step: StepSizes) -> None:
        shared, block = step.shards > 1, step.sizes.block.elements
        self.gradient = step.compute if shared else step.gradient
        """Bytes per element of a gradient. Gradients of gathered weights have the compute type, until they are added up
        over the devices in fp32."""
        self.outside = step.compute * step.sizes.outside.elements if shared else 0
        """Gathered weights that are not in a block."""
        self.gathered = self.outside + (2 * step.compute * block if shared else 0)
        """Gathered weights while blocks compute: those outside the blocks, and two blocks."""
        self.beginning = self.gathered + self.outside
        """The same at the first block, while the receive buffer of the weights outside the blocks still exists."""
        trains_blocks = shared and not step.frozen_blocks
        self.reduced = 4 * block if trains_blocks else 0
        """The gradients of a block, while they are added up over the devices."""
        inside = step.flow.blocks * block
        self.trained_outside = max(0, step.trained.elements - inside) if trains_blocks else 0
        """Trained elements that are not in a block."""
