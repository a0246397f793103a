"""How long a plan takes: floating-point operations and bytes moved against the device's rates.

A step's time is arithmetic plus traffic plus launch overhead, each against the share of the peak rate that
training is known to reach on that kind of device (coefficients.json, with sources). These are `~` numbers.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.memory.activations.kept import kept_by_blocks
from memconsole.memory.activations.tiles import computes_in_tiles
from memconsole.memory.coefficients import Speed, speed
from memconsole.memory.exchange import devices_at_once, exchange_seconds
from memconsole.memory.state.data import units_per_row, units_per_step
from memconsole.memory.state.gradient_flow import Flow, flow_of
from memconsole.memory.state.optimizer_state import state_bytes
from memconsole.memory.state.sizes import sizes
from memconsole.memory.state.step_sizes import trained_group
from memconsole.plan.machine import processor
from memconsole.plan.machine.budget import Budget
from memconsole.plan.machine.processor import missing_instructions, slow_vectors, wide_vectors
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import ORTHOGONALIZED, Model
from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import EIGHT_BIT
from memconsole.plan.tasks import task_for
from memconsole.plan.toggles.arithmetic import COMPILE
from memconsole.plan.training.trained import frozen_names

GENERIC_BANDWIDTH = {"cpu": 20e9, "gpu": 500e9, "rocm": 400e9, "apple": 100e9, "tpu": 800e9}
"""Bytes per second of a device whose bandwidth is unknown."""
GENERIC_FLOPS = {"gpu": 2e13, "rocm": 1.3e13, "apple": 3.5e12, "tpu": 1e14}
HOST_LINK = 12e9
"""Bytes per second between host and device (PCIe 4 x16 at half its peak, pageable memory)."""
PINNED_LINK = 24e9
"""The same from pinned memory."""
CLEARED = 2.4e-10
"""Seconds per byte that a CPU takes to clear a new page from the system. It is the difference between steps with `heap =
tight` and `fast`, for 0.8 M and 19 M parameters (docs/optimizations.md, "The heap of a CPU run")."""
WAITED_SHARE = 0.1
"""A step waits for this share of the copies that overlap its work, measured with a 3B model on an H100
(`tests/bench/gpu.py --ladder`), where copies took less time than the work. Longer copies are not measured."""
DISK = 1e9
"""Bytes per second to and from a file that is mostly in the page cache."""
SOFT_FACTORS = {True: {"bf16": 3.0, "fp16": 50.0}, False: {"bf16": 21.0, "fp16": 24.0}}
"""Slowdown of torch's 16-bit arithmetic on a CPU without instructions for it, by whether vectors have 512 bits
(`tests/bench/optimizations.py`)."""
VECTOR_SHARES = {"bf16": 0.29, "fp16": 0.40}
"""On a CPU with 16-bit vector instructions but no matrix unit: the share of the doubled peak that torch reaches,
relative to its share in fp32. An Intel processor of this kind reached 0.58 and 0.80 of fp32's speed."""


def forward_flops_per_token(a: Architecture, sequence: int) -> int:
    """Forward FLOPs of the matrices, the head and attention (Kaplan et al. 2020, table 1). A multiply-add counts as two.
    Of the experts only those that a token goes to count."""
    s = sizes(a)
    idle = int((1 - a.active_share) * s.block_experts)
    matrices = 2 * ((s.block_matrices - idle) * s.layers + s.head_matrix)
    return matrices + attention_flops_per_token(a, sequence)


def attention_flops_per_token(a: Architecture, sequence: int) -> int:
    """The attention part of these FLOPs: scores and weighted values, with the average number of visible keys."""
    attended = sequence
    if a.sliding_window is not None:
        local = a.local_layers
        window = min(sequence, a.sliding_window)
        attended = (local * window + (a.layers - local) * sequence) // max(1, a.layers)
    return 4 * attended * a.query_width * a.layers // 2


def step_flops(plan: Plan, model: Model) -> float:
    """FLOPs of one optimizer step on one device, recomputation included."""
    if not isinstance(model, Architecture):
        return _step_flops_in_general(plan, model)
    o, architecture = plan.optimize, model
    forward = forward_flops_per_token(architecture, plan.data.sequence_length)
    head = 2 * sizes(architecture).head_matrix
    total = _passes(plan, model) * forward
    if plan.learns_pairs:
        total += head  # first for the likelihoods that the gradients depend on
    if o.gradient_checkpointing == "full":
        total += forward - head
    elif o.gradient_checkpointing == "attention":
        total += forward - head - attention_flops_per_token(architecture, plan.data.sequence_length)
    elif o.gradient_checkpointing == "selective":
        total += 0.05 * (forward - head)
    # A recomputed block computes its MLP again anyway, unless a norm after the MLP needs its output first.
    again = o.gradient_checkpointing == "none" or architecture.post_norms
    if again and computes_in_tiles(plan, architecture, plan.micro_batch_tokens):
        total += mlp_flops_per_token(architecture)
    tokens = plan.micro_batch_tokens * o.accumulation_steps
    return float(total) * tokens


def mlp_flops_per_token(a: Architecture) -> int:
    """Forward FLOPs of the matrices of all MLPs without experts."""
    return 2 * (3 if a.gated_mlp else 2) * a.hidden_size * a.intermediate_size * a.layers


def forward_share(plan: Plan, model: Architecture) -> float:
    """The share of a step's FLOPs that a forward pass over the same rows has."""
    rows = plan.micro_batch_tokens * plan.optimize.accumulation_steps
    return (
        rows * forward_flops_per_token(model, plan.data.sequence_length) / step_flops(plan, model)
    )


def _step_flops_in_general(plan: Plan, model: Model) -> float:
    """FLOPs of an optimizer step of any model, from the task's FLOPs per row. Recomputed matmuls and attention are not
    distinguished."""
    o = plan.optimize
    again = {"none": 0.0, "selective": 0.05}.get(o.gradient_checkpointing, 1.0)
    again *= _flow(plan, model).blocks / max(1, model.layers)
    rows = plan.train.batch_size * o.accumulation_steps
    return rows * (_passes(plan, model) + again) * task_for(plan, model).flops_per_row(plan, model)


def _passes(plan: Plan, model: Model) -> float:
    """FLOPs of forward and backward pass, divided by the forward pass. Those of adapters are not counted."""
    return _flow(plan, model).passes


def _flow(plan: Plan, model: Model) -> Flow:
    return flow_of(model, frozen_names(plan, model), plan.optimize.lora_rank > 0)


def peak_units_per_second(plan: Plan, model: Model, budget: Budget) -> float:
    """Tokens (or the task's units) per second at the dense peak of one device, without recomputation. The estimated
    rate divided by this is the model FLOPs utilization (Chowdhery et al. 2022, appendix B)."""
    if isinstance(model, Architecture):
        forward: float = forward_flops_per_token(model, plan.data.sequence_length)
    else:
        row = task_for(plan, model).flops_per_row(plan, model)
        forward = row / units_per_row(plan, model)
    flops = _passes(plan, model) * forward
    return peak_flops(budget, plan.optimize.precision, plan.backend) / flops


def peak_flops(budget: Budget, precision: str, backend: str = "torch") -> float:
    """The device's dense peak at `precision`, FLOP/s; for a CPU from its cores, clock and SIMD width.

    XLA on a CPU computes 16-bit types in fp32.
    """
    rates = budget.peak_flops
    if backend == "jax" and budget.kind == "cpu":
        precision = "fp32"
    widths = {"fp32": ("tf32", "fp32"), "bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}
    for name in widths[precision.removesuffix("-sr")]:
        if name in rates and not (budget.kind == "cpu" and name == "tf32"):
            return rates[name]
    if budget.kind == "cpu":
        fp32 = rates.get("fp32") or _cpu_peak()
        width = precision.removesuffix("-sr")
        return fp32 if width == "fp32" else fp32 * _speedup(width)
    return rates.get("fp32", GENERIC_FLOPS.get(budget.kind, 1e13))


@lru_cache(maxsize=2)
def _speedup(width: str) -> float:
    """Speedup of a 16-bit type over fp32 on this machine's processor."""
    return 1 / SOFT_FACTORS[wide_vectors()][width] if missing_instructions(width) else 2.0


@lru_cache(maxsize=4)
def _vector_share(precision: str) -> float:
    return VECTOR_SHARES[precision.removesuffix("-sr")] if slow_vectors(precision) else 1.0


@lru_cache(maxsize=1)
def _cpu_peak() -> float:
    """fp32 FLOP/s of this machine: cores × Hz × 2 FMA × lanes × 2."""
    flags = processor.flags()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    hertz = (processor.megahertz() or 2500) * 1e6
    return processor.process_cpus() * hertz * 2 * lanes * 2


def _traffic(plan: Plan, model: Model, kind: str) -> float:
    """Bytes a step moves through device memory for activations, logits, weights and state, without matmul operands."""
    o = plan.optimize
    s = sizes(model)
    element = _element(plan, kind)
    activations = _passing(plan, model, kind)
    weights = 3 * element * s.total
    if element == 2:
        weights += 6 * s.total
    trained = trained_group(plan, model)
    accumulate = 12 * trained.elements if o.accumulation_steps > 1 else 0
    update = 16 * trained.elements + 2 * state_bytes(o.optimizer, trained)
    return float(o.accumulation_steps * (activations + weights + accumulate) + update)


def _element(plan: Plan, kind: str) -> int:
    """Bytes of an element in matmuls. XLA on a CPU computes 16-bit types in fp32."""
    wide = plan.optimize.precision == "fp32" or (plan.backend == "jax" and kind == "cpu")
    return 4 if wide else 2


def _passing(plan: Plan, model: Model, kind: str) -> float:
    """Bytes of activations and logits that a micro-batch writes and reads."""
    per_token = kept_by_blocks(plan, model, _flow(plan, model), "none", kind)
    vocabulary = model.vocab_size if isinstance(model, Architecture) else 0
    logits = vocabulary * (24 if _element(plan, kind) == 4 else 20)
    again = {"none": 1.0, "selective": 1.2}.get(plan.optimize.gradient_checkpointing, 1.4)
    return plan.micro_batch_tokens * (3 * per_token * again + logits)


def _transfers(plan: Plan, model: Model) -> float:
    """Seconds of moving offloaded state between host and device."""
    o = plan.optimize
    seconds = 0.0
    if o.optimizer_offload != "none":
        link = HOST_LINK if o.optimizer_offload == "cpu" else PINNED_LINK
        compressed = o.optimizer_offload == "compressed"
        trained = trained_group(plan, model)
        seconds += 2 * state_bytes(o.optimizer, trained, compressed=compressed) / link
    return seconds


def _moving(plan: Plan, model: Model, kind: str) -> tuple[float, float]:
    """Seconds of moving activations off the device and back: those that the step waits for, and those of copies that
    overlap its work. They are moved to disk if host and device share memory."""
    if not plan.optimize.activation_offload:
        return 0.0, 0.0
    if kind in ("cpu", "apple"):
        return _moved_bytes(plan, model, kind) / DISK, 0.0
    return 0.0, _moved_bytes(plan, model, "gpu") / PINNED_LINK


def _moved_bytes(plan: Plan, model: Model, kind: str) -> float:
    """Bytes of activations moved off the device and back in a step."""
    o = plan.optimize
    tokens = plan.micro_batch_tokens
    tiled = isinstance(model, Architecture) and computes_in_tiles(plan, model, tokens)
    flow = _flow(plan, model)
    kept = kept_by_blocks(plan, model, flow, o.gradient_checkpointing, kind, tiled=tiled)
    return 2.0 * kept * plan.micro_batch_tokens * o.accumulation_steps


@lru_cache(maxsize=256)
def _orthogonalizing_flops(model: Model, rank: int, frozen: tuple[str, ...]) -> float:
    """FLOPs of Muon's five steps for every trained matrix and adapter, each expert's by itself: two products with the whole
    matrix, and one of its short side (m, m)."""
    found, apart = 0, frozenset(frozen)
    for p in model.parameters():
        if rank and p.role == "matrix":
            found += sum(_newton_schulz_flops((rank, side)) for side in p.shape)
        if p.role in ORTHOGONALIZED and p.name not in apart:
            found += p.matrices * _newton_schulz_flops(p.matrix_shape)
    return float(found)


def _newton_schulz_flops(shape: tuple[int, ...]) -> int:
    m, n = min(shape), max(shape)
    return 5 * (4 * m * m * n + 2 * m**3)


class Work(msgspec.Struct, frozen=True):
    """What a step does, in units that a `Speed` turns into seconds."""

    arithmetic: float
    """Seconds at the device's dense peak."""
    traffic: float
    """Seconds at the device's bandwidth."""
    launches: float
    """Layers of all micro-batches, which run one after the other."""
    coded: float
    """Trained elements whose optimizer state has 8 bits, on a CPU."""
    overlapped: float
    """Seconds of copies that overlap all other work."""
    apart: float
    """Seconds that do not depend on the speed: transfers, pages that the system clears, and what devices exchange."""

    def seconds(self, costs: Speed) -> float:
        work = (
            self.arithmetic / costs.flops_share
            + self.traffic / costs.bandwidth_share
            + self.launches * costs.step_overhead_seconds
            + self.coded * costs.eight_bit_seconds
        )
        return max(work, self.overlapped) + WAITED_SHARE * self.overlapped + self.apart


def step_work(plan: Plan, model: Model, budget: Budget) -> Work:
    """The work of one optimizer step."""
    o, kind = plan.optimize, budget.kind
    peak = peak_flops(budget, o.precision, plan.backend)
    if kind == "cpu" and plan.backend == "torch":
        peak *= _vector_share(o.precision)
    arithmetic = step_flops(plan, model) / peak
    if o.optimizer == "muon":
        update = _orthogonalizing_flops(model, o.lora_rank, frozen_names(plan, model))
        arithmetic += update / peak_flops(budget, "fp32", plan.backend)
    bandwidth = budget.bandwidth_bytes_per_second or GENERIC_BANDWIDTH.get(kind, 1e11)
    traffic = _traffic(plan, model, kind) / bandwidth
    launches = float(o.accumulation_steps * (model.layers + 2))
    apart, overlapped = _moving(plan, model, kind)
    if kind != "cpu":
        apart += _transfers(plan, model)
    elif o.heap == "tight":
        apart += CLEARED * o.accumulation_steps * _passing(plan, model, kind)
    coded = trained_group(plan, model).elements if o.optimizer in EIGHT_BIT and kind == "cpu" else 0
    turns = plan.device.count / devices_at_once(plan, budget)
    compiled = o.compile and COMPILE.refusal(plan, kind=kind) is None
    return Work(
        turns * arithmetic,
        turns * traffic * (0.6 if compiled else 1.0),
        turns * launches * (0.5 if compiled else 1.0),
        turns * coded,
        turns * overlapped,
        turns * apart + exchange_seconds(plan, model, budget),
    )


def step_seconds(plan: Plan, model: Model, budget: Budget) -> float:
    """Estimated seconds of one optimizer step."""
    return step_work(plan, model, budget).seconds(speed(budget.kind, plan.backend))


def seconds_per_unit(plan: Plan, model: Model, budget: Budget) -> float:
    """Estimated seconds of a step, divided by its tokens (or the task's units)."""
    return step_seconds(plan, model, budget) / units_per_step(plan, model)
