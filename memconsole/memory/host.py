"""Host memory of the trainer's process tree: framework, data, and what is offloaded from the device."""

from __future__ import annotations

from collections.abc import Iterable

from memconsole.memory.activations.jax_packing import forward_library_bytes, library_bytes
from memconsole.memory.activations.kept import kept_by_blocks
from memconsole.memory.activations.tiles import computes_in_tiles
from memconsole.memory.coefficients import Heap, Runtime
from memconsole.memory.state.data import (
    data_bytes,
    held_out_bytes,
    table_bytes,
    waiting_bytes,
)
from memconsole.memory.state.saving import SHARD_BYTES
from memconsole.memory.state.step_sizes import Moment, StepSizes
from memconsole.memory.table import HostBytes
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole.plan.processes import devices_of_each
from memconsole.plan.training.compiler import imports_compiler

OF_MORE_ROWS = 0.85
"""The share of the bytes that an evaluation frees which the heap keeps if it has many more rows than a step. Of nine plans
in torch with 32 to 256 rows in an evaluation and 1 to 16 in a step, each evaluated four times or more, the estimated peaks
are 20 % under to 27 % over the measured ones, which are 99 to 435 MiB. With the heap of a step they were up to 42 % under."""


def runtime_bytes(step: StepSizes, costs: Runtime) -> int:
    """The framework's own bytes in addition to tensors."""
    kernels = costs.kernels_16_bytes if step.compute == 2 else 0
    library = costs.library_bytes
    if isinstance(step.model, Architecture):
        library = library_bytes(step) if step.plan.backend == "jax" else 0
    return costs.workspace_bytes + kernels + library


def fewer_in_passes(step: StepSizes, rows: int) -> int:
    """How many bytes less `runtime_bytes` is for a forward pass of `rows` rows than for a step."""
    if step.plan.backend != "jax" or not isinstance(step.model, Architecture):
        return 0
    return library_bytes(step) - forward_library_bytes(step, rows)


def returns_pages(step: StepSizes, costs: Runtime) -> bool:
    """Whether the trainer returns the heap's free pages to the system before it evaluates or saves."""
    return step.kind == "cpu" and costs.settled_bytes is not None


def settled_bytes(
    step: StepSizes, costs: Runtime, moment: Moment, heap: int, step_peak: int
) -> int:
    """Bytes of the framework and the heap of a CPU while a run evaluates or saves, in addition to the tensors of `moment`,
    if the trainer has returned free pages before. `heap`: freed bytes that the heap keeps while the run trains. What a
    step left cannot make more than `step_peak`, the peak of a step with framework and heap."""
    left = min(costs.settled_bytes or 0, max(step_peak - moment.total, runtime_bytes(step, costs)))
    left += costs.kernels_16_bytes if step.compute == 2 else 0
    if moment.phase == "evaluation":
        left += evaluation_heap(step, costs, moment, heap)
    return left


def evaluation_heap(step: StepSizes, costs: Runtime, moment: Moment, heap: int) -> int:
    """Freed bytes that the heap of a CPU keeps while a run evaluates; `heap`: while it trains. An evaluation of a decoder
    leaves at most the bytes that it frees, and `OF_MORE_ROWS` of them if it has many more rows than a step; evaluations of
    other models have many more rows than a step."""
    freed = moment.activations + moment.logits + moment.workspace
    own = _heap(step, costs)
    if own is None or not own.evaluation:
        return min(heap, freed)
    if not isinstance(step.model, Architecture):
        return int(own.evaluation * freed)
    more = step.plan.evaluation_batch / step.plan.train.batch_size
    return int(max(min(heap, freed), min(more * heap, OF_MORE_ROWS * freed)))


def heap_spread(step: StepSizes, costs: Runtime, kept: int) -> tuple[int, int]:
    """How many bytes less and more than `kept` the heap of a CPU may keep. They vary with the order in which gaps are
    filled."""
    own = _heap(step, costs)
    low, high = own.range if own is not None else (1.0, 1.0)
    return int((1 - low) * kept), int((high - 1) * kept)


def compiler_bytes(plan: Plan, costs: Runtime) -> int:
    """Host bytes that torch.compile takes in the trainer."""
    return costs.compiler_bytes if plan.optimize.compile else 0


def heap_bytes(step: StepSizes, costs: Runtime, largest: Iterable[Moment]) -> int:
    """Bytes that the heap of a CPU usually keeps of freed memory in a step; `largest` are its largest moments."""
    heap = _heap(step, costs)
    if heap is None:
        return 0
    found, kept = tuple(largest), 0.0
    if heap.step:  # weights and optimizer state are never freed
        lasting = step.weights + step.state.resident
        kept += heap.step * max(0, max(m.total for m in found) - lasting)
    if isinstance(step.model, Architecture):
        kept += heap.logits * max(m.logits for m in found)
    kept += _of_blocks(step, heap)
    return int(kept)


def trimmed_heap(step: StepSizes, costs: Runtime, heap: int) -> int:
    """Bytes that the heap of a CPU keeps in warmup and full phases of a hybrid run. `heap`: what it keeps in a plain
    run."""
    own = _heap(step, costs)
    return heap if own is None else int(own.trimmed * heap)


def heap_of_passes(step: StepSizes, costs: Runtime, heap: int, freed: int) -> int:
    """Bytes that the heap of a CPU keeps while only forward passes run, if it kept nothing before. `heap`: what it keeps in
    a step; `freed`: what a pass allocates and frees, which is the most that it leaves."""
    own = _heap(step, costs)
    if own is None:
        return 0
    return int(own.step * freed) if own.step else min(heap, freed)


def _heap(step: StepSizes, costs: Runtime) -> Heap | None:
    return costs.heaps.get(step.plan.optimize.heap) if step.kind == "cpu" else None


def _of_blocks(step: StepSizes, heap: Heap) -> float:
    """Freed bytes that the heap keeps because of the activations that blocks keep for the backward pass."""
    share = heap.activations_frozen if step.frozen_blocks else heap.activations
    if not share:
        return 0.0
    blocks = kept_by_blocks(step.plan, step.model, step.flow, "none", step.kind)
    return share * blocks * step.tokens


def saved_bytes(step: StepSizes) -> int:
    """Bytes of host copies while a checkpoint is written: one shard each of weights, optimizer state and averaged
    weights. On a CPU the tensors are written without a copy."""
    if step.kind == "cpu":
        return 0
    weights = 4 * step.trained.elements if step.frozen else step.weights
    kinds = (weights, step.state.resident - step.state.average, step.state.average)
    return sum(min(size, SHARD_BYTES) for size in kinds)


def offloaded_activations(step: StepSizes) -> int:
    """Bytes of activations in the trainer's host memory. A CPU and an Apple GPU move them to disk."""
    plan, model = step.plan, step.model
    if not plan.optimize.activation_offload or step.kind in ("cpu", "apple"):
        return 0
    tiled = isinstance(model, Architecture) and computes_in_tiles(plan, model, step.tokens)
    mode = plan.optimize.gradient_checkpointing
    kept = kept_by_blocks(plan, model, step.flow, mode, step.kind, tiled=tiled)
    return kept * step.tokens * devices_of_each(plan)


def host_of(step: StepSizes, costs: Runtime, on_host: int) -> HostBytes:
    """Resident memory of the idle trainer with its data, and in addition what the run holds while it trains: offloaded
    optimizer state and activations, and `on_host` bytes of tensors if the device is the CPU."""
    plan, model = step.plan, step.model
    idle = costs.host_bytes
    if isinstance(model, Architecture):
        idle += data_bytes(plan, model.vocab_size) + table_bytes(plan)
    else:
        idle += waiting_bytes(plan, model) + held_out_bytes(plan, model) - costs.text_bytes
    if imports_compiler(plan):
        idle += costs.compiler_import_bytes
    return HostBytes(
        idle + step.state.host + offloaded_activations(step) + on_host,
        idle + costs.compiling_bytes,
        costs.compiler_code_bytes,
    )
