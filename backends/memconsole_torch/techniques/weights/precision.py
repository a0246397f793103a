"""Mixed precision: matmuls in 16 bits by autocast; loss and norm statistics stay fp32.

Weights stay fp32 with bf16 and fp16; with bf16-sr, `rounding` keeps them in bf16. For fp16 the loss
is scaled as `memconsole_trainer.techniques.loss_scale` specifies. `torch.amp.GradScaler` waits for
the device unless the optimizer is one of torch's fused ones. Here a skipped step runs but changes
nothing, so no wait is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from memconsole.plan.machine.processor import missing_instructions, slow_vectors
from memconsole.plan.plan import Precision
from memconsole_torch.techniques.optimizer import optimizers
from memconsole_trainer.techniques import loss_scale

COMPUTE = {"bf16": torch.bfloat16, "bf16-sr": torch.bfloat16, "fp16": torch.float16}
"""The dtype of matmuls, by precision."""
_NAMES = {
    "bf16": "Mixed precision (bfloat16)",
    "bf16-sr": "Weights in bfloat16, stochastically rounded,",
    "fp16": "Mixed precision (float16, dynamic loss scaling)",
}


def forward_context(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """A context for a forward pass and its loss; backward pass and optimizer run outside.

    Use a new one for each micro-batch, because leaving it frees the 16-bit copies of the weights.
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=COMPUTE[precision])


class LossScale:
    """The loss scale of one run, on the device."""

    def __init__(
        self, device: torch.device, process_sum: optimizers.ProcessSum | None = None
    ) -> None:
        """`process_sum`: see `optimizers.global_norm`."""
        self._process_sum = process_sum
        self.state = torch.tensor(loss_scale.start(), device=device)
        """Scale, good steps in a row, steps skipped."""

    @property
    def now(self) -> Tensor:
        """The current factor of the loss."""
        return self.state[0].clone()

    def skipped(self) -> int:
        """Number of skipped steps. Waits for the device."""
        return int(self.state[2])

    @torch.no_grad()
    def take(
        self, optimizer: optimizers.Optimizer, gradients: Sequence[Tensor], most: float
    ) -> Tensor:
        """Take one step with the gradients of the scaled loss, or skip it if a gradient is not
        finite. The gradients are divided by the scale and then clipped to a global norm of `most`
        (0: not clipped).

        Returns their norm before clipping, a device scalar that is not finite if the step is
        skipped.
        """
        norm = optimizers.global_norm(gradients, self._process_sum) / self.state[0]
        finite = torch.isfinite(norm)
        factor = (most / norm.clamp(min=most) if most else torch.ones_like(norm)) / self.state[0]
        torch._foreach_mul_(list(gradients), factor)
        for gradient in gradients:
            gradient.masked_fill_(~finite, 0.0)
        optimizers.step_if(optimizer, finite)
        self._adapt(finite)
        return norm

    def _adapt(self, finite: Tensor) -> None:
        scale, good, skipped = self.state.unbind()
        grown = finite & (good + 1 >= loss_scale.GROWTH_STEPS)
        more = (scale * loss_scale.GROWTH).clamp(max=loss_scale.MOST)
        after = torch.where(grown, more, scale)
        self.state.copy_(
            torch.stack(
                [
                    torch.where(finite, after, scale * loss_scale.BACKOFF),
                    torch.where(finite & ~grown, good + 1, torch.zeros_like(good)),
                    skipped + ~finite,
                ]
            )
        )


def line(device: torch.device, precision: Precision) -> str:
    """The log line about `precision` on this device."""
    if precision == "fp32":
        tensor_cores = (
            device.type == "cuda"
            and torch.version.hip is None
            and torch.cuda.get_device_capability(device) >= (8, 0)
        )
        return "Precision: float32" + (" with TF32 matmuls" if tensor_cores else "")
    return f"{_NAMES[precision]} enabled - {_speed(device, precision)}"


def _speed(device: torch.device, precision: Precision) -> str:
    if device.type == "cuda":
        native = precision == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
        return "native on this GPU" if native else "emulated on this GPU: slow"
    if device.type == "cpu":
        missing = missing_instructions(precision)
        if missing:
            return f"slow on this CPU: no {missing}"
        if slow_vectors(precision):
            return "slower than fp32 on this CPU: it has vectors for it, and no matrix unit (AMX)"
        return "native on this CPU"
    return "loss and norms stay float32"
