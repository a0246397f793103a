"""Every memory optimization: its toggle, what it does, and which backends and devices train with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from memconsole.plan import plan as plans
from memconsole.plan.architecture import Architecture
from memconsole.plan.conflicts import check_conflicts
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.tasks import task_of

"""cpu | gpu (NVIDIA) | rocm (AMD) | apple | tpu"""


class Optimization(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the console's list.

    `values` are the settings a key press steps through, in order; `changes` turns one of them into
    plan settings. `trains` names, per backend, the values its engine really implements: the others
    can be priced, not launched.
    """

    key: str
    label: str
    help: str
    costs: str
    values: Callable[[Plan], tuple[Any, ...]]
    trains: dict[str, tuple[Any, ...] | None]
    """Per backend, the values it implements; None means all. A missing backend implements only
    the first (plain) value."""
    absent: dict[str, str] = {}
    """Per backend, why the toggle does nothing there."""
    changes: Callable[[Plan, Any], dict[str, Any]] | None = None
    current: Callable[[Plan], Any] | None = None
    size: bool = False
    """A size rather than a technique: every backend trains with any of its values."""

    def value(self, plan: Plan) -> Any:
        """The toggle's present value."""
        return self.current(plan) if self.current else plans.get(plan, self.key)

    def apply(self, plan: Plan, value: Any) -> Plan:
        """`plan` with this toggle at `value`."""
        changes = self.changes(plan, value) if self.changes else {self.key: value}
        return plans.replace(plan, changes)

    def press(self, plan: Plan, value: Any) -> Plan:
        """The same. Raises `PlanError` where another optimization of the plan excludes it."""
        changed = self.apply(plan, value)
        check_conflicts(changed)
        return changed

    def next_value(self, plan: Plan) -> Any:
        """What one key press selects: the following value, the first after the last."""
        values = self.values(plan)
        present = self.value(plan)
        return values[(values.index(present) + 1) % len(values)] if present in values else values[0]

    def refusal(self, plan: Plan, value: Any | None = None) -> str | None:
        """Why `plan.backend` cannot train with `value` (default: the plan's), or None if it can."""
        chosen = self.value(plan) if value is None else value
        absent = task_of(plan).not_applicable(plan).get(self.key)
        if absent is not None and chosen != self.value(plan):
            return absent
        plain = self.values(plan)[0]
        if chosen == plain or self.size:
            return None
        if plan.backend in self.absent:
            return self.absent[plan.backend]
        implemented = self.trains.get(plan.backend, (plain,))
        if implemented is None or chosen in implemented:
            return None
        return (
            f"{self.label} = {chosen}: priced here, not yet trained by the {plan.backend} backend"
        )


def _fixed(*values: Any) -> Callable[[Plan], tuple[Any, ...]]:
    return lambda plan: values


def _accumulation_values(plan: Plan) -> tuple[Any, ...]:
    rows = plan.train.batch_size * plan.optimize.accumulation_steps
    steps = tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if rows % n == 0 and n <= rows)
    present = plan.optimize.accumulation_steps
    return steps if present in steps else tuple(sorted({*steps, present}))


def _keep_effective_batch(plan: Plan, steps: int) -> dict[str, Any]:
    rows = plan.train.batch_size * plan.optimize.accumulation_steps
    return {"optimize.accumulation_steps": steps, "train.batch_size": max(1, rows // steps)}


def _length_values(plan: Plan) -> tuple[Any, ...]:
    """Usual lengths, up to what a model with learned positions can hold."""
    from memconsole.plan import catalog

    present = plan.data.sequence_length
    lengths = {64, 128, 256, 512, 1024, 2048, 4096}
    try:
        model = catalog.model(plan)
    except PlanError:
        return tuple(sorted({*lengths, present}))
    if not isinstance(model, Architecture) or model.positions == "learned":
        lengths = {n for n in lengths if n <= model.max_positions}
    return tuple(sorted({*lengths, present}))


def _batch_values(plan: Plan) -> tuple[Any, ...]:
    return tuple(sorted({1, 2, 4, 8, 16, 32, 64, 128, plan.train.batch_size}))


def _buffer_values(plan: Plan) -> tuple[Any, ...]:
    return tuple(sorted({1_000, 5_000, 10_000, 50_000, 100_000, plan.data.shuffle_buffer}))


def _stride_values(plan: Plan) -> tuple[Any, ...]:
    """Rows side by side, then rows that share a half and three quarters with the one before."""
    length = plan.data.sequence_length
    return _none_or({length // 2, length // 4}, plan.data.stride)


def _limit_values(plan: Plan) -> tuple[Any, ...]:
    return _none_or({1_000, 10_000, 50_000, 100_000}, plan.data.max_examples)


def _evaluation_values(plan: Plan) -> tuple[Any, ...]:
    return _none_or({1, 4, 16, 64}, plan.train.evaluation_batch_size)


def _none_or(numbers: set[int], present: int | None) -> tuple[Any, ...]:
    return (None, *sorted(numbers if present is None else {*numbers, present}))


def _lora_changes(plan: Plan, rank: int) -> dict[str, Any]:
    return {"optimize.lora_rank": rank, "optimize.freeze_base": rank > 0}


EVERYWHERE: dict[str, tuple[Any, ...] | None] = {"torch": None, "jax": None}

OPTIMIZATIONS: tuple[Optimization, ...] = (
    Optimization(
        key="optimize.precision",
        label="mixed precision",
        help="compute in 16 bits: weights stay fp32 (bf16; fp16 with loss scaling) or are bf16, stochastically rounded (-sr)",
        costs="rounding; slower on CPUs without 16-bit instructions",
        values=_fixed("fp32", "bf16", "fp16", "bf16-sr"),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="optimize.gradient_checkpointing",
        label="gradient checkpointing (remat)",
        help="keep only block inputs (full), with attention (attention) and matmuls (selective); recompute the rest",
        costs="time to compute it again",
        values=_fixed("none", "selective", "attention", "full"),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="optimize.accumulation_steps",
        label="gradient accumulation",
        help="smaller micro-batches, the same effective batch",
        costs="gradients held meanwhile; small matmuls",
        values=_accumulation_values,
        trains=EVERYWHERE,
        changes=_keep_effective_batch,
    ),
    Optimization(
        key="optimize.optimizer",
        label="optimizer",
        help="bytes of state per parameter: adamw 8, 8-bit 2 (blocks; -all: embedding, head too), lion, sgd, muon's matrices 4, adafactor none",
        costs="other update rules train differently; 8-bit embeddings less stably",
        values=_fixed("adamw", "adamw-8bit", "adamw8-all", "adafactor", "lion", "muon", "sgd"),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="optimize.fused_loss",
        label="chunked cross-entropy",
        help="head and loss in chunks of tokens: the full logits never exist",
        costs="the head's gradients are made in the forward pass, chunk by chunk",
        values=_fixed(False, True),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="optimize.lora_rank",
        label="LoRA adapters on a frozen base",
        help="train low-rank adapters only; no gradient or state for the base",
        costs="fewer trainable parameters",
        values=_fixed(0, 8, 16, 64),
        trains=EVERYWHERE,
        changes=_lora_changes,
    ),
    Optimization(
        key="optimize.optimizer_offload",
        label="optimizer offload",
        help="optimizer state waits in host memory, and visits the device a weight at a time",
        costs="two transfers each step; pinned ones run beside the updates; compressed: state in 16 bits",
        values=_fixed("none", "cpu", "pinned", "compressed"),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="optimize.activation_offload",
        label="activation offload",
        help="what blocks keep waits in pinned host memory, of a CPU or Apple GPU on disk; with full checkpointing only inputs",
        costs="transfers in both passes",
        values=_fixed(False, True),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="optimize.sharding",
        label="FSDP sharding",
        help="weights, gradients and state split over the devices",
        costs="gathers each block",
        values=_fixed("none", "fsdp"),
        trains={},
    ),
    Optimization(
        key="optimize.compile",
        label="torch.compile",
        help="fuse kernels; fewer temporaries",
        costs="compilation before the first step, and its compiler in host memory",
        values=_fixed(False, True),
        trains={"torch": None},
        absent={"jax": "the JAX step is always compiled by XLA"},
    ),
    Optimization(
        key="optimize.optimizer_in_backward",
        label="optimizer in backward",
        help="each weight is updated as soon as its gradient is there, which then goes",
        costs="no accumulation and no clipping by the global norm",
        values=_fixed(False, True),
        trains={"torch": None},
        absent={
            "jax": "not in JAX: a step is one program without hooks, and XLA decides when each update runs"
        },
    ),
    Optimization(
        key="optimize.base_storage",
        label="quantized frozen base (QLoRA)",
        help="a frozen base's matrices in int8 or nf4 codes, made whole one at a time",
        costs="rounding of the base; decoding it in both passes",
        values=_fixed("bf16", "int8", "nf4"),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="train.batch_size",
        label="micro-batch",
        help="rows on the device at a time",
        costs="changes the effective batch",
        values=_batch_values,
        trains=EVERYWHERE,
        size=True,
    ),
    Optimization(
        key="train.evaluation_batch_size",
        label="evaluation batch",
        help="rows on the device at a time while it evaluates; none: as many as a micro-batch",
        costs="small ones evaluate slower",
        values=_evaluation_values,
        trains=EVERYWHERE,
        size=True,
    ),
    Optimization(
        key="data.sequence_length",
        label="sequence length",
        help="tokens per row",
        costs="shorter context",
        values=_length_values,
        trains=EVERYWHERE,
        size=True,
    ),
    Optimization(
        key="data.stride",
        label="stride of rows",
        help="tokens between the starts of two rows; none: a whole row, so that none overlap",
        costs="overlapping rows make epochs longer",
        values=_stride_values,
        trains=EVERYWHERE,
        size=True,
    ),
    Optimization(
        key="data.isolate_documents",
        label="isolated documents",
        help="documents packed into one row do not see one another: positions begin anew, attention is block-diagonal",
        costs="torch masks every row; each document learns from its own tokens alone",
        values=_fixed(False, True),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="data.streaming",
        label="streaming data",
        help="tokenize on the fly; only the shuffle buffer is in memory",
        costs="tokenizing each epoch",
        values=_fixed(True, False),
        trains=EVERYWHERE,
    ),
    Optimization(
        key="data.shuffle_buffer",
        label="shuffle buffer",
        help="rows held to be shuffled when streaming",
        costs="small buffers shuffle less",
        values=_buffer_values,
        trains=EVERYWHERE,
        size=True,
    ),
    Optimization(
        key="data.max_examples",
        label="dataset limit",
        help="only the first documents of the dataset; none: all",
        costs="less to learn from",
        values=_limit_values,
        trains=EVERYWHERE,
        size=True,
    ),
)

BY_KEY: dict[str, Optimization] = {row.key: row for row in OPTIMIZATIONS}


def check_trainable(plan: Plan) -> None:
    """Raise `PlanError` if the plan's combination cannot be trained, naming key and reason."""
    for row in OPTIMIZATIONS:
        reason = row.refusal(plan)
        if reason:
            raise PlanError(f"{row.key} = {row.value(plan)}: {reason}", row.key)
    if plan.device.count > 1:
        raise PlanError(
            f"device.count = {plan.device.count}: runs use one device; larger counts are for planning",
            "device.count",
        )
