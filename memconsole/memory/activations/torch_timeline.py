"""The moments of a torch training step in the order in which they come, with the bytes that are live at each.

`block_programs` gives the live bytes of a block and of the final norm. This module arranges them in the order of
`memconsole_torch`: engine.py for the step, fused_loss.py for the logits. `tests/accuracy/torch_formula.py` compares
the result with a trace of the engine. Symbols in comments: T tokens, V vocabulary, h hidden, c bytes of a compute
element.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations.adapted import not_kept_first
from memconsole.memory.activations.block_programs import Live, evaluated_norm, final_norm_program
from memconsole.memory.activations.kernels import updating_bytes
from memconsole.memory.activations.torch_blocks import (
    blocks_of,
    kernels_of,
    kernels_of_evaluation,
    kernels_of_norm,
    starts_frozen,
    widest,
)
from memconsole.memory.activations.torch_masks import mask_making, tables_of
from memconsole.memory.activations.torch_sharing import Sharing
from memconsole.memory.state.step_sizes import Moment, StepSizes

CHUNK_TOKENS = 512
"""`memconsole_torch.techniques.activations.fused_loss.CHUNK_TOKENS`."""
CPU_CAPPED, CAPPED = 2**18, 2**24
"""`memconsole_torch.techniques.activations.fused_loss.CPU_CACHED` and `CAPPED`."""
EMBEDDING_ROWS = 10
"""Rows that one thread of CUDA's embedding backward sums (EmbeddingBackwardKernel.cu, NROWS_PER_THREAD)."""
EMBEDDING_FEW = 3072
"""Tokens up to which it needs no workspace (PyTorch, Embedding.cu, embedding_dense_backward_cuda)."""


class Timeline:
    """The moments of one plan, without stored weights, optimizer state and data."""

    def __init__(self, step: StepSizes) -> None:
        self.step = step
        a = step.architecture
        self.tokens, self.scores = step.tokens, step.tokens * step.sequence
        self.stream = 4 * a.hidden_size * step.tokens
        """The residual stream, or its gradient: fp32 whatever the precision."""
        self.hidden = step.compute * a.hidden_size * step.tokens
        self.labels = 8 * step.tokens
        """Targets as int64."""
        kernels = kernels_of(step)
        self.kernels, self.stepping = kernels, kernels.stepping
        self.blocks = blocks_of(step, kernels)
        self.norm = final_norm_program(a, kernels_of_norm(kernels))
        self.evaluated_norm = evaluated_norm(a, kernels_of_evaluation(kernels_of_norm(kernels)))
        self.copies = sum(b.count * b.copies for b in self.blocks)
        """16-bit copies of all blocks' weights in autocast's cache, until the forward context ends."""
        self.kept_copies = sum(b.count * b.kept_copies for b in self.blocks)
        self.sharing = Sharing(step)
        self.gradient = self.sharing.gradient
        """Bytes per element of a gradient."""
        trained = step.flow.head
        self.head_gradient = self.gradient * step.head if trained else 0
        self.head_cast = 2 * step.head if trained and step.compute == 2 else 0
        if step.rounded:
            self.head_cast = 0
        self.tied = step.sizes.head == 0
        self.tables, self.tables_kept = tables_of(step, step.tokens)
        self.block_gradients = sum(b.count * b.program.gradients for b in self.blocks)
        self.kept = sum(b.count * b.kept for b in self.blocks)
        """Activations of all blocks that are kept from the forward to the backward pass."""
        o = step.plan.optimize
        if starts_frozen(step) and a.layers > 1 and not o.compile:
            # The first block's input needs no gradient, so norms of it keep neither their input nor their statistics.
            if a.pre_norms and o.gradient_checkpointing == "none":
                statistics = (8 if a.norm == "layernorm" else 4) * (2 if a.parallel_residual else 1)
                self.kept -= self.stream + statistics * step.tokens
            self.kept -= not_kept_first(a, kernels) * step.tokens
        self.kept = (
            self.kept * step.flow.blocks // a.layers
        )  # those below trained weights keep nothing
        self.between = self.kept
        """The part of `kept` on the device while no block runs."""
        self.kept_below = self.kept
        """The part of `kept` on the device while a block runs its backward pass, including that block's own."""
        self.ahead = False
        """Whether the activations of the next block are already on the device during a block's backward pass."""
        if o.activation_offload:
            # A GPU still copies the activations of the block before out in the forward pass, and those of the next block in
            # in the backward pass.
            most = max(b.kept for b in self.blocks)
            self.ahead = step.kind in ("gpu", "rocm") and a.layers > 1
            self.kept = self.kept_below = min(self.kept, 2 * most if self.ahead else most)
            self.between = 0
            self.kept_copies = 0

    def moments(self) -> Iterator[Moment]:
        yield from self._forward()
        fused = self.step.plan.optimize.fused_loss
        yield from self._chunked_loss() if fused else self._whole_loss()
        yield from self._backward()
        yield from self._evaluation()

    def _forward(self) -> Iterator[Moment]:
        standing = self.step.standing
        yield self._at(
            "forward", standing, self.stream + self.tables + mask_making(self.step, self.tokens)
        )
        if self.sharing.outside:
            yield self._at("forward", standing, self.stream, gathered=self.sharing.beginning)
        for b in self.blocks:
            below = max(0, self.kept - b.kept) + self.tables
            live = b.forward if self.step.flow.blocks else b.evaluation
            yield self._block("forward", live, standing, below, self.copies - b.copies)
        live = widest(self.norm.forward, self.tokens, self.scores)
        yield self._live("forward", live, standing, self.between + self.tables, self.copies)

    @property
    def _before_head(self) -> int:
        """Activations kept between the forward and the backward pass, without the hidden states that the head reads."""
        return self.between + self.tables_kept + self.norm.kept.activations.token * self.tokens

    def _whole_loss(self) -> Iterator[Moment]:
        """The loss over whole logits, which their gradient overwrites. Then the gradients of the hidden states and of the
        head are computed from it."""
        step, c = self.step, self.step.compute
        n, standing = self.tokens * step.architecture.vocab_size, step.standing
        live = self._before_head + self.hidden
        logits = self._logits(n, self.tokens) + self.labels
        yield self._at("loss", standing, live, self.copies + self.head_cast, logits)
        if not step.flow.head:
            live -= self.hidden  # a frozen head does not keep its input
        copies = self.kept_copies + self.head_cast
        yield self._at("backward", standing, live, copies, c * n, self.hidden)
        if not self.head_gradient:
            return
        work = c * step.head + self.hidden
        yield self._at("backward", standing, live, self.kept_copies, c * n, work)
        if c == 2 and self.gradient == 4:
            cast = standing + self.head_gradient
            yield self._at("backward", cast, live, self.kept_copies, 0, work)

    def _chunked_loss(self) -> Iterator[Moment]:
        """The loss in chunks. One chunk's logits are live, which their gradient overwrites, and the tensors computed from
        this gradient. The gradients of the hidden states and (in fp32) of the head are live from the first chunk on."""
        step, c, a = self.step, self.step.compute, self.step.architecture
        rows = min(self.tokens, CHUNK_TOKENS)
        n = rows * a.vocab_size
        trained = self.head_gradient > 0
        share = 2 * step.head if trained and c == 2 else 0  # a chunk's share of the head's gradient
        made = c * n + max(c * a.hidden_size * rows, share)
        chunk = max(self._logits(n, rows), made)
        yield self._at(
            "loss",
            step.standing + (4 * step.head if trained else 0),
            self._before_head + self.hidden,
            self.copies + self.head_cast,
            chunk + self.hidden + self.labels,
        )
        if trained and self.gradient == 2:  # the fp32 sum is cast to the weight's type
            live = self._before_head + self.hidden
            yield self._at("backward", step.standing, live, self.kept_copies, 0, 6 * step.head)

    def _logits(self, count: int, rows: int, *, trained: bool = True) -> int:
        """Bytes of `count` logits of `rows` tokens while the loss is computed. A GPU's kernel overwrites them in the type
        of the matmul. Elsewhere they are cast to fp32; if they are capped, the derivative of the cap is live too, for
        the logits that one pass covers."""
        c, a = self.step.compute, self.step.architecture
        if self.step.kind in ("gpu", "rocm"):
            return c * count + 4 * rows  # and the nats of each token
        cast = 4 * count if c == 4 else (4 + c) * count
        if a.logit_cap is None or not trained:
            return cast
        most = CPU_CAPPED if self.step.kind == "cpu" else CAPPED
        bent = min(count, max(1, most // a.vocab_size) * a.vocab_size)
        return max(cast, 4 * (count + bent))

    def _backward(self) -> Iterator[Moment]:
        step = self.step
        standing, shards = step.standing, step.shards
        # A tied head's gradient waits in autograd's buffer until the embedding's gradient is added.
        if not self.tied and self.head_gradient:
            a, read = step.architecture, self._before_head + self.hidden
            yield self._stepped((a.vocab_size, a.hidden_size), read, self.kept_copies)
        waits = self.tied or shards > 1 or not (standing or self.stepping)
        early = standing + (self.head_gradient if waits else 0)
        moments = self.norm.adding if standing else self.norm.backward
        live = widest(moments, self.tokens, self.scores)
        yield self._live("backward", live, early, self.between + self.tables_kept, self.kept_copies)
        early += 0 if standing else self.norm.gradients
        made = 0 if standing else self.block_gradients
        for b in self.blocks if step.flow.blocks else ():
            # Live bytes are linear in the block's position, so the peak is at the top or the bottom block.
            above = max(0, self.kept_below - b.kept) + self.tables_kept
            others = max(0, self.kept_copies - b.kept_copies)
            if self.ahead:
                others = b.kept_copies
                under = early + -(-max(0, made - 2 * b.program.gradients) // shards)
                yield self._block(
                    "backward", b.backward, under, above, others, self.sharing.reduced
                )
            # At the top block, which is the first in the backward pass, no gradients of another block are being added up.
            yield self._block("backward", b.backward, early, above, others)
            below = max(0, above - b.kept)
            yield self._block("backward", b.backward, early, below, others, self.sharing.reduced)
            behind = early + -(-max(0, made - b.program.gradients) // shards)
            yield self._block(
                "backward", b.backward, behind, self.tables_kept, 0, self.sharing.reduced
            )
        made = -(-made // shards)
        if step.flow.table:
            yield from self._embedding_backward(early + made + self.sharing.reduced)
        if shards > 1:  # gradients outside the blocks, which are copied to be added up
            whole = (self.gradient + 4) * self.sharing.trained_outside
            yield self._at("backward", standing + made + whole, 0, gathered=0)

    def _embedding_backward(self, gradients: int) -> Iterator[Moment]:
        """The dense gradient of the embedding. If the head is tied, it is added to the head's gradient in place."""
        step, a = self.step, self.step.architecture
        table = 4 * step.sizes.embedding
        work = self.stream
        if a.embedding_scale != 1.0:
            yield self._at("backward", gradients, 0, 0, 0, 2 * self.stream)
        if a.positions == "learned":
            positions = self.gradient * a.max_positions * a.hidden_size
            yield self._at(
                "backward", gradients + positions, 0, 0, 0, work + 4 * step.sequence * a.hidden_size
            )
            yield self._stepped((a.max_positions, a.hidden_size), work)
            gradients += 0 if step.accumulates or self.stepping else positions
        yield self._at("backward", gradients, 0, 0, 0, work + table + self._embedding_workspace())
        narrow = self.gradient * step.sizes.embedding
        if self.gradient < 4:  # summed in fp32, then cast
            yield self._at("backward", gradients, 0, 0, 0, table + narrow)
        yield self._stepped((a.vocab_size, a.hidden_size), 0)

    def _stepped(self, shape: tuple[int, int], live: int, copies: int = 0) -> Moment:
        """The update of a weight outside the blocks inside the backward pass, while its gradient is live."""
        if not self.stepping:
            return self._at("backward", 0, 0)
        update = updating_bytes(self.kernels, shape, outside=True)
        gradient = self.step.gradient * shape[0] * shape[1]
        return self._at("backward", gradient, live, copies, 0, update)

    def _embedding_workspace(self) -> int:
        """Workspace of CUDA's embedding backward: sorted tokens, and fp32 sums per part and per distinct token."""
        step = self.step
        if step.kind not in ("gpu", "rocm") or self.tokens <= EMBEDDING_FEW:
            return 0
        wide = 4 * -(-step.architecture.hidden_size // 32) * 32
        distinct = min(self.tokens, step.architecture.vocab_size)
        return 16 * self.tokens + wide * (self.tokens // EMBEDDING_ROWS + distinct)

    def _evaluation(self) -> Iterator[Moment]:
        """An evaluation: there are no gradients, a micro-batch keeps nothing for the next one, and the head runs in
        chunks."""
        step, a = self.step, self.step.architecture
        tokens = step.evaluation_tokens
        hidden = step.compute * a.hidden_size * tokens
        tables, _ = tables_of(step, tokens)
        making = 4 * a.hidden_size * tokens + mask_making(step, tokens)
        yield self._at("evaluation", 0, tables + making)
        if self.sharing.outside:
            stream = 4 * a.hidden_size * tokens
            yield self._at("evaluation", 0, stream, gathered=self.sharing.beginning)
        yield from self._evaluated_blocks(tables)
        averaged = self._evaluates_average
        copies = 0 if averaged or step.plan.optimize.compile else self.copies
        n = min(tokens, CHUNK_TOKENS) * a.vocab_size
        copies += 2 * step.head if averaged else self.head_cast
        logits = self._logits(n, min(tokens, CHUNK_TOKENS), trained=False) + 8 * tokens
        yield self._at("evaluation", 0, hidden, copies, logits)

    @property
    def _evaluates_average(self) -> bool:
        """Whether evaluation uses an fp32 average. Autocast caches no copies of it, because it needs no gradient."""
        step = self.step
        return step.state.average > 0 and step.compute == 2 and not step.frozen_blocks

    def _evaluated_blocks(self, tables: int) -> Iterator[Moment]:
        """The blocks and the final norm in an evaluation, beside `tables` bytes."""
        step, averaged = self.step, self._evaluates_average
        for b in self.blocks:
            copies = b.evaluation.copies if step.plan.optimize.compile else self.copies
            if averaged:
                copies = 2 * step.sizes.block.largest
            yield self._block("evaluation", b.evaluation, 0, tables, copies - b.evaluation.copies)
        copies = 0 if averaged or step.plan.optimize.compile else self.copies
        tokens = step.evaluation_tokens
        live = widest(self.evaluated_norm, tokens, tokens * step.sequence)
        yield self._live("evaluation", live, 0, tables, copies)

    def _at(
        self,
        phase: str,
        gradients: int,
        live: int,
        copies: int = 0,
        logits: int = 0,
        work: int = 0,
        gathered: int | None = None,
    ) -> Moment:
        """A moment. `gathered`: bytes of sharded weights that this device holds whole at this moment; None: those outside
        the blocks. They are gathered in the compute type, so there are no 16-bit `copies` of them."""
        if self.step.shards > 1:
            copies = self.sharing.outside if gathered is None else gathered
        return Moment(phase, copies, gradients, 0, live, logits, work)

    def _live(
        self,
        phase: str,
        live: Live,
        gradients: int,
        below: int,
        copies: int,
        work: int = 0,
        gathered: int | None = None,
    ) -> Moment:
        t = self.step.evaluation_tokens if phase == "evaluation" else self.tokens
        s = t * self.step.sequence
        made = live.gradients
        if self.step.shards > 1:
            made = made * self.gradient // 4
        return self._at(
            phase,
            gradients + made,
            below + live.activations.bytes(t, s),
            copies + live.copies,
            0,
            work + live.workspace.bytes(t, s),
            gathered,
        )

    def _block(
        self, phase: str, live: Live, gradients: int, below: int, copies: int, work: int = 0
    ) -> Moment:
        """A moment of a block, while its weights and those of the next block are gathered."""
        return self._live(phase, live, gradients, below, copies, work, self.sharing.gathered)
