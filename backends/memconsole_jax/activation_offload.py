"""The inputs of checkpointed blocks in a file on disk: for a CPU, which has no memory apart from the host's.

A block's input is written when its forward pass begins, and read back into XLA's own buffer when its backward pass
does; of each layer the program keeps where it was written. A program with calls into Python is in no cache: it is
compiled at every start.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.errors import JaxRuntimeError
from jax.experimental.buffer_callback import buffer_callback
from numpy.typing import NDArray

Function = Callable[..., Any]


class Disk:
    """A stack of arrays of one shape, in a file without a name that goes with the process."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._file: Any = None
        self._end = 0
        self._error: OSError | None = None

    def offloaded(self, block: Function) -> Function:
        """`checkpointing.full`, the input x (B, T, C) of ``block(x, *rest)`` waiting here between the passes."""

        @jax.custom_vjp
        def run(x: Array, *rest: Any) -> Any:
            return block(x, *rest)

        def forward(x: Array, *rest: Any) -> Any:
            number = jax.ShapeDtypeStruct((), jnp.int32)
            place = buffer_callback(self._push, number, has_side_effect=True)(x)
            return block(x, *rest), (place, jnp.zeros((0, *x.shape), x.dtype), rest)

        def backward(kept: Any, gradient: Any) -> Any:
            place, like, rest = kept
            shape = jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
            x = buffer_callback(self._pop, shape, has_side_effect=True)(place)
            return jax.vjp(block, x, *rest)[1](gradient)

        run.defvjp(forward, backward)
        return run

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raises the OSError of a full disk as such, which XLA gives as an internal error of its own."""
        try:
            yield
        except JaxRuntimeError as error:
            raise (self._error or error) from None

    def _push(self, _: Any, place: Any, x: Any) -> None:
        """Write `x` at the end; `place` is how many are below it."""
        data = _bytes(x)
        np.asarray(place)[...] = self._end // len(data)
        self._all(os.pwrite, data, self._end)
        self._end += len(data)

    def _pop(self, _: Any, x: Any, place: Any) -> None:
        """Read `x`, which was written at `place`, and forget it and what is above."""
        data = _bytes(x)
        self._end = int(np.asarray(place)) * len(data)
        self._all(lambda file, rest, start: os.preadv(file, [rest], start), data, self._end)
        os.ftruncate(self._file.fileno(), self._end)

    def _all(self, move: Callable[..., int], data: NDArray[np.uint8], start: int) -> None:
        """Move all of `data` between memory and the file from byte `start` on."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(  # noqa: SIM115
                    dir=self._directory, prefix="activations-", buffering=0
                )
            done = 0
            while done < len(data):
                count = move(self._file.fileno(), data[done:], start + done)
                if not count:
                    raise OSError(f"activations on disk end at {start + done} bytes")
                done += count
        except OSError as error:
            self._error = error
            raise


def _bytes(buffer: Any) -> NDArray[np.uint8]:
    """XLA's own memory of an array."""
    return np.asarray(buffer).reshape(-1).view(np.uint8)
