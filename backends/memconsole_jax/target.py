"""The kind of device that programs are made for: the default device, or an absent one that a tracer
compiles for."""

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


def is_ampere_or_later() -> bool:
    """Whether the device is an NVIDIA GPU of compute capability 8.0 or higher. An absent GPU counts as one."""
    if kind() != "gpu":
        return False
    found = getattr(jax.devices()[0], "compute_capability", "")
    return is_absent() or not found or float(found) >= 8.0


def is_absent() -> bool:
    """Whether the device is absent, so that libraries that query it cannot be used."""
    return _absent.get() is not None


@contextmanager
def absent(kind: str) -> Iterator[None]:
    """A context in which programs are made for an absent device of `kind`."""
    token = _absent.set(kind)
    try:
        yield
    finally:
        _absent.reset(token)
