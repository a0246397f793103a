"""Runs the torch engine's own training step, evaluation and checkpoint on fake tensors and records all allocations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memconsole.memory.activations.torch_masks import MASK_ALIGNMENT
from memconsole.memory.activations.torch_timeline import EMBEDDING_FEW
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks import Input, task_for
from memconsole_torch import devices
from memconsole_torch import engine as torch_engine
from memconsole_torch.models import pretrained
from memconsole_torch.techniques.activations import fused_loss
from memconsole_torch.techniques.optimizer import offload
from memconsole_torch.techniques.weights import lora
from memconsole_torch.tracing import trace_devices, trace_distributed, trace_operators
from memconsole_torch.tracing.trace_cache import OperatorCache
from memconsole_torch.tracing.trace_liveness import Liveness, Workspace
from memconsole_trainer.engine import Batch
from memconsole_trainer.techniques import adapters, base_storage

STEPS = 1
"""Number of traced steps. One is enough: optimizer state exists from the start, and each step frees its gradients."""
EVALUATED = 2
"""Micro-batches of the traced evaluation. What the first one leaves in memory counts while the second one runs."""


_CHUNKED = fused_loss.chunked
"""The function itself: `_phases` puts another in its place."""


class TracedSizes:
    """The sizes of a traced step: micro-batch (rows), sequence length, and tokens of a chunk of the loss."""

    def __init__(self, batch: int, length: int, chunk: int = fused_loss.CHUNK_TOKENS) -> None:
        self.batch, self.length, self.chunk = batch, length, chunk


def trace(
    plan: Plan,
    model: Model,
    kind: str = "cpu",
    sizes: TracedSizes | None = None,
    evaluated: TracedSizes | None = None,
    *,
    steps: int = STEPS,
    internal: bool = True,
    check: Callable[[], None] | None = None,
    cached: bool = True,
) -> Liveness:
    """Run `steps` training steps, an evaluation and a checkpoint on fake tensors. The keys of `.peaks` are the phases of the
    memory table.

    `kind` is the kind of device to emulate. `sizes` replace the plan's own, `evaluated` those of its evaluation.
    `internal`: also count what kernels allocate internally. `check` is called before each operator and may raise.
    `cached`: cache the results of each operator by shapes.
    """
    length = plan.data.sequence_length
    evaluated = evaluated or sizes or TracedSizes(plan.evaluation_batch, length)
    sizes = sizes or TracedSizes(plan.train.batch_size, length)
    fake = FakeTensorMode()
    live = _recorder(plan, model, kind, internal, check, OperatorCache(fake) if cached else None)
    micro_batches = plan.optimize.accumulation_steps
    plan = _traced_plan(plan, sizes)
    gc.collect()
    emulated = trace_devices.emulated(kind, aligned=length % MASK_ALIGNMENT == 0)
    with trace_distributed.simulated(plan) as group, emulated, without_data(sizes), fake:
        engine = torch_engine.TorchEngine(plan, torch.device("cpu"), None, group)
        engine._memory = NoMemory()
        with live:
            engine.build(plan, model, 10, NoWeights())
            _declare(live, engine, plan)
            live.start()
            # A CPU holds the rows of the whole step; other devices are sent one micro-batch at a time.
            resident = micro_batches * group.size if kind == "cpu" else 0
            engine._to_device = partial(_to_device, live, resident == 0)  # type: ignore[method-assign]
            inputs = task_for(plan, model).inputs(plan, model)
            with _phases(engine, live), trace_distributed.declared(live):
                for _ in range(steps):
                    _train(engine, live, plan, inputs, resident)
                _evaluate(engine, live, plan, model, evaluated, resident)
            live.phase = "checkpoint"
            trace_distributed.save(engine, kind)
            live.phase = "end"
    live.peaks.pop("end", None)
    return live


def _recorder(
    plan: Plan,
    model: Model,
    kind: str,
    internal: bool,
    check: Callable[[], None] | None,
    run: OperatorCache | None,
) -> Liveness:
    """What records the allocations of the plan's steps on a `kind` of device; see `trace`."""
    vocabulary = model.vocab_size if isinstance(model, Architecture) else 0
    rows_bound = plan.micro_batch_tokens <= vocabulary
    few = plan.micro_batch_tokens <= EMBEDDING_FEW if vocabulary else None
    of_device = trace_operators.overrides() | trace_operators.device_overrides(kind)
    workspaces: dict[Any, Workspace] = {}
    if internal:
        workspaces = trace_operators.workspaces(
            kind, rows_bound, few
        ) | trace_distributed.workspaces(kind)
    return Liveness(
        internal=internal,
        vocabulary=vocabulary,
        overrides=of_device | trace_distributed.OVERRIDES,
        workspaces=workspaces,
        check=check,
        run=run,
    )


def _traced_plan(plan: Plan, sizes: TracedSizes) -> Plan:
    """`plan` on a CPU at the sizes to trace. Two micro-batches show all that more would, and the trace is of what the step
    allocates without a compiler."""
    changes: dict[str, Any] = {
        "device.name": "cpu",
        "data.sequence_length": sizes.length,
        "train.batch_size": sizes.batch,
        "optimize.accumulation_steps": min(2, plan.optimize.accumulation_steps),
        "optimize.compile": False,
    }
    return replace(plan, changes)


def _train(
    engine: Any, live: Liveness, plan: Plan, inputs: tuple[Input, ...], resident: int
) -> None:
    """One training step. `resident`: how many micro-batches of rows are in memory during it."""
    live.phase = "forward"
    start, rows = len(live.events), plan.train.batch_size
    with _rows_in_memory(live, inputs, resident * rows):
        rows *= plan.device.count  # each process is given the rows of all
        engine.train_step(_batch(inputs, plan.optimize.accumulation_steps, rows))
    engine._metrics.clear()
    live.steps.append((start, len(live.events)))


def _evaluate(
    engine: Any, live: Liveness, plan: Plan, model: Model, sizes: TracedSizes, resident: int
) -> None:
    """An evaluation of `EVALUATED` micro-batches of `sizes`. `resident`: as in `_train`."""
    live.phase = "evaluation"
    evaluating = replace(plan, {"data.sequence_length": sizes.length})
    inputs = task_for(evaluating, model).inputs(evaluating, model)
    with _rows_in_memory(live, inputs, resident * sizes.batch), _loss_chunk(sizes):
        engine.evaluate([_batch(inputs, EVALUATED, engine.process_group.size * sizes.batch)])


def _loss_chunk(sizes: TracedSizes) -> AbstractContextManager[Any]:
    """A context in which `fused_loss.chunked` uses the chunk of `sizes`."""
    return patch.object(_CHUNKED, "__defaults__", (sizes.chunk,))


def _batch(inputs: tuple[Input, ...], micro_batches: int, rows: int) -> Batch:
    """Arrays with the shapes that a task names, without padding. They take no memory; `_to_device` makes the tensors."""
    arrays = {}
    for array in inputs:
        one = np.ones((), np.dtype(array.dtype))
        arrays[array.name] = np.broadcast_to(one, (micro_batches, rows, *array.shape))
    return Batch(arrays, 1.0)


@contextmanager
def _rows_in_memory(live: Liveness, inputs: tuple[Input, ...], rows: int) -> Iterator[None]:
    """A context in which `rows` rows of every array are live."""
    releases = [live.allocate(rows * array.row_bytes, "data") for array in inputs if rows]
    yield
    for release in releases:
        release()


def _to_device(live: Liveness, counted: bool, array: Any) -> torch.Tensor:
    """The tensor of one array of a micro-batch. Unless `counted`, its bytes are those of `_rows_in_memory`."""
    tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    if counted:
        live.declare(tensor, "data")
    else:
        live.ignore(tensor)
    return tensor


def _declare(live: Liveness, engine: Any, plan: Plan) -> None:
    """Assign weights, their average and optimizer state to their components."""
    away = plan.optimize.optimizer_offload != "none" and not offload.same_memory(engine._device)
    for weight in (*engine.module.parameters(), *engine.module.buffers()):
        live.declare(trace_distributed.local_part(weight), "weights")
    for _, tensor in engine._average.named() if engine._average is not None else ():
        live.declare(tensor, "optimizer state")
    for state in engine._optimizer.state.values():
        for name, value in state.items():
            if away and name != "step":
                live.ignore(value)  # it waits in host memory
            elif isinstance(value, torch.Tensor):
                live.declare(value, "optimizer state")


@contextmanager
def _phases(engine: Any, live: Liveness) -> Iterator[None]:
    """A context that records the phases as the engine enters them, and declares the gradients once they exist."""
    backward, step, loss = torch.Tensor.backward, engine._optimizer.step, engine.task.criterion
    forward, chunked = engine.module.forward, fused_loss.chunked

    def in_phase(phase: str, function: Callable[..., Any], after: str) -> Callable[..., Any]:
        """`function`, which runs in `phase`; phase `after` follows. An evaluation is one phase."""

        def run(*arguments: Any, **options: Any) -> Any:
            if live.phase != "evaluation":
                live.phase = phase
            try:
                return function(*arguments, **options)
            finally:
                if live.phase != "evaluation":
                    live.phase = after

        return run

    def in_loss(function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose allocations belong to the loss."""

        def run(*arguments: Any, **options: Any) -> Any:
            live.within = "logits and loss"
            try:
                return function(*arguments, **options)
            finally:
                live.within = None

        return run

    def backward_and_declare(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        for parameter in engine._trained:
            if parameter.grad is not None:
                live.declare(parameter.grad, "gradients")

    with ExitStack() as stack:
        change = stack.enter_context
        change(patch.object(engine.module, "forward", in_phase("forward", forward, "forward")))
        if engine.process_group.size > 1:  # weights are gathered before the module is called
            begun = in_phase("forward", engine.task.loss, "loss")
            change(patch.object(engine.task, "loss", begun))
        run = in_phase("backward", backward_and_declare, "optimizer step")
        change(patch.object(torch.Tensor, "backward", run))
        change(
            patch.object(
                engine._optimizer, "step", in_phase("optimizer step", step, "optimizer step")
            )
        )
        change(patch.object(engine.task, "criterion", in_loss(in_phase("loss", loss, "loss"))))
        change(patch.object(fused_loss, "chunked", in_loss(chunked)))
        yield


@contextmanager
def without_data(sizes: TracedSizes) -> Iterator[None]:
    """A context in which no weights are initialized and no values are read, because a trace needs only shapes."""
    with ExitStack() as stack:
        change = stack.enter_context
        change(patch.object(torch.nn.Module, "to_empty", _to_empty))
        change(patch.object(pretrained, "copy_into", lambda *_: None))
        change(patch.object(adapters, "Fingerprinted", _NoFingerprint))
        change(patch.object(lora, "parts", lambda *_: ()))
        change(patch.object(base_storage, "parts", lambda *_: ()))
        change(patch.object(lora, "InitialAdapters", NoWeights))
        change(patch.object(torch.Tensor, "tolist", lambda t: [0.0] * t.numel()))
        change(_loss_chunk(sizes))
        yield


def _to_empty(module: torch.nn.Module, *, device: torch.device) -> None:
    """Replaces `Module.to_empty`, which cannot swap one fake tensor for another. This allocates shards only."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                empty = trace_distributed.empty_like(p, device)
                part._parameters[name] = torch.nn.Parameter(empty, requires_grad=p.requires_grad)
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device=device)


class NoWeights:
    """A source of weights that has none."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def tensor(self, name: str) -> Any:
        return None


class _NoFingerprint(NoWeights):
    def fingerprint(self) -> None:
        return None


class NoMemory(devices.DeviceMemory):
    """Measures nothing."""

    def __init__(self) -> None:
        pass

    def start(self) -> None:
        pass

    def observe(self) -> None:
        pass
