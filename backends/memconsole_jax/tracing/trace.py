"""The tracer process of the JAX backend: questions on standard input, XLA's own memory plan on standard output.

    python -m memconsole_jax.tracing.trace

The engine's programs are lowered from shapes alone and compiled for the device in question, which need not be present:
nothing is allocated and nothing runs. For several devices, the numbers are those of one device.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any

import jax
import msgspec

from memconsole.memory.exact.timeline import Exact, ExactPhase, TracerAnswer, TracerQuestion
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.plan_file import loads
from memconsole.plan.processes import nodes
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_jax import target as compile_target
from memconsole_jax.compiled.offload import Lowered
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.tracing import trace_targets
from memconsole_jax.tracing.trace_targets import Target
from memconsole_jax.tracing.trace_verdict import is_out_of_memory, needed_bytes
from memconsole_trainer import tracing

STEP = "backward"
"""The phase under which the one number of the whole step is stored."""


def answer(question: TracerQuestion, interrupt: tracing.Interrupt) -> TracerAnswer:
    """XLA's memory plan of the question's plan, or why there is none."""
    started = time.monotonic()
    try:
        plan = loads(question.plan)
        check(plan)
        check_trainable(plan, question.kind)
        target = trace_targets.target(
            question.target, question.kind, plan.device.count, nodes(plan)
        )
        exact = planned(plan, catalog.model(plan), target, interrupt)
    except PlanError as error:
        return TracerAnswer(id=question.id, problem=str(error))
    seconds = time.monotonic() - started
    return TracerAnswer(id=question.id, exact=msgspec.structs.replace(exact, seconds=seconds))


def planned(
    plan: Plan,
    model: Model,
    target: Target,
    interrupt: tracing.Interrupt = lambda: None,
) -> Exact:
    """What the compiler plans for one training step and one evaluation batch. Raises `PlanError`."""
    if target.is_absent:
        with compile_target.absent(target.kind):
            return _planned(plan, model, target, interrupt)
    return _planned(plan, model, target, interrupt)


def _planned(plan: Plan, model: Model, target: Target, interrupt: tracing.Interrupt) -> Exact:
    programs = Programs.of(plan, model, target.kind, target.devices)
    state = 0 if programs.keeps_state_on_host else _bytes(programs.state_shapes)
    lasting = {
        "weights": _bytes(programs.trained_shapes) + _bytes(programs.frozen_shapes),
        "optimizer state": state + _bytes(programs.average_shapes),
    }
    batch = _bytes(programs.arrays(*programs.batch_axes))
    evaluation_batch = _bytes(programs.arrays(plan.evaluation_batch))
    source = f"{target.compiler}, for {target.name}"
    step = _step(programs, target, interrupt)
    phases = {
        STEP: ExactPhase(total_bytes=step.needed, components={**lasting, "data": batch}),
        "checkpoint": ExactPhase(total_bytes=sum(lasting.values()), components=lasting),
    }
    if step.refused:
        return Exact(
            phases=phases,
            program_phase=STEP,
            source=source,
            caveat=target.caveat,
            out_of_memory=True,
        )
    interrupt()
    # Neither the optimizer's state nor, if their average is evaluated, the weights are arguments of the evaluation, but they
    # stay allocated meanwhile.
    weights = programs.trained_shapes if programs.average_shapes else ()
    evaluation = _compiled(programs.lower_evaluate(), target)
    phases["evaluation"] = ExactPhase(
        total_bytes=evaluation.needed + state + _bytes(weights),
        components={**lasting, "data": evaluation_batch},
    )
    return Exact(
        phases=phases,
        program_phase=STEP,
        host_bytes=step.host,
        source=source,
        caveat=target.caveat,
        out_of_memory=evaluation.refused,
    )


def _step(
    programs: Programs, target: Target, interrupt: tracing.Interrupt = lambda: None
) -> Needed:
    """The memory that an optimizer step needs, whether it is one program or several."""
    lowered = programs.lower_train()
    if not programs.keeps_state_on_host:
        return _compiled(lowered, target)
    assert isinstance(lowered, Lowered)
    averages = _bytes(programs.average_shapes)
    backward = _compiled(lowered.gradients, target)
    largest = backward.needed + averages
    lasting = backward.arguments + averages  # gradients are its outputs
    layout, refused = lowered.layout, backward.refused
    fetched: dict[str, int] = {}
    """By weight: most bytes of the state that is fetched while this weight is updated."""
    for layer, following in pairwise(layout.layers):
        fetched[layer.name] = max(fetched.get(layer.name, 0), layout.bytes_of(following))
    for name, update in lowered.updates.items():
        interrupt()
        program = _compiled(update, target)
        own = 2 * _bytes(programs.trained_shapes[name])  # weights and gradients
        own += _bytes((programs.average_shapes or {}).get(name))
        largest = max(largest, lasting + program.needed - own + fetched.get(name, 0))
        refused |= program.refused
    host = backward.host + _bytes(programs.state_shapes)
    return Needed(largest, host, backward.arguments, refused)


class Needed(msgspec.Struct, frozen=True):
    """Bytes of one program on its device and in host memory."""

    needed: int
    host: int = 0
    arguments: int = 0
    """The part of `needed` that is allocated before and after the program as well."""
    refused: bool = False
    """Whether the compiler says that the program does not fit."""


def _compiled(lowered: Any, target: Target) -> Needed:
    """Compile a program. The bytes it needs are arguments, outputs that do not reuse arguments, and temporaries. On a CPU
    and a GPU, XLA reserves one arena for the temporaries. On a TPU, its count of temporaries includes buffers in vector
    memory, each with room of its own; there the most bytes live at once are used instead."""
    try:
        compiled = lowered.compile(compiler_options=dict(target.options) or None)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        needed = needed_bytes(message) if is_out_of_memory(message) else None
        if needed is None:
            first = message.strip().splitlines()[0][:300]
            raise PlanError(f"XLA cannot compile this for {target.name}: {first}") from error
        return Needed(needed, refused=True)
    m = compiled.memory_analysis()
    if m is None:
        raise PlanError(f"XLA reports no memory plan for {target.name}")
    lasting = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    needed = m.peak_memory_in_bytes if target.kind == "tpu" else lasting + m.temp_size_in_bytes
    host = (
        m.host_argument_size_in_bytes
        + m.host_output_size_in_bytes
        - m.host_alias_size_in_bytes
        + m.host_temp_size_in_bytes
    )
    return Needed(needed, host, lasting)


def _bytes(shapes: Any) -> int:
    """The bytes of arrays of these shapes on each device."""
    shards = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(shapes))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def main() -> None:
    trace_targets.prepare_environment()
    tracing.run(answer)


if __name__ == "__main__":
    main()
