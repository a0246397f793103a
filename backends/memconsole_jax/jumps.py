"""Snapshots of the trained weights and jumps between them, in JAX."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from memconsole.plan.plan import replace
from memconsole_jax import releasing, tasks
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.layout.mesh import put_donatable
from memconsole_jax.tasks.task import Tree
from memconsole_trainer import engine
from memconsole_trainer.control.confirm import rows_of_group
from memconsole_trainer.engine import Batch, StateSource
from memconsole_trainer.jumps import (
    PREFIX,
    Pairs,
    Path,
    phase_precision,
    saved_snapshots,
    shrunk_sum,
)

SLICE = 2**17
"""Elements of a weight whose snapshots are converted to fp32 at a time, on the host."""
Host = dict[str, NDArray[Any]]
"""Arrays on the host, by stacked name of a weight."""


class JaxJumps:
    """Implements `memconsole_trainer.jumps.Jumps`. Groups are the stacks of the weights.

    The first snapshot's bf16 rounding is the anchor. Each snapshot is stored as its difference from
    the anchor in bf16, which is more precise than the bf16 of a weight as long as weights stay near
    the anchor.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Callable[[], Tree],
        frozen: Callable[[], Tree],
        arrays: Callable[[Mapping[str, engine.Array], int], Tree],
    ) -> None:
        """`weights` returns the dict of the trained weights, whose entries jumps replace. `arrays`
        puts a micro-batch of so many rows on the device. Compiles the loss of predict phases."""
        plan, rows = programs.plan, programs.batch_axes
        self._programs, self._stacks = programs, programs.trained
        self._weights, self._frozen, self._arrays = weights, frozen, arrays
        compute = phase_precision(plan, "predict")
        self._in_bf16 = {
            name: compute == "bf16" and len(stack.members[0].shape) > 1
            for name, stack in self._stacks.items()
        }
        """Whether predict phases use a weight as a bf16 copy: matrices, if these phases compute in bf16."""
        self._releases = compute == "bf16" and programs.kind != "cpu"
        """Whether weights leave the device while their bf16 copies are there."""
        self._rows = rows[1] if rows[0] > 1 else (rows[1] + 1) // 2
        computed = replace(plan, {"optimize.precision": compute})
        evaluation = tasks.of(computed, programs.model).evaluation(computed, programs.model)
        self._loss = self._compiled(evaluation, self._rows)
        # The half of a batch that confirms a jump is the second, which may be one row shorter.
        second = rows[1] if rows[0] > 1 else rows[1] // 2
        self._group_rows = rows_of_group(second, max(1, rows[0] // 2))
        self._groups = -(-second // self._group_rows)
        self._loss_by_group = self._compiled(
            _by_group(evaluation, self._groups), self._groups * self._group_rows
        )
        self._warm_up()
        self._anchor: Host = {}
        self._snapshots: list[Host] = []
        self._path: Tree = {}
        self._base: Tree = {}
        """The unmoved weights that a jump tries, some as bf16 copies."""
        self._before: Host = {}
        """The weights before the first move since `settle`, on the host."""

    def _compiled(self, evaluation: Any, rows: int) -> Any:
        """The compiled `evaluation` of the weights that jumps try, for micro-batches of so many rows."""
        shapes = {
            name: jax.ShapeDtypeStruct(
                x.shape, jnp.bfloat16 if self._in_bf16[name] else x.dtype, sharding=x.sharding
            )
            for name, x in self._programs.trained_shapes.items()
        }
        arrays = self._programs.arrays(rows)
        return jax.jit(evaluation).lower(shapes, self._programs.frozen_shapes, arrays).compile()

    def _warm_up(self) -> None:
        """Compile the functions that move weights, by use on zeros. If they were compiled later, the compiler's memory would
        be counted as that of a jump."""
        shapes = self._programs.trained_shapes
        path = {n: releasing.zeros(x, jnp.bfloat16) for n, x in shapes.items()}
        base = {n: self._tried_copy(n, releasing.zeros(x, x.dtype)) for n, x in shapes.items()}
        jax.block_until_ready(_move(base, path, 1.0))
        del base
        weights = {n: releasing.zeros(x, x.dtype) for n, x in shapes.items()}
        jax.block_until_ready(_move_in_place(weights, path, 1.0))

    def _tried_copy(self, name: str, weight: Array) -> Array:
        """The array that a jump tries in place of a weight."""
        return weight.astype(jnp.bfloat16) if self._in_bf16[name] else weight

    def snapshot(self) -> None:
        """Add a snapshot of the weights."""
        if not self._snapshots:
            self._anchor = {n: np.array(w).astype(jnp.bfloat16) for n, w in self._weights().items()}
        self._snapshots.append(
            {
                name: (np.array(w) - self._anchor[name].astype(np.float32)).astype(jnp.bfloat16)
                for name, w in self._weights().items()
            }
        )

    def forget(self, count: int) -> None:
        """Drop the `count` oldest snapshots."""
        del self._snapshots[:count]
        if not self._snapshots:
            self._anchor = {}

    def products(self, pairs: Pairs) -> dict[str, NDArray[np.float64]]:
        """The inner products of movements, (pairs, pairs), by group."""
        found: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros((len(pairs),) * 2))
        work = self._workspace(pairs)
        for name in self._stacks:
            for _, moved in self._movements(name, pairs, work):
                found[name] += (moved @ moved.T).astype(np.float64)
        return dict(found)

    def begin(self, path: Path) -> None:
        """Prepare to try moves along `path`."""
        weights = self._weights()
        for name, in_bf16 in self._in_bf16.items():
            weight = weights[name]
            self._base[name] = self._tried_copy(name, weight)
            if in_bf16 and self._releases:  # matrices leave the device before the path is put there
                weights[name] = releasing.release(weight)
        work = self._workspace(path.pairs)
        for name, weight in self._base.items():
            flat = np.empty(weight.size, jnp.bfloat16)
            for part, moved in self._movements(name, path.pairs, work):
                flat[part] = shrunk_sum(moved, path.shares[name]).astype(jnp.bfloat16)
            self._path[name] = jax.device_put(flat.reshape(weight.shape), weight.sharding)

    def loss(self, batch: Batch, scale: float) -> float:
        """The summed loss of `batch` with the weights moved by `scale` times the path."""
        moved = _move(self._base, self._path, scale) if scale else self._base
        frozen = self._frozen()
        sums = [
            self._loss(moved, frozen, self._arrays(arrays, self._rows))[0]
            for arrays in batch.micro_batches()
        ]
        return float(sum(jax.device_get(sums)))

    def losses(self, batch: Batch, scale: float) -> NDArray[np.float64]:
        """The summed loss of each group of rows of `batch`, computed one after another."""
        moved = _move(self._base, self._path, scale) if scale else self._base
        frozen, rows = self._frozen(), self._groups * self._group_rows
        found = [
            self._loss_by_group(moved, frozen, self._arrays(arrays, rows))
            for arrays in batch.micro_batches()
        ]
        summed: NDArray[np.float64] = np.concatenate(jax.device_get(found)).astype(np.float64)
        return summed

    def end(self, scale: float) -> None:
        """Move the weights by `scale` times the path. With 0 they are as before, bit for bit."""
        weights = self._weights()
        self._base = {}
        weights.update(releasing.restore(dict(weights)))
        if scale and not self._before:
            self._before = {n: np.array(w) for n, w in weights.items()}
        if scale:
            weights.update(_move_in_place(dict(weights), self._path, scale))
        self._path = {}

    def undo(self) -> None:
        """Set the weights back to before the first move since `settle`, bit for bit."""
        weights = self._weights()
        for name, before in self._before.items():
            weights[name] = put_donatable(before, weights[name].sharding)
        self._before = {}

    def settle(self) -> None:
        """Forget the weights to which `undo` would set back."""
        self._before = {}

    def tensors(self) -> Iterator[tuple[str, engine.Array]]:
        """The snapshots as the tensors of a checkpoint."""
        parts = {"before": self._before, "anchor": self._anchor}
        parts |= {str(number): snapshot for number, snapshot in enumerate(self._snapshots)}
        for which, arrays in parts.items():
            for name, array in arrays.items():
                for canonical, row in self._stacks[name].split(array):
                    yield f"{PREFIX}{which}.{canonical}", row

    def load(self, source: StateSource) -> None:
        """Take over the snapshots of a checkpoint."""

        def taken(which: str, dtype: Any = jnp.bfloat16) -> Host:
            return {
                name: stack.gather(lambda n: source.tensor(f"{PREFIX}{which}.{n}")).astype(dtype)
                for name, stack in self._stacks.items()
            }

        kept = saved_snapshots(source)
        self._before = taken("before", np.float32) if kept.before else {}
        self._anchor = taken("anchor") if kept.snapshots else {}
        self._snapshots = [taken(str(number)) for number in range(kept.snapshots)]

    def _workspace(self, pairs: Pairs) -> NDArray[np.float32]:
        """Memory for the movements of a slice. All slices use the same."""
        largest = max(array.size for array in self._anchor.values())
        return np.empty(len(pairs) * min(largest, SLICE), np.float32)

    def _movements(
        self, name: str, pairs: Pairs, work: NDArray[np.float32]
    ) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The movements of a weight, (pairs, elements) in fp32, slice by slice in `work`."""
        flat = [snapshot[name].reshape(-1) for snapshot in self._snapshots]
        for start in range(0, flat[0].size, SLICE):
            part = slice(start, start + SLICE)
            rows = [f[part] for f in flat]
            moved = work[: len(pairs) * len(rows[0])].reshape(len(pairs), -1)
            for movement, (before, after) in zip(moved, pairs, strict=True):
                np.subtract(rows[after], rows[before], out=movement, dtype=np.float32)
            yield part, moved


def _by_group(evaluation: Any, groups: int) -> Any:
    """A function that computes the losses (groups,) of groups of rows, one after another."""

    def run(trained: Tree, frozen: Tree, arrays: Tree) -> Array:
        parts = {name: x.reshape(groups, -1, *x.shape[1:]) for name, x in arrays.items()}
        return jax.lax.map(lambda part: evaluation(trained, frozen, part)[0], parts)

    return run


def _add_path(base: Tree, path: Tree, scale: float) -> Tree:
    """The weights `base`, moved by `scale` times `path`; the sum is rounded to the dtype of each weight."""

    def one(weight: Array, movement: Array) -> Array:
        moved = weight.astype(jnp.float32) + scale * movement.astype(jnp.float32)
        return moved.astype(weight.dtype)

    return jax.tree.map(one, base, path)


_move = jax.jit(_add_path)
_move_in_place = jax.jit(_add_path, donate_argnums=0)
