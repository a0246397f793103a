"""Compiles the programs of an engine in threads of their own, while the data are read.

Tracing is Python's work, one program after another. XLA compiles without Python's lock, so that one
program is compiled while the next one is traced. Two are never compiled at once: each takes memory,
and XLA has threads of its own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from memconsole_jax import tasks
from memconsole_jax.compiled.offload import OffloadedStep
from memconsole_jax.compiled.programs import FusedStep, Programs
from memconsole_jax.tasks.task import Sampler


@dataclass(frozen=True)
class Compiled:
    """The compiled programs of an engine."""

    programs: Programs
    initialize: Any
    train_step: FusedStep | OffloadedStep
    evaluation_step: Any
    sampler: Sampler | None


def begin(programs: Programs) -> Future[Compiled]:
    """Begin to compile. The future returns the programs, or raises the error."""
    pool = ThreadPoolExecutor(1, "tracing")
    future = pool.submit(compile_all, programs)
    pool.shutdown(wait=False)
    return future


def compile_all(programs: Programs) -> Compiled:
    """Compile all programs. The step takes longest and comes first."""
    plan, model = programs.plan, programs.model
    with ThreadPoolExecutor(1, "compiling") as compiler:
        lowered = programs.lower_train()
        train_step = compiler.submit(programs.compiled_step, lowered)
        evaluation_step = compiler.submit(programs.lower_evaluate().compile)
        initialize = compiler.submit(programs.lower_initialize().compile)
        shapes = programs.evaluated_shapes | programs.frozen_shapes
        sampler = tasks.of(plan, model).sampler(plan, model, shapes, programs.sharding)
        if sampler is not None:
            compiler.submit(sampler.prepare(plan.train.sample_tokens)).result()
        return Compiled(
            programs,
            initialize.result(),
            train_step.result(),
            evaluation_step.result(),
            sampler,
        )
