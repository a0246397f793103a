"""From a plan to its memory table: every component's bytes at every moment of a training step.

A step is a sequence of moments; a component's live bytes are a sum of products of sizes at each, and the
peak is the largest moment, not a sum of largest components. Each phase of the table is its largest moment.
"""

from __future__ import annotations

from memconsole.memory.activations import Block, jax_block, torch_block
from memconsole.memory.coefficients import Runtime, runtime
from memconsole.memory.host import host_bytes
from memconsole.memory.loss import Loss, loss
from memconsole.memory.optimizer_state import State, state
from memconsole.memory.sizes import Group, Sizes, sizes
from memconsole.memory.table import COMPONENTS, PHASES, Budget, Component, MemoryTable, Tier
from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan

Moment = tuple[str, tuple[int, ...]]
"""A phase, and the live bytes of each of COMPONENTS at one moment in it."""

CACHE_POSITIONS = 8
"""Bytes of rotary cosine and sine per position and head element, fp32."""


def memory_table(plan: Plan, architecture: Architecture, budget: Budget) -> MemoryTable:
    """Price `plan` for `architecture` on the device of `budget`, from formulas alone."""
    costs = runtime(plan.backend, budget.kind)
    step = _Step(plan, architecture, budget, costs)
    best: dict[str, tuple[int, tuple[int, ...]]] = {}
    for phase, live in step.moments():
        total = sum(live)
        if phase not in best or total > best[phase][0]:
            best[phase] = (total, live)
    components = tuple(
        Component(name, {p: best[p][1][row] for p in PHASES if p in best and best[p][1][row]})
        for row, name in enumerate(COMPONENTS)
    )
    phases = {phase: best[phase][0] for phase in PHASES if phase in best}
    peak_phase = max(phases, key=lambda phase: phases[phase])
    peak = phases[peak_phase]
    on_cpu = budget.kind == "cpu"
    reserved = peak if on_cpu else peak + int(peak * costs.reserve_share)
    device = reserved if on_cpu else reserved + costs.context_bytes
    low, high = costs.band
    return MemoryTable(
        backend=plan.backend,
        budget=budget,
        tier=Tier.FORMULA,
        components=components,
        phases=phases,
        peak_phase=peak_phase,
        peak_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=device,
        host_bytes=host_bytes(plan, costs, step.state.host, peak if on_cpu else 0),
        band_bytes=(int(device * low), int(device * high)),
    )


class _Step:
    """The sizes of one training step on one device, in bytes, and its moments."""

    def __init__(
        self, plan: Plan, architecture: Architecture, budget: Budget, costs: Runtime
    ) -> None:
        a, o = architecture, plan.optimize
        self.plan, self.a, self.costs = plan, a, costs
        self.is_jax = plan.backend == "jax"
        self.sizes = s = sizes(a)
        self.tokens = plan.micro_batch_tokens
        self.sequence = plan.data.sequence_length
        self.compute = 4 if o.precision == "fp32" else 2
        self.shards = plan.device.count if o.sharding == "fsdp" else 1
        self.frozen = o.freeze_base or o.lora_rank > 0
        self.adapters = o.lora_rank * s.block.adapter_width * s.layers
        self.trained = self._trained(s, o.lora_rank)
        self.state: State = state(o, plan.backend, self.trained, self.shards)
        self.accumulates = o.accumulation_steps > 1
        block_of = jax_block if self.is_jax else torch_block
        self.block: Block = block_of(
            a, o.precision, o.gradient_checkpointing, o.lora_rank > 0 and o.precision == "fp32"
        )
        self.loss: Loss = loss(plan.backend, o.precision, o.fused_loss, a, self.tokens)

    def _trained(self, s: Sizes, rank: int) -> Group:
        if not self.frozen:
            return s.used
        return Group(
            elements=self.adapters,
            tensors=2 * rank and 14 * s.layers,
            largest=rank * s.block.adapter_largest,
            factored=(s.block.adapter_width + 14 * rank) * s.layers if rank else 0,
        )

    def weights(self) -> int:
        """The model's own weights on this device: frozen ones in the compute precision."""
        base = self.sizes.total * (self.compute if self.frozen else 4)
        return -(-(base + 4 * self.adapters) // self.shards)

    def copies(self) -> int:
        """Lower-precision copies of the weights that live through forward and backward."""
        if self.compute == 4 or self.frozen:
            return 0
        s = self.sizes
        return 2 * (s.block_matrices * s.layers + s.head_matrix)

    def gathered(self) -> int:
        """Two unsharded blocks and the root (embeddings, head) under FSDP."""
        if self.shards == 1:
            return 0
        s = self.sizes
        return self.compute * (2 * s.block.elements + s.outside.elements)

    def moments(self) -> list[Moment]:
        s, t, block, loss = self.sizes, self.tokens, self.block, self.loss
        score = t * self.sequence
        weights = self.weights()
        gathered = self.gathered()
        training = weights + self.copies() + gathered
        gradients = -(-4 * self.trained.elements // self.shards)
        standing = gradients if self.accumulates else 0
        head_gradient = 0 if self.frozen else 4 * s.head_matrix
        embedding_gradient = 0 if self.frozen else 4 * s.embedding
        resident = self.state.resident
        stream = 4 * t * self.a.hidden_size
        per_block = block.kept * t + block.kept_scores * score
        kept = per_block * s.layers + stream
        if self.plan.optimize.activation_offload:
            kept = 2 * per_block + stream
        again = block.recomputed * t + block.recomputed_scores * score
        widest_forward = block.forward * t + block.forward_scores * score
        widest_backward = block.backward * t + block.backward_scores * score
        data = 2 * 8 * t if not self.is_jax else 2 * 4 * t
        rotary = (
            CACHE_POSITIONS * self.sequence * self.a.head_size if self.a.positions == "rope" else 0
        )
        run = self.costs.workspace_bytes + rotary
        fill = head_gradient if not self.accumulates else standing + head_gradient
        full = max(gradients, standing)

        def at(
            phase: str,
            model: int,
            grads: int = 0,
            optimizer: int = resident,
            activations: int = 0,
            logits: int = 0,
            work: int = 0,
            batch: int = data,
        ) -> Moment:
            return (phase, (model, grads, optimizer, activations, logits, work, batch, run))

        moments = [
            at("forward", training, standing, activations=kept, work=widest_forward),
            at("loss", training, standing, activations=kept, logits=loss.forward),
            at(
                "backward",
                training,
                standing + loss.early_gradient,
                activations=kept,
                logits=loss.backward,
            ),
            at("backward", training, fill, activations=kept, logits=loss.head, work=stream),
            at("backward", training, fill, activations=kept + again, work=widest_backward),
            at(
                "backward",
                training,
                full + (embedding_gradient if s.head == 0 else 0),
                activations=per_block + stream + again,
                work=widest_backward,
            ),
            at(
                "optimizer step",
                weights,
                gradients,
                self.state.at_step,
                work=self.state.temporaries,
            ),
            at(
                "evaluation",
                weights + self._evaluation_copies() + gathered,
                activations=stream,
                logits=loss.evaluation,
                work=widest_forward,
            ),
            at("checkpoint", weights, work=4 * s.used.largest if self._copies_to_save() else 0),
        ]
        if self.is_jax:
            moments[4] = at(
                "backward", training, full, activations=kept + again, work=widest_backward
            )
        return moments

    def _evaluation_copies(self) -> int:
        return self.copies()

    def _copies_to_save(self) -> bool:
        return self.is_jax
