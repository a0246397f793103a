"""The kind of device a program is made for: the default one, or one that a tracer compiles for without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from memconsole_jax.devices import kind_of

_absent: ContextVar[str | None] = ContextVar("absent", default=None)


def kind() -> str:
    """cpu | gpu (NVIDIA) | rocm | tpu."""
    return _absent.get() or kind_of(jax.config.jax_default_device or jax.devices()[0])


def is_absent() -> bool:
    """Whether the device is not there, so that libraries which ask it cannot be used."""
    return _absent.get() is not None


@contextmanager
def absent(kind: str) -> Iterator[None]:
    """Make programs for a `kind` of device that is not there."""
    token = _absent.set(kind)
    try:
        yield
    finally:
        _absent.reset(token)
