"""Computes outputs and gradients of a model, for comparing backends."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole_jax import tasks
from memconsole_jax.compiled.step import mean_gradients
from memconsole_jax.layout.stacking import stacks
from memconsole_trainer.engine import Array, Batch, WeightSource


def outputs(model: Model, weights: WeightSource, arrays: Mapping[str, Array]) -> Array:
    """The model's outputs, float32, for the arrays of one micro-batch."""
    stored = {n: jnp.asarray(s.gather(weights.tensor)) for n, s in stacks(model).items()}
    task, own = tasks.of(Plan(), model), {n: jnp.asarray(x) for n, x in arrays.items()}
    return np.array(jax.jit(lambda *found: task.outputs(Plan(), model, *found))(stored, own))


def logits(
    architecture: Architecture, weights: WeightSource, tokens: Array, documents: Array | None = None
) -> Array:
    """Float32 logits (B, T, V) of tokens (B, T)."""
    arrays = {"inputs": tokens} | ({} if documents is None else {"documents": documents})
    found = {name: np.asarray(array, np.int32) for name, array in arrays.items()}
    return outputs(architecture, weights, found)


def gradients(model: Model, weights: WeightSource, batch: Batch) -> dict[str, Array]:
    """Gradients of the batch's mean loss in float32, by canonical name."""
    found, task = stacks(model), tasks.of(Plan(), model)
    arrays = {n: jnp.asarray(s.gather(weights.tensor)) for n, s in found.items()}
    trained = {n: x for n, x in arrays.items() if found[n].used}
    kept = {n: x for n, x in arrays.items() if not found[n].used}
    loss = task.loss(Plan(), model)
    run = jax.jit(lambda *arguments: mean_gradients(task, loss, *arguments)[1])
    result = run(trained, kept, {n: jnp.asarray(x) for n, x in batch.arrays.items()})
    return {c: row for n, x in result.items() for c, row in found[n].split(np.array(x))}
