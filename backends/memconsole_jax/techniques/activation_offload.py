"""The inputs of checkpointed blocks in a file on disk: for a CPU, which has no memory apart from the host's.

A block's input is written when its forward pass begins, and read back into XLA's own buffer when its backward pass
does; of each layer the program keeps where it was written. A program with calls into Python is in no cache: it is
compiled at every start.
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
from jax.experimental.buffer_callback import buffer_callback

Function = Callable[..., Any]


class Disk:
    """Arrays of one shape in a file without a name, which goes with the process. Whatever the order in which a
    program writes and reads them, each is where it was put until it is read, once."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._is_used = False
        self._taken: set[int] = set()
        self._lock = Lock()
        self._error: OSError | None = None

    def offloaded(self, block: Function) -> Function:
        """`checkpointing.full`, the input x (B, T, C) of ``block(x, *rest)`` waiting here between the passes."""
        self._is_used = True

        @jax.custom_vjp
        def run(x: Array, *rest: Any) -> Array:
            y: Array = block(x, *rest)
            return y

        def forward(x: Array, *rest: Any) -> tuple[Array, Any]:
            number = jax.ShapeDtypeStruct((), jnp.int32)
            place = buffer_callback(self._put, number, has_side_effect=True)(x)
            return block(x, *rest), (place, jnp.zeros((0, *x.shape), x.dtype), rest)

        def backward(kept: Any, gradient: Array) -> Any:
            place, like, rest = kept
            shape = jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
            take = buffer_callback(self._take, shape, has_side_effect=True)
            x = take(place, gradient.reshape(-1)[0])  # not before the gradient is there
            return jax.vjp(block, x, *rest)[1](gradient)

        run.defvjp(forward, backward)
        return run

    def ran(self, step: Function, *arguments: Any) -> Any:
        """What `step` gives, waited for if its program writes here. Raises the OSError of a full disk."""
        result = step(*arguments)
        if self._is_used:
            jax.block_until_ready(result)
            if self._error is not None:
                raise self._error
        return result

    def _put(self, _: Any, place: Any, x: Any) -> None:
        """Write `x`, and into `place` where."""
        with self._lock:
            free = min(set(range(len(self._taken) + 1)) - self._taken)
            self._taken.add(free)
        np.asarray(place)[...] = free
        self._move(os.pwrite, x, free)

    def _take(self, _: Any, x: Any, place: Any, gradient: Any) -> None:
        """Read `x` from `place`, which is free from then on."""
        taken = int(np.asarray(place))
        self._move(_read, x, taken)
        with self._lock:
            self._taken.remove(taken)
            if not self._taken and self._error is None:
                os.ftruncate(self._file.fileno(), 0)

    def _move(self, some: Callable[..., int], buffer: Any, place: int) -> None:
        """Move all of an array between memory and the file. An error waits for the end of the program."""
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
        """Opened when it is first written to: a program that is only compiled has none."""
        return tempfile.TemporaryFile(dir=self._directory, prefix="activations-", buffering=0)


def _read(file: int, data: memoryview, start: int) -> int:
    return os.preadv(file, [data], start)
