"""The optimizers that a plan can name, as Optax transformations without the learning rate.

``new = old - rate · update``: the rate is an argument of the training step. Weight decay is
decoupled (Loshchilov and Hutter 2019) and applies to `Parameter.decays` only. With SGD it is added
to the gradient, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import EIGHT_BIT
from memconsole.plan.training.recipe import weight_decay
from memconsole_jax import target
from memconsole_jax.layout.stacking import stacked
from memconsole_jax.techniques.optimizer.apollo import Settings, scale_by_apollo_mini
from memconsole_jax.techniques.optimizer.compressed import Place, compressed
from memconsole_jax.techniques.optimizer.muon import scale_by_muon
from memconsole_jax.techniques.optimizer.quantized_adam import scale_by_quantized_adam
from memconsole_jax.techniques.optimizer.slices import in_slices
from memconsole_jax.techniques.optimizer.trees import Tree, divided
from memconsole_trainer.techniques.adapters import trained_parameters
from memconsole_trainer.techniques.apollo import is_projected
from memconsole_trainer.techniques.blockwise import is_quantized
from memconsole_trainer.techniques.compressed import is_compressed
from memconsole_trainer.techniques.muon import is_orthogonalized


class Part(NamedTuple):
    """One layer (1, …) of a stack, or a whole weight outside the layers."""

    name: str
    layer: jax.Array


def transformation(
    plan: Plan, model: Model, part: Part | None = None
) -> optax.GradientTransformation:
    """The update rule of `optimize.optimizer` over stacked arrays, or of a part of one."""
    t, name = plan.train, plan.optimize.optimizer
    trained = list(stacked(trained_parameters(plan, model)).values())
    if part is not None:
        trained = [s for s in trained if s.name == part.name]
    decays = {s.name: s.decays for s in trained}
    layered = {s.name for s in trained if s.layered}
    share = weight_decay(plan)
    decay = optax.add_decayed_weights(share, mask=decays) if share else optax.identity()
    kept = _compressed(plan, model, part) if is_compressed(plan) else _as_it_is
    if name == "adamw":
        return optax.chain(kept(optax.scale_by_adam(t.beta1, t.beta2, t.epsilon)), decay)
    if name in EIGHT_BIT:
        narrow = {s.name: s.layered for s in trained if is_quantized(name, s.members[0])}
        rule = scale_by_quantized_adam(t.beta1, t.beta2, t.epsilon, narrow)
        return optax.chain(rule, decay)
    if name == "muon":
        matrices = {
            s.name: s.members[0].matrix_shape for s in trained if is_orthogonalized(s.members[0])
        }
        rest = optax.scale_by_adam(t.beta1, t.beta2, t.epsilon)
        return optax.chain(kept(scale_by_muon(matrices, rest)), decay)
    if name == "apollo-mini":
        projected = {
            s.name: s.members[0].matrix_shape for s in trained if is_projected(s.members[0])
        }
        rest = optax.scale_by_adam(t.beta1, t.beta2, t.epsilon)
        settings = Settings(t.beta1, t.beta2, t.epsilon, t.seed)
        return optax.chain(scale_by_apollo_mini(projected, rest, settings), decay)
    if name == "lion":
        rule = optax.scale_by_lion(t.beta1, t.beta2)
        return optax.chain(in_slices(rule, layered) if is_sliced(plan) else kept(rule), decay)
    if name == "sgd":
        return optax.chain(decay, kept(optax.trace(t.beta1)))
    factored = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(1e-3),
    )
    several = {s.name: s.members[0].matrices for s in trained if s.members[0].matrices > 1}
    each = per_matrix(factored, several) if several else factored
    return optax.chain(per_tensor(each, layered), decay)


def is_sliced(plan: Plan) -> bool:
    """Whether Lion's update runs slice by slice: on a CPU, whose XLA would copy the momentum otherwise."""
    o = plan.optimize
    alone = o.sharding == "none" and not is_compressed(plan)
    return o.optimizer == "lion" and alone and target.kind() == "cpu"


def _as_it_is(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    return rule


def _compressed(
    plan: Plan, model: Model, part: Part | None
) -> Callable[[optax.GradientTransformation], optax.GradientTransformation]:
    """The wrapper that stores a rule's moments in bf16 if the plan asks for it."""
    found = trained_parameters(plan, model)
    indices = {p.name: i for i, p in enumerate(found)}
    muon = plan.optimize.optimizer == "muon"
    places = {
        name: Place(
            _of(part, np.array([indices[p.name] for p in stack.members], np.uint32)),
            stack.layered,
            matrix=stack.members[0].matrix_shape
            if muon and is_orthogonalized(stack.members[0])
            else None,
        )
        for name, stack in stacked(found).items()
    }
    return lambda rule: compressed(rule, places, plan.train.seed)


def _of(part: Part | None, members: Any) -> Any:
    """The entries of a stack's `members` (L,) that belong to its part, (1,)."""
    return members if part is None else jnp.asarray(members)[part.layer][None]


def per_tensor(
    inner: optax.GradientTransformation, layered: set[str]
) -> optax.GradientTransformation:
    """Apply `inner` to each layer's tensor of a stack separately.

    This is for rules that depend on a tensor's shape or norm: a stack (L, out, in) is L matrices,
    not one tensor. A layer's update overwrites its gradient before the next layer is processed.
    """

    def init(parameters: Tree) -> Any:
        stacked, rest = divided(parameters, layered)
        layers = next((len(x) for x in stacked.values()), 1)
        return jax.vmap(inner.init, axis_size=layers)(stacked), inner.init(rest)

    def update(updates: Tree, state: Any, parameters: Tree | None = None) -> tuple[Tree, Any]:
        assert parameters is not None
        stacked, rest = divided(updates, layered)
        stacked_parameters, rest_parameters = divided(parameters, layered)

        def one(layer: jax.Array, carry: tuple[Tree, Any]) -> tuple[Tree, Any]:
            at = jax.tree.map(lambda x: x[layer], (*carry, stacked_parameters))
            return jax.tree.map(lambda x, new: x.at[layer].set(new), carry, inner.update(*at))

        layers = next((len(x) for x in stacked.values()), 0)
        stacked, first = lax.fori_loop(0, layers, one, (stacked, state[0]))
        rest, second = inner.update(rest, state[1], rest_parameters)
        return {n: (stacked if n in layered else rest)[n] for n in updates}, (first, second)

    return optax.GradientTransformation(init, update)


def per_matrix(
    inner: optax.GradientTransformation, several: Mapping[str, int]
) -> optax.GradientTransformation:
    """Apply `inner` to each matrix of the weights that hold `several` of them, one below the other. All of these hold equally
    many."""
    each = per_tensor(inner, set(several))

    def apart(tree: Tree) -> Tree:
        return {
            n: x.reshape(several[n], -1, x.shape[-1]) if n in several else x
            for n, x in tree.items()
        }

    def init(parameters: Tree) -> Any:
        return each.init(apart(parameters))

    def update(updates: Tree, state: Any, parameters: Tree | None = None) -> tuple[Tree, Any]:
        assert parameters is not None
        found, after = each.update(apart(updates), state, apart(parameters))
        return {n: x.reshape(updates[n].shape) for n, x in found.items()}, after

    return optax.GradientTransformation(init, update)


def clip_factor(norm: jax.Array, most: float) -> jax.Array:
    """Factor that scales gradients of global norm `norm` down to at most `most`; 1 if `most` is
    0."""
    if not most:
        return jnp.float32(1.0)
    return jnp.minimum(1.0, most / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
