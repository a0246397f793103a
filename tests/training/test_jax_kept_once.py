"""What the JAX engine's backward pass waits for is there once, and no sooner than it is needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models

from memconsole.plan.plan import Plan, replace
from memconsole_jax import target
from memconsole_jax.decoder import looked_up
from memconsole_jax.fused_loss import MASKED, plain_nats
from memconsole_jax.programs import Programs
from memconsole_jax.step import summed_loss

RANDOM = np.random.default_rng(0)


def test_looking_rows_up_has_the_gradient_of_indexing() -> None:
    table = RANDOM.normal(size=(11, 5)).astype(np.float32)
    indices = np.array([[3, 3, 0], [10, 3, 7]])
    weights = RANDOM.normal(size=(2, 3, 5)).astype(np.float32)
    found = jax.grad(lambda t: jnp.sum(looked_up(t, indices) ** 2 * weights))(table)
    expected = jax.grad(lambda t: jnp.sum(t[indices] ** 2 * weights))(table)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.abs(found[3]).max() > 0
    assert np.abs(found[1]).max() == 0


def test_a_padded_head_changes_neither_the_loss_nor_its_gradients() -> None:
    hidden = RANDOM.normal(size=(2, 3, 4)).astype(np.float32)
    head = RANDOM.normal(size=(37, 4)).astype(np.float32)  # no multiple of 16
    targets = np.array([[36, 0, MASKED], [5, 36, 12]])

    def loss(*x: Any) -> Any:
        return jax.value_and_grad(lambda h, w: plain_nats(h, w, targets), argnums=(0, 1))(*x)

    expected = loss(hidden, head)
    with target.absent("gpu"):
        widths = {v.aval.shape[-1:] for v in _values(jax.make_jaxpr(loss)(hidden, head).jaxpr)}
        found = loss(hidden, head)
    assert (48,) in widths  # it was padded
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)


def test_the_output_of_fused_attention_is_kept_in_one_shape_only() -> None:
    """Joined heads beside split ones would be a second copy of every layer's."""
    architecture = tiny_models.ARCHITECTURES["llama"]
    plan = replace(
        Plan(),
        {
            "backend": "jax",
            "train.batch_size": 3,
            "data.sequence_length": 24,
            "optimize.precision": "bf16",
        },
    )
    a, (b, t) = architecture, (3, 24)
    with target.absent("gpu"):
        programs = Programs.of(plan, a, "gpu", jax.devices()[0])
        loss = summed_loss(plan, a, chunked=False)
        rows = programs.row_shape
        program = jax.make_jaxpr(jax.grad(loss))(programs.trained_shapes, {}, rows, rows, None)
    forward = next(
        e for e in program.jaxpr.eqns if e.primitive.name == "scan" and not e.params["reverse"]
    )
    stacked = [v.aval.shape for v in forward.outvars]
    assert (a.layers, b, t, a.heads, a.head_size) in stacked
    assert a.query_width != a.hidden_size
    assert (a.layers, b, t, a.query_width) not in stacked


def _values(jaxpr: Any) -> list[Any]:
    return [v for e in jaxpr.eqns for v in e.outvars]
