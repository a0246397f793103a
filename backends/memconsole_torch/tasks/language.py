"""Language modeling in torch: cross-entropy of the decoder's logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.tasks.task import MicroBatch
from memconsole_torch.techniques.activations import fused_loss


class Language:
    """Implements `Task`."""

    criterion: Callable[..., Tensor]

    def __init__(self, plan: Plan, architecture: Architecture) -> None:
        """Raises `PlanError` if the sequence is longer than the learned positions."""
        length, most = plan.data.sequence_length, architecture.max_positions
        if architecture.positions == "learned" and length > most:
            raise PlanError(
                f"data.sequence_length = {length}: the model has {most} positions",
                "data.sequence_length",
            )
        self._architecture = architecture
        self.criterion = fused_loss.chunked if plan.optimize.fused_loss else fused_loss.whole
        self.cap = architecture.logit_cap

    def module(self) -> nn.Module:
        return Decoder(self._architecture)

    def loss(self, module: nn.Module, rows: MicroBatch, share: Tensor | float) -> Tensor:
        hidden = hidden_states(module, rows)
        head, targets = module.head_weight, rows["targets"]
        return self.criterion(hidden, head, targets, share=share, cap=self.cap)

    def sums(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """Always computes the head in chunks, so evaluation never needs the full logits."""
        hidden = hidden_states(module, rows)
        head: Tensor = module.head_weight  # type: ignore[assignment,unused-ignore]
        return fused_loss.chunked(hidden, head, rows["targets"], cap=self.cap).view(1)

    def outputs(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """Logits (B, T, V)."""
        assert isinstance(module, Decoder)
        return module.scores(hidden_states(module, rows))


def hidden_states(module: nn.Module, rows: MicroBatch) -> Tensor:
    """Final hidden states (B, T, H)."""
    found: Tensor
    if "documents" in rows:
        found = module(rows["inputs"], rows["documents"])
    else:
        found = module(rows["inputs"])
    return found
