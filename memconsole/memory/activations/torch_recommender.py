"""The moments of a recommender's step in torch: its decoder's blocks, between an adapter and two softmaxes.

`torch_timeline` arranges the blocks. This module adds what `memconsole_torch.models.recommender` and
`memconsole_torch.techniques.activations.two_level` do around them. All of it is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations import recommender
from memconsole.memory.activations.torch_masks import tables_of
from memconsole.memory.activations.torch_timeline import Timeline
from memconsole.memory.state.step_sizes import Moment, StepSizes
from memconsole.plan.models.recommender import Recommender


class RecommenderTimeline(Timeline):
    """The moments of one plan, without stored weights, optimizer state and data."""

    def __init__(self, step: StepSizes) -> None:
        super().__init__(step)
        assert isinstance(step.model, Recommender)
        self.model = step.model
        self.head_cast = 0
        self.head_gradient = recommender.adapter_gradient_bytes(step.model)
        """The adapter's gradients from the clusters, which wait for those from the items."""
        self.projected = recommender.projected_bytes(step.model)
        """All items after the adapter, which are inputs and are scored; later their gradient."""
        self.tables += self.projected
        self.tables_kept += self.projected

    def moments(self) -> Iterator[Moment]:
        yield self._at("forward", self.step.standing, recommender.adapter_forward_bytes(self.model))
        yield from self._forward()
        yield from self._scored()
        yield from self._backward()
        yield from self._evaluation()

    def _scored(self) -> Iterator[Moment]:
        """The loss in chunks of positions, whose backward pass reads the items of the targets' clusters again. The
        gradient of the items exists three times as soon as the second chunk's is added to the first one's."""
        chunk = min(self.tokens, self.model.chunk_positions)
        own = recommender.chosen_bytes(self.model, chunk)
        live, standing = self._before_head + self.stream, self.step.standing
        yield self._at("loss", standing, live, self.copies, own)
        chunks = -(-self.tokens // chunk)
        whole = self.projected if chunks > 1 else 0
        work = max(
            whole + 2 * own + self.stream, whole + own + self.projected + self.stream, 3 * whole
        )
        yield self._at("backward", standing, live, self.kept_copies, 0, work)

    def _embedding_backward(self, gradients: int) -> Iterator[Moment]:
        """The gradient of the inputs is added to that of the scored items, and passes through the adapter."""
        live = 2 * self.projected + self.stream + self._embedding_workspace()
        yield self._at("backward", gradients, 0, 0, 0, live)
        yield self._at(
            "backward", gradients, 0, 0, 0, recommender.adapter_backward_bytes(self.model)
        )

    def _evaluation(self) -> Iterator[Moment]:
        step = self.step
        tokens = step.evaluation_tokens
        tables, _ = tables_of(step, tokens)
        yield self._at("evaluation", 0, recommender.adapter_forward_bytes(self.model))
        yield from self._evaluated_blocks(tables + self.projected)
        scores = recommender.evaluation_bytes(self.model, tokens)
        yield self._at(
            "evaluation", 0, 4 * step.architecture.hidden_size * tokens, self.copies, scores
        )
