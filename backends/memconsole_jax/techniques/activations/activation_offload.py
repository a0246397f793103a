"""Offloads the inputs of checkpointed blocks to a file on disk. It is for CPUs, which have no
separate host memory.

A block's input is written when its forward pass begins, and read back into XLA's buffer when its
backward pass begins. The program keeps only its place in the file. JAX does not cache programs that
call Python, so such a program is compiled at every start.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.experimental.buffer_callback import buffer_callback

Function = Callable[..., Any]


class Disk:
    """Arrays of one shape in an unnamed file, which disappears with the process. A program may
    write and read them in any order. Each array is read once, and its place is free after that."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._is_used = False
        self._taken: set[int] = set()
        self._lock = Lock()
        self._error: OSError | None = None

    def offloaded(self, block: Function) -> Function:
        """Like `checkpointing.full`, but the input x (B, T, C) of ``block(x, *rest)`` is kept here
        between the passes. Only what of `rest` is trained has a gradient."""
        self._is_used = True

        @jax.custom_vjp
        def run(x: Array, *rest: Any) -> Array:
            y: Array = block(x, *rest)
            return y

        def forward(*arguments: Any) -> tuple[Array, Any]:
            wanted = [() if leaf.perturbed else None for leaf in jax.tree.leaves(arguments[1:])]
            x, *rest = custom_vjp_primal_tree_values(arguments)
            number = jax.ShapeDtypeStruct((), jnp.int32)
            place = buffer_callback(self._put, number, has_side_effect=True)(x)
            return block(x, *rest), (place, jnp.zeros((0, *x.shape), x.dtype), rest, wanted)

        def backward(kept: Any, gradient: Array) -> Any:
            place, like, rest, wanted = kept
            shape = jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
            take = buffer_callback(self._take, shape, has_side_effect=True)
            x = take(place, gradient.reshape(-1)[0])  # read only once the gradient exists
            leaves, tree = jax.tree.flatten(rest)

            def again(x: Array, trained: list[Any]) -> Array:
                y: Array = block(x, *jax.tree.unflatten(tree, _with(leaves, wanted, trained)))
                return y

            trained = [leaf for leaf, own in zip(leaves, wanted, strict=True) if own is not None]
            by_x, by_trained = jax.vjp(again, x, trained)[1](gradient)
            none = [None] * len(leaves)
            return by_x, *jax.tree.unflatten(tree, _with(none, wanted, by_trained))

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run

    def ran(self, step: Function, *arguments: Any) -> Any:
        """Run `step` and return its result. Waits for it if its program writes here. Raises OSError
        if the disk is full."""
        result = step(*arguments)
        if self._is_used:
            jax.block_until_ready(result)
            if self._error is not None:
                raise self._error
        return result

    def _put(self, _: Any, place: Any, x: Any) -> None:
        """Write `x` to the file and its place into `place`."""
        with self._lock:
            free = min(set(range(len(self._taken) + 1)) - self._taken)
            self._taken.add(free)
        np.asarray(place)[...] = free
        self._move(os.pwrite, x, free)

    def _take(self, _: Any, x: Any, place: Any, gradient: Any) -> None:
        """Read `x` from `place` and free the place."""
        taken = int(np.asarray(place))
        self._move(_read, x, taken)
        with self._lock:
            self._taken.remove(taken)
            if not self._taken and self._error is None:
                os.ftruncate(self._file.fileno(), 0)

    def _move(self, some: Callable[..., int], buffer: Any, place: int) -> None:
        """Copy an array between memory and the file. `ran` raises an error after the program has
        ended."""
        data = np.asarray(buffer).reshape(-1).view(np.uint8).data  # XLA's own memory
        start, done = place * len(data), 0
        try:
            while done < len(data):
                count = some(self._file.fileno(), data[done:], start + done)
                if not count:
                    raise OSError(f"activations on disk end at {start + done} bytes")
                done += count
        except OSError as error:
            self._error = self._error or error

    @cached_property
    def _file(self) -> Any:
        """The file, created at the first write, so that a program that is only compiled has
        none."""
        return tempfile.TemporaryFile(dir=self._directory, prefix="activations-", buffering=0)


def _with(leaves: list[Any], wanted: list[Any], trained: list[Any]) -> list[Any]:
    """`leaves` with those of `trained`, one after another, where `wanted` is not None."""
    some = iter(trained)
    return [leaf if own is None else next(some) for leaf, own in zip(leaves, wanted, strict=True)]


def _read(file: int, data: memoryview, start: int) -> int:
    return os.preadv(file, [data], start)
